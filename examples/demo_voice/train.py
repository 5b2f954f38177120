"""Stages 2 to 5 in one command, on a machine with a GPU and without a network: speech, codec, codes, Talker, decoder.

Every stage has a schedule of so many seconds, over all calls. A call stops in time for ``--budget`` and goes on where
the last one stopped; what is there is packed into ``--output`` after every stage, as three files of less than 15 MB. To
go on with nothing but those, unpack them into the work folder (``--input``): a longer schedule of the Talker goes on
with the learning rate of its place in the longer one.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import shutil
import tarfile
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import speech

RESERVE_SECONDS = 15.0
"""Kept back at the end of a call, to save and pack."""
_STAGES = ("codec", "talker", "look_ahead", "decoder")
_FACTS = ("frames.npy", "places.npy", "phones.json", *(f"{stage}.json" for stage in _STAGES), "*_log.jsonl")
_FACTS_FILE = "facts.tar.gz"
_ALONE = ("codes.npy", "talker-0.safetensors")
"""Files that are packed by themselves."""


def pack(work: Path, output: Path) -> None:
    """Copy what later stages and ``export.py`` need; weights in FP16, as the checkpoint has them."""
    # Imported late: the processes that speak import this file, and need no torch.
    from safetensors.torch import save_file  # noqa: PLC0415
    from training import load_weights  # noqa: PLC0415

    output.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as temporary, tarfile.open(output / _FACTS_FILE, "w:gz", dereference=True) as archive:
        narrow = Path(temporary)
        for stage in sorted({path.name.rsplit("-", 1)[0] for path in work.glob("*-[0-9].safetensors")}):
            weights = {name: value.half() for name, value in load_weights(work, stage).items()}
            save_file(weights, narrow / f"{stage}-0.safetensors")
        paths = [*narrow.iterdir(), *(path for pattern in ("codes.npy", *_FACTS) for path in work.glob(pattern))]
        for path in sorted(paths, key=lambda path: path.name):
            if path.name in _ALONE:
                shutil.copyfile(path, output / path.name)
            else:
                archive.add(path, path.name)


def unpack(packed: Path, work: Path) -> None:
    """Put back what :func:`pack` packed."""
    with tarfile.open(packed / _FACTS_FILE) as archive:
        archive.extractall(work, filter="data")
    for name in _ALONE:
        if (packed / name).is_file():
            shutil.copyfile(packed / name, work / name)


def run(args: argparse.Namespace) -> None:
    """Run the stages that are not complete, each for as long as its schedule and the call's budget leave."""
    deadline = time.perf_counter() + args.budget - RESERVE_SECONDS
    work: Path = args.work

    def left(schedule: float) -> float:
        return max(0.0, min(schedule, deadline - time.perf_counter()))

    wanted = not (work / "codes.npy").is_file() or args.decoder > 0
    if wanted and not (work / "speech.npy").is_file():
        started = time.perf_counter()
        hours = speech.speak_corpus(work, args.processes)
        print(f"{hours:.2f} hours of speech in {time.perf_counter() - started:.0f} s", flush=True)
    import codec  # noqa: PLC0415
    import decoder  # noqa: PLC0415
    import talker  # noqa: PLC0415
    import torch  # noqa: PLC0415

    def after(stage: str, started: float) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        if args.output is not None:
            pack(work, args.output)
        print(f"{stage}: {time.perf_counter() - started:.0f} s", flush=True)

    if not (work / "codes.npy").is_file():
        started = time.perf_counter()
        codec.train(
            work, schedule=args.codec, limit=left(args.codec), batch=args.codec_batch, frames=args.codec_frames,
            judged=args.judged, peak=args.codec_lr, seed=args.seed,
            weights=codec.Weights(phones=args.phones, whole=args.whole, shallow=args.shallow), fused=args.fused,
        )  # fmt: skip
        if not codec.complete(work):
            after("codec, to be continued", started)
            return
        codec.encode(work, batch=256)
        after("codec and codes", started)
    stages: list[tuple[talker.Stage, float]] = [("talker", args.talker), ("look_ahead", args.look_ahead)]
    for name, schedule in stages:
        started = time.perf_counter()
        if schedule <= 0 or left(schedule) <= 0:
            continue
        talker.train(
            work, schedule=schedule, limit=left(schedule), batch_rows=args.rows, peak=args.talker_lr,
            dropout=args.dropout, seed=args.seed, name=name, share=args.share, rehearse_from=args.rehearse_from,
            eager=args.eager,
        )  # fmt: skip
        after(name, started)
    started = time.perf_counter()
    if left(args.decoder) > 0:
        decoder.train(
            work, schedule=args.decoder, limit=left(args.decoder), batch=args.codec_batch, frames=args.codec_frames,
            judged=args.judged, peak=args.decoder_lr, temperature=args.drawn_at, rows=args.rows, seed=args.seed,
            fused=args.fused, eager=args.eager,
        )  # fmt: skip
        after("decoder", started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of all stages, with what corpus.py wrote")
    parser.add_argument("--input", type=Path, help="what an earlier call packed")
    parser.add_argument("--output", type=Path, help="receives what is to be kept")
    parser.add_argument("--budget", type=float, default=540, help="seconds of this call")
    parser.add_argument("--codec", type=float, default=165, help="seconds of the codec's schedule")
    parser.add_argument("--talker", type=float, default=220, help="seconds of the Talker's schedule")
    parser.add_argument("--rehearseFrom", dest="rehearse_from", type=float, default=0.2, help="see talker.py")
    parser.add_argument("--lookAhead", dest="look_ahead", type=float, default=0, help="seconds; 0 leaves it out")
    parser.add_argument("--decoder", type=float, default=0, help="seconds of decoder.py; 0 leaves it out")
    parser.add_argument("--decoderRate", dest="decoder_lr", type=float, default=5e-4)
    parser.add_argument("--drawnAt", dest="drawn_at", type=float, default=0.6, help="temperature, see decoder.py")
    parser.add_argument("--codecBatch", dest="codec_batch", type=int, default=64)
    parser.add_argument("--codecFrames", dest="codec_frames", type=int, default=20)
    parser.add_argument("--judged", type=int, default=8, help="see codec.py")
    parser.add_argument("--phones", type=float, default=1.5, help="see codec.py, as the next two")
    parser.add_argument("--whole", type=float, default=0.1)
    parser.add_argument("--shallow", type=float, default=0.5)
    parser.add_argument("--fused", action="store_true", help="see codec.py")
    parser.add_argument("--codecRate", dest="codec_lr", type=float, default=8e-4)
    parser.add_argument("--rows", type=int, default=24576, help="rows of a Talker step")
    parser.add_argument("--talkerRate", dest="talker_lr", type=float, default=1.5e-3)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--share", type=float, default=0.2, help="see talker.py")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs in the Talker's steps")
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
