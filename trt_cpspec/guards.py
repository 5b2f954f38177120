"""Speech that is none: what is refused outright, and what is worth a warning."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .errors import EngineError

FRAME_SECONDS = 0.08
"""Length of one frame."""

BASE_FRAMES = 50
FRAMES_PER_TOKEN = 20
"""A text may take so many frames, and so many more for each token: 4 s, and 1.6 s a token, some five times its due."""

MOST_FRAMES = 4096
"""Frames that no text may take where its request does not say: 328 s."""

REPEAT_SECONDS = 3.0
"""First codes that repeat for so long are no speech: a pause is shorter."""

LONGEST_PERIOD = 4
"""Frames of a pattern whose repetition is looked for."""

SILENCE_SECONDS = 3.0
SILENCE_RMS = 1e-3
"""Of full scale: -60 dBFS."""


def frame_limit(tokens: int) -> int:
    """Return the frames that a text of so many tokens may take where a request does not say."""
    return min(BASE_FRAMES + FRAMES_PER_TOKEN * tokens, MOST_FRAMES)


def cut_warning(tokens: int, room: int) -> str:
    """Return what to say of speech that reached its limit, or the end of the engine's room, in frames."""
    limit = frame_limit(tokens)
    if room < limit:
        return f"the speech is cut after {room} frames, the room that the engine's max_kv_cache_capacity leaves"
    if limit == MOST_FRAMES:
        return f"the speech is cut after {limit} frames, the most where max_audio_length is not given"
    return (
        f"the end of speech did not come within {limit} frames, ample for this text: the speech may be degenerate; try "
        "another seed, or give max_audio_length"
    )


def check_waveform(waveform: NDArray[np.floating]) -> None:
    """Refuse a waveform that cannot be speech.

    Raises
    ------
    EngineError
        It is not finite, or constant.
    """
    if not np.isfinite(waveform).all():
        raise EngineError("the waveform is not finite: it is not written as speech")
    if len(waveform) > 1 and (waveform == waveform[0]).all():
        raise EngineError(f"the waveform is constant, {waveform[0]:.3g} throughout: it is not written as speech")


def speech_warnings(
    codes: NDArray[np.int32],
    waveform: NDArray[np.float32],
    sample_rate: int,
    *,
    if_cut: str | None = None,
) -> tuple[str, ...]:
    """Return what is suspicious of a spoken text.

    Parameters
    ----------
    codes : ndarray, shape [F, G], int32
    waveform : ndarray, shape [n], float32
    sample_rate : int
        Hz.
    if_cut : str or None
        Warning that the end of speech did not come, where it did not (see :func:`cut_warning`).
    """
    found = []
    if not len(codes):
        found.append("the speech ended before its first frame")
    if if_cut is not None:
        found.append(if_cut)
    start, length = longest_repeat(codes[:, 0]) if len(codes) else (0, 0)
    if length * FRAME_SECONDS >= REPEAT_SECONDS:
        found.append(f"the first codes repeat for {length * FRAME_SECONDS:.1f} s from frame {start} on")
    silent = longest_silence(waveform, sample_rate)
    if len(waveform) and (silent >= SILENCE_SECONDS or np.abs(waveform).max() < SILENCE_RMS):
        found.append(f"{silent:.1f} s of the speech are silent (below -60 dBFS)")
    return tuple(found)


def longest_repeat(codes: NDArray[np.integer]) -> tuple[int, int]:
    """Return start and length, in frames, of the longest stretch that repeats a pattern of 1 to 4 codes."""
    best = (0, 0)
    for period in range(1, min(LONGEST_PERIOD, len(codes) - 1) + 1):
        start, length = _longest_run(codes[period:] == codes[:-period])
        if length and length + period > best[1]:
            best = (start, length + period)
    return best


def longest_silence(waveform: NDArray[np.float32], sample_rate: int) -> float:
    """Return the longest silence in seconds, to a frame's length."""
    samples = max(int(FRAME_SECONDS * sample_rate), 1)
    windows = [waveform[start : start + samples] for start in range(0, len(waveform), samples)]
    quiet = np.array([float(np.sqrt(np.mean(window**2))) < SILENCE_RMS for window in windows], bool)
    return _longest_run(quiet)[1] * FRAME_SECONDS


def _longest_run(flags: NDArray[np.bool_]) -> tuple[int, int]:
    """Return start and length of the longest run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(np.int8), [0]])))
    starts, stops = edges[0::2], edges[1::2]
    if not len(starts):
        return 0, 0
    place = int(np.argmax(stops - starts))
    return int(starts[place]), int(stops[place] - starts[place])
