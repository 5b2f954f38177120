"""Streams: chunks that are the waveform of the whole, when they leave, and what an end before the end leaves behind."""

from __future__ import annotations

import gc
import io
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from click.testing import CliRunner, Result
from crash import assert_interrupted
from media_case import MediaCase, user

from trt_cpspec import Qwen3TTS, Speech
from trt_cpspec.cli import llm, tts
from trt_cpspec.codec import Code2Wav, CodecStream
from trt_cpspec.errors import ConfigError, CpSpecError, EngineError, NumericsError, SpeechError
from trt_cpspec.pipeline import SpeechModel
from trt_cpspec.runtime import Runtime
from trt_cpspec.streaming import AudioStream, ChunkMaker

Patch = pytest.MonkeyPatch
PCM16_STEP = 1 / 32768
SIZES = (1, 2, 7, 25)
SAID: dict[str, Any] = {"seed": 3, "max_audio_length": 30, "verify_size": 3}
CPSPEC = str(Path(sys.executable).with_name("cpspec"))


@pytest.fixture
def work(tmp_path: Path, monkeypatch: Patch) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="module")
def said(lively: Qwen3TTS) -> Speech:
    speech = lively.synthesize("Hello there.", **SAID)
    assert len(speech.codes) == 30  # enough for each size to end in a shorter chunk, but for 1 and 2
    return speech


def assert_streamed(chunks: list[np.ndarray], whole: Speech, streamed: Speech) -> None:
    """Chunks, and the result of their stream, are those of the speech that was made at once."""
    found = np.concatenate(chunks)
    assert found.shape == whole.waveform.shape
    assert np.abs(found - whole.waveform).max() < PCM16_STEP
    np.testing.assert_array_equal(streamed.waveform, found)
    np.testing.assert_array_equal(streamed.codes, whole.codes)
    same = ("sample_rate", "finish_reason", "max_frames", "sampling", "speaker", "language", "warnings")
    assert [getattr(streamed, name) for name in same] == [getattr(whole, name) for name in same]
    assert streamed.stats.as_dict() == whole.stats.as_dict()
    assert whole.time_to_first_audio_ms is None
    assert streamed.time_to_first_audio_ms is not None
    assert streamed.time_to_first_audio_ms > 0


# ---- the chunks of an utterance -------------------------------------------------------------------------------------


class FakeCodec:
    """Says, one sample a frame, what the first code is; a stand-in for the codec and for its stream."""

    frames = 0

    def stream(self) -> FakeCodec:
        return self

    def push(self, codes: np.ndarray) -> np.ndarray:
        self.frames += len(codes)
        return codes[:, 0].astype(np.float32)


def maker_of(chunk_frames: int) -> ChunkMaker:
    codec: Any = FakeCodec()
    return ChunkMaker(codec, chunk_frames, lambda stage, started: None)


def frames_of(*first: int) -> list[np.ndarray]:
    return [np.array([code, 0], np.int32) for code in first]


def test_chunks_leave_when_their_frames_are_there() -> None:
    maker, frames = maker_of(2), frames_of(1, 2, 3, 4, 5)
    found = [maker.take(frames[:count]).tolist() for count in range(1, 6)]
    assert found == [[], [1, 2], [], [3, 4], []]
    assert maker.take(frames, last=True).tolist() == [5]
    assert maker.waveform().tolist() == [1, 2, 3, 4, 5]


def test_an_end_at_a_chunks_end_leaves_nothing_over() -> None:
    maker, frames = maker_of(2), frames_of(1, 2)
    assert maker.take(frames).tolist() == [1, 2]
    assert maker.take(frames, last=True).tolist() == []
    assert maker_of(2).take([], last=True).tolist() == []


def test_a_constant_waits_until_something_else_has_come() -> None:
    maker, frames = maker_of(2), frames_of(1, 1, 1, 1, 1, 2, 3, 3)
    found = [maker.take(frames[:count]).tolist() for count in range(1, 9)]
    assert found == [[], [], [], [], [], [1, 1, 1, 1, 1, 2], [], [3, 3]]


def test_a_constant_is_never_given_out() -> None:
    maker, frames = maker_of(1), frames_of(4, 4, 4)
    assert [maker.take(frames[:count]).tolist() for count in (1, 2, 3)] == [[], [], []]
    with pytest.raises(EngineError, match="constant, 4 throughout"):
        maker.take(frames, last=True)
    assert maker_of(1).take(frames_of(4), last=True).tolist() == [4]  # one sample is not called constant


# ---- what a consumer has in hand ------------------------------------------------------------------------------------


def stream_of(make: Callable[..., Iterator[Any]]) -> AudioStream[Any]:
    chunks: Any = make
    return AudioStream(chunks, 24000)


def counted(length: int, ended: list[str]) -> Callable[..., Iterator[Any]]:
    """Make chunks of their own numbers; ``ended`` is told how the generator was left."""

    def chunks(*, progress: Callable[[int], None]) -> Iterator[Any]:
        try:
            for number in range(length):
                progress(1)
                yield np.full(2, number, np.float32)
            ended.append("all")
            return length
        finally:
            ended.append("left")

    return chunks


def test_chunks_come_in_order_and_the_result_behind_them() -> None:
    ended: list[str] = []
    stream = stream_of(counted(5, ended))
    with pytest.raises(EngineError, match="no result: its chunks were not all taken"):
        _ = stream.result
    assert ended == []  # nothing is made before the first chunk is asked for
    assert [chunk.tolist() for chunk in stream] == [[n, n] for n in range(5)]
    assert (stream.result, ended, list(stream)) == (5, ["all", "left"], [])


@pytest.mark.parametrize("how", ["close", "with", "drop"])
def test_a_stream_that_is_left_early_ends(how: str) -> None:
    ended: list[str] = []
    stream = stream_of(counted(10**9, ended))
    next(stream)
    thread = stream._thread
    if how == "drop":
        del stream
        gc.collect()
    elif how == "close":
        stream.close()
        stream.close()
    else:
        with stream:
            pass
    assert (thread.is_alive(), ended) == (False, ["left"])
    if how == "close":
        assert list(stream) == []
        with pytest.raises(EngineError, match="no result"):
            _ = stream.result


def test_a_stream_that_was_never_begun_can_be_closed() -> None:
    stream_of(counted(3, [])).close()


def test_what_fails_is_raised_where_the_next_chunk_is_asked_for() -> None:
    def chunks(*, progress: Callable[[int], None]) -> Iterator[Any]:
        yield np.zeros(2, np.float32)
        raise EngineError("out of memory")

    stream = stream_of(chunks)
    assert next(stream).tolist() == [0, 0]
    with pytest.raises(EngineError, match="out of memory"):
        next(stream)
    assert list(stream) == []
    assert not stream._thread.is_alive()


def test_python_exits_with_a_stream_that_is_open() -> None:
    code = (
        "import numpy as np\nfrom trt_cpspec.streaming import AudioStream\n"
        "def chunks(*, progress):\n    while True:\n        progress(1)\n        yield np.zeros(2)\n"
        "stream = AudioStream(chunks, 24000)\nprint(len(next(stream)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")


# ---- a text --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_a_stream_is_the_speech(size: int, lively: Qwen3TTS, said: Speech) -> None:
    with lively.synthesize_stream("Hello there.", chunk_frames=size, **SAID) as stream:
        chunks = list(stream)
    assert stream.sample_rate == said.sample_rate
    assert [len(chunk) // 1920 for chunk in chunks] == [size] * (30 // size) + [30 % size] * (30 % size > 0)
    assert_streamed(chunks, said, stream.result)


def test_a_stream_begins_anew_where_the_offline_decode_does(lively: Qwen3TTS, said: Speech, monkeypatch: Patch) -> None:
    real = CodecStream.__init__
    monkeypatch.setattr(CodecStream, "__init__", lambda self, codec, chunk, context: real(self, codec, 8, 3))
    short = lively.synthesize("Hello there.", **SAID)
    assert np.abs(short.waveform - said.waveform).max() > 10 * PCM16_STEP  # the chunks are heard
    for size in SIZES:
        stream = lively.synthesize_stream("Hello there.", chunk_frames=size, **SAID)
        assert_streamed(list(stream), short, stream.result)


def count_steps(
    monkeypatch: Patch, model: SpeechModel, before: Callable[[int], None] = lambda steps: None
) -> list[int]:
    """Count the Talker's steps in a list's length; ``before`` is called with the number of each."""
    real, steps = model.talker.step, list[int]()

    def step(embeds: np.ndarray) -> np.ndarray:
        steps.append(len(embeds))
        before(len(steps))
        return real(embeds)

    monkeypatch.setattr(model.talker, "step", step)
    return steps


@pytest.mark.parametrize("size", SIZES)
def test_the_first_chunk_leaves_before_the_step_behind_its_frames(
    size: int, lively: Qwen3TTS, monkeypatch: Patch
) -> None:
    """The Talker waits before step ``size + 2`` until the chunk is in the consumer's hands."""
    taken = threading.Event()
    waited: list[bool] = []

    def before(step: int) -> None:
        if step == size + 2:
            waited.append(taken.wait(timeout=20))

    count_steps(monkeypatch, lively, before)
    with lively.synthesize_stream("Hello there.", chunk_frames=size, **SAID) as stream:
        assert len(next(stream)) == 1920 * size
        taken.set()
        list(stream)
    assert waited == [True]


@pytest.mark.parametrize("size", SIZES)
def test_a_chunk_is_made_before_the_talkers_next_step(size: int, lively: Qwen3TTS, monkeypatch: Patch) -> None:
    steps = count_steps(monkeypatch, lively)
    request = lively.prepare(_request())
    chunks = lively.chunks(
        request, window=lively.window(3), mode="rejection", chunk_frames=size, progress=lambda frames: None
    )
    for number in range(1, 30 // size + 1):
        next(chunks)
        assert len(steps) == size * number - 1  # the first frame follows the prefill
    chunks.close()


def _request() -> Any:
    from trt_cpspec.requests import make_request  # noqa: PLC0415

    return make_request("Hello there.", {key: value for key, value in SAID.items() if key != "verify_size"})


def test_times_are_in_the_speech_and_in_the_profile(lively: Qwen3TTS, monkeypatch: Patch) -> None:
    model = Qwen3TTS(lively.talker, lively.predictor, lively.codec, lively.tokenizer)
    streams = [model.synthesize_stream("Hi.", chunk_frames=2, **SAID) for _ in range(2)]
    for stream in streams:
        list(stream)
    times = [stream.result.time_to_first_audio_ms for stream in streams]
    profile = model.times.as_profile()["time_to_first_audio"]
    assert profile == {"count": 2, "average_ms": sum(times) / 2, "min_ms": min(times), "max_ms": max(times)}
    plain = Qwen3TTS(lively.talker, lively.predictor, lively.codec, lively.tokenizer)
    plain.synthesize("Hi.", **SAID)
    assert "time_to_first_audio" not in plain.times.as_profile()


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_the_model_is_free_behind_a_stream_that_was_left(taken: int, lively: Qwen3TTS, said: Speech) -> None:
    stream = lively.synthesize_stream("Something else.", chunk_frames=2, **SAID)
    for _ in range(taken):
        next(stream)
    stream.close()
    np.testing.assert_array_equal(lively.synthesize("Hello there.", **SAID).codes, said.codes)


def test_a_stream_that_nobody_reads_on_holds_up_nothing(lively: Qwen3TTS, said: Speech) -> None:
    """Its thread goes on by itself, so the model comes free, in this thread too, and the chunks wait."""
    stream = lively.synthesize_stream("Hello there.", chunk_frames=7, **SAID)
    chunks = [next(stream)]
    np.testing.assert_array_equal(lively.synthesize("Hello there.", **SAID).codes, said.codes)
    chunks += stream
    assert_streamed(chunks, said, stream.result)


def test_a_stream_that_waits_for_the_model_can_be_left(lively: Qwen3TTS, omni: Any) -> None:
    for busy, stream in (
        (lively.lock, lively.synthesize_stream("Hi.", **SAID)),
        (omni.model.voice.lock, omni.model.respond_stream("Hi", seed=1)),
    ):
        with busy:
            stream._thread.start()  # as the first chunk that is asked for does, which would not come
            stream.close()
            assert not stream._thread.is_alive()


def test_streams_and_speeches_of_several_threads(lively: Qwen3TTS, said: Speech) -> None:
    found: dict[int, Any] = {}

    def speak(number: int) -> None:
        if number % 2:
            found[number] = lively.synthesize("Hello there.", **SAID)
        else:
            stream = lively.synthesize_stream("Hello there.", chunk_frames=number + 1, **SAID)
            found[number] = [list(stream), stream.result]

    threads = [threading.Thread(target=speak, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for number in (0, 2):
        assert_streamed(found[number][0], said, found[number][1])
    for number in (1, 3):
        np.testing.assert_array_equal(found[number].codes, said.codes)


def silenced(monkeypatch: Patch, *, after: int, value: float) -> None:
    """Let the codec's calls give a constant from one call on."""
    real, calls = Code2Wav.call, list[int]()

    def call(self: Code2Wav, *args: Any) -> np.ndarray:
        calls.append(1)
        samples = real(self, *args)
        return samples if len(calls) <= after else np.full_like(samples, value)

    monkeypatch.setattr(Code2Wav, "call", call)


@pytest.mark.parametrize("end", ["exhausted", "closed", "failed"])
def test_the_codecs_state_is_freed(end: str, lively: Qwen3TTS, monkeypatch: Patch) -> None:
    """Also where an error is kept that came through it."""
    begin, states = lively.codec._graph.begin, list[Any]()

    def begun() -> Any:
        calls = begin()
        states.append(weakref.ref(calls))
        return calls

    monkeypatch.setattr(lively.codec._graph, "begin", begun)
    if end == "failed":
        silenced(monkeypatch, after=3, value=np.nan)
        monkeypatch.setattr(CodecStream, "push", _checked_push(CodecStream.push))
    stream = lively.synthesize_stream("Hello there.", chunk_frames=2, **SAID)
    next(stream)
    kept = None
    if end == "closed":
        stream.close()
    else:
        try:
            list(stream)
        except EngineError as error:
            kept = error
    gc.disable()
    try:
        assert [state() for state in states] == [None]
    finally:
        gc.enable()
    assert (kept is not None) == (end == "failed")


def test_a_constant_waveform_is_not_streamed(lively: Qwen3TTS, monkeypatch: Patch) -> None:
    silenced(monkeypatch, after=0, value=0.25)
    stream = lively.synthesize_stream("Hi.", chunk_frames=2, **SAID)
    with pytest.raises(EngineError, match=r"constant, 0\.25 throughout"):
        next(stream)


def test_silence_is_warned_of(lively: Qwen3TTS, monkeypatch: Patch) -> None:
    silenced(monkeypatch, after=1, value=0.0)
    monkeypatch.setattr("trt_cpspec.guards.SILENCE_SECONDS", 1.0)
    stream = lively.synthesize_stream("Hello there.", chunk_frames=2, **SAID)
    list(stream)
    assert any("are silent" in warning for warning in stream.result.warnings)


def test_a_sound_that_is_not_finite_ends_the_stream(lively: Qwen3TTS, said: Speech, monkeypatch: Patch) -> None:
    graph: Any = lively.codec._graph
    calls = graph.begin()
    real = type(calls).run

    def run(self: Any, feeds: dict[str, Any]) -> dict[str, Any]:
        outputs = real(self, feeds)
        if feeds["position"][0] == 4:
            outputs["waveform"][..., 5] = np.nan
        return outputs

    with monkeypatch.context() as patch:
        patch.setattr(type(calls), "run", run)
        stream = lively.synthesize_stream("Hello there.", chunk_frames=2, **SAID)
        assert [len(next(stream)) for _ in range(2)] == [3840, 3840]
        with pytest.raises(EngineError, match="not finite, first in frame 4"):
            next(stream)
    np.testing.assert_array_equal(lively.synthesize("Hello there.", **SAID).codes, said.codes)


def test_logits_that_describe_no_law_end_the_stream(lively: Qwen3TTS, monkeypatch: Patch) -> None:
    real, calls = lively.talker.logits, list[int]()

    def logits(hidden: np.ndarray) -> np.ndarray:
        calls.append(1)
        return real(hidden) * (np.nan if len(calls) == 6 else 1)

    monkeypatch.setattr(lively.talker, "logits", logits)
    stream = lively.synthesize_stream("Hello there.", chunk_frames=2, **SAID)
    assert len([next(stream), next(stream)]) == 2
    with pytest.raises(NumericsError, match="frame 5, depth 0"):
        next(stream)


@pytest.mark.parametrize("value", [0, -1, True, 2.5, None, "3"])
def test_chunks_that_cannot_be_made(value: Any, lively: Qwen3TTS) -> None:
    with pytest.raises(ConfigError, match=r"chunk_frames is .* must be an integer of at least 1"):
        lively.synthesize_stream("Hi.", chunk_frames=value)


def test_options_are_refused_before_anything_is_made(lively: Qwen3TTS) -> None:
    for words, text, options in (
        ("unknown option 'speeker'", "Hi.", {"speeker": "x"}),
        ("one stream speaks one text", ["Hi."], {}),
        ("2 to 8", "Hi.", {"verify_size": 9}),
        ("unknown verification mode", "Hi.", {"mode": "fast"}),
    ):
        with pytest.raises(ConfigError, match=words):
            lively.synthesize_stream(text, **options)  # type: ignore[arg-type]


def test_the_fastest_verify_size_is_measured_for_a_stream_too(lively: Qwen3TTS, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Qwen3TTS, "fastest_verify_size", lambda self, mode, *, batch: {"verify_size": 3})
    stream = lively.synthesize_stream("Hi.", seed=3, max_audio_length=3, verify_size="auto")
    list(stream)
    assert stream.result.stats.window.verify_size == 3


def test_an_engine_of_before_says_to_build_it_again(lively: Qwen3TTS, monkeypatch: Patch) -> None:
    monkeypatch.setattr(lively.codec, "config", replace(lively.codec.config, carries_state=False))
    with pytest.raises(EngineError, match=r"built before streaming .* build the engine folder again"):
        lively.synthesize_stream("Hi.")


# ---- an answer -----------------------------------------------------------------------------------------------------


def answers(omni: Any, size: int, **options: Any) -> tuple[Any, list[np.ndarray], Any]:
    """Return an answer made at once, the chunks of the same as a stream, and its reply."""
    whole = omni.model.respond("Hi", **options)
    stream = omni.model.respond_stream("Hi", chunk_frames=size, **options)
    return whole, list(stream), stream.result


@pytest.mark.parametrize(
    ("tokens", "frames", "size"),
    [
        *((20, 30, size) for size in SIZES),  # the speech outlives the text
        *((60, 8, size) for size in (2, 7)),  # the text outlives the speech
        *((3, 12, size) for size in (2, 7)),  # shorter than the threshold
    ],
)
def test_an_answer_that_is_spoken_while_it_is_written(tokens: int, frames: int, size: int, omni: Any) -> None:
    options = {"seed": 3, "max_generate_length": tokens, "max_audio_length": frames}
    whole, chunks, reply = answers(omni, size, **options)
    assert (reply.text, reply.token_ids, reply.finish_reason) == (whole.text, whole.token_ids, whole.finish_reason)
    assert_streamed(chunks, whole.speech, reply.speech)


def test_the_limit_of_an_answer_follows_from_its_whole_text(omni: Any) -> None:
    whole, chunks, reply = answers(omni, 10, seed=3, max_generate_length=2, verify_size=3, mode="coupled")
    assert whole.speech.max_frames == 50 + 20
    assert_streamed(chunks, whole.speech, reply.speech)


@pytest.mark.parametrize("index", [0, 1])
def test_streamed_answers_are_those_of_the_reference(index: int, omni: Any) -> None:
    case = omni.case(index)
    stream = omni.model.respond_stream(case.prompt["messages"], chunk_frames=2, **case.options)
    waveform = np.concatenate(list(stream))
    assert list(stream.result.token_ids) == case["thinker_ids"].tolist()
    np.testing.assert_array_equal(stream.result.speech.codes, case["codes"])
    assert np.abs(waveform - case["waveform"]).max() < 5e-5


def test_an_answer_without_words_is_an_empty_stream(omni: Any) -> None:
    whole, chunks, reply = answers(omni, 2, seed=1, max_generate_length=1)
    assert chunks == []
    assert (reply.text, reply.speech.warnings) == (whole.text, whole.speech.warnings)
    assert len(reply.speech.waveform) == 0


@pytest.mark.parametrize("threshold", [1, 4, 9])
def test_the_talker_begins_while_the_thinker_writes(threshold: int, omni: Any, monkeypatch: Patch) -> None:
    real, fed = omni.model.thinker.step, list[int]()

    def step(embeds: np.ndarray) -> np.ndarray:
        fed.append(1)
        return real(embeds)  # type: ignore[no-any-return]

    monkeypatch.setattr(omni.model.thinker, "step", step)
    steps = count_steps(monkeypatch, omni.model.voice)
    chat = omni.model.prepare(_chat(seed=3, max_generate_length=60, max_audio_length=30))
    voice = omni.model.voice
    chunks = omni.model._chunks(voice, chat, omni.model.window(0), "rejection", 3, threshold, lambda frames: None)
    for number in (1, 2, 3):
        next(chunks)
        assert (len(steps), len(fed)) == (3 * number - 1, max(threshold, 3 * number))
    chunks.close()


def _chat(**options: Any) -> Any:
    from trt_cpspec.requests import make_chat  # noqa: PLC0415

    return make_chat([{"role": "user", "content": "Hi"}], options)


def test_an_answer_whose_sound_fails_is_written_to_its_end(omni: Any, monkeypatch: Patch) -> None:
    options = {"seed": 3, "max_generate_length": 40, "max_audio_length": 30}
    whole = omni.model.respond("Hi", **options)
    with monkeypatch.context() as patch:
        silenced(patch, after=2, value=np.nan)
        patch.setattr(CodecStream, "push", _checked_push(CodecStream.push))
        stream = omni.model.respond_stream("Hi", chunk_frames=2, **options)
        with pytest.raises(SpeechError, match="not finite") as caught:
            list(stream)
    assert (caught.value.text, caught.value.token_ids) == (whole.text, whole.token_ids)
    assert omni.model.respond("Hi", **options).text == whole.text


def test_a_limit_that_ends_the_speech_leaves_what_is_written(omni: Any) -> None:
    options = {"seed": 3, "max_generate_length": 40, "max_audio_length": 30}
    whole, spoken = omni.model.respond("Hi", **options), list[int]()

    def progress(frames: int) -> None:
        spoken.append(frames)
        if sum(spoken) >= 3:
            raise EngineError("the time is up")

    stream = omni.model.respond_stream("Hi", chunk_frames=2, progress=progress, **options)
    with pytest.raises(SpeechError, match="the time is up") as caught:
        list(stream)
    written = len(caught.value.token_ids)
    assert 4 <= written < 10
    assert caught.value.token_ids == whole.token_ids[:written]


def _checked_push(real: Any) -> Any:
    def push(self: CodecStream, codes: np.ndarray) -> np.ndarray:
        samples = real(self, codes)
        if not np.isfinite(samples).all():
            raise EngineError("not finite")
        return samples  # type: ignore[no-any-return]

    return push


@pytest.mark.parametrize("error", [EngineError("out of memory"), NumericsError("nan")])
def test_a_thinker_that_fails_in_mid_stream_fails_the_answer(error: CpSpecError, omni: Any, monkeypatch: Patch) -> None:
    options = {"seed": 3, "max_generate_length": 40, "max_audio_length": 30}
    before = omni.model.respond("Hi", **options)
    real, calls = omni.model.thinker.logits, list[int]()

    def logits(hidden: np.ndarray) -> Any:
        calls.append(1)
        if len(calls) == 12:
            raise error
        return real(hidden)

    with monkeypatch.context() as patch:
        patch.setattr(omni.model.thinker, "logits", logits)
        stream = omni.model.respond_stream("Hi", chunk_frames=2, **options)
        assert len(next(stream)) == 2 * 1920 - 555
        with pytest.raises(type(error), match=str(error)) as caught:
            list(stream)
    assert not isinstance(caught.value, SpeechError)
    assert omni.model.respond("Hi", **options).text == before.text


def test_a_model_without_a_voice_has_no_stream(omni: Any) -> None:
    from trt_cpspec.omni import Qwen3Omni  # noqa: PLC0415

    model = Qwen3Omni(omni.model.thinker, omni.model.tokenizer, None)
    with pytest.raises(ConfigError, match="nothing is spoken: open the model with audio=True"):
        model.respond_stream("Hi")
    chat, how = omni.model.prepare(_chat(seed=1)), {"window": omni.model.window(0), "mode": "rejection"}
    with pytest.raises(ConfigError, match="prefill_threshold is 0"):
        omni.model.stream(chat, **how, chunk_frames=2, prefill_threshold=0)


# ---- an answer to what is heard and seen ----------------------------------------------------------------------------


@pytest.fixture
def shown(omni: Any, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Return what makes a conversation that holds a clip and an image."""
    files = MediaCase("heard", omni.model, tmp_path)
    clip, picture = {"type": "audio", "audio": str(files.clip)}, {"type": "image", "image": str(files.picture)}
    return lambda: user("Listen: ", clip, "and look: ", picture, "What is it?")


@pytest.mark.parametrize(("size", "how"), [(2, {}), (7, {"verify_size": 3, "mode": "coupled"})])
def test_an_answer_to_a_clip_and_an_image_is_streamed(
    size: int, how: dict[str, Any], omni: Any, shown: Callable[..., Any]
) -> None:
    options = {"seed": 3, "max_generate_length": 12, "max_audio_length": 16, **how}
    whole = omni.model.respond(shown(), **options)
    assert omni.model.respond(user("Listen: and look: What is it?"), **options).speech.codes.tolist() != (
        whole.speech.codes.tolist()
    )
    stream = omni.model.respond_stream(shown(), chunk_frames=size, **options)
    chunks, reply = list(stream), stream.result
    assert (reply.text, reply.token_ids, reply.finish_reason) == (whole.text, whole.token_ids, whole.finish_reason)
    assert_streamed(chunks, whole.speech, reply.speech)


@pytest.mark.parametrize("name", ["heard", "seen"])
def test_streamed_answers_to_media_are_those_of_the_reference(name: str, omni: Any, tmp_path: Path) -> None:
    case = MediaCase(name, omni.model, tmp_path)
    stream = omni.model.respond_stream(case.messages, chunk_frames=2, **case.options)
    waveform = np.concatenate(list(stream))
    assert list(stream.result.token_ids) == case["thinker_ids"].tolist()
    np.testing.assert_array_equal(stream.result.speech.codes, case["codes"])
    assert np.abs(waveform - case["waveform"]).max() < 1e-4


def test_an_encoder_that_fails_ends_its_stream_alone(omni: Any, shown: Callable[..., Any], monkeypatch: Patch) -> None:
    def fail(*args: Any) -> Any:
        raise EngineError("out of memory")

    options = {"seed": 3, "max_generate_length": 3, "max_audio_length": 2}
    whole = omni.model.respond(shown(), **options)
    with monkeypatch.context() as patch:
        patch.setattr(omni.model.encoders.vision(), "encode", fail)
        patch.setattr(omni.model.thinker, "prefill", lambda *rows: pytest.fail("there is nothing to answer"))
        with pytest.raises(EngineError, match="out of memory") as caught:
            list(omni.model.respond_stream(shown(), **options))
    assert not isinstance(caught.value, SpeechError)
    stream = omni.model.respond_stream(shown(), **options)
    assert_streamed(list(stream), whole.speech, stream.result.speech)


def test_threads_open_an_encoder_once(omni: Any, monkeypatch: Patch) -> None:
    real, opened, given = Runtime.graph, list[Any](), list[Any]()

    def graph(self: Runtime, *args: Any) -> Any:
        opened.append(args)
        time.sleep(0.05)  # long enough for the other to come
        return real(self, *args)

    monkeypatch.setattr(Runtime, "graph", graph)
    encoders = replace(omni.model.encoders)
    threads = [threading.Thread(target=lambda: given.append(encoders.vision())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 1
    assert given[0] is given[1]


# ---- the commands --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engines(variants: dict[str, Any]) -> Path:
    return variants["tts_a"].engine  # type: ignore[no-any-return]


def speak(engines: Path, *args: str) -> Result:
    return CliRunner().invoke(tts, [str(engines), *args])


def samples_of(path: Path) -> np.ndarray:
    return soundfile.read(path, dtype="int16")[0].astype(int)  # type: ignore[no-any-return]


STREAM = ("--streaming", "--chunkFrames", "2")


def test_a_streamed_file_is_the_file(engines: Path, work: Path) -> None:
    request = {"messages": [{"role": "assistant", "content": "Hello there."}], "max_audio_length": 9}
    Path("in.json").write_text(json.dumps({"requests": [request, request | {"seed": 4}], "batch_size": 2}))
    common = ("--talkerEngineDir", str(engines / "talker"), "--inputFile", "in.json", "--seed", "3")
    found = {}
    for name, args in (("plain", ()), ("stream", STREAM)):
        result = CliRunner().invoke(tts, [*common, "--outputAudioDir", name, *args, "--dumpProfile"])
        assert (result.exit_code, result.stderr) == (0, "")
        found[name] = json.loads(result.stdout)
        assert {path.name for path in Path(name).iterdir()} == {
            f"{kind}_req{index}.{end}" for index in (0, 1) for kind, end in (("audio", "wav"), ("rvq", "safetensors"))
        }
    times = [response.pop("time_to_first_audio_ms") for response in found["stream"]["responses"]]
    assert found["stream"]["profile"]["time_to_first_audio"]["count"] == 2
    assert found["stream"]["profile"]["time_to_first_audio"]["max_ms"] == max(times)
    for plain, stream in zip(found["plain"]["responses"], found["stream"]["responses"], strict=True):
        for key in ("audio_file", "rvq_file"):
            stream[key], moved = plain[key], Path(stream[key])
            if key == "rvq_file":
                assert moved.read_bytes() == Path(plain[key]).read_bytes()
            else:
                assert moved.read_bytes()[:44] == Path(plain[key]).read_bytes()[:44]
                assert np.abs(samples_of(moved) - samples_of(Path(plain[key]))).max() <= 1
        assert stream == plain


def piped(engines: Path, *args: str, **how: Any) -> subprocess.CompletedProcess[bytes]:
    command = [CPSPEC, "tts", str(engines), "Hello there.", "--seed", "3", *args, "-o", "-"]
    return subprocess.run(command, stderr=subprocess.PIPE, timeout=60, check=False, **how)


def test_a_stream_on_standard_output(engines: Path, work: Path) -> None:
    with Path("plain.wav").open("wb") as plain, Path("stream.wav").open("wb") as stream:
        assert (piped(engines, stdout=plain).stderr, piped(engines, *STREAM, stdout=stream).stderr) == (b"", b"")
    pipe = piped(engines, *STREAM, stdout=subprocess.PIPE).stdout
    assert pipe[4:8] == pipe[40:44] == b"\xff" * 4
    assert Path("stream.wav").read_bytes()[44:] == pipe[44:]
    assert Path("stream.wav").read_bytes()[:44] == Path("plain.wav").read_bytes()[:44]
    assert np.abs(samples_of(Path("stream.wav")) - samples_of(Path("plain.wav"))).max() <= 1
    assert len(soundfile.read(io.BytesIO(pipe))[0]) == (len(pipe) - 44) // 2 > 1920


FAILING = """
import sys
from trt_cpspec import codec
from trt_cpspec.cli import tts
from trt_cpspec.errors import EngineError
real, calls = codec.CodecStream.push, []
def push(self, codes):
    calls.append(1)
    if len(calls) == 3:
        {event}
    return real(self, codes)
codec.CodecStream.push = push
tts(sys.argv[1:])
"""


@pytest.mark.parametrize("place", ["pipe", "file", "append", "wav", "folder"])
def test_a_stream_that_fails_does_not_pass_for_complete(place: str, engines: Path, work: Path) -> None:
    code = FAILING.format(event="raise EngineError('out of memory')")
    command = [sys.executable, "-c", code, str(engines), "Hello there.", "--seed", "3", *STREAM[:2], "1"]
    command += {"wav": ["-o", "x.wav"], "folder": []}.get(place, ["-o", "-"])
    Path("x.wav").write_bytes(b"old")
    with Path("x.wav").open("ab" if place == "append" else "wb" if place == "file" else "rb") as file:
        stdout = file if place in ("file", "append") else subprocess.PIPE
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, timeout=60, check=False)
    assert done.returncode == 1
    assert b"requests[0] failed: out of memory" in done.stderr
    found = {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    if place == "pipe":
        assert (done.stdout[40:44], len(done.stdout)) == (b"\xff" * 4, 44 + 2 * 3840)
    elif place == "file":
        assert found == {"x.wav": b""}
    elif place == "append":
        assert len(found["x.wav"]) == 3 + 44 + 2 * 3840
    elif place == "wav":
        assert found == {}  # a request that failed leaves no file, nor one of an earlier run
        assert json.loads(done.stdout)["responses"][0]["output_text"] == "FAILED"
    else:
        assert found == {"x.wav": b"old"}


def test_ctrl_c_in_mid_stream_leaves_no_file(engines: Path, work: Path) -> None:
    code = FAILING.format(event="print('third', file=sys.stderr, flush=True)")
    long = " ".join(["word"] * 200)
    command = [sys.executable, "-c", code, str(engines), long, "--seed", "1", *STREAM[:2], "1", "-o", "x.wav"]
    assert_interrupted(command, behind=b"third\n")
    assert list(work.iterdir()) == []


def test_a_player_that_goes_away_ends_the_run_in_silence(engines: Path, work: Path) -> None:
    source, target = os.pipe()
    command = [CPSPEC, "tts", str(engines), "Hello there.", "--seed", "3", *STREAM, "-o", "-"]
    with subprocess.Popen(command, stdout=target, stderr=subprocess.PIPE) as process:
        os.close(target)
        os.close(source)
        assert process.communicate(timeout=60)[1] == b""
    assert process.returncode == 1


def test_a_time_limit_ends_a_stream(engines: Path, work: Path, monkeypatch: Patch) -> None:
    now, real = [0.0], Qwen3TTS._decode_frame

    def decode(self: Qwen3TTS, *args: Any) -> Any:
        now[0] += 1
        return real(self, *args)

    monkeypatch.setattr(Qwen3TTS, "_decode_frame", decode)
    monkeypatch.setattr("trt_cpspec.cli.time.monotonic", lambda: now[0])
    request = {"messages": [{"role": "assistant", "content": "Hello there."}], "max_audio_length": 9, "seed": 3}
    Path("in.json").write_text(json.dumps({"requests": [request] * 2}))
    args = ("--talkerEngineDir", str(engines / "talker"), "--inputFile", "in.json", "--timeLimit", "2")
    result = CliRunner().invoke(tts, [*args, "--streaming", "--chunkFrames", "1"])
    responses = json.loads(result.stdout)["responses"]
    assert (result.exit_code, now[0]) == (1, 3)
    assert {response["error"] for response in responses} == {"the time limit of 2 s was reached"}
    assert list(Path("audio").iterdir()) == []


@pytest.mark.parametrize("args", [("--streaming",), ("--chunkFrames", "4")])
def test_a_stream_has_the_length_of_its_chunks(args: tuple[str, ...], engines: Path, work: Path) -> None:
    result = speak(engines, "Hi.", *args)
    assert (result.exit_code, "--streaming and --chunkFrames N go together" in result.stderr) == (2, True)
    assert list(work.iterdir()) == []


def test_an_engine_of_before_is_refused_before_any_work(engine_copy: Any, work: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Code2Wav, "from_engine_dir", classmethod(_of_before(Code2Wav.from_engine_dir)))
    engine = engine_copy()
    result = speak(engine, "Hi.", "--seed", "1", "--streaming", "--chunkFrames", "2")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "built before streaming" in result.stderr
    assert list(work.iterdir()) == []


def _of_before(real: Any) -> Any:
    def opened(cls: type[Code2Wav], folder: Path, **options: Any) -> Code2Wav:
        codec: Code2Wav = real(folder, **options)
        codec.config = replace(codec.config, carries_state=False)
        return codec

    return opened


def answer(omni: Any, *args: str) -> Result:
    engines = ("--engineDir", str(omni.engine / "thinker"), "--talkerEngineDir", str(omni.engine / "talker"))
    return CliRunner().invoke(llm, [*engines, *args])


def test_streamed_answers_are_the_answers(omni: Any, work: Path) -> None:
    request = {"messages": [{"role": "user", "content": "Hi"}], "max_audio_length": 9, "max_generate_length": 12}
    document: dict[str, Any] = {"requests": [request | {"seed": 3}, request | {"seed": 4}, request], "batch_size": 2}
    Path("plain.json").write_text(json.dumps(document))
    streaming = {"enable": True, "codec_chunk_frames": 2, "talker_prefill_threshold": 1}
    Path("stream.json").write_text(json.dumps(document | {"streaming": streaming}))
    found = {}
    for name, args in (
        ("plain", ("--inputFile", "plain.json", "--enableAudioOutput")),
        ("flag", ("--inputFile", "plain.json", "--enableThinkerTalkerStreaming", "--chunkFrames", "4")),
        ("file", ("--inputFile", "stream.json", "--enableAudioOutput")),
    ):
        result = answer(omni, *args, "--seed", "5", "--outputAudioDir", name)
        assert (result.exit_code, result.stderr) == (0, "")
        found[name] = json.loads(result.stdout)["responses"]
    names = ("req0_batch0", "req0_batch1", "req1_batch0")
    for name in ("flag", "file"):
        for place, plain, stream in zip(names, found["plain"], found[name], strict=True):
            assert stream["audio_file"] == f"{name}/audio_{place}.wav"
            assert np.abs(samples_of(Path(stream["audio_file"])) - samples_of(Path(plain["audio_file"]))).max() <= 1
            assert Path(stream["rvq_file"]).read_bytes() == Path(plain["rvq_file"]).read_bytes()
            moved = {"audio_file", "rvq_file", "time_to_first_audio_ms"}
            assert stream.keys() - plain.keys() == {"time_to_first_audio_ms"}
            assert all(stream[key] == plain[key] for key in plain.keys() - moved)


def test_the_command_streams_an_answer_to_a_clip_and_an_image(omni: Any, shown: Callable[..., Any], work: Path) -> None:
    requests = [{"messages": shown(), "max_audio_length": 5, "max_generate_length": 6, "seed": 3}]
    Path("in.json").write_text(json.dumps({"requests": requests}))
    whole = omni.model.respond(shown(), seed=3, max_audio_length=5, max_generate_length=6)
    result = answer(omni, "--inputFile", "in.json", "--enableThinkerTalkerStreaming", "--dumpProfile")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    (response,) = document["responses"]
    assert response["output_text"] == whole.text
    sound = np.rint(whole.speech.waveform * 32767)
    assert np.abs(samples_of(Path(response["audio_file"])) - sound).max() <= 1
    stages = {stage["stage_id"] for stage in document["profile"]["stages"]}
    assert {"audio_encoder", "vision_encoder", "talker_prefill"} <= stages


def test_a_streamed_answer_without_a_wav_keeps_its_text(omni: Any, work: Path, monkeypatch: Patch) -> None:
    request = {"messages": [{"role": "user", "content": "Hi"}], "max_audio_length": 4, "max_generate_length": 6}
    Path("in.json").write_text(json.dumps({"requests": [request]}))
    args = ("--inputFile", "in.json", "--seed", "3", "--enableThinkerTalkerStreaming")
    text = json.loads(answer(omni, *args).stdout)["responses"][0]["output_text"]
    silenced(monkeypatch, after=0, value=0.5)
    result = answer(omni, *args, "--outputAudioDir", "other")
    (response,) = json.loads(result.stdout)["responses"]
    assert (result.exit_code, response["output_text"], response["text"]) == (1, "FAILED", text)
    assert "constant" in response["error"]
    assert list(Path("other").iterdir()) == []


def test_what_streaming_flags_need(omni: Any, work: Path) -> None:
    thinker = ("--engineDir", str(omni.engine / "thinker"), "--text", "Hi")
    result = CliRunner().invoke(llm, [*thinker, "--enableThinkerTalkerStreaming"])
    assert (result.exit_code, "--enableThinkerTalkerStreaming needs --talkerEngineDir" in result.stderr) == (2, True)
    result = answer(omni, "--text", "Hi", "--enableAudioOutput", "--chunkFrames", "3")
    assert (result.exit_code, "--chunkFrames belongs to" in result.stderr) == (2, True)


def test_a_stream_that_nothing_is_spoken_of_is_told(omni: Any, work: Path, caplog: pytest.LogCaptureFixture) -> None:
    request = {"messages": [{"role": "user", "content": "Hi"}], "max_generate_length": 2}
    Path("in.json").write_text(json.dumps({"requests": [request], "streaming": {"enable": True}}))
    thinker = ("--engineDir", str(omni.engine / "thinker"), "--inputFile", "in.json", "--seed", "1")
    assert CliRunner().invoke(llm, list(thinker)).exit_code == 0
    assert any("ignored, as nothing is spoken" in message for message in caplog.messages)
