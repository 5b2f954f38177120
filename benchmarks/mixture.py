"""Time the two ways through a mixture of experts: few rows gather their own, many pass all.

    python benchmarks/mixture.py --component talker --random-weights

Two graphs of two layers at the sizes of Qwen3-Omni 30B-A3B run in turn: in one, as many rows gather as can without
reading more than all experts; in the other, a single one.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from frame import machine
from talker import numbers
from trt_cpspec.builder.build import BuildOptions
from trt_cpspec.builder.omni import OmniBuild
from trt_cpspec.builder.synthetic import OmniSpec, write_checkpoint

from trt_cpspec.config import DecoderSpec, Section
from trt_cpspec.session import DecoderSession

LAYERS = 2
CAPACITY = 1024


@click.command()
@click.option("--component", type=click.Choice(["thinker", "talker"]), default="talker", show_default=True)
@click.option("--random-weights", is_flag=True, required=True, help="Says aloud that the weights are random.")
@click.option("--rows", default="1,2,4,8,16,64,512", show_default=True, help="Rows of a pass, comma separated.")
@click.option("--passes", type=click.IntRange(min=2), default=5, show_default=True)
@click.option("--threads", type=click.IntRange(min=1))
@click.option("--workDir", "work_dir", type=click.Path(path_type=Path), help="Where checkpoint and graphs may lie.")
def main(component: str, rows: str, passes: int, threads: int | None, work_dir: Path | None, **_: Any) -> None:
    """Time passes of several numbers of rows."""
    with tempfile.TemporaryDirectory(dir=work_dir) as folder:
        sessions = build(Path(folder), component, threads)
        measured = [measure(sessions, count, passes) for count in numbers(rows)]
    print(" ".join(f"{key}={value}" for key, value in machine().items()), " ".join(sys.argv), sep="\n")
    for entry in measured:
        print(json.dumps(entry))


def build(folder: Path, component: str, threads: int | None) -> dict[str, tuple[DecoderSession, int]]:
    """Return, each with its width, the graph that gathers as far as it pays, and the one that gathers a single row."""
    spec = OmniSpec.released_30b_a3b(accept_hidden_layer=1, text_vocab=1024)
    thinker, talker = (replace(size, layers=LAYERS) for size in (spec.thinker, spec.talker))
    write_checkpoint(folder / "checkpoint", replace(spec, thinker=thinker, talker=talker, codec=OmniSpec.tiny().codec))
    sessions = {}
    for name, batch in (("gathered", 128), ("passed", 1)):
        options = BuildOptions(max_batch_size=batch, max_kv_cache_capacity=CAPACITY, max_input_len=512)
        with OmniBuild(folder / "checkpoint", folder / name, options) as run:
            {folder: write for folder, _, write in run.components}[component](lambda: None)
            run.commit()
        shape = DecoderSpec.from_section(Section.from_file(folder / name / component / "config.json"))
        path = folder / name / component / "model.onnx"
        session = DecoderSession(path, shape, capacity=CAPACITY, threads=threads)
        sessions[name] = session, shape.hidden_size
    return sessions


def measure(sessions: dict[str, tuple[DecoderSession, int]], rows: int, passes: int) -> dict[str, Any]:
    """Run so many rows through both graphs in turn; milliseconds a layer, quartiles behind the median."""
    random = np.random.default_rng(rows)
    times: dict[str, list[float]] = {name: [] for name in sessions}
    for session, _ in sessions.values():
        session.start(1, rows)
    for number in range(passes + 1):
        for name, (session, width) in sessions.items():
            embeds = random.standard_normal((1, rows, width), np.float32)
            started = time.perf_counter()
            session.forward(embeds, np.arange(rows)[None])
            if number:  # the first pass of a length takes memory
                times[name].append(1000 * (time.perf_counter() - started) / LAYERS)
    return {"rows": rows} | {name: [round(q, 2) for q in quartiles(found)] for name, found in times.items()}


def quartiles(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return middle, low, high


if __name__ == "__main__":
    main()
