"""Speech that is none: what is never written, what is warned of, and what ends a run early."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from click.testing import CliRunner, Result
from crash import assert_interrupted
from trt_cpspec.builder.cli import main

from trt_cpspec import outputs
from trt_cpspec.cli import llm, tts
from trt_cpspec.codec import Code2Wav
from trt_cpspec.errors import ConfigError, EngineError
from trt_cpspec.guards import check_waveform, frame_limit, longest_repeat, longest_silence, speech_warnings
from trt_cpspec.pipeline import Qwen3TTS, SpeechModel
from trt_cpspec.thinker import Thinker

Patch = pytest.MonkeyPatch
RATE = 24000
CHECKPOINT = Path(__file__).parent / "golden" / "tts_a" / "checkpoint"


@pytest.fixture(scope="module")
def engines(variants: dict[str, Any]) -> Path:
    return variants["tts_a"].engine  # type: ignore[no-any-return]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: Patch) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def endless(monkeypatch: Patch) -> None:
    """A Talker that never says that speech has ended."""
    real = SpeechModel._sample_first_codes

    def sample(self: SpeechModel, live: Any, hidden: Any) -> Any:
        eos = self.talker.spec.ids.codec_eos_token_id
        logits = type(self.talker).logits
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(self.talker), "logits", lambda talker, row: _without(logits(talker, row), eos))
            return real(self, live, hidden)

    monkeypatch.setattr(SpeechModel, "_sample_first_codes", sample)


def _without(logits: np.ndarray, code: int) -> np.ndarray:
    out = logits.copy()
    out[code] = -1e9
    return out


def speak(engines: Path, *args: str) -> Result:
    return CliRunner().invoke(tts, [str(engines), *args])


def noise(seconds: float) -> np.ndarray:
    return np.random.default_rng(0).uniform(-0.5, 0.5, int(seconds * RATE)).astype(np.float32)


def codes_of(first: list[int]) -> np.ndarray:
    return np.array([[code] * 16 for code in first], np.int32)


# ---- the end of speech that does not come ---------------------------------------------------------------------------


def test_without_an_end_the_cap_is_scaled_to_the_text(engines: Path, work: Path, endless: None) -> None:
    response = json.loads(speak(engines, "Hi.", "--seed", "1").stdout)["responses"][0]
    limit = response["max_audio_length"]
    assert limit < 150
    assert (response["finish_reason"], response["cp_spec"]["frames"]) == ("length", limit)
    assert response["warnings"][0].startswith(f"the end of speech did not come within {limit} frames")


@pytest.mark.parametrize(("args", "code"), [((), 0), (("--strict",), 1)])
def test_speech_without_an_end_is_a_failure_where_that_is_asked_for(
    args: tuple[str, ...], code: int, engines: Path, work: Path, endless: None
) -> None:
    Path("in.json").write_text(
        json.dumps({"requests": [{"messages": [{"role": "assistant", "content": "Hi."}]}], "max_audio_length": 3})
    )
    result = CliRunner().invoke(tts, ["--talkerEngineDir", str(engines / "talker"), "--inputFile", "in.json", *args])
    response = json.loads(result.stdout)["responses"][0]
    assert (result.exit_code, response["finish_reason"], response["cp_spec"]["frames"]) == (code, "length", 3)
    assert response["warnings"] == []  # the length was asked for


def test_speech_that_ends_passes_strictly(engines: Path, work: Path) -> None:
    result = speak(engines, "Hello there, this is a short test.", "--seed", "3", "--strict")
    response = json.loads(result.stdout)["responses"][0]
    assert (result.exit_code, response["finish_reason"], response["warnings"]) == (0, "eos", [])


def test_the_limit_grows_with_the_text() -> None:
    assert [frame_limit(tokens) for tokens in (1, 10, 202, 203, 1000)] == [70, 250, 4090, 4096, 4096]


# ---- repeated codes and silence -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([], (0, 0)),
        ([7], (0, 0)),
        ([1, 2, 3, 4, 5], (0, 0)),
        ([1, 7, 7, 7, 2], (1, 3)),
        ([9, 1, 2, 1, 2, 1, 2, 8], (1, 6)),
        ([9, 1, 2, 3, 4, 1, 2, 3, 4, 1], (1, 9)),
    ],
)
def test_the_longest_repeat(codes: list[int], expected: tuple[int, int]) -> None:
    assert longest_repeat(np.array(codes, np.int32)) == expected


@pytest.mark.parametrize(("frames", "warned"), [(37, False), (38, True)])
def test_codes_that_repeat_are_warned_of(frames: int, warned: bool) -> None:
    codes = codes_of([*range(100, 110), *[5, 6] * (frames // 2), *[5] * (frames % 2)])
    found = speech_warnings(codes, noise(4), RATE)
    assert [text for text in found if "repeat" in text] == (
        ["the first codes repeat for 3.0 s from frame 10 on"] if warned else []
    )


@pytest.mark.parametrize(("seconds", "warned"), [(2.9, False), (3.2, True)])
def test_silence_is_warned_of(seconds: float, warned: bool) -> None:
    silent = np.zeros(int(seconds * RATE), np.float32)
    silent[::100] = 1e-4  # not constant
    waveform = np.concatenate([noise(1), silent, noise(1)])
    assert bool(speech_warnings(codes_of(list(range(60))), waveform, RATE)) == warned
    assert longest_silence(waveform, RATE) == pytest.approx(seconds, abs=0.16)


def test_short_speech_that_is_all_silent_is_warned_of() -> None:
    waveform = np.full(RATE // 2, 1e-5, np.float32)
    assert "silent" in speech_warnings(codes_of([1, 2, 3, 4, 5, 6]), waveform, RATE)[0]


def test_no_frames_are_warned_of() -> None:
    assert speech_warnings(codes_of([]).reshape(0, 16), noise(0), RATE) == ("the speech ended before its first frame",)


def test_warnings_reach_the_response_and_standard_error(engines: Path, work: Path) -> None:
    command = [sys.executable, "-c", "import sys, trt_cpspec.guards as g; g.REPEAT_SECONDS = 0.0\n"
               "from trt_cpspec.cli import tts; tts(sys.argv[1:])", str(engines), "Hi.", "--seed", "1"]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    (warning,) = json.loads(result.stdout)["responses"][0]["warnings"]
    assert "the first codes repeat" in warning
    assert (result.returncode, result.stderr) == (0, f"WARNING: requests[0]: {warning}\n")
    assert subprocess.run([*command, "--strict"], capture_output=True, timeout=60, check=False).returncode == 1


# ---- what is never written ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0, -1.0, 0.25])
def test_a_waveform_without_speech_is_never_written(value: float, tmp_path: Path) -> None:
    waveform = np.full(1920, value, np.float32)
    with pytest.raises(EngineError, match=r"not finite|constant"):
        check_waveform(waveform)
    with pytest.raises(EngineError, match="not written as speech"):
        outputs.write_wav(tmp_path / "x.wav", waveform, RATE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_a_codec_that_gives_a_constant_fails_the_request(
    value: float, engines: Path, work: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(Code2Wav, "decode", lambda self, codes: np.full(1920 * len(codes), value, np.float32))
    result = speak(engines, "Hi.", "--seed", "1")
    response = json.loads(result.stdout)["responses"][0]
    assert (result.exit_code, response["output_text"]) == (1, "FAILED")
    assert "constant" in response["error"]
    assert [path for path in work.rglob("*") if path.is_file()] == []


def test_a_constant_waveform_is_no_speech_in_python_either(lively: Qwen3TTS, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Code2Wav, "decode", lambda self, codes: np.zeros(1920 * len(codes), np.float32))
    with pytest.raises(EngineError, match="constant"):
        lively.synthesize("Hi.", seed=1, max_audio_length=2)


# ---- a wav on standard output ---------------------------------------------------------------------------------------


def piped(engines: Path, *args: str, **how: Any) -> subprocess.CompletedProcess[bytes]:
    command = [str(Path(sys.executable).with_name("cpspec")), "tts", str(engines), *args]
    return subprocess.run(command, capture_output=True, timeout=60, check=False, **how)


def test_a_wav_is_piped_and_nothing_else(engines: Path, work: Path) -> None:
    result = piped(engines, "Hello.", "--seed", "1", "-o", "-", "--outputFile", "out.json")
    assert (result.returncode, result.stderr) == (0, b"")
    wave, rate = soundfile.read(io.BytesIO(result.stdout), dtype="float32")
    response = json.loads(Path("out.json").read_text())["responses"][0]
    assert (rate, len(wave), response["audio_file"]) == (RATE, response["audio_samples"], "-")
    assert response["sampling"]["seed"] == 1
    assert [path.name for path in work.iterdir()] == ["out.json"]


def test_a_wav_is_followed_by_nothing_when_the_summary_fails(engines: Path, work: Path) -> None:
    code = (
        "import sys; from trt_cpspec import cli, outputs\n"
        "def full(*_): raise OSError(28, 'No space left on device')\n"
        "outputs.write_json = full; cli.tts()"
    )
    args = [str(engines), "Hello.", "--seed", "1", "-o", "-", "--outputFile", "out.json"]
    result = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, timeout=60, check=False)
    told, _, message = result.stderr.decode().rpartition("Error: ")
    assert (result.returncode, "No space left" in message) == (1, True)
    assert json.loads(told)["responses"][0]["audio_samples"] > 0
    assert result.stdout == piped(engines, "Hello.", "--seed", "1", "-o", "-").stdout


def test_a_seed_that_was_drawn_is_told_where_no_response_is(engines: Path, work: Path) -> None:
    drawn = piped(engines, "Hello.", "-o", "-")
    seed = re.fullmatch(rb"seed: (\d+)\n", drawn.stderr)
    assert seed is not None
    assert piped(engines, "Hello.", "-o", "-", "--seed", seed[1].decode()).stdout == drawn.stdout


def test_a_wav_goes_where_it_is_told_to(engines: Path, work: Path) -> None:
    result = speak(engines, "Hello.", "--seed", "1", "-o", "made/hello.wav")
    response = json.loads(result.stdout)["responses"][0]
    assert (result.exit_code, response["audio_file"]) == (0, "made/hello.wav")
    assert "rvq_file" not in response
    assert Path("made/hello.wav").read_bytes() == piped(engines, "Hello.", "--seed", "1", "-o", "-").stdout
    assert [path.name for path in work.rglob("*") if path.is_file()] == ["hello.wav"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("Hi.", "-o", "file/x.wav"), "cannot be written"),
        (("Hi.", "-o", "-", "--dumpProfile"), "no room on standard output"),
        (("Hi.", "-o", "x.wav", "--outputFile", "x.wav"), "named twice"),
        (("Hi.", "-o", "x.opus"), "only wav is written"),
        (("Hi.", "--text", "Ho."), "give the text once"),
        (("Hi.", "--talkerEngineDir", "x"), "either ENGINE_DIR or --talkerEngineDir"),
        (("Hi.", "--timeLimit", "0"), "--timeLimit"),
        ((), "either --inputFile or --text"),
        (("--inputFile", "two.json", "-o", "x.wav"), "one text, there are 2"),
        (("--inputFile", "typo.json"), "did you mean 'language'"),
    ],
)
def test_what_the_short_form_refuses(args: tuple[str, ...], message: str, engines: Path, work: Path) -> None:
    (work / "file").touch()
    request = {"messages": [{"role": "assistant", "content": "Hi."}]}
    Path("two.json").write_text(json.dumps({"requests": [request] * 2}))
    Path("typo.json").write_text(json.dumps({"requests": [request | {"languag": "english"}]}))
    result = speak(engines, *args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert {path.name for path in work.iterdir()} == {"file", "two.json", "typo.json"}


def test_no_wav_goes_to_a_terminal(engines: Path, work: Path) -> None:
    ours, theirs = pty.openpty()
    command = [str(Path(sys.executable).with_name("cpspec")), "tts", str(engines), "Hi.", "-o", "-"]
    result = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(theirs)
    os.close(ours)
    assert (result.returncode, b"on the terminal" in result.stderr) == (2, True)


# ---- time limit and interrupts --------------------------------------------------------------------------------------


def test_a_time_limit_fails_what_is_not_spoken_and_leaves_no_file(
    engines: Path, work: Path, endless: None, monkeypatch: Patch
) -> None:
    """The clock moves a second a frame: the first request is short, the second meets the limit, the third is late."""
    now = [0.0]
    real = Qwen3TTS._decode_frame

    def decode(self: Qwen3TTS, *args: Any) -> Any:
        now[0] += 1
        return real(self, *args)

    monkeypatch.setattr(Qwen3TTS, "_decode_frame", decode)
    monkeypatch.setattr("trt_cpspec.cli.time.monotonic", lambda: now[0])
    request = {"messages": [{"role": "assistant", "content": "Hi."}], "seed": 1}
    lengths = (3, 50, 3)
    Path("in.json").write_text(json.dumps({"requests": [request | {"max_audio_length": n} for n in lengths]}))
    args = ["--talkerEngineDir", str(engines / "talker"), "--inputFile", "in.json", "--timeLimit", "10"]
    result = CliRunner().invoke(tts, args)
    responses = json.loads(result.stdout)["responses"]
    assert result.exit_code == 1
    assert [response["output_text"] for response in responses] == ["", "FAILED", "FAILED"]
    assert {response.get("error") for response in responses[1:]} == {"the time limit of 10 s was reached"}
    assert now[0] == 3 + 8  # not one frame more than it takes to see that the time is up
    names = {path.name for path in (work / "audio").iterdir()}
    assert names == {"audio_req0.wav", "rvq_req0.safetensors"}


def test_ctrl_c_leaves_no_partial_file_and_no_process(engines: Path, work: Path) -> None:
    long = " ".join(["word"] * 200)
    code = (
        "import sys\nfrom trt_cpspec.pipeline import Qwen3TTS\nfrom trt_cpspec.cli import tts\n"
        "real = Qwen3TTS._decode_frame\n"
        "def say(self, *args):\n    print('frame', file=sys.stderr, flush=True)\n    return real(self, *args)\n"
        "Qwen3TTS._decode_frame = say\ntts(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, str(engines), long, "--seed", "1", "-o", "x.wav"]
    assert_interrupted(command, behind=b"frame\n")
    assert list(work.iterdir()) == []


# ---- answers aloud --------------------------------------------------------------------------------------------------


def answer(omni: Any, *args: str) -> tuple[int, list[dict[str, Any]]]:
    """Return exit code and responses of ``llm_inference`` with short answers."""
    given = ["--engineDir", str(omni.engine / "thinker"), "--enableAudioOutput", "--talkerEngineDir"]
    length = ["--maxGenerateLength", "3", "--seed", "1"]
    result = CliRunner().invoke(llm, [*given, str(omni.engine / "talker"), *length, *args])
    return result.exit_code, json.loads(result.stdout)["responses"]


@pytest.mark.parametrize(("args", "code"), [((), 0), (("--strict",), 1)])
def test_an_answer_whose_speech_has_no_end(
    args: tuple[str, ...], code: int, omni: Any, work: Path, endless: None
) -> None:
    found, (response,) = answer(omni, "--text", "Hi.", *args)
    limit = frame_limit(2)  # the last token of an answer that ends at its limit is not spoken
    assert (found, response["max_audio_length"], response["cp_spec"]["frames"]) == (code, limit, limit)
    assert (response["finish_reason"], response["audio_finish_reason"]) == ("length", "length")
    assert response["warnings"][0].startswith(f"the end of speech did not come within {limit} frames")


def test_a_length_that_was_asked_for_is_no_warning(omni: Any, work: Path, endless: None) -> None:
    document = {"requests": [{"messages": [{"role": "user", "content": "Hi."}]}], "max_audio_length": 3}
    Path("in.json").write_text(json.dumps(document))
    code, (response,) = answer(omni, "--inputFile", "in.json")
    assert (code, response["max_audio_length"], response["cp_spec"]["frames"], response["warnings"]) == (0, 3, 3, [])


def test_a_text_at_its_limit_is_no_failure_where_nothing_is_spoken(omni: Any, work: Path) -> None:
    args = ["--engineDir", str(omni.engine / "thinker"), "--text", "Hi.", "--maxGenerateLength", "1", "--strict"]
    result = CliRunner().invoke(llm, [*args, "--seed", "1"])
    assert (result.exit_code, json.loads(result.stdout)["responses"][0]["finish_reason"]) == (0, "length")


def test_a_constant_answer_is_never_written(omni: Any, work: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Code2Wav, "decode", lambda self, codes: np.zeros(1920 * len(codes), np.float32))
    code, (response,) = answer(omni, "--text", "Hi.")
    assert (code, response["output_text"], "constant" in response["error"]) == (1, "FAILED", True)
    assert [path for path in work.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(("stage", "method"), [(Thinker, "step"), (SpeechModel, "_decode_frame")])
def test_a_time_limit_ends_an_answer_in_either_stage(
    stage: type, method: str, omni: Any, work: Path, endless: None, monkeypatch: Patch
) -> None:
    """The clock moves a second for each step of one stage; the next answer is not begun."""
    now, real = [0.0], getattr(stage, method)

    def step(self: Any, *args: Any) -> Any:
        now[0] += 1
        return real(self, *args)

    monkeypatch.setattr(stage, method, step)
    monkeypatch.setattr("trt_cpspec.cli.time.monotonic", lambda: now[0])
    request = {"messages": [{"role": "user", "content": "Hi."}], "max_audio_length": 9}
    Path("in.json").write_text(json.dumps({"requests": [request] * 2}))
    code, responses = answer(omni, "--inputFile", "in.json", "--timeLimit", "1")
    assert (code, now[0]) == (1, 2)
    assert {response["error"] for response in responses} == {"the time limit of 1 s was reached"}
    assert [path.name for path in work.rglob("*") if path.is_file()] == ["in.json"]


# ---- clear errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [3, None, 2.5])
def test_a_text_that_is_no_text_is_named(text: Any, lively: Qwen3TTS) -> None:
    with pytest.raises(ConfigError, match="text must be a string or a list of strings, it is"):
        lively.synthesize(text)
    with pytest.raises(ConfigError, match="text must be a string"):
        lively.synthesize([text])


@pytest.mark.parametrize("as_link", [False, True])
def test_engines_are_not_built_into_the_checkpoint(
    as_link: bool, edited_checkpoint: Any, tmp_path: Path, monkeypatch: Patch
) -> None:
    folder = edited_checkpoint()
    target = folder
    if as_link:
        target = tmp_path / "link"
        target.symlink_to(folder)
    before = sorted(folder.rglob("*"))
    result = CliRunner().invoke(main, ["build", "--checkpointDir", str(folder), "--engineDir", str(target)])
    assert (result.exit_code, "is the checkpoint itself" in result.stderr) == (2, True)
    assert sorted(folder.rglob("*")) == before


def test_a_folder_that_cannot_be_written_is_named_and_no_temporary_file(tmp_path: Path, monkeypatch: Patch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(tmp_path / "tmpabc123"))

    monkeypatch.setattr("trt_cpspec.outputs.tempfile.TemporaryFile", refuse)
    with pytest.raises(ConfigError, match=f"^the folder {re.escape(str(tmp_path))} cannot be written: Permission den"
                       "ied$"):  # fmt: skip
        outputs.check_folder(tmp_path)


def test_a_write_that_fails_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with pytest.raises(OSError, match=re.escape(f"'{path}'")), outputs.replacing(path) as partial:
        raise OSError(28, "No space left on device", str(partial))
