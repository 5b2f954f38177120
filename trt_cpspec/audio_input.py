"""Audio files to log-mel features, as the reference's feature extractor makes them.

A file is read as ``librosa.load`` reads it: channels averaged, then resampled by soxr in its quality HQ. The features
are those of ``transformers`` 4.57, ``WhisperFeatureExtractor``: frames 10 ms apart, Slaney's mel bins, and the decimal
logarithm down to 8 below the loudest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

from .config import Section, is_plain_file
from .errors import ConfigError

FORMATS = ("WAV", "WAVEX", "RF64", "FLAC", "MP3")
"""What libsndfile calls the kinds of files that are read."""

MIN_RATE, MAX_RATE = 1_000, 384_000
"""Sample rates that are resampled, in hertz."""

_MOST = {
    "feature_size": 1024,
    "sampling_rate": MAX_RATE,
    "hop_length": 1 << 16,
    "n_fft": 1 << 16,
    "chunk_length": 24 * 3600,
}
"""What the numbers of a front may be: beyond, a clip would take memory that its file does not."""

_LOUDEST = 2.0**31
"""Of floats that were never scaled to [-1, 1]; far beyond, a filter overflows."""

_MAX_OVERLAP = 8
"""Frames that a sample may be in."""

_BLOCK_SAMPLES = 1 << 16
_BLOCK_FRAMES = 4096
_MEL_LINEAR_HZ = 200 / 3
_MEL_BREAK_HZ = 1000.0
_MEL_LOG_STEP = math.log(6.4) / 27
_MAX_HZ = 8000.0
_FLOOR = 1e-10
_RANGE = 8.0

Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioFront:
    """What stands before the audio encoder; the field names are keys of the official ``preprocessor_config.json``.

    Attributes
    ----------
    feature_size : int
        Mel bins.
    sampling_rate : int
        Hertz.
    hop_length, n_fft : int
        Samples from frame to frame, and of a frame.
    chunk_length : int
        Seconds of the longest clip.
    """

    feature_size: int
    sampling_rate: int
    hop_length: int
    n_fft: int
    chunk_length: int

    @classmethod
    def from_section(cls, section: Section) -> AudioFront:
        """Read it; a key that is missing or not supported is a ConfigError that names it."""
        for key in ("dither", "padding_value"):
            if section.has(key) and section.number(key):
                raise ConfigError(f"{section.where}: {key} is {section.number(key)}, only 0 is supported")
        front = cls(
            **{item.name: section.integer(item.name, minimum=1, maximum=_MOST[item.name]) for item in fields(cls)}
        )
        overlap = front.n_fft / front.hop_length
        if front.sampling_rate < MIN_RATE or not 1 <= overlap <= _MAX_OVERLAP:
            raise ConfigError(
                f"{section.where}: sampling_rate {front.sampling_rate} must be at least {MIN_RATE}, and hop_length "
                f"{front.hop_length} from an eighth of n_fft {front.n_fft} to all of it"
            )
        return front

    @property
    def min_samples(self) -> int:
        """Samples of the shortest clip: a frame is centred on its time, and half of it is mirrored at the start."""
        return self.n_fft // 2 + 1


def read_clip(path: Path, front: AudioFront) -> Float32:
    """Read an audio file at the encoder's sample rate.

    Parameters
    ----------
    path : Path
        A wav, flac or mp3.
    front : AudioFront

    Returns
    -------
    ndarray, shape [S], float32

    Raises
    ------
    ConfigError
        No such file, no audio of these kinds, damaged, not finite, too short or too long.
    """
    if not is_plain_file(path):
        raise ConfigError(f"{path}: there is no such file")
    try:
        with soundfile.SoundFile(str(path)) as file:
            rate = int(file.samplerate)
            _check_kind(path, file.format, rate)
            mono = _mono(file, front.chunk_length * rate)
    except (soundfile.LibsndfileError, OSError, MemoryError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as audio (wav, flac and mp3 can): {error}") from error
    if not (np.abs(mono) <= _LOUDEST).all():
        raise ConfigError(f"{path} holds samples that are not finite, or beyond what 32 bits can be: it is damaged")
    if len(mono) > front.chunk_length * rate:
        raise ConfigError(
            f"{path} is too long: it lasts more than {front.chunk_length} s, the longest clip; give it in parts"
        )
    clip = resampled(mono, rate, front.sampling_rate)
    if len(clip) < front.min_samples:
        raise ConfigError(
            f"{path} is too short: it has {len(clip)} samples at {front.sampling_rate} Hz, give at least "
            f"{front.min_samples} ({1000 * front.min_samples / front.sampling_rate:.1f} ms)"
        )
    return clip


def _mono(file: Any, longest: int) -> Float32:
    """Return the mean of a file's channels, ``[S]``: not much beyond the longest, whatever the header says of it."""
    parts, count = [np.zeros(0, np.float32)], 0
    # Not blocks(): of a file that is cut short it gives the samples that the header promises.
    while count <= longest and len(block := file.read(_BLOCK_SAMPLES, dtype="float32", always_2d=True)):
        with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is told by who asked
            parts.append(block.mean(axis=1, dtype=np.float32))
        count += len(block)
    return np.concatenate(parts)


def _check_kind(path: Path, kind: str, rate: int) -> None:
    if kind not in FORMATS:
        raise ConfigError(f"{path} is audio of the kind {kind}; give wav, flac or mp3")
    if not MIN_RATE <= rate <= MAX_RATE:
        raise ConfigError(f"{path} has a sample rate of {rate} Hz; give {MIN_RATE} to {MAX_RATE}")


def resampled(mono: Float32, rate: int, wanted: int) -> Float32:
    """Resample ``[S]`` to another rate, ``[ceil(S * wanted / rate)]``, in the reference's quality."""
    if rate == wanted or not len(mono):
        return mono
    length = -(-len(mono) * wanted // rate)
    made = np.asarray(soxr.resample(mono, rate, wanted, quality="HQ"), np.float32)
    return np.pad(made, (0, length - len(made)))  # soxr rounds the length, librosa rounds it up


def log_mel(clips: Sequence[Float32], front: AudioFront) -> list[Float32]:
    """Return the features of the clips of one conversation.

    As in the reference, they are filled up with silence to the longest, and each keeps the frames that it reaches.

    Parameters
    ----------
    clips : sequence of ndarray, shape [S], float32
        Each of at least ``front.min_samples``.
    front : AudioFront

    Returns
    -------
    list of ndarray, shape [bins, M], float32
    """
    longest = max(map(len, clips))
    features = []
    for clip in clips:
        whole = _features(np.pad(clip, (0, longest - len(clip))), front)
        frames = min(-(-len(clip) // front.hop_length), whole.shape[1])
        features.append(np.ascontiguousarray(whole[:, :frames]))
    return features


def _features(clip: Float32, front: AudioFront) -> Float32:
    """Return ``[bins, S // hop]`` of one clip."""
    half = front.n_fft // 2
    frames = np.lib.stride_tricks.sliding_window_view(np.pad(clip, half, mode="reflect"), front.n_fft)
    frames = frames[:: front.hop_length][: len(clip) // front.hop_length]
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(front.n_fft) / front.n_fft)
    filters = mel_filters(front)
    mel = np.empty((front.feature_size, len(frames)))
    for start in range(0, len(frames), _BLOCK_FRAMES):  # bounds the memory of a long clip
        part = slice(start, start + _BLOCK_FRAMES)
        mel[:, part] = filters @ (np.abs(np.fft.rfft(frames[part] * window)) ** 2).T
    log = np.log10(np.maximum(mel, _FLOOR))
    features: Float32 = ((np.maximum(log, log.max() - _RANGE) + 4) / 4).astype(np.float32)
    return features


def mel_filters(front: AudioFront) -> NDArray[np.float64]:
    """Return Slaney's triangular filters of equal area, ``[bins, n_fft // 2 + 1]``, from 0 to 8000 Hz."""
    last = _MEL_BREAK_HZ / _MEL_LINEAR_HZ
    top = last + math.log(_MAX_HZ / _MEL_BREAK_HZ) / _MEL_LOG_STEP
    mels = np.linspace(0, top, front.feature_size + 2)
    edges = np.where(mels < last, mels * _MEL_LINEAR_HZ, _MEL_BREAK_HZ * np.exp(_MEL_LOG_STEP * (mels - last)))
    places = np.arange(front.n_fft // 2 + 1) * (front.sampling_rate / front.n_fft)
    rising = (places - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falling = (edges[2:, None] - places) / np.diff(edges)[1:, None]
    area = 2 / (edges[2:] - edges[:-2])
    filters: NDArray[np.float64] = np.maximum(0, np.minimum(rising, falling)) * area[:, None]
    return filters
