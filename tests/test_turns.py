"""The turn of a model: batches, streams, encoders and callbacks of several threads. Nothing here may wait for ever."""

from __future__ import annotations

import faulthandler
import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from media_case import MediaCase

from trt_cpspec.errors import ConfigError, EngineError, SpeechError
from trt_cpspec.omni import Qwen3Omni
from trt_cpspec.pipeline import Qwen3TTS
from trt_cpspec.streaming import AudioStream
from trt_cpspec.turns import ModelLock, Turn

Patch = pytest.MonkeyPatch
OWN = "from a callback of its own call"
SAID: dict[str, Any] = {"seed": 3, "max_audio_length": 12, "verify_size": 3}
ANSWERED: dict[str, Any] = {"seed": 3, "max_generate_length": 8, "max_audio_length": 8}
PATIENCE = 30


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """End the process with the stacks of its threads where a test hangs: they wait for each other."""
    faulthandler.dump_traceback_later(4 * PATIENCE, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(params=["tts", "omni"])
def family(request: pytest.FixtureRequest, lively: Qwen3TTS, omni: Any) -> Family:
    return Family(lively) if request.param == "tts" else Family(omni.model)


class Family:
    """A model of either family, by what both have."""

    def __init__(self, model: Qwen3TTS | Qwen3Omni) -> None:
        self.model = model
        self.lock = model.lock if isinstance(model, Qwen3TTS) else model._turn._lock

    def batch(self, **options: Any) -> Any:
        if isinstance(self.model, Qwen3TTS):
            return self.model.synthesize("Hello there.", **SAID, **options)
        return self.model.respond("Hi", **ANSWERED, **options).speech

    def stream(self, **options: Any) -> AudioStream[Any]:
        if isinstance(self.model, Qwen3TTS):
            return self.model.synthesize_stream("Hello there.", chunk_frames=2, **SAID, **options)
        return self.model.respond_stream("Hi", chunk_frames=2, **ANSWERED, **options)

    def streamed(self, stream: AudioStream[Any]) -> Any:
        """Take what is left of a stream; return its speech."""
        list(stream)
        return stream.result if isinstance(self.model, Qwen3TTS) else stream.result.speech


@pytest.fixture
def spoken(family: Family) -> np.ndarray:
    codes: np.ndarray = family.batch().codes
    assert len(codes) >= 8
    return codes


@pytest.fixture
def other() -> Iterator[ThreadPoolExecutor]:
    """A second thread; its answers are waited for so long at most."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


def once(action: Callable[[], Any]) -> tuple[Callable[[int], None], list[Any]]:
    """Return a callback that does something in its first call, and the list of what came of it."""
    outcomes: list[Any] = []

    def progress(frames: int) -> None:
        if not outcomes:
            outcomes.append(None)
            try:
                outcomes[0] = action()
            except ConfigError as error:
                outcomes[0] = str(error)

    return progress, outcomes


# ---- who is within a call ------------------------------------------------------------------------------------------


def test_a_chunk_asked_for_within_a_batch(family: Family, spoken: np.ndarray) -> None:
    """The stream would wait for the batch, and the batch for it. It stays open, and gives its chunks afterwards."""
    stream = family.stream()
    progress, outcomes = once(lambda: next(stream))
    np.testing.assert_array_equal(family.batch(progress=progress).codes, spoken)
    assert OWN in outcomes[0]
    np.testing.assert_array_equal(family.streamed(stream).codes, spoken)


def test_a_chunk_asked_for_within_a_stream(family: Family, spoken: np.ndarray) -> None:
    """Of another stream, or of the very stream whose thread asks."""
    others = [family.stream()]
    progress, outcomes = once(lambda: next(others[0]))
    np.testing.assert_array_equal(family.streamed(family.stream(progress=progress)).codes, spoken)
    assert OWN in outcomes[0]
    progress, outcomes = once(lambda: next(others[0]))
    others[0] = family.stream(progress=progress)
    np.testing.assert_array_equal(family.streamed(others[0]).codes, spoken)
    assert OWN in outcomes[0]


def test_a_batch_asked_for_within_a_stream(family: Family, spoken: np.ndarray) -> None:
    """What the callback raises is the consumer's; an answer's too, as it is."""
    progress, outcomes = once(family.batch)
    np.testing.assert_array_equal(family.streamed(family.stream(progress=progress)).codes, spoken)
    assert OWN in outcomes[0]
    with pytest.raises(ConfigError, match=OWN) as caught:
        list(family.stream(progress=lambda frames: family.batch() if frames else None))
    assert not isinstance(caught.value, SpeechError)
    np.testing.assert_array_equal(family.batch().codes, spoken)


def test_a_callback_while_a_stream_waits_for_its_turn(family: Family, spoken: np.ndarray) -> None:
    """Its thread is within a call, though it has not the turn yet."""
    progress, outcomes = once(family.batch)
    stream, told = family.stream(progress=progress), threading.Event()
    with family.lock, ThreadPoolExecutor(1) as pool:
        first = pool.submit(next, stream)
        while not outcomes or outcomes[0] is None:
            told.wait(0.01)
        assert not first.done()
        family.lock.release()
        first.result(PATIENCE)
        family.lock.acquire(PATIENCE)
    assert OWN in outcomes[0]
    np.testing.assert_array_equal(family.streamed(stream).codes, spoken)


def test_a_chunk_asked_for_by_who_holds_the_lock(family: Family, spoken: np.ndarray) -> None:
    stream = family.stream()
    with family.lock, pytest.raises(ConfigError, match="whose lock this thread holds: release it first"):
        next(stream)
    np.testing.assert_array_equal(family.streamed(stream).codes, spoken)


# ---- closing -------------------------------------------------------------------------------------------------------


def test_a_stream_is_closed_within_a_batch(family: Family, spoken: np.ndarray, other: ThreadPoolExecutor) -> None:
    """It waits for the batch's turn, in a thread that another one waits for; closing it waits for neither."""
    stream = family.stream()

    def close() -> str:
        first = other.submit(lambda: list(stream))
        while stream._thread.ident is None:
            pass
        stream.close()
        return f"{first.result(PATIENCE)} {stream._thread.is_alive()}"

    progress, outcomes = once(close)
    np.testing.assert_array_equal(family.batch(progress=progress).codes, spoken)
    assert outcomes == ["[] False"]


def test_a_stream_is_dropped_within_a_batch(family: Family, spoken: np.ndarray) -> None:
    streams = [family.stream()]
    streams[0]._thread.start()
    thread = streams[0]._thread

    def drop() -> bool:
        streams.clear()
        gc.collect()
        return thread.is_alive()

    progress, outcomes = once(drop)
    with ThreadPoolExecutor(1) as pool:
        np.testing.assert_array_equal(
            pool.submit(lambda: family.batch(progress=progress)).result(PATIENCE).codes, spoken
        )
    assert outcomes == [False]


def test_a_stream_closes_itself(family: Family, spoken: np.ndarray) -> None:
    streams: list[AudioStream[Any]] = []
    progress, outcomes = once(lambda: streams[0].close())
    streams.append(family.stream(progress=progress))
    assert list(streams[0]) == []
    assert outcomes == [None]
    with pytest.raises(EngineError, match="no result"):
        _ = streams[0].result
    np.testing.assert_array_equal(family.batch().codes, spoken)


@pytest.mark.parametrize("taken", [0, 1])
def test_a_stream_is_closed_by_another_thread(
    taken: int, family: Family, spoken: np.ndarray, other: ThreadPoolExecutor
) -> None:
    """Its consumer waits for a chunk that does not come, and sees the end instead."""
    waits, goes_on = threading.Event(), threading.Event()

    def progress(frames: int) -> None:
        if (taken == 0 or frames) and not waits.is_set():
            waits.set()
            goes_on.wait(PATIENCE)

    stream = family.stream(progress=progress)
    found = other.submit(lambda: [len(chunk) for chunk in stream])
    assert waits.wait(PATIENCE)
    closing = threading.Thread(target=stream.close)
    closing.start()
    while not stream._stop.is_set():
        pass
    goes_on.set()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    assert found.result(PATIENCE) == []
    with pytest.raises(EngineError, match="its chunks were not all taken"):
        _ = stream.result
    np.testing.assert_array_equal(family.batch().codes, spoken)


# ---- who waits for whom --------------------------------------------------------------------------------------------


def test_a_batch_waits_for_a_stream_and_a_stream_for_a_batch(
    family: Family, spoken: np.ndarray, other: ThreadPoolExecutor
) -> None:
    events: list[str] = []

    def told(word: str) -> Callable[[int], None]:
        return lambda frames: events.append(word) if frames else None

    for first, second in (("stream", "batch"), ("batch", "stream")):
        events.clear()
        began, arrived = threading.Event(), threading.Event()

        def hold(frames: int, word: str = first, began: Any = began, arrived: Any = arrived) -> None:
            if frames:
                events.append(word)
            began.set()
            arrived.wait(PATIENCE)

        made = {"stream": lambda progress: family.streamed(family.stream(progress=progress)),
                "batch": lambda progress: family.batch(progress=progress)}  # fmt: skip
        one = other.submit(made[first], hold)
        assert began.wait(PATIENCE)
        with ThreadPoolExecutor(1) as pool:
            two = pool.submit(made[second], told(second))
            while len(family.model._turn._calls) < 2:
                pass
            arrived.set()
            for speech in (one.result(PATIENCE), two.result(PATIENCE)):
                np.testing.assert_array_equal(speech.codes, spoken)
        assert events == [first] * events.count(first) + [second] * events.count(second)
        assert min(events.count(first), events.count(second)) >= 8


def test_a_code_predictor_waits_for_a_stream(lively: Qwen3TTS, other: ThreadPoolExecutor) -> None:
    hidden = np.random.default_rng(2).standard_normal((1, lively.predictor.spec.talker_hidden_size), np.float32)
    alone = lively.predictor.decode_frame(hidden, 3, seeds=1, frames=0, verify_size=3).codes
    began, goes_on = threading.Event(), threading.Event()

    def hold(frames: int) -> None:
        began.set()
        goes_on.wait(PATIENCE)

    stream = lively.synthesize_stream("Hello there.", progress=hold, **SAID)
    stream._thread.start()
    assert began.wait(PATIENCE)
    frame = other.submit(lively.predictor.decode_frame, hidden, 3, seeds=1, frames=0, verify_size=3)
    with pytest.raises(TimeoutError):
        frame.result(0.1)
    goes_on.set()
    np.testing.assert_array_equal(frame.result(PATIENCE).codes, alone)
    stream.close()


# ---- encoders ------------------------------------------------------------------------------------------------------


def test_an_encoder_is_opened_when_no_call_has_the_turn(omni: Any, other: ThreadPoolExecutor) -> None:
    """To open it is work on the model's device; one that is open is there at once, whoever has the turn."""
    encoders = replace(omni.model.encoders)
    with omni.model.voice.lock:
        waiting = other.submit(encoders.audio)
        with pytest.raises(TimeoutError):
            waiting.result(0.1)
        assert encoders._audio is None
        assert encoders.vision() is encoders.vision()  # this thread has the turn
    assert waiting.result(PATIENCE) is encoders._audio
    with omni.model.voice.lock:
        assert other.submit(encoders.audio).result(PATIENCE) is encoders._audio


def test_a_conversation_is_prepared_while_another_is_answered(
    omni: Any, tmp_path: Path, other: ThreadPoolExecutor
) -> None:
    case = MediaCase("heard", omni.model, tmp_path)
    request = case.request()
    omni.model.prepare(request)
    with omni.model.voice.lock:
        assert other.submit(omni.model.prepare, request).result(PATIENCE).media is not None


def test_an_encoder_that_is_opened_in_a_callback(omni: Any, tmp_path: Path) -> None:
    """Within a stream, between two of its frames: the thread has the turn, and does not wait for itself."""
    model = Qwen3Omni(omni.model.thinker, omni.model.tokenizer, omni.model.voice, replace(omni.model.encoders))
    request = MediaCase("seen", model, tmp_path).request()
    assert model.encoders is not None
    assert model.encoders._vision is None
    progress, outcomes = once(lambda: model.prepare(request).media is not None)
    list(model.respond_stream("Hi", progress=progress, **ANSWERED))
    assert outcomes == [True]


def test_a_build_that_was_killed_meanwhile_is_seen_when_an_encoder_is_opened(omni_copy: Path) -> None:
    model = Qwen3Omni.from_engine_dir(omni_copy, threads=1)
    assert model.encoders is not None
    (omni_copy / ".unfinished").write_text("{}")
    with pytest.raises(EngineError, match="holds files of two builds"):
        model.encoders.audio()


# ---- too little memory ---------------------------------------------------------------------------------------------


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise MemoryError("Unable to allocate 9 GiB")


USED_UP = r"memory of this machine is used up \(Unable to allocate 9 GiB\)"


@pytest.mark.parametrize("part", ["talker.prefill", "talker.step", "codec.decode", "codec.call"])
def test_memory_that_is_used_up_while_speaking(part: str, family: Family, spoken: np.ndarray) -> None:
    voice = family.model if isinstance(family.model, Qwen3TTS) else family.model.voice
    holder, name = part.split(".")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(getattr(voice, holder), name, refuse)
        for speak in (family.batch, lambda: family.streamed(family.stream())):
            if part == "codec.decode" and speak is not family.batch:
                continue  # a stream does not call it
            with pytest.raises(EngineError, match=USED_UP) as caught:
                speak()
            assert isinstance(caught.value, SpeechError) == isinstance(family.model, Qwen3Omni)
    np.testing.assert_array_equal(family.batch().codes, spoken)


@pytest.mark.parametrize("part", ["thinker.step", "encoders.audio"])
def test_memory_that_is_used_up_while_answering(part: str, omni: Any, tmp_path: Path, monkeypatch: Patch) -> None:
    case = MediaCase("heard", omni.model, tmp_path)
    chat, window = omni.model.prepare(case.request()), omni.model.window(0)
    holder, name = part.split(".")
    owner = omni.model.thinker if holder == "thinker" else omni.model.encoders.audio()
    monkeypatch.setattr(owner, name if holder == "thinker" else "encode", refuse)
    (result,) = omni.model.run_batch([chat], window=window, mode="rejection")
    assert isinstance(result, EngineError)
    assert "memory of this machine is used up" in str(result)
    with pytest.raises(EngineError, match=USED_UP) as caught:
        list(omni.model.stream(chat, window=window, mode="rejection", chunk_frames=2))
    assert not isinstance(caught.value, SpeechError)


# ---- the lock ------------------------------------------------------------------------------------------------------


def test_the_lock_knows_its_holder(other: ThreadPoolExecutor) -> None:
    lock = ModelLock()
    assert not lock.is_held_here
    with lock:
        with lock:
            assert lock.is_held_here
        assert lock.is_held_here
        assert not other.submit(lambda: lock.is_held_here).result(PATIENCE)
        assert not other.submit(lock.acquire, 0.01).result(PATIENCE)
        with pytest.raises(RuntimeError, match="held by another thread"):
            other.submit(lock.release).result(PATIENCE)
    assert not lock.is_held_here
    with pytest.raises(RuntimeError, match="or by none"):
        lock.release()
    assert other.submit(lock.acquire, 0.01).result(PATIENCE)


def test_a_turn_that_is_not_had_is_no_call(other: ThreadPoolExecutor) -> None:
    """Who gave up waiting may try again."""
    lock = ModelLock()
    turn = Turn(lock)

    def give_up() -> None:
        raise EngineError("enough")

    def wait() -> None:
        with turn.waiting(give_up):
            pytest.fail("the turn is another's")

    with lock:
        for _ in range(2):
            with pytest.raises(EngineError, match="enough"):
                other.submit(wait).result(PATIENCE)
    assert turn._calls == set()
    with turn, pytest.raises(ConfigError, match=OWN), turn:
        pytest.fail("this thread has it already")
    assert turn._calls == set()
