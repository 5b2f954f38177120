"""Stages 2 to 4 in one command, on a machine with a GPU and without a network: speech, codec, codes, Talker.

Every stage has a schedule of so many seconds, over all calls. A call stops in time for ``--budget`` and goes on where
the last one stopped; what is there is packed into ``--output`` after every stage, as at most six files of less than
15 MB. To go on with nothing but those, unpack them into the work folder (``--input``).
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import shutil
import tarfile
import time
from pathlib import Path

import speech

RESERVE_SECONDS = 15.0
"""Kept back at the end of a call, to save and pack."""
_SMALL = ("frames.npy", "codec.json", "talker.json", "rehearsal.json", "look_ahead.json", "*_log.jsonl")
_SMALL_FILE = "facts.tar.gz"


def pack(work: Path, output: Path) -> None:
    """Copy weights and codes, and put what is small into one file."""
    output.mkdir(parents=True, exist_ok=True)
    for path in [*work.glob("*-[0-9].safetensors"), *work.glob("codes.npy")]:
        shutil.copyfile(path, output / path.name)
    with tarfile.open(output / _SMALL_FILE, "w:gz") as archive:
        for pattern in _SMALL:
            for path in sorted(work.glob(pattern)):
                archive.add(path, path.name)


def unpack(packed: Path, work: Path) -> None:
    """Put back what :func:`pack` packed."""
    for path in packed.iterdir():
        if path.name == _SMALL_FILE:
            with tarfile.open(path) as archive:
                archive.extractall(work, filter="data")
        elif path.suffix in (".safetensors", ".npy", ".npz", ".json"):
            shutil.copyfile(path, work / path.name)


def run(args: argparse.Namespace) -> None:
    """Run the stages that are not complete, each for as long as its schedule and the call's budget leave."""
    deadline = time.perf_counter() + args.budget - RESERVE_SECONDS
    work: Path = args.work

    def left(schedule: float) -> float:
        return max(0.0, min(schedule, deadline - time.perf_counter()))

    if not (work / "speech.npy").is_file():
        started = time.perf_counter()
        hours = speech.speak_corpus(work, args.processes)
        print(f"{hours:.2f} hours of speech in {time.perf_counter() - started:.0f} s", flush=True)
    # Imported late: the processes that speak import this file, and need no torch.
    import codec  # noqa: PLC0415
    import talker  # noqa: PLC0415
    import torch  # noqa: PLC0415

    def after(stage: str, started: float) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        if args.output is not None:
            pack(work, args.output)
        print(f"{stage}: {time.perf_counter() - started:.0f} s", flush=True)

    started = time.perf_counter()
    codec.train(
        work, schedule=args.codec, limit=left(args.codec), batch=args.codec_batch, frames=args.codec_frames,
        peak=args.codec_lr, seed=args.seed,
    )  # fmt: skip
    if not codec.complete(work):
        after("codec, to be continued", started)
        return
    if not (work / "codes.npy").is_file():
        codec.encode(work, batch=256)
    after("codec and codes", started)
    stages: list[tuple[talker.Stage, float, float]] = [
        ("talker", args.talker, args.talker_lr),
        ("rehearsal", args.rehearsal, args.rehearsal_lr),
        ("look_ahead", args.look_ahead, args.talker_lr),
    ]
    for name, schedule, peak in stages:
        started = time.perf_counter()
        if schedule <= 0 or left(schedule) <= 0:
            continue
        talker.train(
            work, schedule=schedule, limit=left(schedule), batch_rows=args.rows, peak=peak,
            dropout=args.dropout, seed=args.seed, name=name,
        )  # fmt: skip
        after(name, started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of all stages, with what corpus.py wrote")
    parser.add_argument("--input", type=Path, help="what an earlier call packed")
    parser.add_argument("--output", type=Path, help="receives what is to be kept")
    parser.add_argument("--budget", type=float, default=540, help="seconds of this call")
    parser.add_argument("--codec", type=float, default=190, help="seconds of the codec's schedule")
    parser.add_argument("--talker", type=float, default=240, help="seconds of the Talker's schedule")
    parser.add_argument("--rehearsal", type=float, default=0, help="seconds of its schedule; 0 leaves it out")
    parser.add_argument("--rehearsalRate", dest="rehearsal_lr", type=float, default=5e-4)
    parser.add_argument("--lookAhead", dest="look_ahead", type=float, default=30, help="seconds; 0 leaves it out")
    parser.add_argument("--codecBatch", dest="codec_batch", type=int, default=32)
    parser.add_argument("--codecFrames", dest="codec_frames", type=int, default=20)
    parser.add_argument("--codecRate", dest="codec_lr", type=float, default=8e-4)
    parser.add_argument("--rows", type=int, default=24576, help="rows of a Talker step")
    parser.add_argument("--talkerRate", dest="talker_lr", type=float, default=1.5e-3)
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.input is not None:
        unpack(args.input, args.work)
    try:
        run(args)
    finally:
        if args.output is not None:
            pack(args.work, args.output)


if __name__ == "__main__":
    main()
