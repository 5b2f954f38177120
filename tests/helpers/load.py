"""Two hundred requests of all kinds, and four threads that ask for them: shared by the tests of the CPU and of the GPU.

As a program it speaks them again and again and prints what the process holds after each round:
``python load.py ENGINE ROUNDS REQUESTS DEVICE [EXECUTOR]``.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trt_cpspec.errors import CpSpecError
from trt_cpspec.pipeline import Qwen3TTS
from trt_cpspec.requests import make_request
from trt_cpspec.tensorfile import TensorFile

THREADS, LONGEST = 4, 3
WORDS = ("the", "quick", "brown fox", "jumps", "over", "a lazy dog", "and rests", "in the warm", "light", "of evening")

BAD: dict[str, dict[str, Any]] = {
    "unknown speaker 'nobody'": {"speaker": "nobody"},
    "unknown language 'klingon'": {"language": "klingon"},
    "the text is empty": {"text": ""},
    "contains '<|im_end|>', a special token": {"text": "a<|im_end|>b"},
    "talker_top_p is 2": {"talker_top_p": 2},
    "seed is -1, it must be from 0": {"seed": -1},
    "unknown option 'pitch'": {"pitch": 1},
    "a verify size of 9 is not possible": {"verify_size": 9},
    "unknown verification mode 'magic'": {"mode": "magic"},
    "the engine's max_input_len is": {"text": "word " * 1500, "non_streaming_mode": True},
    "the logits hold nan": {"speaker": "broken"},
}
"""Words of an error, and what asks for it. The speaker ``broken`` has an embedding that is no number."""


@dataclass
class Ask:
    """One request, and the words of its error where it is a bad one."""

    text: str
    options: dict[str, Any]
    verify_size: int
    mode: str
    error: str | None = None


def make_asks(
    count: int, speaker: str, seed: int = 1, *, bad_share: float = 0.2, modes: Sequence[str] = ("rejection", "coupled")
) -> list[Ask]:
    """Return requests of mixed lengths, seeds, laws and windows; a share of them is bad, each kind in turn."""
    draw = random.Random(seed)
    asks, kinds, bad = [], list(BAD), itertools.count()
    for _ in range(count):
        given: dict[str, Any] = {
            "text": " ".join(draw.choices(WORDS, k=draw.randint(1, 15))) + ".",
            "seed": draw.randrange(2**64),
            "max_audio_length": draw.randint(1, LONGEST),
            "speaker": speaker,
            "non_streaming_mode": draw.random() < 0.5,
            "talker_temperature": draw.choice([0.0, 0.7, 1.0]),
            "subtalker_top_k": draw.choice([0, 5, 50]),
            "verify_size": draw.choice([0, 2, 3, 8]),
            "mode": draw.choice(modes),
        }
        error = None
        if draw.random() < bad_share:
            error = kinds[next(bad) % len(kinds)]
            given |= BAD[error]
        asks.append(Ask(given.pop("text"), given, given.pop("verify_size"), given.pop("mode"), error))
    return asks


def with_broken_speaker(engine: Path) -> Path:
    """Give an engine folder the speaker ``broken`` in place of one of its own; return the folder."""
    path = engine / "talker" / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["speaker_id"]["broken"] = config["speaker_id"].pop("dylan")
    config["spk_is_dialect"].pop("dylan")
    path.write_text(json.dumps(config), encoding="utf-8")
    table = engine / "talker" / "embedding.safetensors"
    info = TensorFile(table).info("embedding")
    values = np.memmap(table, {"F32": np.float32, "F16": np.float16}[info.dtype], "r+", info.offset, info.shape)
    values[config["speaker_id"]["broken"], 0] = np.nan
    values.flush()
    return engine


Outcome = np.ndarray | str


def speak_alone(model: Qwen3TTS, ask: Ask) -> Outcome:
    """Speak one request by itself; return its codes, or the message of its error."""
    try:
        return model.synthesize(ask.text, verify_size=ask.verify_size, mode=ask.mode, **ask.options).codes  # type: ignore[arg-type]
    except CpSpecError as error:
        return str(error)


def stream_alone(model: Qwen3TTS, ask: Ask) -> Outcome:
    """Stream one request, and return what :func:`speak_alone` does."""
    try:
        stream = model.synthesize_stream(
            ask.text,
            chunk_frames=2,
            verify_size=ask.verify_size,
            mode=ask.mode,
            **ask.options,  # type: ignore[arg-type]
        )
        samples = sum(map(len, stream))
        assert samples == len(stream.result.waveform)
        return stream.result.codes
    except CpSpecError as error:
        return str(error)


def speak_together(model: Qwen3TTS, asks: Sequence[Ask]) -> list[Outcome]:
    """Speak requests of one window as a batch, the bad ones among them; each has its own codes or its own error."""
    outcomes: list[Outcome | None] = [None] * len(asks)
    batch = []
    for place, ask in enumerate(asks):
        try:
            batch.append((place, model.prepare(make_request(ask.text, ask.options))))
        except CpSpecError as error:
            outcomes[place] = str(error)
    if batch:
        window = model.window(asks[0].verify_size)
        results = model.run_batch([prepared for _, prepared in batch], window=window, mode=asks[0].mode)  # type: ignore[arg-type]
        for (place, _), result in zip(batch, results, strict=True):
            outcomes[place] = str(result) if isinstance(result, CpSpecError) else result.codes
    return outcomes  # type: ignore[return-value]


def jobs_of(
    model: Qwen3TTS, asks: Sequence[Ask], seed: int = 1, *, largest: int = 4
) -> list[tuple[list[int], Callable[[], list[Outcome]]]]:
    """Deal requests out to calls: one, every other time as a stream, or up to ``largest`` of a window as a batch."""
    draw = random.Random(seed)
    waiting = list(range(len(asks)))
    jobs: list[tuple[list[int], Callable[[], list[Outcome]]]] = []
    while waiting:
        first = waiting.pop(0)
        window, size = (asks[first].verify_size, asks[first].mode), draw.randint(1, largest)
        batchable = window[0] != 9 and window[1] != "magic"
        others = [i for i in waiting if (asks[i].verify_size, asks[i].mode) == window][: size - 1] if batchable else []
        waiting = [i for i in waiting if i not in others]
        places = [first, *others]
        if len(places) == 1:
            speak = (speak_alone, stream_alone)[first % 2]
            jobs.append((places, lambda ask=asks[first], speak=speak: [speak(model, ask)]))  # type: ignore[misc]
        else:
            chosen = [asks[i] for i in places]
            jobs.append((places, lambda chosen=chosen: speak_together(model, chosen)))  # type: ignore[misc]
    return jobs


def speak_all(model: Qwen3TTS, asks: Sequence[Ask], *, threads: int = THREADS, largest: int = 4) -> list[Outcome]:
    """Speak all requests from several threads at once."""
    outcomes: dict[int, Outcome] = {}
    jobs = jobs_of(model, asks, largest=largest)
    with ThreadPoolExecutor(threads) as pool:
        for (places, _), results in zip(jobs, pool.map(lambda job: job[1](), jobs), strict=True):
            outcomes.update(zip(places, results, strict=True))
    return [outcomes[place] for place in range(len(asks))]


def held() -> dict[str, int]:
    """Return what the process holds: resident bytes, objects of Python (its blocks of memory) and open files."""
    gc.collect()
    resident = 4096 * int(Path("/proc/self/statm").read_text().split()[1])
    return {"resident_bytes": resident, "blocks": sys.getallocatedblocks(), "files": len(os.listdir("/proc/self/fd"))}


def main(engine: str, rounds: str, count: str, device: str, executor: str = "auto") -> None:
    """Print what is held after each round."""
    model = Qwen3TTS.from_engine_dir(engine, threads=1, device=device, executor=executor)
    asks = make_asks(int(count), "vivian")
    for _ in range(int(rounds)):
        speak_all(model, asks)
        state = held()
        if device == "cuda":
            state["free_device_bytes"] = model.predictor._session.device.free_bytes()  # type: ignore[attr-defined]
        print(json.dumps(state), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
