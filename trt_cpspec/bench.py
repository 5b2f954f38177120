"""Measure on an engine what speculation is worth: time, passes and acceptance for N = 0 and every window, in one run.

Every window decodes the same frames in turn, so that a slow minute of the machine falls on all of them.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .config import MAX_VERIFY_SIZE, TRIAL_TEXT, Mode, SamplingParams
from .contexts import Contexts, Loaded
from .frame import CpSpecStats
from .hardware import describe_machine
from .pipeline import Qwen3TTS
from .predictor import CodePredictor

logger = logging.getLogger(__name__)

Progress = Callable[[int], None]

PAYS = 0.98
"""A window is taken only where a frame takes at most this share of the time without speculation."""

SPEECH_TURNS = 4
"""Utterances of each window; the first is the warm-up."""

SPEECH_FRAMES = 25
"""Longest utterance whose time is taken: 2 s of audio."""

_SEED = 1


class WindowTimes(NamedTuple):
    """What one window did over the frames of a measurement."""

    verify_size: int
    frame_ms: list[float]
    stats: CpSpecStats


def usable_windows(predictor: CodePredictor) -> tuple[int, ...]:
    """Return 0, and the verify sizes that this engine serves; a fallback is warned of."""
    widest = min(predictor.max_verify_size, MAX_VERIFY_SIZE)
    sizes = range(2, widest + 1) if widest >= 2 else range(2, 3)
    return (0, *(size for size in sizes if predictor.window(size).verify_size))


def time_windows(
    predictor: CodePredictor,
    contexts: Contexts,
    windows: Sequence[int],
    *,
    frames: int,
    warmup: int = 1,
    batch: int = 1,
    mode: Mode = "rejection",
    params: SamplingParams | None = None,
    progress: Progress | None = None,
) -> list[WindowTimes]:
    """Decode the same frames with each window in turn.

    Parameters
    ----------
    predictor : CodePredictor
    contexts : Contexts
    windows : sequence of int
        Verify sizes.
    frames, warmup : int
        Frames that count, and frames before them that do not.
    batch : int
        Rows of a frame.
    mode : {"rejection", "coupled"}
    params : SamplingParams or None
        None is ``SamplingParams()``.
    progress : callable or None
        Called with 1 for each frame and window.

    Returns
    -------
    list of WindowTimes
        In the order of ``windows``; times are of a whole batch.
    """
    found = [WindowTimes(n, [], CpSpecStats(predictor.window(n), mode, predictor.num_code_groups)) for n in windows]
    for number in range(warmup + frames):
        places = (np.arange(batch) + number * batch) % len(contexts.code0)
        for window in found:
            started = time.perf_counter()
            result = predictor.decode_frame(
                contexts.talker_hidden[places],
                contexts.code0[places],
                params=params,
                seeds=[_SEED + row for row in range(batch)],
                frames=number,
                verify_size=window.verify_size,
                mode=mode,
            )
            elapsed_ms = 1000 * (time.perf_counter() - started)
            if number >= warmup:
                window.frame_ms.append(elapsed_ms)
                for rounds in result.rounds:
                    window.stats.add_frame(rounds)
            if progress is not None:
                progress(1)
    return found


def choose_verify_size(
    predictor: CodePredictor,
    contexts: Contexts,
    *,
    mode: Mode = "rejection",
    batch: int = 1,
    params: SamplingParams | None = None,
    frames: int = 6,
) -> dict[str, Any]:
    """Return the fastest verify size of a short measurement; 0 where speculation does not pay.

    Returns
    -------
    dict
        ``verify_size``, ``frame_ms`` (the mean for each size, of a whole batch), and ``reason`` in words.
    """
    windows = usable_windows(predictor)
    found = time_windows(predictor, contexts, windows, frames=frames, batch=batch, mode=mode, params=params)
    means = {window.verify_size: statistics.fmean(window.frame_ms) for window in found}
    fastest = min(means, key=lambda size: means[size])
    chosen = fastest if means[fastest] <= PAYS * means[0] else 0
    times = f"a frame takes {means[0]:.2f} ms without speculation"
    if len(means) == 1:
        reason = f"speculation is off: {predictor.window(2).reason}"
    elif chosen:
        reason = f"N = {chosen}: {times} and {means[chosen]:.2f} ms with it"
    else:
        best = min((size for size in means if size), key=lambda size: means[size])
        least = f"{100 * (1 - PAYS):.0f} % less"
        reason = f"speculation is off, it does not pay: {times} and {means[best]:.2f} ms with N = {best}, not {least}"
    return {"verify_size": chosen, "frame_ms": {str(size): mean for size, mean in means.items()}, "reason": reason}


def bench(
    loaded: Loaded,
    *,
    frames: int = 40,
    warmup: int = 3,
    text: str = TRIAL_TEXT,
    mode: Mode = "rejection",
    batch: int = 1,
    spoken: bool = True,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure every window; return the report (see :func:`format_bench`).

    Parameters
    ----------
    loaded : Loaded
        From :func:`~trt_cpspec.contexts.load_engines`.
    frames, warmup : int
    text : str
        What is spoken, where there are Talker and codec.
    mode : {"rejection", "coupled"}
    batch : int
        Rows of a frame.
    spoken : bool
        Take Talker states from the text and time speech too, where that is possible.
    progress : callable or None
        Called with 1, :func:`bench_steps` times.
    """
    predictor, windows = loaded.predictor, usable_windows(loaded.predictor)
    contexts = loaded.contexts(text, min(frames * batch, 256), spoken=spoken)
    params = loaded.model.talker.spec.defaults.subtalker if loaded.model is not None else SamplingParams()
    found = time_windows(
        predictor, contexts, windows, frames=frames, warmup=warmup, batch=batch, mode=mode, params=params,
        progress=progress,
    )  # fmt: skip
    rows = [_row(window, found[0]) for window in found]
    if loaded.model is not None and spoken:
        measured = time_speech(loaded.model, windows, text, min(frames, SPEECH_FRAMES), mode, progress=progress)
        for row, speech in zip(rows, measured, strict=True):
            row.update(speech)
    return {
        "machine": describe_machine(predictor),
        "mode": mode,
        "batch": batch,
        "frames": frames,
        "contexts": contexts.source,
        "sampling": {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p},
        "fallback_reason": predictor.window(2).reason if len(windows) == 1 else None,
        "windows": rows,
    }


def bench_steps(loaded: Loaded, frames: int, warmup: int, *, spoken: bool) -> int:
    """Return how often :func:`bench` reports progress."""
    speech = SPEECH_TURNS if loaded.model is not None and spoken else 0
    return (frames + warmup + speech) * len(usable_windows(loaded.predictor))


def _row(window: WindowTimes, plain: WindowTimes) -> dict[str, Any]:
    stats = window.stats.as_dict()
    low, median, high = statistics.quantiles(window.frame_ms, n=4) if len(window.frame_ms) > 1 else window.frame_ms * 3
    return {
        "verify_size": window.verify_size,
        "frame_ms": median,
        "frame_ms_quartiles": [low, high],
        "speedup": statistics.median(plain.frame_ms) / median,
        "passes_per_frame": stats["passes"] / stats["frames"],
        **{
            key: stats[key]
            for key in (
                "codes_per_round", "proposed", "accepted", "acceptance_by_depth", "acceptance_by_offset",
                "tested_by_depth", "tested_by_offset", "commit_histogram",
            )
        },
    }  # fmt: skip


def time_speech(
    model: Qwen3TTS, windows: Sequence[int], text: str, frames: int, mode: Mode, *, progress: Progress | None = None
) -> list[dict[str, float | None]]:
    """Time whole utterances: the real-time factor, and the time to the first frame's samples.

    ``real_time_factor`` above 1 is faster than real time. ``first_audio_ms`` is Talker prefill, one frame and its
    samples. Both are medians of three, the windows in turn.
    """
    factors: dict[int, list[float]] = {n: [] for n in windows}
    firsts: dict[int, list[float]] = {n: [] for n in windows}
    for turn in range(SPEECH_TURNS):
        for n in windows:
            _, first_ms = _timed(model, text, 1, n, mode, _SEED + turn)
            audio_ms, spent_ms = _timed(model, text, frames, n, mode, _SEED + turn)
            if turn and audio_ms:
                firsts[n].append(first_ms)
                factors[n].append(audio_ms / spent_ms)
            if progress is not None:
                progress(1)
    return [
        {
            "real_time_factor": statistics.median(factors[n]) if factors[n] else None,
            "first_audio_ms": statistics.median(firsts[n]) if firsts[n] else None,
        }
        for n in windows
    ]


def _timed(model: Qwen3TTS, text: str, frames: int, n: int, mode: Mode, seed: int) -> tuple[float, float]:
    """Return the milliseconds of audio, and those that it took."""
    started = time.perf_counter()
    speech = model.synthesize(text, verify_size=n, mode=mode, seed=seed, max_audio_length=frames)
    return speech.duration_ms, 1000 * (time.perf_counter() - started)


def format_bench(report: dict[str, Any]) -> str:
    """Return the report as text."""
    machine = ", ".join(f"{key} {value}" for key, value in report["machine"].items())
    lines = [
        machine,
        f"mode {report['mode']}, batch {report['batch']}, {report['frames']} frames a window, {report['contexts']}",
        "",
        "N  ms a frame (quartiles)     speed-up  passes a frame  codes a round  real-time factor  first audio, ms",
    ]
    for row in report["windows"]:
        low, high = row["frame_ms_quartiles"]
        times = f"{row['frame_ms']:8.2f} ({low:.2f} - {high:.2f})"
        factor, first = row.get("real_time_factor"), row.get("first_audio_ms")
        lines.append(
            f"{row['verify_size']}  {times:<26} {row['speedup']:7.2f}x {row['passes_per_frame']:14.2f} "
            f"{_number(row['codes_per_round'], '14.2f')} {_number(factor, '17.2f')} {_number(first, '16.1f')}"
        )
    if any(row.get("real_time_factor") for row in report["windows"]):
        lines.append("real-time factor: seconds of speech a second; above 1 is faster than real time")
    if report["fallback_reason"]:
        lines.append(f"no speculation: {report['fallback_reason']}")
    else:
        lines += [
            "",
            "acceptance, in percent",
            *_acceptance_lines(report, "offset"),
            *_acceptance_lines(report, "depth"),
        ]
    return "\n".join(lines)


def _acceptance_lines(report: dict[str, Any], kind: str) -> list[str]:
    rates = [(row["verify_size"], row[f"acceptance_by_{kind}"]) for row in report["windows"] if row["verify_size"]]
    longest = max(len(values) for _, values in rates)
    # Depths 0 and 1 are never drafted, nor is the last.
    first, stop = (0, longest) if kind == "offset" else (2, longest - 1)
    lines = ["by " + f"{kind:<8}" + "".join(f"{place + (kind == 'offset'):>5}" for place in range(first, stop))]
    for size, values in rates:
        shown = (values[place] if place < len(values) else None for place in range(first, stop))
        lines.append(f"   N = {size}   " + "".join("    -" if rate is None else f"{100 * rate:5.0f}" for rate in shown))
    return lines


def _number(value: float | None, how: str) -> str:
    return f"{value:{how}}" if value is not None else f"{'-':>{how.split('.')[0]}}"
