"""Whether a recogniser understands the voice: word error rate on the 50 test sentences, and spectrograms.

The recogniser is pocketsphinx (PyPI, ships its model). It hears espeak-ng itself, the codec's reconstruction of that,
the same with all codes but the first of each frame drawn by the CodePredictor, and the demo voice. Needs no torch.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from acceptance import interval, open_checkpoint
from chart import grey_png
from forced import forced_states
from numpy.typing import NDArray
from speech import FRAME, RATE, Espeak, resampled

from trt_cpspec import Qwen3TTS
from trt_cpspec.outputs import write_wav

Wave = NDArray[np.float32]
_HEARD_RATE = 16000


def word_errors(said: str, heard: str) -> tuple[int, int]:
    """Return the least number of words to replace, add or drop, and the number of words said."""
    wanted, found = _words(said), _words(heard)
    row = list(range(len(found) + 1))
    for number, word in enumerate(wanted, 1):
        diagonal, row[0] = row[0], number
        for place, other in enumerate(found, 1):
            diagonal, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, diagonal + (word != other))
    return row[-1], len(wanted)


def _words(text: str) -> list[str]:
    return re.sub(r"[^a-z' ]", " ", text.lower()).split()


class Recogniser:
    """pocketsphinx with the model that it ships."""

    def __init__(self) -> None:
        from pocketsphinx import Decoder  # noqa: PLC0415  the other functions do without it

        self._decoder = Decoder(samprate=_HEARD_RATE, loglevel="FATAL")

    def hear(self, wave: Wave) -> str:
        """Return the words of a waveform at 24 kHz."""
        quiet = np.zeros(RATE // 4)
        samples = resampled(np.concatenate([quiet, wave.astype(float), quiet]), RATE, _HEARD_RATE)
        samples *= 20000 / max(np.abs(samples).max(), 1e-6)
        self._decoder.start_utt()
        self._decoder.process_raw(samples.astype(np.int16).tobytes(), no_search=False, full_utt=True)
        self._decoder.end_utt()
        found = self._decoder.hyp()
        return found.hypstr if found else ""


class Text(NamedTuple):
    """A held-out text, and its place among all texts."""

    place: int
    said: str


def held_out_texts(work: Path, part: str, count: int) -> list[Text]:
    """Return the first texts of ``dev`` or ``test`` that have no digits: a recogniser writes numbers as words."""
    sets: dict[str, list[str]] = json.loads((work / "corpus.json").read_text(encoding="utf-8"))
    first = len(sets["train"]) + (len(sets["dev"]) if part == "test" else 0)
    texts = [Text(first + number, text) for number, text in enumerate(sets[part])]
    return [text for text in texts if not re.search(r"\d", text.said)][:count]


def synthesized(model: Qwen3TTS, texts: Sequence[Text], options: dict[str, Any]) -> list[Wave]:
    """Return what the voice says."""
    return [
        # Ample, so that a voice that does not find its end cannot talk for minutes.
        model.synthesize(text.said, seed=number, max_audio_length=38 + 2 * len(text.said), **options).waveform
        for number, text in enumerate(texts, 1)
    ]


def real_codes(work: Path, text: Text) -> NDArray[np.int32]:
    """Return the codes of espeak-ng's own speech, ``[F, G]``."""
    lengths, codes = np.load(work / "frames.npy"), np.load(work / "codes.npy", mmap_mode="r")
    end = lengths[: text.place + 1].sum()
    return np.array(codes[end - lengths[text.place] : end], np.int32)


def completed(model: Qwen3TTS, text: Text, codes: NDArray[np.int32], temperature: float | None) -> NDArray[np.int32]:
    """Return the codes with all but the first of each frame drawn anew by the CodePredictor, along real speech."""
    hidden = forced_states(model, text.said, codes).talker_hidden
    params = model.talker.spec.defaults.subtalker
    if temperature is not None:
        params = replace(params, temperature=temperature)
    found = [
        model.predictor.decode_frame(
            hidden[frame : frame + 1], codes[frame : frame + 1, 0], params=params, seeds=[text.place], frames=[frame]
        ).codes
        for frame in range(len(codes))
    ]
    return np.concatenate(found)


def score(texts: Sequence[str], heard: Sequence[str], other: Sequence[str]) -> dict[str, Any]:
    """Return word error rate, and what it is more than that of other hearing; 95 % by a bootstrap over sentences."""
    errors, words = _errors(texts, heard)
    more = errors - _errors(texts, other)[0]
    intervals = interval(np.arange(len(texts)), lambda w: np.array([w @ errors, w @ more]) / (w @ words))
    (rate_low, more_low), (rate_high, more_high) = np.asarray(intervals).tolist()
    return {
        "word_error_rate": errors.sum() / words.sum(), "interval": [rate_low, rate_high], "words": int(words.sum()),
        "more": more.sum() / words.sum(), "more_interval": [more_low, more_high], "heard": list(heard),
    }  # fmt: skip


def _errors(texts: Sequence[str], heard: Sequence[str]) -> NDArray[np.float64]:
    return np.array([word_errors(said, found) for said, found in zip(texts, heard, strict=True)], float).T


def spectrogram(wave: Wave, size: int = 1024, hop: int = 240) -> NDArray[np.uint8]:
    """Return a spectrogram up to 8 kHz, 70 dB deep in 16 greys, dark where it is loud: ``[bins, steps] uint8``."""
    padded = np.pad(wave.astype(float), size // 2)
    pieces = np.lib.stride_tricks.sliding_window_view(padded, size)[::hop] * np.hanning(size)
    levels = 20 * np.log10(np.abs(np.fft.rfft(pieces)) + 1e-9)[:, : size // 3]
    shares = np.clip((levels - levels.max() + 70) / 70, 0, 1)
    return (np.round(15 * (1 - shares)) * 17).astype(np.uint8).T[::-1]


def stacked(waves: Sequence[Wave]) -> bytes:
    """Return the spectrograms of waveforms below each other as a PNG."""
    pictures = [spectrogram(wave) for wave in waves]
    width = max(picture.shape[1] for picture in pictures)
    rows = [np.pad(picture, ((0, 6), (0, width - picture.shape[1])), constant_values=255) for picture in pictures]
    return grey_png(np.concatenate(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of all stages: texts, frames and codes")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True, help="receives PART.json, PART.png and some wavs")
    parser.add_argument("--part", choices=("test", "dev"), default="test", help="dev is for choosing, test for telling")
    parser.add_argument("--count", type=int, default=50, help="sentences")
    parser.add_argument(
        "--mostErrors", dest="most_errors", type=float,
        help="leave out sentences of which more than this share of words is misheard from espeak-ng itself",
    )  # fmt: skip
    parser.add_argument("--temperatures", type=float, nargs="+", help="of the Talker; default: the voice's own")
    parser.add_argument("--subtalkerTemperatures", dest="subtalker_temperatures", type=float, nargs="+")
    parser.add_argument("--wavs", type=int, default=5, help="sentences that are written as wavs")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    texts = held_out_texts(args.work, args.part, args.count)
    recogniser, espeak = Recogniser(), Espeak()
    original = [espeak.say(text.said).samples.astype(np.float32) / 32768 for text in texts]
    if args.most_errors is not None:
        kept = [
            place
            for place, (errors, words) in enumerate(
                word_errors(text.said, recogniser.hear(wave)) for text, wave in zip(texts, original, strict=True)
            )
            if errors <= args.most_errors * words
        ]
        texts, original = [texts[place] for place in kept], [original[place] for place in kept]
    result: dict[str, Any] = {"sentences": [text.said for text in texts]}

    def listen(name: str, waves: list[Wave]) -> list[Wave]:
        heard = [recogniser.hear(wave) for wave in waves]
        found = result[name] = score(result["sentences"], heard, result.get("espeak-ng", {"heard": heard})["heard"])
        rate, more = (
            f"{100 * found[part]:.1f} % ({100 * low:.0f} to {100 * high:.0f})"
            for part, (low, high) in (("word_error_rate", found["interval"]), ("more", found["more_interval"]))
        )
        print(f"{name}: word error rate {rate}, more than espeak-ng's: {more}", flush=True)
        return waves

    spoken = {"espeak-ng": listen("espeak-ng", original)}
    with TemporaryDirectory() as temporary:
        model = open_checkpoint(args.checkpoint, Path(temporary) / "engines")
        codes = [real_codes(args.work, text) for text in texts]
        spoken["codec"] = listen("codec", [model.codec.decode(part) for part in codes])
        for subtalker in args.subtalker_temperatures or [None]:
            drawn = [completed(model, text, part, subtalker) for text, part in zip(texts, codes, strict=True)]
            name = "codec, codes 1 to 15 drawn" + (f" at {subtalker}" if subtalker is not None else "")
            spoken[name] = listen(name, [model.codec.decode(part) for part in drawn])
            for talker in args.temperatures or [None]:
                given = {"talker_temperature": talker, "subtalker_temperature": subtalker}
                options = {name: value for name, value in given.items() if value is not None}
                name = ", ".join(["voice", *(f"{name} {value}" for name, value in options.items())])
                spoken[name] = listen(name, synthesized(model, texts, options))
    (args.output / f"{args.part}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (args.output / f"{args.part}.png").write_bytes(stacked([waves[0] for waves in spoken.values()]))
    for number in range(min(args.wavs, len(texts))):
        for name, waves in spoken.items():
            write_wav(args.output / f"{args.part}_{number:02d}_{name}.wav", waves[number], RATE)
    print(f"{FRAME / RATE:.2f} s a frame; {len(texts)} sentences")


if __name__ == "__main__":
    main()
