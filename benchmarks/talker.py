"""Time a Talker step at several numbers of positions and several KV capacities, in one run.

    python benchmarks/talker.py --size 0b6 --random-weights

A step's time must grow with the positions in use, and must not depend on the capacity.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from frame import machine
from synthetic_engine import built, spec_of
from trt_cpspec.builder.build import BuildOptions
from trt_cpspec.builder.synthetic import SyntheticSpec

from trt_cpspec.cli import reports_errors
from trt_cpspec.config import Section, TalkerSpec
from trt_cpspec.outputs import check_file
from trt_cpspec.session import DecoderSession


@click.command()
@click.option("--size", type=click.Choice(["tiny", "demo", "0b6", "1b7"]), default="0b6", show_default=True)
@click.option("--random-weights", is_flag=True, required=True, help="Says aloud that the weights are random.")
@click.option("--positions", default="100,1000", show_default=True, help="Comma separated.")
@click.option("--capacities", default="2048,16384", show_default=True, help="KV capacities, comma separated.")
@click.option("--steps", type=click.IntRange(min=2), default=15, show_default=True)
@click.option("--threads", type=click.IntRange(min=1))
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures there too.")
@reports_errors
def main(**options: Any) -> None:
    """Time a Talker step."""
    if options["json_file"] is not None:
        check_file(options["json_file"])
    spec = replace(spec_of(options["size"], 0.0), text_hidden=32, text_vocab=512, codec=SyntheticSpec.tiny().codec)
    with built(spec, ("talker",), BuildOptions()) as engines:
        rows = measure(engines / "talker", options)
    report: dict[str, Any] = {"machine": machine(), "rows": rows}
    print(" ".join(f"{key}={value}" for key, value in report["machine"].items()), " ".join(sys.argv), sep="\n")
    print("capacity  positions  slots bound  ms/step  quartiles")
    for entry in rows:
        counts = f"{entry['capacity']:>8}  {entry['positions']:>9}  {entry['slots']:>11}"
        low, high = entry["ms_quartiles"]
        print(f"{counts}  {entry['ms_per_step']:7.2f}  {low:.2f} - {high:.2f}")
    if options["json_file"]:
        options["json_file"].write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def measure(folder: Path, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Step sessions of every capacity in turn, so that a slow minute of the machine falls on all of them."""
    spec = TalkerSpec.from_section(Section.from_file(folder / "config.json")).decoder
    sessions = {
        capacity: DecoderSession(folder / "model.onnx", spec, capacity=capacity, threads=options["threads"])
        for capacity in numbers(options["capacities"])
    }
    rng, rows = np.random.default_rng(0), []
    for positions in numbers(options["positions"]):
        first = positions - options["steps"]
        prompt = rng.standard_normal((1, first, spec.hidden_size), np.float32)
        times: dict[int, list[float]] = {capacity: [] for capacity in sessions}
        for session in sessions.values():
            session.start(1, positions)
            session.forward(prompt, np.arange(first)[None])
        for position in range(first, positions):
            embeds = rng.standard_normal((1, 1, spec.hidden_size), np.float32)
            for capacity, session in sessions.items():
                started = time.perf_counter()
                session.forward(embeds, np.array([[position]]))
                times[capacity].append(1000 * (time.perf_counter() - started))
        rows += [row(capacity, positions, sessions[capacity].slots, times[capacity][1:]) for capacity in sessions]
    return rows


def row(capacity: int, positions: int, slots: int, times: list[float]) -> dict[str, Any]:
    quarters = statistics.quantiles(times, n=4)
    return {
        "capacity": capacity,
        "positions": positions,
        "slots": slots,
        "ms_per_step": statistics.median(times),
        "ms_quartiles": [quarters[0], quarters[2]],
    }


if __name__ == "__main__":
    main()
