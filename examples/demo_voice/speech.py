"""Stage 2: espeak-ng speaks the texts: 24 kHz mono, and for each frame of 80 ms where in its text it is and its sounds.

``libespeak-ng`` is taken from the PyPI package ``espeakng-loader`` where that is installed, else from the system
(Debian: ``apt-get install espeak-ng``). It speaks some thousand times faster than real time on one core.
"""

from __future__ import annotations

import argparse
import ctypes
import ctypes.util
import importlib
import json
import multiprocessing
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

RATE = 24000
FRAME = 1920
"""Samples of a frame: 80 ms."""
PARTS = 4
"""Parts of a frame, 20 ms each, whose phonemes are known."""

VOICE, SPEED, PITCH = "en-us+f2", 140, 40
"""Of the voices tried, the one that pocketsphinx understands best."""

_LEAD_SECONDS, _TAIL_SECONDS, _PEAK = 0.04, 0.12, 0.5
_SYNCHRONOUS, _PHONEME_EVENTS, _CHARACTERS, _UTF8 = 2, 1, 1, 1
_SPEED_PARAMETER, _PITCH_PARAMETER = 1, 3
_END_EVENT, _WORD_EVENT, _PHONEME_EVENT = 0, 1, 7


class _Event(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int), ("identifier", ctypes.c_uint), ("text_position", ctypes.c_int),
        ("length", ctypes.c_int), ("audio_position", ctypes.c_int), ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p), ("id", ctypes.c_char * 8),
    )  # fmt: skip


_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event))


class Spoken(NamedTuple):
    """One utterance.

    Attributes
    ----------
    samples : ndarray, shape [F * 1920], int16
    places : ndarray, shape [F, 3], int16
        For each frame the characters of its word, first and behind the last, and the character that is spoken in the
        frame's middle if the letters of a word take the same time each; -1 in silence.
    phones : ndarray, shape [F, 4], S8
        espeak-ng's name of the phoneme in the middle of each 20 ms, without its stress; empty in silence.
    """

    samples: NDArray[np.int16]
    places: NDArray[np.int16]
    phones: NDArray[np.bytes_]


class Espeak:
    """The synthesiser, one a process."""

    def __init__(self) -> None:
        path, data = _library()
        self._library = ctypes.CDLL(path)
        self._rate = self._library.espeak_Initialize(_SYNCHRONOUS, 0, data, _PHONEME_EVENTS)
        if self._rate <= 0:
            raise RuntimeError(f"espeak-ng ({path}) did not start")
        self._blocks: list[NDArray[np.int16]] = []
        self._words: list[tuple[int, int, float]] = []
        self._phones: list[tuple[bytes, float]] = []
        self._callback = _CALLBACK(self._receive)  # kept: the library holds its address
        self._library.espeak_SetSynthCallback(self._callback)
        if self._library.espeak_SetVoiceByName(VOICE.encode()) != 0:
            raise RuntimeError(f"espeak-ng ({path}) has no voice {VOICE}")
        self._library.espeak_SetParameter(_SPEED_PARAMETER, SPEED, 0)
        self._library.espeak_SetParameter(_PITCH_PARAMETER, PITCH, 0)

    def _seed(self) -> None:
        """Let every text begin with the same random numbers: since 1.52 espeak-ng takes them from the clock."""
        if hasattr(self._library, "espeak_ng_SetRandSeed"):
            self._library.espeak_ng_SetRandSeed(ctypes.c_long(1))
        else:
            ctypes.CDLL(None).srand(1)

    def _receive(self, samples: Any, count: int, events: Any) -> int:
        if samples and count:
            self._blocks.append(np.ctypeslib.as_array(samples, (count,)).copy())
        index = 0
        while events[index].type != _END_EVENT:
            event = events[index]
            if event.type == _WORD_EVENT:
                self._words.append((event.text_position - 1, event.length, event.audio_position / 1000))
            elif event.type == _PHONEME_EVENT:
                self._phones.append((bytes(event.id), event.audio_position / 1000))
            index += 1
        return 0

    def say(self, text: str) -> Spoken:
        """Speak a text; silence is cut to the same short one in front and behind, and the peak is the same for all."""
        self._seed()
        self._blocks.clear()
        self._words.clear()
        self._phones.clear()
        encoded = text.encode() + b"\0"
        self._library.espeak_Synth(
            ctypes.c_char_p(encoded), ctypes.c_size_t(len(encoded)), 0, _CHARACTERS, 0, _UTF8, None, None
        )
        self._library.espeak_Synchronize()
        wave = np.concatenate([*self._blocks, np.zeros(1, np.int16)]).astype(np.float64)
        loud = np.flatnonzero(np.abs(wave) > 0.005 * max(np.abs(wave).max(), 1))
        first, last = (int(loud[0]), int(loud[-1])) if len(loud) else (0, 0)
        wave = resampled(wave[first : last + 1], self._rate, RATE)
        wave *= _PEAK * 32767 / max(np.abs(wave).max(), 1)
        lead, tail = int(_LEAD_SECONDS * RATE), int(_TAIL_SECONDS * RATE)
        frames = -(-(lead + len(wave) + tail) // FRAME)
        samples = np.zeros(frames * FRAME, np.int16)
        samples[lead : lead + len(wave)] = np.round(wave)
        shift = _LEAD_SECONDS - first / self._rate
        end = (lead + len(wave)) / RATE
        return Spoken(samples, _places(self._words, shift, end, frames), _phones(self._phones, shift, end, frames))


def _places(words: Sequence[tuple[int, int, float]], shift: float, end: float, frames: int) -> NDArray[np.int16]:
    places = np.full((frames, 3), -1, np.int16)
    middles = (np.arange(frames) + 0.5) * FRAME / RATE
    begins = [begin + shift for _, _, begin in words]
    for (start, length, _), begin, stop in zip(words, begins, [*begins[1:], end], strict=True):
        inside = (middles >= begin) & (middles < stop)
        share = (middles[inside] - begin) / max(stop - begin, 1e-3)
        places[inside, 0], places[inside, 1] = start, start + length
        places[inside, 2] = start + np.minimum((share * length).astype(int), length - 1)
    return places


def _phones(phones: Sequence[tuple[bytes, float]], shift: float, end: float, frames: int) -> NDArray[np.bytes_]:
    middles = (np.arange(frames * PARTS) + 0.5) * FRAME / PARTS / RATE
    names = np.array([b"", *(name.lstrip(b"',%=") for name, _ in phones)], "S8")
    names[np.char.startswith(names, b"_")] = b""
    found = names[np.searchsorted([begin + shift for _, begin in phones], middles, "right")]
    return np.where(middles < end, found, b"").astype("S8").reshape(frames, PARTS)


def resampled(wave: NDArray[np.float64], given: int, wanted: int) -> NDArray[np.float64]:
    """Resample a whole utterance by its spectrum; silence is put behind it, to lengths that transform fast."""
    step = given // np.gcd(given, wanted) * 32
    padded = np.pad(wave, (0, -len(wave) % step))
    count = len(padded) * wanted // given
    spectrum, wide = np.fft.rfft(padded), np.zeros(count // 2 + 1, complex)
    kept = min(len(spectrum), len(wide))
    wide[:kept] = spectrum[:kept]
    return np.fft.irfft(wide, count)[: len(wave) * wanted // given] * (wanted / given)


def _library() -> tuple[str, bytes | None]:
    try:
        loader = importlib.import_module("espeakng_loader")
        return str(loader.get_library_path()), str(loader.get_data_path()).encode()
    except ImportError:
        path = ctypes.util.find_library("espeak-ng")
        if path is None:
            raise SystemExit(
                "libespeak-ng is missing: pip install espeakng-loader, or apt-get install espeak-ng"
            ) from None
        return path, None


def _say_all(texts: Sequence[str]) -> list[Spoken]:
    espeak = Espeak()
    return [espeak.say(text) for text in texts]


def speak_corpus(work: Path, processes: int) -> float:
    """Write the speech of all texts, one behind the other, and return its hours.

    ``speech.npy`` has the samples, ``frames.npy`` the frames of each text, ``places.npy`` the places in the text,
    ``phones.npy`` the phonemes as places in the list of names ``phones.json``, whose first is silence.
    """
    sets: dict[str, list[str]] = json.loads((work / "corpus.json").read_text(encoding="utf-8"))
    texts = [*sets["train"], *sets["dev"], *sets["test"]]
    parts = [texts[place : place + 100] for place in range(0, len(texts), 100)]
    # What espeak-ng says depends a little on what it said before: a process a part makes it the same every time.
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=1) as pool:
        spoken = [item for part in pool.imap(_say_all, parts) for item in part]
    frames = np.array([len(item.places) for item in spoken], np.int32)
    if (work / "codes.npy").is_file() and not np.array_equal(frames, np.load(work / "frames.npy")):
        raise SystemExit(f"{work} holds codes of other speech than espeak-ng makes here: use another folder")
    np.save(work / "places.npy", np.concatenate([item.places for item in spoken]))
    phones = np.concatenate([item.phones for item in spoken])
    names, numbers = np.unique(phones, return_inverse=True)  # sorted: silence, the empty name, comes first
    np.save(work / "phones.npy", numbers.reshape(phones.shape).astype(np.uint8))
    (work / "phones.json").write_text(json.dumps([name.decode() for name in names]) + "\n", encoding="utf-8")
    np.save(work / "frames.npy", frames)
    np.save(work / "speech.npy", np.concatenate([item.samples for item in spoken]))
    return sum(len(item.samples) for item in spoken) / RATE / 3600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of all stages")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    args = parser.parse_args()
    started = time.perf_counter()
    hours = speak_corpus(args.work, args.processes)
    print(f"{hours:.2f} hours of speech in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
