"""How well later heads predict: cross-entropy of the CodePredictor by depth, acceptance of drafts, codes a round.

Everything is measured on held-out texts, along their own codes: the frames begin at the Talker's states of real speech.
Needs no torch; the engines run on ONNX Runtime.

Figures
-------
Cross-entropy, in bits
    of each depth's code, on held-out frames: of the CodePredictor; of the shares of codes in training; and of counts
    given code 0, ``(n(code 0, code) + b share(code)) / (n(code 0) + b)``, with the ``b`` of each depth that is best on
    a part of training that the counts leave out. Held-out cross-entropy is an upper bound of entropy for all three.
Chance of acceptance
    ``sum min(target, draft)`` of the two laws, exact, for every depth and every offset, along the frames' own codes.
    Offset 1 is the first draft of a round.
Codes a round, passes a frame, acceptance
    of the production loop, on the same frames for every N and mode.
Intervals
    95 %, by a bootstrap over utterances.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from chart import line_chart
from forced import forced_states
from numpy.typing import NDArray
from trt_cpspec.builder.build import BuildOptions
from trt_cpspec.builder.tts import TtsBuild

from trt_cpspec import Qwen3TTS
from trt_cpspec.config import MAX_VERIFY_SIZE, Mode, SamplingParams
from trt_cpspec.frame import CpSpecStats
from trt_cpspec.predictor import PredictorTables
from trt_cpspec.sampling import law

AHEAD = MAX_VERIFY_SIZE - 1
MODES: tuple[Mode, ...] = ("rejection", "coupled")
TEMPERATURES = (0.9, 0.7)
TOP_K, TOP_P = 50, 1.0
RESAMPLES = 1000

F64 = NDArray[np.float64]


class HeldOut(NamedTuple):
    """Held-out frames of U utterances, F in all.

    Attributes
    ----------
    owner : ndarray, shape [F], int
        The utterance of each frame.
    codes : ndarray, shape [F, G], int32
    talker_hidden : ndarray, shape [F, Ht], float32
    states : ndarray, shape [F, G - 1, C], float32
        What each head reads.
    """

    owner: NDArray[np.int64]
    codes: NDArray[np.int32]
    talker_hidden: NDArray[np.float32]
    states: NDArray[np.float32]


def held_out(model: Qwen3TTS, work: Path, frames: int) -> HeldOut:
    """Return the development texts' frames, whole texts until there are enough."""
    sets = json.loads((work / "corpus.json").read_text(encoding="utf-8"))
    lengths, codes = np.load(work / "frames.npy"), np.load(work / "codes.npy", mmap_mode="r")
    begins = np.cumsum(lengths) - lengths
    owner: list[int] = []
    kept, hidden, states = [], [], []
    for number, text in enumerate(sets["dev"]):
        if len(owner) >= frames:
            break
        index = len(sets["train"]) + number
        own = np.array(codes[begins[index] : begins[index] + lengths[index]], np.int32)
        forced = forced_states(model, text, own)
        owner += [number] * len(own)
        kept.append(own)
        hidden.append(forced.talker_hidden)
        states.append(forced.predictor_hidden)
    if len(owner) < frames:
        raise SystemExit(f"the development texts have {len(owner)} frames, {frames} are wanted")
    return HeldOut(np.array(owner), np.concatenate(kept), np.concatenate(hidden), np.concatenate(states))


def interval(owner: NDArray[np.int64], figure: Callable[[NDArray[np.float64]], F64], seed: int = 1) -> tuple[F64, F64]:
    """Return the 95 % interval of a figure, by a bootstrap over utterances; NaN where no sample has the figure.

    Parameters
    ----------
    owner : ndarray, shape [n], int
        The utterance of each row of the data.
    figure : callable
        Of weights ``[n]``: how often a row was drawn.
    seed : int
    """
    random = np.random.default_rng(seed)
    names, places = np.unique(owner, return_inverse=True)
    drawn = random.multinomial(len(names), np.full(len(names), 1 / len(names)), RESAMPLES)
    found = np.array([figure(weights[places].astype(float)) for weights in drawn])
    flat = found.reshape(RESAMPLES, -1)
    bounds = np.full((2, flat.shape[1]), np.nan)
    known = np.isfinite(flat).any(axis=0)
    bounds[:, known] = np.nanpercentile(flat[:, known], [2.5, 97.5], axis=0)
    low, high = bounds.reshape(2, *found.shape[1:])
    return low, high


def bits_of(logits: NDArray[np.float32], codes: NDArray[np.int32]) -> F64:
    """Return minus the binary logarithm of each code's probability, of logits ``[n, V]`` at temperature 1."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    losses: F64 = np.log(np.exp(wide).sum(axis=1)) - wide[np.arange(len(codes)), codes]
    return losses / np.log(2)


def entropies(heads: NDArray[np.float32], data: HeldOut, training: NDArray[np.uint8]) -> list[dict[str, Any]]:
    """Return for each depth the cross-entropies that the module's docstring defines, in bits."""
    depths, size, _ = heads.shape
    rows = []
    for depth in range(1, depths + 1):
        codes = data.codes[:, depth]
        own = bits_of(data.states[:, depth - 1] @ heads[depth - 1].T, codes)
        shares = (np.bincount(training[:, depth], minlength=size) + 0.5) / (len(training) + 0.5 * size)
        losses = {"code_predictor": own, "unigram": -np.log2(shares)[codes]}
        losses["given_code_0"], best = given_first(training, data.codes, depth, size)
        row: dict[str, Any] = {"depth": depth, "given_code_0_b": best}
        for name, values in losses.items():
            row[name] = values.mean()
            row[f"{name}_interval"] = _pair(interval(data.owner, lambda w, v=values: np.average(v, weights=w)))  # type: ignore[misc]
        # How good the same head is on the states before its own.
        row["drafted"] = [
            bits_of(data.states[:, depth - 1 - ahead] @ heads[depth - 1].T, codes).mean()
            for ahead in range(1, min(AHEAD, depth - 1) + 1)
        ]
        rows.append(row)
    return rows


def given_first(training: NDArray[np.uint8], codes: NDArray[np.int32], depth: int, size: int) -> tuple[F64, float]:
    """Return the bits of each code of a depth by counts given code 0, and the weight of the unigram in them."""
    cut = len(training) * 9 // 10
    counted, left_out = training[:cut], training[cut:]

    def bits(counts: F64, weight: float, pairs: NDArray[Any]) -> F64:
        shares = (counts.sum(axis=0) + 0.5) / (counts.sum() + 0.5 * size)
        mixed = (counts + weight * shares) / (counts.sum(axis=1, keepdims=True) + weight)
        found: F64 = -np.log2(mixed[pairs[:, 0], pairs[:, depth]])
        return found

    weights = [2.0**power for power in range(17)]
    counts = _pairs(counted, depth, size)
    best = min(weights, key=lambda weight: bits(counts, weight, left_out).mean())
    return bits(_pairs(training, depth, size), best, codes), best


def _pairs(codes: NDArray[np.uint8], depth: int, size: int) -> F64:
    flat = codes[:, 0].astype(np.int64) * size + codes[:, depth]
    return np.bincount(flat, minlength=size * size).reshape(size, size).astype(float)


def chances(heads: NDArray[np.float32], data: HeldOut, temperature: float) -> dict[str, Any]:
    """Return the exact chance that a draft is accepted, for each depth and offset, and its mean by offset."""
    params = SamplingParams(temperature=temperature, top_k=TOP_K, top_p=TOP_P)
    depths = len(heads)
    found = np.full((len(data.codes), depths + 1, AHEAD + 1), np.nan)  # depth, offset
    for depth in range(2, depths):  # depth 1 is never drafted, and the last one never
        logits = np.einsum("fic,vc->fiv", data.states[:, :depth], heads[depth - 1])
        for frame in range(len(data.codes)):
            target = law(logits[frame, depth - 1], params)
            for offset in range(1, min(AHEAD, depth - 1) + 1):
                draft = law(logits[frame, depth - 1 - offset], params)
                found[frame, depth, offset] = np.minimum(target, draft).sum()
    tested = found[:, 2:depths]
    rows = []
    for offset in range(1, min(AHEAD, depths - 2) + 1):
        mean = tested[:, offset - 1 :, offset].mean(axis=1)  # an offset is possible from depth offset + 1 on
        low, high = interval(data.owner, lambda w, m=mean: np.average(m, weights=w))  # type: ignore[misc]
        rows.append({"offset": offset, "chance": float(mean.mean()), "interval": [float(low), float(high)]})
    first, by_depth = tested[:, :, 1], tested.mean(axis=0)
    low, high = interval(data.owner, lambda w: np.average(first, weights=w, axis=0))
    return {
        "by_offset": rows,
        "first_draft_by_depth": [
            {"depth": depth, "chance": float(mean), "interval": [float(a), float(b)]}
            for depth, mean, a, b in zip(range(2, depths), first.mean(axis=0), low, high, strict=True)
        ],
        "by_depth_and_offset": [
            {"depth": depth, "chances": [None if np.isnan(x) else float(x) for x in row[1:]]}
            for depth, row in zip(range(2, depths), by_depth, strict=True)
        ],
    }


class _Counts(NamedTuple):
    """Counts of each frame; offsets from 1."""

    rounds: F64
    tested: F64
    accepted: F64
    tested_by_depth: F64
    accepted_by_depth: F64


def simulate(model: Qwen3TTS, data: HeldOut, size: int, mode: Mode, temperature: float, batch: int) -> dict[str, Any]:
    """Decode every held-out frame with the production loop; return what a round and a frame came to."""
    predictor = model.predictor
    params = SamplingParams(temperature=temperature, top_k=TOP_K, top_p=TOP_P)
    groups, window = predictor.num_code_groups, predictor.window(size)
    stats = CpSpecStats(window, mode, groups)
    frames = len(data.codes)
    by_offset, by_depth = (frames, size - 1), (frames, groups)
    counts = _Counts(np.zeros(frames), *map(np.zeros, (by_offset, by_offset, by_depth, by_depth)))
    for place in range(0, frames, batch):
        chosen = np.arange(place, min(place + batch, frames))
        result = predictor.decode_frame(
            data.talker_hidden[chosen], data.codes[chosen, 0], params=params, seeds=[1] * len(chosen),
            frames=chosen.tolist(), verify_size=size, mode=mode,
        )  # fmt: skip
        for frame, rounds in zip(chosen, result.rounds, strict=True):
            stats.add_frame(rounds)
            counts.rounds[frame] = len(rounds)
            for first, proposed, accepted in rounds:
                for offset in range(min(accepted + 1, proposed)):
                    good = offset < accepted
                    counts.tested[frame, offset] += 1
                    counts.accepted[frame, offset] += good
                    counts.tested_by_depth[frame, first + offset] += 1
                    counts.accepted_by_depth[frame, first + offset] += good
    found = stats.as_dict()
    drawn = found["codes"] - found["frames"]

    def codes_a_round(weights: F64) -> F64:
        return np.asarray(drawn / frames * weights.sum() / (weights @ counts.rounds))

    def rates(tested: F64, accepted: F64) -> tuple[F64, F64]:
        with np.errstate(invalid="ignore"):
            return interval(data.owner, lambda w: (w @ accepted) / (w @ tested))

    kept = ("codes_per_round", "acceptance_by_offset", "acceptance_by_depth", "tested_by_offset", "commit_histogram")
    return {
        "verify_size": size, "mode": mode, "temperature": temperature, "frames": frames,
        **{name: found[name] for name in kept},
        "passes_per_frame": found["passes"] / frames,
        "codes_per_round_interval": _pair(interval(data.owner, codes_a_round)),
        "passes_per_frame_interval": _pair(
            interval(data.owner, lambda w: np.asarray(1 + (w @ counts.rounds) / w.sum()))
        ),
        "acceptance_by_offset_interval": _pairs_of(rates(counts.tested, counts.accepted)),
        "acceptance_by_depth_interval": _pairs_of(rates(counts.tested_by_depth, counts.accepted_by_depth)),
    }  # fmt: skip


def _pair(bounds: tuple[F64, F64]) -> list[float]:
    return [float(bound) for bound in bounds]


def _pairs_of(bounds: tuple[F64, F64]) -> list[list[float] | None]:
    return [None if np.isnan(low) else [float(low), float(high)] for low, high in zip(*bounds, strict=True)]


def measure(
    model: Qwen3TTS,
    heads: NDArray[np.float32],
    work: Path,
    *,
    frames: int,
    sizes: Sequence[int],
    batch: int,
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure everything on at least so many held-out frames."""
    data = held_out(model, work, frames)
    report(f"{len(data.codes)} frames of {data.owner[-1] + 1} utterances")
    lengths = np.load(work / "frames.npy")
    sets = json.loads((work / "corpus.json").read_text(encoding="utf-8"))
    training = np.load(work / "codes.npy")[: int(lengths[: len(sets["train"])].sum())]
    result: dict[str, Any] = {
        "frames": len(data.codes), "utterances": int(data.owner[-1] + 1), "training_frames": len(training),
        "top_k": TOP_K, "top_p": TOP_P, "entropies_bits": entropies(heads, data, training),
    }  # fmt: skip
    result["chances"] = [{"temperature": t, **chances(heads, data, t)} for t in TEMPERATURES]
    result["windows"] = []
    for temperature in TEMPERATURES:
        for mode in MODES:
            for size in sizes:
                result["windows"].append(simulate(model, data, size, mode, temperature, batch))
                row = result["windows"][-1]
                report(f"T={temperature} {mode} N={size}: {row['codes_per_round']:.3f} codes a round")
    return result


def markdown(result: dict[str, Any]) -> str:
    """Return the report as tables."""
    lines = [
        f"{result['frames']} held-out frames of {result['utterances']} utterances; 95 % intervals by a bootstrap over "
        f"utterances; top-k {result['top_k']}, top-p {result['top_p']}.",
        "", "| depth | CodePredictor, bits | given code 0 | unigram | drafted 1 ahead | 4 ahead | 7 ahead |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in result["entropies_bits"]:
        drafted = [f"{row['drafted'][a - 1]:.2f}" if len(row["drafted"]) >= a else "" for a in (1, 4, 7)]
        figures = [f"{row[name]:.2f} {_span(row[f'{name}_interval'])}" for name in ("code_predictor", "given_code_0")]
        lines.append(f"| {row['depth']} | {' | '.join(figures)} | {row['unigram']:.2f} | {' | '.join(drafted)} |")
    for part in result["chances"]:
        cells = [f"{100 * row['chance']:.1f} {_span(row['interval'], 100, 1)}" for row in part["by_offset"]]
        lines += [
            "", f"Chance of acceptance by offset at temperature {part['temperature']}, in percent:", "",
            "| " + " | ".join(str(row["offset"]) for row in part["by_offset"]) + " |", "|---" * len(cells) + "|",
            "| " + " | ".join(cells) + " |",
        ]  # fmt: skip
    lines += [
        "", "| temperature | mode | N | codes a round | passes a frame | accepted by offset, % |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in result["windows"]:
        rates = " ".join("-" if rate is None else f"{100 * rate:.0f}" for rate in row["acceptance_by_offset"])
        lines.append(
            f"| {row['temperature']} | {row['mode']} | {row['verify_size']} | {row['codes_per_round']:.2f} "
            f"{_span(row['codes_per_round_interval'])} | {row['passes_per_frame']:.2f} "
            f"{_span(row['passes_per_frame_interval'])} | {rates} |"
        )
    return "\n".join(lines) + "\n"


def _span(bounds: Sequence[float], scale: float = 1.0, digits: int = 2) -> str:
    return f"({scale * bounds[0]:.{digits}f} to {scale * bounds[1]:.{digits}f})"


def picture(result: dict[str, Any]) -> str:
    """Return the SVG: acceptance by depth and by offset, and codes a round by N."""
    part = result["chances"][0]
    by_depth = {
        f"offset {offset}": [
            (row["depth"], 100 * row["chances"][offset - 1])
            for row in part["by_depth_and_offset"]
            if row["chances"][offset - 1] is not None
        ]
        for offset in (1, 2, 4, 7)
    }
    by_size = {
        f"{mode}, T = {temperature}": [
            (row["verify_size"], row["codes_per_round"])
            for row in result["windows"]
            if (row["mode"], row["temperature"]) == (mode, temperature)
        ]
        for temperature in TEMPERATURES
        for mode in MODES
    }
    most = max(rate for line in by_size.values() for _, rate in line)
    return line_chart(
        [
            (f"chance of acceptance by depth, %, T = {part['temperature']}", by_depth, 100.0),
            ("codes a round by N", by_size, 0.4 * math.ceil(most / 0.4)),
        ]
    )


def open_checkpoint(checkpoint: Path, engines: Path, threads: int | None = None) -> Qwen3TTS:
    """Build the engines of a checkpoint and open them."""
    with TtsBuild(checkpoint, engines, BuildOptions()) as build:
        for _, _, write in build.components:
            write(lambda: None)
        build.commit()
    return Qwen3TTS.from_engine_dir(engines, device="cpu", threads=threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of all stages: texts, frames and codes")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True, help="receives acceptance.json, .md and .svg")
    parser.add_argument("--frames", type=int, default=2400, help="held-out frames, at least")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(range(2, MAX_VERIFY_SIZE + 1)), help="N")
    parser.add_argument("--batch", type=int, default=4, help="frames decoded together")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as temporary:
        engines = Path(temporary) / "engines"
        model = open_checkpoint(args.checkpoint, engines)
        heads = PredictorTables.from_dir(engines / "code_predictor", model.predictor.spec).heads
        result = measure(model, heads, args.work, frames=args.frames, sizes=args.sizes, batch=args.batch)
    (args.output / "acceptance.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (args.output / "acceptance.md").write_text(markdown(result), encoding="utf-8")
    (args.output / "acceptance.svg").write_text(picture(result), encoding="utf-8")
    print(markdown(result))


if __name__ == "__main__":
    main()
