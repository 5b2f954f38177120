"""The command lines: what they refuse and when, what they write, and what goes to which stream."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import soundfile
from click.testing import CliRunner, Result
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from trt_cpspec.builder.cli import build, main
from trt_cpspec.builder.tts import TtsBuild

from trt_cpspec import outputs
from trt_cpspec.cli import tts
from trt_cpspec.errors import ConfigError, EngineError
from trt_cpspec.predictor import CodePredictor

GOLDEN = Path(__file__).parent / "golden"
CHECKPOINT = GOLDEN / "tts_a" / "checkpoint"
BIN = Path(sys.executable).parent
TEXT = "Hello there, this is a short test."
CP_SPEC_KEYS = {
    "requested_verify_size", "verify_size", "mode", "fallback_reason", "frames", "rounds", "passes", "proposed",
    "accepted", "codes", "codes_per_round", "acceptance_by_depth", "acceptance_by_offset", "commit_histogram",
}  # fmt: skip
RESPONSE_KEYS = {
    "request_idx", "output_text", "messages", "audio_file", "audio_samples", "audio_sample_rate", "audio_duration_ms",
    "rvq_file", "finish_reason", "speaker", "language", "instruct", "non_streaming_mode", "max_audio_length",
    "sampling", "warnings", "cp_spec",
}  # fmt: skip
DEFAULTS = {
    "talker_temperature": 0.9, "talker_top_k": 50, "talker_top_p": 1.0, "repetition_penalty": 1.05,
    "subtalker_temperature": 0.9, "subtalker_top_k": 50, "subtalker_top_p": 1.0,
}  # fmt: skip


def build_engines(folder: Path, *args: str, checkpoint: Path = CHECKPOINT) -> Path:
    """Build for ONNX Runtime."""
    given = ("--checkpointDir", str(checkpoint), "--engineDir", str(folder), "--backend", "onnxruntime")
    result = CliRunner().invoke(build, [*given, *args])
    assert (result.exit_code, result.stderr) == (0, "backend: ONNX Runtime\n"), result.output
    return folder


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines") / "eng"
    return build_engines(folder, "--maxInputLen", "64", "--maxKVCacheCapacity", "256")


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def run(engines: Path, *args: str) -> Result:
    return CliRunner().invoke(tts, ["--talkerEngineDir", str(engines / "talker"), *args])


def request(text: str = TEXT, **options: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": text}], **options}


def speak(engines: Path, requests: list[dict[str, Any]], *args: str, code: int = 0, **top: Any) -> list[dict[str, Any]]:
    """Speak from an input file in the working folder; return the responses."""
    Path("input.json").write_text(json.dumps({"requests": requests, **top}))
    result = run(engines, "--inputFile", "input.json", *args)
    assert result.exit_code == code, result.output
    document = json.loads(result.stdout)
    assert document["input_file"] == "input.json"
    return document["responses"]  # type: ignore[no-any-return]


def codes_of(response: dict[str, Any]) -> NDArray[np.int32]:
    return load_file(response["rvq_file"])["rvq_codes"]


def digest(response: dict[str, Any]) -> list[str]:
    return [hashlib.sha256(Path(response[key]).read_bytes()).hexdigest() for key in ("audio_file", "rvq_file")]


def command(name: str, *args: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([str(BIN / name), *args], capture_output=True, timeout=60, check=False, **options)


def on_terminal(name: str, *args: str) -> tuple[int, str, str]:
    """Run a command whose standard error is a terminal; return exit code, standard output, what the terminal got."""
    ours, theirs = pty.openpty()
    with subprocess.Popen([str(BIN / name), *args], stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        while select.select([ours], [], [], 60)[0]:
            try:
                shown += os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
        assert process.stdout is not None
        stdout = process.stdout.read().decode()
    os.close(ours)
    return process.returncode, stdout, shown.decode()


# ---- what is refused ------------------------------------------------------------------------------------------------

SAY = ("--text", TEXT)
REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    **{
        f"N={n}": ((*SAY, "--cpSpecVerifySize", n), r"--cpSpecVerifySize.* 0 to switch .* 2 to 8")
        for n in ("1", "-1", "9", "10")
    },
    "clone": ((*SAY, "--cloneEncoderDir", "x"), "--cloneEncoderDir: voice clone .* not supported yet"),
    "cuda": ((*SAY, "--device", "cuda"), "CUDA|--device cuda"),
    "device": ((*SAY, "--device", "tpu"), "'--device'.*'tpu'"),
    "mode": ((*SAY, "--cpSpecMode", "greedy"), "'rejection', 'coupled'"),
    "no text": ((), "give either --inputFile or --text"),
    "both": ((*SAY, "--inputFile", "in.json"), "give either --inputFile or --text"),
    "speaker of a file": (("--inputFile", "in.json", "--speaker", "ryan"), "--speaker goes with --text.*key 'speaker'"),
    "no file": (("--inputFile", "in.json"), r"in.json: there is no such file"),
    **{f"blank {t!a}": (("--text", t), "the text (is empty|holds nothing visible)") for t in ("", " \t\n", "\u200b")},
    "template token": (("--text", "a<|im_end|>"), r"<\|im_end\|>"),
    "long text": (("--text", "word " * 60), "max_input_len is 64; .*--maxInputLen"),
    "speaker": ((*SAY, "--speaker", "vivan"), "unknown speaker 'vivan'; did you mean 'vivian'"),
    "language": ((*SAY, "--language", "Englsh"), "unknown language 'Englsh'; did you mean 'english'"),
    "batch": ((*SAY, "--batchSize", "5"), "batch size of 5 exceeds the engine's max_batch_size 4"),
    "no batch": ((*SAY, "--batchSize", "0"), "--batchSize.* 0"),
    "seed": ((*SAY, "--seed", "-1"), "--seed.* -1"),
    "wide seed": ((*SAY, "--seed", str(2**64)), "--seed.* 18446744073709551616"),
    "audio folder": ((*SAY, "--outputAudioDir", "file/audio"), "the folder file/audio cannot be written"),
    "output file": ((*SAY, "--outputFile", "file/out.json"), "the folder file cannot be written"),
    "output folder": ((*SAY, "--outputFile", "folder"), "folder is a folder or a device; give the path of a file"),
    "profile file": ((*SAY, "--profileOutputFile", "file/p.json"), "the folder file cannot be written"),
    "engine": ((*SAY, "--talkerEngineDir", "nowhere"), "nowhere"),
    "codec": ((*SAY, "--code2wavEngineDir", "nowhere"), "nowhere"),
    "tokenizer": ((*SAY, "--tokenizerDir", "nowhere"), "nowhere is no folder"),
    "checkpoint": ((*SAY, "--checkpointDir", "nowhere"), "nowhere is no folder"),
    "flag": ((*SAY, "--cpSpecVerifySise", "3"), "--cpSpecVerifySize"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_used_is_refused_before_any_work(case: str, engines: Path, work: Path) -> None:
    (work / "file").touch()
    (work / "folder").mkdir()
    args, message = REFUSED[case]
    result = run(engines, *args)
    assert result.exit_code == 2
    assert re.search(message, result.stderr.replace("\n", " "))
    assert result.stdout == ""
    assert files(work) == {"file", "folder"}


def test_the_verify_size_is_refused_before_anything_is_looked_at(work: Path) -> None:
    result = run(Path("nowhere"), "--inputFile", "nowhere.json", "--cpSpecVerifySize", "9")
    assert (result.exit_code, "2 to 8" in result.stderr, "nowhere" in result.stderr) == (2, True, False)


def test_a_verify_size_is_not_clamped(engines: Path, work: Path) -> None:
    narrow = shutil.copytree(engines, work / "narrow")
    config = json.loads((narrow / "code_predictor" / "config.json").read_text())
    config["builder_config"]["max_verify_size"] = 3
    (narrow / "code_predictor" / "config.json").write_text(json.dumps(config))
    args = ("--text", TEXT, "--seed", "1", "--cpSpecVerifySize")
    cp_spec = [json.loads(run(narrow, *args, n).stdout)["responses"][0]["cp_spec"] for n in ("3", "4")]
    assert [entry["verify_size"] for entry in cp_spec] == [3, 0]
    assert cp_spec[0]["fallback_reason"] is None
    assert "--maxVerifySize 4" in cp_spec[1]["fallback_reason"]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"requests": [request()], "speeker": "ryan"}, "speeker is no known key; did you mean 'speaker'"),
        ({"requests": [request(lanugage="x")]}, r"requests\[0\].lanugage is no known key; did you mean 'language'"),
        ({"requests": [request(), request(speaker="ry")]}, r"input.json: requests\[1\]: unknown speaker 'ry'"),
        ({"requests": [request(), request(language="Fench")]}, r"requests\[1\]: .*did you mean 'french'"),
        ({"requests": [request(" ")]}, r"requests\[0\].*holds nothing visible"),
        ({"requests": [request("word " * 60)]}, r"requests\[0\]: .*max_input_len"),
        ({"requests": [request(seed=-1)]}, r"requests\[0\].seed is -1"),
        ({"requests": [request(ref_audio="a.wav")]}, r"requests\[0\].ref_audio: voice clone is not supported yet"),
        ({"requests": [request()], "batch_size": 5}, "max_batch_size 4"),
        ({"requests": []}, "requests is empty"),
    ],
)
def test_an_input_file_is_refused_as_a_whole(document: Any, message: str, engines: Path, work: Path) -> None:
    Path("input.json").write_text(json.dumps(document))
    result = run(engines, "--inputFile", "input.json", "--outputFile", "out/o.json")
    assert result.exit_code == 2
    assert re.search(message, result.stderr)
    assert files(work) == {"input.json"}


def test_a_refusal_has_no_traceback_unless_it_is_asked_for(engines: Path, work: Path) -> None:
    args = ("--talkerEngineDir", str(engines / "talker"), *SAY, "--speaker", "vivan")
    plain, debug = command("qwen3_tts_inference", *args), command("cpspec", "tts", *args, "--debug")
    assert (plain.returncode, debug.returncode) == (2, 2)
    assert plain.stderr.startswith(b"Error: unknown speaker")
    assert b"Traceback" in debug.stderr


# ---- what is written ------------------------------------------------------------------------------------------------


def test_the_reference_is_met_from_json_to_files(engines: Path, work: Path) -> None:
    golden, arrays = (
        json.loads((GOLDEN / "tts_a" / "golden.json").read_text()),
        np.load(GOLDEN / "tts_a" / "golden.npz"),
    )
    prompts = golden["prompts"]
    keys = ("language", "speaker", "instruct", "non_streaming_mode", "repetition_penalty")
    requests = [
        request(prompt["request"]["text"], **{key: prompt["request"][key] for key in keys}) for prompt in prompts
    ]
    top = {"talker_temperature": 0, "subtalker_temperature": 0, "max_audio_length": 12, "batch_size": 4}
    responses = speak(engines, requests, **top)
    for index, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        assert set(response) == RESPONSE_KEYS
        assert (response["request_idx"], response["output_text"]) == (index, "")
        assert response["messages"] == requests[index]["messages"]
        assert response["finish_reason"] == {"max": "length", "eos": "eos"}[prompt["finish_reason"]]
        codes = codes_of(response)
        assert codes.dtype == np.int32
        np.testing.assert_array_equal(codes, arrays[f"{prompt['id']}.codes"])
        frames = prompt["n_frames"]
        info = soundfile.info(response["audio_file"])
        assert (info.samplerate, info.channels, info.subtype, info.format) == (24000, 1, "PCM_16", "WAV")
        assert info.frames == response["audio_samples"] == 1920 * frames
        assert (response["audio_sample_rate"], response["audio_duration_ms"]) == (24000, 80.0 * frames)
        wave, _ = soundfile.read(response["audio_file"])
        np.testing.assert_allclose(wave, arrays[f"{prompt['id']}.wav"], atol=1e-4)
        assert set(response["cp_spec"]) >= CP_SPEC_KEYS
        assert response["cp_spec"]["passes"] == 15 * frames
    assert [len(response["warnings"]) for response in responses] == [0, 0, 0, 1]  # 0.6B knows no instruct
    assert files(work) == {"input.json", "audio"} | {
        f"audio/{name}" for i in range(4) for name in (f"audio_req{i}.wav", f"rvq_req{i}.safetensors")
    }


CHANGES: dict[str, Any] = {
    "seed": 2, "subtalker_temperature": 0, "subtalker_top_k": 1, "subtalker_top_p": 1e-6, "talker_temperature": 0,
    "talker_top_k": 1, "talker_top_p": 1e-6, "repetition_penalty": 0.01, "speaker": "ryan", "language": "english",
    "non_streaming_mode": False,
}  # fmt: skip


@pytest.mark.parametrize("where", ["request", "top"])
def test_an_option_takes_effect(where: str, engines: Path, work: Path) -> None:
    base = {"seed": 1, "max_audio_length": 4, "speaker": "vivian"}
    changes = [base | {key: value} for key, value in CHANGES.items()]
    if where == "request":
        plain, *changed = speak(engines, [request(**options) for options in (base, *changes)], "--batchSize", "4")
    else:
        plain, *changed = (
            speak(engines, [request()], "--outputAudioDir", f"audio{i}", **options)[0]
            for i, options in enumerate((base, *changes))
        )
    found = dict(zip(CHANGES, changed, strict=True))
    for key, response in found.items():
        assert not np.array_equal(codes_of(plain), codes_of(response)), key
        shown = response | response["sampling"]
        assert key == "non_streaming_mode" or shown[key] == CHANGES[key]
    argmax = codes_of(found["subtalker_temperature"])
    for key in ("subtalker_top_k", "subtalker_top_p"):
        np.testing.assert_array_equal(codes_of(found[key]), argmax)


ENDLESS = {"speaker": "vivian", "language": "english", "talker_temperature": 0, "subtalker_temperature": 0}
"""Of which the reference says that it does not end within 12 frames."""


@pytest.mark.parametrize("length", [1, 2, 7])
def test_max_audio_length_counts_frames(length: int, engines: Path, work: Path) -> None:
    response = speak(engines, [request(max_audio_length=length, **ENDLESS)])[0]
    assert (len(codes_of(response)), response["finish_reason"]) == (length, "length")
    assert response["audio_samples"] == 1920 * length


def test_a_length_beyond_the_engine_is_limited_and_said(engines: Path, work: Path) -> None:
    Path("input.json").write_text(json.dumps({"requests": [request(max_audio_length=9999, seed=1)]}))
    args = ("--talkerEngineDir", str(engines / "talker"), "--inputFile", "input.json")
    result = command("qwen3_tts_inference", *args)
    warning = json.loads(result.stdout)["responses"][0]["warnings"][0]
    assert "max_kv_cache_capacity 256" in warning
    assert result.stderr.decode().splitlines() == [f"WARNING: input.json: requests[0]: {warning}"]


def test_an_instruct_takes_effect_where_the_model_knows_it(work: Path) -> None:
    engines = build_engines(work / "eng", checkpoint=GOLDEN / "tts_b" / "checkpoint")
    base = {"seed": 1, "max_audio_length": 4}
    responses = speak(engines, [request(**base), request(**base, instruct="Speak slowly.")])
    assert not np.array_equal(codes_of(responses[0]), codes_of(responses[1]))
    assert responses[1]["warnings"] == []
    assert responses[0]["speaker"] is None


def test_what_a_request_leaves_open_comes_from_the_checkpoint(engines: Path, work: Path) -> None:
    absent, null, given = speak(
        engines,
        [request(), request(talker_temperature=None), request(**DEFAULTS)],
        "--seed", "5", max_audio_length=5,
    )  # fmt: skip
    assert absent["sampling"] == given["sampling"] == DEFAULTS | {"seed": 5}
    assert digest(absent) == digest(given) == digest(null)
    assert (absent["speaker"], absent["language"]) == ("serena", "auto")
    other = shutil.copytree(engines, work / "other")
    config = json.loads((other / "talker" / "config.json").read_text())
    config["generation_config"] |= {"temperature": 0.5, "subtalker_top_k": 7, "top_p": 0.8}
    (other / "talker" / "config.json").write_text(json.dumps(config))
    changed = speak(other, [request()], "--seed", "5", max_audio_length=5)[0]
    assert changed["sampling"] == DEFAULTS | {
        "talker_temperature": 0.5, "subtalker_top_k": 7, "talker_top_p": 0.8, "seed": 5,
    }  # fmt: skip


def test_the_seed_decides_every_byte(engines: Path, work: Path) -> None:
    def of(*args: str) -> dict[str, Any]:
        result = run(engines, *SAY, "--outputAudioDir", f"audio{len(files(work))}", *args)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)["responses"][0]  # type: ignore[no-any-return]

    first, again, other = of("--seed", "42"), of("--seed", "42"), of("--seed", "43")
    assert digest(first) == digest(again)
    assert all(a != b for a, b in zip(digest(first), digest(other), strict=True))
    drawn, redrawn = of(), of()
    seed = drawn["sampling"]["seed"]
    assert seed != redrawn["sampling"]["seed"]
    assert digest(of("--seed", str(seed))) == digest(drawn)


def test_a_request_goes_before_the_command_line(engines: Path, work: Path) -> None:
    own, theirs = speak(engines, [request(seed=3), request()], "--seed", "9", max_audio_length=2)
    assert (own["sampling"]["seed"], theirs["sampling"]["seed"]) == (3, 9)


@pytest.mark.parametrize("n", ["2", "3", "8"])
def test_coupled_mode_gives_the_codes_of_no_speculation(n: str, engines: Path, work: Path) -> None:
    requests = [request(seed=seed, max_audio_length=8) for seed in (1, 2)]
    plain = [codes_of(response) for response in speak(engines, requests)]
    responses = speak(engines, requests, "--cpSpecVerifySize", n, "--cpSpecMode", "coupled", "--batchSize", "2")
    for codes, response in zip(plain, responses, strict=True):
        np.testing.assert_array_equal(codes_of(response), codes)
        cp_spec, frames = response["cp_spec"], len(codes)
        assert (cp_spec["requested_verify_size"], cp_spec["verify_size"], cp_spec["mode"]) == (
            int(n),
            int(n),
            "coupled",
        )
        assert (cp_spec["frames"], cp_spec["codes"]) == (frames, 15 * frames)
        assert cp_spec["passes"] == frames + cp_spec["rounds"]
        assert cp_spec["rounds"] + cp_spec["accepted"] == 14 * frames
        assert cp_spec["codes_per_round"] == 14 * frames / cp_spec["rounds"]
        assert (len(cp_spec["acceptance_by_depth"]), len(cp_spec["acceptance_by_offset"])) == (16, int(n) - 1)
        assert sum(cp_spec["commit_histogram"]) == cp_spec["rounds"]


def test_other_folders_of_codec_and_tokenizer(engines: Path, work: Path) -> None:
    parts = shutil.copytree(engines, work / "parts")
    (parts / "code2wav").rename(work / "codec")
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        (parts / "talker" / name).unlink()
    args = ("--seed", "1", "--code2wavEngineDir", "codec")
    expected = digest(speak(engines, [request()], "--seed", "1", max_audio_length=3)[0])
    for option, folder in (("--checkpointDir", CHECKPOINT), ("--tokenizerDir", engines / "talker")):
        assert digest(speak(parts, [request()], *args, option, str(folder), max_audio_length=3)[0]) == expected


# ---- streams, files and exit codes ----------------------------------------------------------------------------------


def test_standard_output_is_json_and_warnings_are_elsewhere(engines: Path, work: Path) -> None:
    narrow = build_engines(work / "narrow", "--maxVerifySize", "1")
    Path("input.json").write_text(
        json.dumps({"requests": [request("你好, hello.", seed=seed) for seed in range(3)], "max_audio_length": 2})
    )
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    args = ("--talkerEngineDir", str(narrow / "talker"), "--inputFile", "input.json", "--cpSpecVerifySize", "3")
    result = command("qwen3_tts_inference", *args, "--dumpProfile", env=env)
    assert result.returncode == 0
    document = json.loads(result.stdout)
    assert document["responses"][0]["messages"][0]["content"] == "你好, hello."
    reasons = {response["cp_spec"]["fallback_reason"] for response in document["responses"]}
    assert "--maxVerifySize 3" in reasons.pop()
    assert result.stderr.count(b"WARNING: CodePredictor speculation is off") == 1
    assert result.stderr.count(b"\n") == 1  # no progress in a pipe
    assert document["profile"]["stages"]


def test_a_terminal_shows_progress(engines: Path, work: Path) -> None:
    code, stdout, shown = on_terminal(
        "qwen3_tts_inference", "--talkerEngineDir", str(engines / "talker"), "--text", TEXT, "--seed", "1"
    )
    frames = json.loads(stdout)["responses"][0]["cp_spec"]["frames"]
    assert code == 0
    assert re.search(rf"speaking .*100%.* {frames} frames", shown)


def test_output_and_profile_files(engines: Path, work: Path) -> None:
    args = (*SAY, "--seed", "1", "--outputFile", "a/b/out.json", "--profileOutputFile", "c/profile.json")
    silent = run(engines, *args)
    assert (silent.exit_code, silent.stdout) == (0, "")
    document, profile = json.loads(Path("a/b/out.json").read_text()), json.loads(Path("c/profile.json").read_text())
    assert document["input_file"] == ""
    frames = document["responses"][0]["cp_spec"]["frames"]
    stages = {stage["stage_id"]: stage for stage in profile["stages"]}
    assert profile["talker"]["total_audio_outputs"] == 1
    assert profile["talker"]["total_audio_codes"] == frames
    assert profile["real_time_factor"] > 0
    assert {name: stage["total_runs"] for name, stage in stages.items()} == {
        "talker_prefill": 1, "talker_generation": frames, "codepredictor_generation": frames, "code2wav": 1,
    }  # fmt: skip
    for stage in stages.values():
        assert 0 < stage["min_ms"] <= stage["average_time_per_run_ms"] <= stage["max_ms"] <= stage["total_time_ms"]
    assert json.loads(run(engines, *args, "--dumpOutput").stdout) == document
    assert set(json.loads(run(engines, *args, "--dumpProfile").stdout)) == {"profile"}
    both = json.loads(run(engines, *args, "--dumpOutput", "--dumpProfile").stdout)
    assert set(both) == {"input_file", "responses", "profile"}
    assert not any(name.endswith(".partial") for name in files(work))


def test_a_request_that_fails_leaves_the_others_alone(engines: Path, work: Path) -> None:
    broken = shutil.copytree(engines, work / "broken")
    table = load_file(broken / "talker" / "text_embedding.safetensors")
    vocabulary = json.loads((CHECKPOINT / "vocab.json").read_text())
    table["text_embedding"][vocabulary["z"]] = np.nan
    save_file(table, broken / "talker" / "text_embedding.safetensors")
    requests = [request(seed=1, max_audio_length=4), request("zz zz", seed=2), request(seed=3, max_audio_length=4)]
    whole = [digest(response) for response in speak(engines, [requests[0], request(), requests[2]], "--seed", "2")]
    Path("input.json").write_text(json.dumps({"requests": requests, "batch_size": 3}))
    result = command(
        "qwen3_tts_inference", "--talkerEngineDir", str(broken / "talker"), "--inputFile", "input.json",
        "--outputFile", "out.json", "--cpSpecVerifySize", "3", "--cpSpecMode", "coupled",
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (1, b"")
    first, failed, last = json.loads(Path("out.json").read_text())["responses"]
    assert (digest(first), digest(last)) == (whole[0], whole[2])
    assert (failed["output_text"], failed["request_idx"], failed["sampling"]["seed"]) == ("FAILED", 1, 2)
    assert failed["error"] in result.stderr.decode()
    assert not {"audio_file", "rvq_file", "finish_reason"} & set(failed)
    # Nor does the file of an earlier run pass for this one's.
    assert {Path(name).name for name in files(work / "audio")} == {
        "audio_req0.wav", "audio_req2.wav", "rvq_req0.safetensors", "rvq_req2.safetensors",
    }  # fmt: skip


@pytest.mark.parametrize("writer", ["soundfile.write", "save"])
def test_a_write_that_fails_leaves_no_partial_file(
    writer: str, engines: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    real = outputs.soundfile.write if writer == "soundfile.write" else outputs.save

    def second_fails(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **kwargs)

    monkeypatch.setattr(f"trt_cpspec.outputs.{writer}", second_fails)
    responses = speak(engines, [request(seed=seed, max_audio_length=2) for seed in range(3)], code=1)
    assert [response["output_text"] for response in responses] == ["", "FAILED", ""]
    assert "No space left" in responses[1]["error"]
    assert files(work / "audio") == {f"{stem}{i}.{end}" for i in (0, 2) for stem, end in STEMS}


STEMS = (("audio_req", "wav"), ("rvq_req", "safetensors"))


def test_a_summary_that_cannot_be_written_is_an_error_and_no_bug(
    engines: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, document: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(outputs, "write_json", full)
    result = run(engines, *SAY, "--outputFile", "out.json")
    assert (result.exit_code, "No space left" in result.stderr, isinstance(result.exception, SystemExit)) == (
        1,
        True,
        True,
    )
    assert json.loads(result.stdout)["responses"][0]["audio_samples"] > 0  # what was spoken is not lost


@pytest.mark.parametrize("pair", [("--outputFile", "--profileOutputFile"), ("--inputFile", "--outputFile")])
def test_one_path_for_two_files_is_refused(engines: Path, work: Path, pair: tuple[str, str]) -> None:
    Path("same.json").write_text(json.dumps({"requests": [request(TEXT)]}))
    before = Path("same.json").read_text()
    source = [] if "--inputFile" in pair else ["--text", TEXT]
    result = run(engines, *source, pair[0], "same.json", pair[1], "./same.json")
    assert (result.exit_code, "is named twice" in result.stderr) == (2, True)
    assert Path("same.json").read_text() == before
    assert files(work) == {"same.json"}


def test_an_engine_that_fails_fails_its_request_only(
    engines: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    decode = CodePredictor.decode_frame

    def second_request_fails(self: CodePredictor, *args: Any, **kwargs: Any) -> Any:
        if kwargs["seeds"] == [1]:
            calls.append(1)
            raise EngineError("the engine is out of memory")
        return decode(self, *args, **kwargs)

    monkeypatch.setattr(CodePredictor, "decode_frame", second_request_fails)
    responses = speak(engines, [request(seed=seed, max_audio_length=2) for seed in range(3)], code=1)
    assert calls
    assert [response["output_text"] for response in responses] == ["", "FAILED", ""]
    assert responses[1]["error"] == "the engine is out of memory"
    assert files(work / "audio") == {f"{stem}{i}.{end}" for i in (0, 2) for stem, end in STEMS}


def test_a_bug_shows_its_traceback(engines: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trt_cpspec.pipeline.Qwen3TTS.run_batch", lambda *_, **__: 1 / 0)
    assert isinstance(run(engines, *SAY).exception, ZeroDivisionError)
    assert files(work) == set()


# ---- cpspec-build ---------------------------------------------------------------------------------------------------


def test_the_flags_of_the_build_reach_the_engines(work: Path) -> None:
    flags = {"max_input_len": 48, "max_kv_cache_capacity": 96, "max_batch_size": 2}
    args = ("--maxInputLen", "48", "--maxKVCacheCapacity", "96", "--maxBatchSize", "2", "--maxVerifySize", "4")
    result = command(
        "cpspec-build", "--checkpointDir", str(CHECKPOINT), "--engineDir", "e", "--precision", "fp16",
        "--backend", "onnxruntime", *args,
    )  # fmt: skip
    assert (result.returncode, result.stdout, result.stderr) == (0, b"e\n", b"backend: ONNX Runtime\n")
    talker, predictor = (json.loads((work / "e" / n / "config.json").read_text()) for n in ("talker", "code_predictor"))
    assert talker["builder_config"] == flags
    assert (talker["precision"], predictor["precision"]) == ("fp16", "fp16")
    assert load_file("e/code_predictor/lm_heads.safetensors")["lm_head_0.weight"].dtype == np.float16
    assert predictor["builder_config"]["max_verify_size"] == 4
    assert speak(work / "e", [request(seed=1)], "--cpSpecVerifySize", "4", max_audio_length=2)[0]["output_text"] == ""


def checkpoint_copy(folder: Path, **changes: Any) -> Path:
    shutil.copytree(CHECKPOINT, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--precision", "fp8"), "unknown precision 'fp8'; allowed: fp32, fp16, bf16"),
        (("--maxInputLen", "0"), "max_input_len is 0"),
        (("--maxBatchSize", "-2"), "max_batch_size is -2"),
        (("--maxVerifySize", "9"), "max_verify_size is 9, the widest window is 8"),
        (("--maxVerifySize", "0"), "max_verify_size is 0"),
        (("--maxInputLen", "64", "--maxKVCacheCapacity", "64"), "max_kv_cache_capacity 64 must exceed"),
        (("--maxKVCacheCapacity", "99999"), "max_position_embeddings 32768"),
        (("--maxInputLen", "many"), "--maxInputLen"),
        (("--checkpointDir", "nowhere"), "nowhere"),
        (("--checkpointDir", "base"), "'base' .voice clone.* not"),
        (("--engineDir", "file/eng"), "file/eng cannot be written"),
        (("--engineDir", "mine"), "mine/talker exists and is no engine folder: it is left as it is"),
    ],
)
def test_a_build_that_is_refused_writes_nothing(args: tuple[str, ...], message: str, work: Path) -> None:
    (work / "file").touch()
    (work / "mine" / "talker").mkdir(parents=True)
    (work / "mine" / "talker" / "notes.txt").write_text("keep me")
    if "base" in args:
        checkpoint_copy(work / "base", tts_model_type="base")
    before = files(work)
    given = ("--checkpointDir", str(CHECKPOINT), "--engineDir", "eng", "--backend", "onnxruntime")
    result = CliRunner().invoke(build, [*given, *args])
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.search(message, result.stderr.replace("\n", " "))
    assert isinstance(result.exception, SystemExit)
    assert files(work) == before


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in files(folder) if (folder / name).is_file()}


def test_a_build_replaces_an_older_one(work: Path) -> None:
    build_engines(work / "eng", "--maxBatchSize", "2")
    (work / "eng" / "talker" / "stale").touch()
    (work / "eng" / "notes.txt").write_text("keep me")
    build_engines(work / "eng", "--maxBatchSize", "3")
    assert json.loads((work / "eng" / "talker" / "config.json").read_text())["builder_config"]["max_batch_size"] == 3
    assert not (work / "eng" / "talker" / "stale").exists()
    assert (work / "eng" / "notes.txt").read_text() == "keep me"


@pytest.mark.parametrize("error", [ConfigError("overflows"), OSError(errno.ENOSPC, "disk full"), KeyboardInterrupt()])
@pytest.mark.parametrize("older", [True, False])
def test_a_build_that_fails_leaves_the_folder_as_it_was(
    error: BaseException, older: bool, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if older:
        build_engines(work / "eng")
    before = contents(work)

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(TtsBuild, "build_code2wav", fail)
    result = CliRunner().invoke(
        build,
        ["--checkpointDir", str(CHECKPOINT), "--engineDir", "eng", "--maxBatchSize", "1", "--backend", "onnxruntime"],
    )
    assert result.exit_code == (130 if isinstance(error, KeyboardInterrupt) else 2)
    assert contents(work) == before
    assert (work / "eng").exists() == older


def test_a_build_shows_the_progress_of_each_component(work: Path) -> None:
    args = ("--checkpointDir", str(CHECKPOINT), "--engineDir", "eng", "--backend", "onnxruntime")
    code, stdout, shown = on_terminal("cpspec-build", *args)
    assert (code, stdout) == (0, "eng\n")
    for component in ("talker", "code_predictor", "code2wav"):
        assert re.search(rf"{component} .*100%", shown)


# ---- cpspec-build: plans --------------------------------------------------------------------------------------------

PLANS = {"talker": "llm.engine", "code_predictor": "llm.engine", "code2wav": "code2wav.engine"}
RTX = ("--backend", "tensorrt_rtx", "--computeCapability", "8.6", "--builderOptimizationLevel", "0")
LIMITS = ("--maxInputLen", "64", "--maxKVCacheCapacity", "256")


def build_plans(*args: str | Path) -> tuple[str, str]:
    """Run cpspec-build; return standard output and what followed the backend's line on standard error."""
    result = CliRunner().invoke(build, [*map(str, args)])
    assert result.exit_code == 0, result.output
    backend, *others = result.stderr.splitlines()
    assert re.fullmatch(r"backend: TensorRT-RTX \d+\.\d+\..*", backend)
    return result.stdout, "\n".join(others)


@pytest.fixture(scope="module")
def narrow_plans(rtx_binding: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build plans, in FP16, whose CodePredictor takes one position a pass."""
    folder = tmp_path_factory.mktemp("plans") / "eng"
    args = ("--checkpointDir", CHECKPOINT, "--engineDir", folder, "--maxVerifySize", "1")
    assert build_plans(*args, *RTX, *LIMITS) == (f"{folder}\n", "")
    return folder


@pytest.fixture
def plans(narrow_plans: Path, work: Path) -> Path:
    shutil.copytree(narrow_plans, work / "eng")
    return Path("eng")


def record(component: Path) -> dict[str, Any]:
    return json.loads((component / "config.json").read_text())["builder_config"]["engine"]  # type: ignore[no-any-return]


def speak_without_a_gpu(engines: Path, *args: str) -> tuple[dict[str, Any], list[str]]:
    """Speak where no CUDA device is to be seen; return the first response, and the lines on standard error."""
    given = ("--talkerEngineDir", str(engines / "talker"), *args)
    result = command("qwen3_tts_inference", *given, env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1"})
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)["responses"][0], result.stderr.decode().splitlines()


def test_a_checkpoint_becomes_plans_that_their_sidecars_describe(rtx_binding: Any, narrow_plans: Path) -> None:
    assert {path.name for path in narrow_plans.iterdir()} == set(PLANS)
    for component, name in PLANS.items():
        folder = narrow_plans / component
        content, found = (folder / name).read_bytes(), record(folder)
        assert found["plan"] == {
            "file": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest(),
        }  # fmt: skip
        assert (found["flavour"], found["tensorrt_version"]) == ("tensorrt_rtx", rtx_binding.__version__)
        assert (found["compute_capabilities"], found["options"]["optimization_level"]) == (["8.6"], 0)
        assert found["precision"] == ("fp32" if component == "code2wav" else "fp16")  # the default of a GPU
        assert found["graph"].keys() == {"model.onnx", "model.onnx.data"}
        assert not list(folder.glob("*.bak"))
    assert record(narrow_plans / "code_predictor")["verify_size"] == 1
    assert json.loads((narrow_plans / "talker" / "config.json").read_text())["precision"] == "fp16"


def test_only_the_code_predictor_is_widened_and_once(plans: Path) -> None:
    before = contents(plans)
    args = ("--engineDir", plans, "--onlyCodePredictor", "--maxVerifySize", "3", *RTX)
    stdout, _ = build_plans(*args)
    assert re.fullmatch(
        r"eng/code_predictor: code predictor built in [\d.]+ s \(it takes 1 position\(s\) a pass, 3 are wanted\)\n",
        stdout,
    )
    after = contents(plans)
    plan, config = "code_predictor/llm.engine", "code_predictor/config.json"
    assert {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)} == {
        plan, f"{plan}.bak", config,
    }  # fmt: skip
    assert after[f"{plan}.bak"] == before[plan]
    old, new = json.loads(before[config]), json.loads(after[config])
    assert (old["builder_config"].pop("max_verify_size"), new["builder_config"].pop("max_verify_size")) == (1, 3)
    assert (old["builder_config"].pop("engine") | {"plan": 0}).keys() == new["builder_config"].pop("engine").keys()
    assert old == new
    stdout, _ = build_plans(*args)
    assert "code predictor unchanged (it takes 3 position(s) a pass, 3 are wanted" in stdout
    assert contents(plans) == after


def test_no_backup_keeps_none(plans: Path) -> None:
    build_plans("--engineDir", plans / "code_predictor", "--onlyCodePredictor", "--noBackup", *RTX)
    assert record(plans / "code_predictor")["verify_size"] == 8
    assert not list(plans.rglob("*.bak"))


def test_a_rebuild_keeps_the_recorded_devices(plans: Path) -> None:
    """The command that widens names no device; what a dry run promises is what the run then does."""
    devices = record(plans / "code_predictor")["compute_capabilities"]
    assert devices == ["8.6"]
    for flags, word in ((["--dryRun"], "would build"), ([], "built"), (["--dryRun"], "unchanged"), ([], "unchanged")):
        args = ["--engineDir", str(plans), "--onlyCodePredictor", "--backend", "tensorrt_rtx", *flags]
        result = CliRunner().invoke(build, args)
        assert (result.exit_code, f"code predictor {word}" in result.stdout) == (0, True), result.output
    assert record(plans / "code_predictor")["compute_capabilities"] == devices


def test_a_dry_run_prints_the_profiles_and_writes_nothing(plans: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_name: str) -> None:
        raise EngineError("a dry run needs no TensorRT")

    monkeypatch.setattr("trt_cpspec.builder.engine.load_binding", absent)
    before = contents(plans)
    result = CliRunner().invoke(build, ["--engineDir", str(plans), "--dryRun", "--maxVerifySize", "3"])
    assert (result.exit_code, result.stderr) == (0, "backend: ONNX Runtime\n")
    assert contents(plans) == before
    heads = [line for line in result.stdout.splitlines() if line.startswith("eng/")]
    assert heads == [
        "eng/code2wav: codec decoder unchanged (nothing to do)",
        "eng/code_predictor: code predictor would build (it takes 1 position(s) a pass, 3 are wanted)",
        "eng/talker: decoder unchanged (nothing to do)",
    ]
    marked = [re.split(r"  +", line)[1:] for line in result.stdout.splitlines() if line.startswith("*")]
    assert marked == [
        ["generation", "positions", "1x1 | 1x1 | 4x1", "1x1 | 1x1 | 4x3"],
        ["generation", "inputs_embeds", "1x1x16 | 1x1x16 | 4x1x16", "1x1x16 | 1x1x16 | 4x3x16"],
    ]


def test_a_dry_run_for_a_backend_says_what_it_would_build_again(plans: Path) -> None:
    args = ("--engineDir", plans, "--dryRun", "--maxVerifySize", "1", "--backend", "tensorrt_rtx")
    stdout, _ = build_plans(*args, "--computeCapability", "12.0", "--builderOptimizationLevel", "0")
    assert stdout.count("would build (compute_capabilities was ['8.6'], it is now ['12.0'])") == 3
    stdout, _ = build_plans(*args, "--computeCapability", "8.6", "--builderOptimizationLevel", "0")
    assert stdout.count(" unchanged (") == 3


def test_plans_are_built_of_exported_graphs(rtx_binding: Any, engines: Path, work: Path) -> None:
    before = contents(engines)
    stdout, _ = build_plans("--onnxDir", engines, "--engineDir", "eng", "--maxVerifySize", "2", *RTX)
    assert contents(engines) == before
    assert re.findall(r"^eng/(\w+): .* built in [\d.]+ s \(there is no plan yet\)$", stdout, re.MULTILINE) == sorted(
        PLANS
    )
    for component, name in PLANS.items():
        found = {path.name for path in (work / "eng" / component).iterdir()}
        of_graph = {path.name for path in (engines / component).iterdir()}
        assert found == of_graph - {"model.onnx", "model.onnx.data"} | {name}
        assert record(work / "eng" / component)["precision"] == "fp32"
    # One component by itself: the others stay as they are.
    after = contents(work / "eng")
    stdout, _ = build_plans("--onnxDir", engines / "code_predictor", "--engineDir", "eng", "--maxVerifySize", "4", *RTX)
    assert stdout.startswith("eng/code_predictor: code predictor built")
    now = contents(work / "eng")
    assert {name for name in now if now[name] != after.get(name)} == {
        f"code_predictor/{name}" for name in ("llm.engine", "llm.engine.bak", "config.json")
    }


def test_without_a_cuda_device_the_graphs_beside_the_plans_speak(rtx_binding: Any, work: Path) -> None:
    """What a newcomer gets with TensorRT-RTX installed and no GPU: the default backend, and the default device."""
    backend = () if importlib.util.find_spec("tensorrt") is None else ("--backend", "tensorrt_rtx")
    args = ("--checkpointDir", CHECKPOINT, "--engineDir", "eng", "--precision", "fp32")
    build_plans(*args, *backend, *LIMITS)
    golden, arrays = (GOLDEN / "tts_a" / name for name in ("golden.json", "golden.npz"))
    prompt = json.loads(golden.read_text())["prompts"][0]
    asked = {key: prompt["request"][key] for key in ("language", "speaker", "non_streaming_mode", "repetition_penalty")}
    asked |= {"talker_temperature": 0, "subtalker_temperature": 0, "max_audio_length": 12}
    Path("input.json").write_text(json.dumps({"requests": [request(prompt["request"]["text"], **asked)]}))
    for args in ((), ("--cpSpecVerifySize", "3"), ("--device", "cpu")):
        response, lines = speak_without_a_gpu(Path("eng"), "--inputFile", "input.json", *args)
        np.testing.assert_array_equal(codes_of(response), np.load(arrays)[f"{prompt['id']}.codes"])
        if "--device" in args:
            assert lines == []
        else:
            (warning,) = lines
            assert re.fullmatch("WARNING: the engines have plans, but .*CUDA.*; running on the CPU", warning)


def test_a_narrow_plan_falls_back_until_it_is_widened(plans: Path) -> None:
    say = ("--text", TEXT, "--seed", "1", "--cpSpecVerifySize", "3")
    response, lines = speak_without_a_gpu(plans, *say)
    reason = response["cp_spec"]["fallback_reason"]
    assert (response["cp_spec"]["requested_verify_size"], response["cp_spec"]["verify_size"]) == (3, 0)
    assert "at most 1 position(s) a pass and 3 were asked" in reason
    assert [line for line in lines if reason in line] == lines[1:]
    assert response["audio_samples"] > 0
    build_plans("--engineDir", plans, "--onlyCodePredictor", "--maxVerifySize", "3", *RTX)
    response, lines = speak_without_a_gpu(plans, *say)
    assert (response["cp_spec"]["verify_size"], response["cp_spec"]["fallback_reason"], len(lines)) == (3, None, 1)


OF_CHECKPOINT = ("--checkpointDir", str(CHECKPOINT))
REFUSED_PLANS: dict[str, tuple[tuple[str, ...], str]] = {
    "both sources": ((*OF_CHECKPOINT, "--onnxDir", "graphs"), "--onnxDir builds from graphs .* give one of them"),
    "only, of a checkpoint": (
        (*OF_CHECKPOINT, "--onlyCodePredictor"), "--onlyCodePredictor builds from graphs and --checkpointDir from a",
    ),
    "dry run of a checkpoint": ((*OF_CHECKPOINT, "--dryRun"), "--dryRun builds from graphs and --checkpointDir from a"),
    "precision of graphs": (
        ("--onnxDir", "graphs", "--precision", "fp16"), "--precision goes with --checkpointDir: .* written in",
    ),
    "backend": (("--backend", "rtx", *OF_CHECKPOINT), "unknown backend 'rtx'; allowed: .*tensorrt, tensorrt_rtx"),
    "backend of a dry run": (("--onnxDir", "graphs", "--dryRun", "--backend", "trt"), "unknown backend 'trt'"),
    "no plan": (("--onnxDir", "graphs", "--backend", "onnxruntime"), "a plan needs TensorRT or TensorRT-RTX"),
    "nothing to build from": ((), "eng does not exist, .*: say with --checkpointDir or --onnxDir what to build from"),
    "no graphs": (("--onnxDir", "nowhere"), "the ONNX folder nowhere does not exist"),
    "empty": (("--onnxDir", "empty"), "empty holds no component: none of its folders has both model.onnx and config"),
    "only, of nothing": (("--onnxDir", "graphs", "--onlyCodePredictor"), "eng does not exist: .* an existing one"),
    "width": (("--onnxDir", "graphs", "--maxVerifySize", "9"), "max_verify_size is 9"),
    "capability": (("--onnxDir", "graphs", "--computeCapability", "86"), "'86'; give major.minor, for example 8.6"),
    "level": (("--onnxDir", "graphs", "--builderOptimizationLevel", "6"), "is 6, it must be 0 to 5"),
    "workspace": (("--onnxDir", "graphs", "--workspaceMiB", "0"), "workspaceMiB is 0, it must be at least 1"),
    "a GPU for ONNX Runtime": (
        (*OF_CHECKPOINT, "--backend", "onnxruntime", "--computeCapability", "8.6"), "--computeCapability,.*without one",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED_PLANS)
def test_a_plan_that_is_refused_writes_nothing(case: str, engines: Path, work: Path) -> None:
    shutil.copytree(engines / "code_predictor", work / "graphs")
    (work / "empty").mkdir()
    before = contents(work)
    args, message = REFUSED_PLANS[case]
    result = CliRunner().invoke(build, ["--engineDir", "eng", *args])
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.search(message, result.stderr.replace("\n", " ")), result.stderr
    assert isinstance(result.exception, SystemExit)
    assert contents(work) == before
    assert not (work / "eng").exists()


@pytest.mark.parametrize(("name", "extra"), [("tensorrt", "tensorrt"), ("tensorrt_rtx", "rtx")])
def test_a_backend_that_is_not_installed_names_its_extra(
    name: str, extra: str, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    args = ("--checkpointDir", str(CHECKPOINT), "--engineDir", "eng", "--backend", name)
    result = CliRunner().invoke(build, args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"cannot be imported (ModuleNotFoundError: import of {name} halted; None in sys.modules)" in result.stderr
    assert f'install it with pip install "trt_cpspec[{extra}]"' in result.stderr
    assert files(work) == set()


def test_a_capability_that_the_backend_lacks_is_refused(rtx_binding: Any, engines: Path, work: Path) -> None:
    args = ("--onnxDir", str(engines), "--engineDir", "eng", "--backend", "tensorrt_rtx", "--computeCapability", "1.0")
    result = CliRunner().invoke(build, args)
    assert result.exit_code == 2
    assert re.search(r"does not build for compute capability 1.0; allowed: .*8.6", result.stderr)
    assert files(work) == set()


def test_a_terminal_shows_the_progress_of_plans(plans: Path) -> None:
    args = ("--engineDir", str(plans), "--onlyCodePredictor", "--maxVerifySize", "2", *RTX)
    code, stdout, shown = on_terminal("cpspec-build", *args)
    assert (code, " built in " in stdout) == (0, True)
    assert re.search(r"plans .*100%", shown)


# ---- help -----------------------------------------------------------------------------------------------------------


def test_the_umbrella_lists_its_commands() -> None:
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    for name in ("build", "tts", "demo", "inspect"):
        assert re.search(rf"^  {name}  +\S.*[.]$", result.output, re.MULTILINE)
    assert CliRunner().invoke(main, ["--version"]).output.startswith("cpspec, version 0.")


@pytest.mark.parametrize("name", ["build", "tts", "demo", "inspect"])
def test_every_option_has_a_help_text(name: str) -> None:
    options = [item for item in main.commands[name].params if isinstance(item, click.Option) and not item.hidden]
    assert options
    assert [item.name for item in options if not item.help] == []
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 80
    for item in options:
        assert item.opts[0] in result.output


def test_the_flags_of_the_original_are_all_known() -> None:
    original = (
        "--inputFile --talkerEngineDir --code2wavEngineDir --cloneEncoderDir --tokenizerDir --checkpointDir "
        "--outputFile --outputAudioDir --batchSize --streaming --chunkFrames --dumpOutput --dumpProfile "
        "--profileOutputFile --debug --cpSpecVerifySize"
    )
    assert set(original.split()) <= {name for item in tts.params for name in item.opts}
