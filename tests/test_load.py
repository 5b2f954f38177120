"""Two hundred requests from four threads and through the command line: each gets what it gets alone, none is kept."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from load import BAD, LONGEST, Ask, make_asks, speak_all, speak_alone, with_broken_speaker
from safetensors.numpy import load_file

from trt_cpspec import outputs
from trt_cpspec.cli import tts
from trt_cpspec.errors import ConfigError, EngineError
from trt_cpspec.omni import Qwen3Omni
from trt_cpspec.pipeline import Qwen3TTS
from trt_cpspec.predictor import CodePredictor
from trt_cpspec.session import KEPT_LENGTH, DecoderSession

HELPERS = Path(__file__).parent / "helpers"
SPEAKER = "vivian"


@pytest.fixture(scope="module")
def engine(lively: Qwen3TTS, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The lively engine, with a speaker that breaks its row."""
    source = Path(lively.tokenizer._where).parent
    return with_broken_speaker(shutil.copytree(source, tmp_path_factory.mktemp("load") / "engine"))


@pytest.fixture(scope="module")
def model(engine: Path) -> Qwen3TTS:
    return Qwen3TTS.from_engine_dir(engine, threads=1)


@pytest.fixture(scope="module")
def asks() -> list[Ask]:
    return make_asks(200, SPEAKER)


@pytest.fixture(scope="module")
def alone(engine: Path, asks: list[Ask]) -> list[Any]:
    """What each request gives by itself, on a model of its own."""
    model = Qwen3TTS.from_engine_dir(engine, threads=1)
    return [speak_alone(model, ask) for ask in asks]


def test_requests_alone_are_what_they_are_meant_to_be(asks: list[Ask], alone: list[Any]) -> None:
    """Else the tests below would compare little."""
    kinds = {ask.error for ask in asks}
    assert kinds == {None, *BAD}
    for ask, outcome in zip(asks, alone, strict=True):
        assert isinstance(outcome, str) == (ask.error is not None), (ask, outcome)
        assert ask.error is None or ask.error in outcome
    good = [outcome for outcome in alone if not isinstance(outcome, str)]
    assert len(good) > 140
    assert {len(codes) for codes in good} == set(range(1, LONGEST + 1))
    assert len({codes.tobytes() for codes in good}) > 0.95 * len(good)


def test_four_threads_get_what_one_request_gets(model: Qwen3TTS, asks: list[Ask], alone: list[Any]) -> None:
    for ask, expected, found in zip(asks, alone, speak_all(model, asks), strict=True):
        if isinstance(expected, str):
            assert found == expected, ask
        else:
            np.testing.assert_array_equal(found, expected, err_msg=str(ask))


def test_the_command_line_gets_what_one_request_gets(
    engine: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """200 requests in batches of four; some fail while they are spoken, each in its place and by its own error."""
    chosen = [ask for ask in make_asks(300, SPEAKER, seed=2) if ask.error in (None, "the logits hold nan")][:200]
    assert len(chosen) == 200
    for ask in chosen[::9]:
        ask.options["speaker"], ask.error = "broken", "the logits hold nan"
    for ask in chosen:
        ask.options["max_audio_length"] = min(ask.options["max_audio_length"], 2)
    requests = [{"messages": [{"role": "assistant", "content": ask.text}], **ask.options} for ask in chosen]
    (tmp_path / "input.json").write_text(json.dumps({"batch_size": 4, "requests": requests}))
    result = invoke(engine, tmp_path, "--cpSpecVerifySize", "3", "--cpSpecMode", "coupled")
    assert result.exit_code == 1, result.output
    model = Qwen3TTS.from_engine_dir(engine, threads=1)
    responses = json.loads((tmp_path / "out.json").read_text())["responses"]
    for index, (ask, response) in enumerate(zip(chosen, responses, strict=True)):
        assert response["request_idx"] == index
        if ask.error is not None:
            assert response["output_text"] == outputs.FAILED
            assert ask.error in response["error"]
            assert not (tmp_path / "audio" / f"audio_req{index}.wav").exists()
        else:
            ask.verify_size = 0  # coupled: the very codes of plain decoding
            np.testing.assert_array_equal(load_file(response["rvq_file"])["rvq_codes"], speak_alone(model, ask))
    assert caplog.text.count("failed: ") == sum(ask.error is not None for ask in chosen) > 20


@pytest.mark.parametrize("words", [words for words, change in BAD.items() if not {"mode", "verify_size"} & set(change)])
def test_the_command_line_names_the_bad_one_of_many(words: str, engine: Path, tmp_path: Path) -> None:
    """What is known before anything is spoken ends the run, names its place, and leaves no file."""
    if words == "the logits hold nan":
        return
    request = {"messages": [{"role": "assistant", "content": "Hi."}], "max_audio_length": 1}
    requests: list[dict[str, Any]] = [dict(request) for _ in range(200)]
    change = dict(BAD[words])
    if "text" in change:
        change |= {"messages": [{"role": "assistant", "content": change.pop("text")}]}
    requests[137] |= change
    (tmp_path / "input.json").write_text(json.dumps({"requests": requests}))
    result = invoke(engine, tmp_path)
    assert result.exit_code == 2
    assert "requests[137]" in result.stderr
    expected = "pitch is no known key" if words == "unknown option 'pitch'" else re.split(" is | has ", words)[-1]
    assert expected in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["input.json"]


def invoke(engine: Path, folder: Path, *args: str) -> Any:
    given = ["--talkerEngineDir", engine / "talker", "--inputFile", folder / "input.json", "--threads", "1", *args]
    given += ["--outputFile", folder / "out.json", "--outputAudioDir", folder / "audio"]
    return CliRunner().invoke(tts, list(map(str, given)))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="what a process holds is read from /proc")
def test_nothing_is_kept(engine: Path) -> None:
    """Rounds of 50 requests from four threads: after four of them, memory, objects and open files stay as they are."""
    rounds, requests = 10, 50
    command = [sys.executable, str(HELPERS / "load.py"), str(engine), str(rounds), str(requests), "cpu"]
    child = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert child.returncode == 0, child.stderr
    states = [json.loads(line) for line in child.stdout.splitlines()]
    assert len(states) == rounds
    warm, spoken = states[3:], requests * (rounds - 4)
    assert {state["files"] for state in warm} == {warm[0]["files"]}
    assert max(state["resident_bytes"] for state in warm[1:]) - warm[0]["resident_bytes"] < 4 * 2**20
    assert warm[-1]["blocks"] - warm[0]["blocks"] < spoken  # less than one object a request; a frame makes dozens


def test_prompts_of_every_length_keep_no_buffers(model: Qwen3TTS) -> None:
    """Steps and verify passes do; a prompt's length may never come again."""
    for words in range(1, 12):
        model.synthesize("word " * words + ".", seed=words, max_audio_length=2, verify_size=3)
    for session in (model.talker._session, model.predictor._session):
        assert isinstance(session, DecoderSession)
        assert {length for length, _ in session._bindings} <= set(range(1, KEPT_LENGTH + 1))


# ---- the contract of threads ----------------------------------------------------------------------------------------


def in_threads(work: Callable[[int], Any], count: int = 8) -> list[Any]:
    """Run ``work`` in four threads that begin together."""
    start = threading.Barrier(4)

    def begin(index: int) -> Any:
        if index < 4:
            start.wait()
        return work(index)

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(begin, range(count)))


def test_frames_of_one_code_predictor(engine: Path) -> None:
    predictor = CodePredictor.from_engine_dir(engine / "code_predictor", threads=1)
    hidden = np.random.default_rng(1).standard_normal((8, 3, predictor.spec.talker_hidden_size), np.float32)

    def decode(index: int) -> np.ndarray:
        rows = 1 + index % 3
        return np.stack(
            [
                predictor.decode_frame(
                    hidden[index, :rows], [1] * rows, seeds=index, frames=frame, verify_size=(0, 3)[index % 2]
                ).codes
                for frame in range(10)
            ]
        )

    expected = [decode(index) for index in range(8)]
    for found, wanted in zip(in_threads(decode), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_model_and_its_code_predictor_at_the_same_time(model: Qwen3TTS) -> None:
    """A predictor that speaks as part of a model may be used by itself as well."""
    hidden = np.random.default_rng(2).standard_normal((1, model.predictor.spec.talker_hidden_size), np.float32)

    def work(index: int) -> np.ndarray:
        if index % 2:
            return model.synthesize("Hello there.", seed=index, max_audio_length=5, verify_size=3).codes
        frames = [model.predictor.decode_frame(hidden, 3, seeds=index, frames=f, verify_size=3) for f in range(20)]
        return np.stack([frame.codes for frame in frames])

    expected = [work(index) for index in range(8)]
    for found, wanted in zip(in_threads(work), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_answers_of_one_omni(omni: Any) -> None:
    model: Qwen3Omni = omni.model

    def respond(index: int) -> tuple[str, bytes]:
        reply = model.respond("Hi " * index + "you.", seed=index, max_generate_length=4, max_audio_length=3)
        assert reply.speech is not None
        return reply.text, reply.speech.codes.tobytes()

    expected = [respond(index) for index in range(8)]
    assert in_threads(respond) == expected


def test_who_calls_from_a_callback_is_told(model: Qwen3TTS, omni: Any) -> None:
    """The thread has the lock already: it would spoil its own batch."""

    def again(frames: int) -> None:
        model.synthesize("Hi.", max_audio_length=1)

    def again_omni(frames: int) -> None:
        omni.model.respond("Hi.", max_generate_length=1)

    for _ in range(2):  # the first has left no lock behind
        with pytest.raises(ConfigError, match="from a callback of its own call"):
            model.synthesize("Hello.", max_audio_length=4, progress=again)
        with pytest.raises(ConfigError, match="from a callback of its own call"):
            omni.model.respond("Hello.", max_generate_length=4, progress=again_omni)
    assert model.synthesize("Hi.", seed=1, max_audio_length=1).codes.shape[0] == 1


def test_a_thread_that_fails_does_not_keep_the_others_waiting(model: Qwen3TTS) -> None:
    def fail(frames: int) -> None:
        raise EngineError("stopped")

    def work(index: int) -> str:
        try:
            model.synthesize("Hello.", seed=index, max_audio_length=4, progress=fail if index % 2 else None)
        except EngineError as error:
            return str(error)
        return "spoke"

    assert in_threads(work) == ["spoke", "stopped"] * 4
