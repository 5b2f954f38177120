"""Time a stream to its first audio for several lengths of a chunk, beside the same speech made at once, in one run.

python benchmarks/synthetic_engine.py 0b6 ENG --random-weights
python benchmarks/streaming.py ENG --chunks 1,2,5,10,25 --frames 50
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from frame import machine

from trt_cpspec import Qwen3TTS
from trt_cpspec.cli import place_of, place_options, reports_errors
from trt_cpspec.errors import EngineError
from trt_cpspec.outputs import check_file

TEXT = "The river is wide here, and nobody knows how deep it runs."


@click.command()
@click.argument("engine_dir", type=click.Path(path_type=Path))
@click.option("--chunks", default="1,2,5,10,25", show_default=True, help="Frames of a chunk, comma separated.")
@click.option("--frames", type=click.IntRange(min=2), default=50, show_default=True, help="Of the speech, at most.")
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--verifySize", "verify_size", type=int, default=3, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures there too.")
@place_options
@reports_errors
def main(**options: Any) -> None:
    """Time streams of one speech."""
    if options["json_file"] is not None:
        check_file(options["json_file"])
    tts = Qwen3TTS.from_engine_dir(options["engine_dir"], **place_of(options))
    report = {"machine": machine(), **measure(tts, options)}
    print(" ".join(f"{key}={value}" for key, value in report["machine"].items()), " ".join(sys.argv), sep="\n")
    print(f"{report['frames']} frames; at once: {spread(report['at_once_ms'])} ms")
    print("chunk  first audio, ms (median, quartiles)  of the whole  all chunks, of the whole  largest difference")
    for row in report["rows"]:
        print(
            f"{row['chunk_frames']:>5}  {spread(row['first_audio_ms']):>35}  {row['first_share']:>12.3f}  "
            f"{row['total_share']:>24.3f}  {row['difference']:>18.1e}"
        )
    if options["json_file"]:
        options["json_file"].write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def measure(tts: Qwen3TTS, options: dict[str, Any]) -> dict[str, Any]:
    """Return the times of the whole and of each chunk's length; repeats take turns, so that a slow minute meets all."""
    how = {"seed": options["seed"], "max_audio_length": options["frames"], "verify_size": options["verify_size"]}
    sizes = [int(word) for word in options["chunks"].split(",")]
    whole = tts.synthesize(TEXT, **how)  # warms up, too
    at_once: list[float] = []
    times: dict[int, list[tuple[float, float]]] = {size: [] for size in sizes}
    differences = dict.fromkeys(sizes, 0.0)
    for _ in range(options["repeats"]):
        started = time.perf_counter()
        tts.synthesize(TEXT, **how)
        at_once.append(1000 * (time.perf_counter() - started))
        for size in sizes:
            started = time.perf_counter()
            stream = tts.synthesize_stream(TEXT, chunk_frames=size, **how)
            waveform = np.concatenate(list(stream))
            total, first = 1000 * (time.perf_counter() - started), stream.result.time_to_first_audio_ms
            if first is None:
                raise EngineError("the speech ended before its first frame: take another --seed")
            times[size].append((first, total))
            differences[size] = max(differences[size], float(np.abs(waveform - whole.waveform).max()))
    base = statistics.median(at_once)
    rows = [
        {
            "chunk_frames": size,
            "first_audio_ms": [first for first, _ in times[size]],
            "first_share": statistics.median(first for first, _ in times[size]) / base,
            "total_share": statistics.median(total for _, total in times[size]) / base,
            "difference": differences[size],
        }
        for size in sizes
    ]
    return {"frames": len(whole.codes), "at_once_ms": at_once, "rows": rows}


def spread(values: list[float]) -> str:
    """Return median and quartiles."""
    low, middle, high = np.percentile(values, [25, 50, 75])
    return f"{middle:.1f} ({low:.1f} - {high:.1f})"


if __name__ == "__main__":
    main()
