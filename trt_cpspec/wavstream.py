"""A wav that is written while it grows, to a file or into a pipe, for players that read it meanwhile."""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

UNKNOWN = 0xFFFFFFFF
"""Sizes of a wav whose end is not known, as ffmpeg writes them into a pipe; players then read to the end."""

HEADER_BYTES = 44
_PCM, _CHANNELS, _BITS = 1, 1, 16


def pcm16(waveform: NDArray[np.floating]) -> NDArray[np.int16]:
    """Return samples in [-1, 1] as 16-bit numbers."""
    samples: NDArray[np.int16] = np.rint(waveform * 32767).astype(np.int16)
    return samples


def wav_header(sample_rate: int, samples: int | None) -> bytes:
    """Return the header of a mono PCM16 wav.

    Parameters
    ----------
    sample_rate : int
        Hz.
    samples : int or None
        None where it is not known.

    Notes
    -----
    Source: Microsoft and IBM, "Multimedia Programming Interface and Data Specifications 1.0", RIFF WAVE.
    """
    width = _BITS // 8 * _CHANNELS
    data = UNKNOWN if samples is None else samples * width
    whole = UNKNOWN if samples is None else data + HEADER_BYTES - 8
    return struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        *(b"RIFF", whole, b"WAVE", b"fmt ", 16, _PCM, _CHANNELS),
        *(sample_rate, sample_rate * width, width, _BITS, b"data", data),
    )


class WavStream:
    """Writes a mono PCM16 wav piece by piece. Every piece is flushed.

    The header stands before the first piece and says that the length is not known. Where the file can go back,
    :meth:`finish` puts the length in, and :meth:`discard` takes everything away that was written.

    Parameters
    ----------
    file : binary file
        Where it stands, the wav begins; it stays open.
    sample_rate : int
        Hz.
    """

    def __init__(self, file: BinaryIO, sample_rate: int) -> None:
        self._file, self._rate = file, sample_rate
        self._start = _place(file)
        self._samples: int | None = None

    def write(self, waveform: NDArray[np.float32]) -> None:
        """Write samples in [-1, 1]."""
        if self._samples is None:
            self._file.write(wav_header(self._rate, None))
            self._samples = 0
        self._file.write(pcm16(waveform).astype("<i2").tobytes())
        self._file.flush()
        self._samples += len(waveform)

    def finish(self) -> None:
        """Complete the wav; one without samples is a header alone."""
        if self._samples is None:
            self._file.write(wav_header(self._rate, 0))
        elif self._start is not None:
            end = self._file.tell()
            self._file.seek(self._start)
            self._file.write(wav_header(self._rate, self._samples))
            self._file.seek(end)
        self._file.flush()

    def discard(self) -> None:
        """Take back what was written, where that is possible: it is no wav of the whole speech."""
        if self._start is not None and self._samples is not None:
            with suppress(OSError):
                self._file.seek(self._start)
                self._file.truncate()


def _place(file: BinaryIO) -> int | None:
    """Return where a file stands; None where nothing behind that place could be changed later, as in a pipe."""
    with suppress(OSError):
        # What is opened for appending writes at its end, wherever it stands.
        if fcntl is not None and fcntl.fcntl(file.fileno(), fcntl.F_GETFL) & os.O_APPEND:
            return None
    with suppress(OSError):
        return file.tell() if file.seekable() else None
    return None
