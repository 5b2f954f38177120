"""The command llm_inference: what it refuses and when, what it writes, and what goes to which stream."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from click.testing import CliRunner, Result
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from trt_cpspec import outputs
from trt_cpspec.cli import llm, tts
from trt_cpspec.codec import Code2Wav
from trt_cpspec.errors import EngineError

BIN = Path(sys.executable).parent
GREEDY = {"temperature": 0, "talker_temperature": 0, "subtalker_temperature": 0}
TEXT_KEYS = {
    "request_idx", "batch_idx", "output_text", "finish_reason", "messages", "formatted_system_prompt",
    "formatted_complete_request", "max_generate_length", "sampling", "warnings",
}  # fmt: skip
AUDIO_KEYS = {
    "audio_file", "audio_samples", "audio_sample_rate", "audio_duration_ms", "rvq_file", "audio_finish_reason",
    "cp_spec", "speaker", "max_audio_length",
}  # fmt: skip


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def audio_flags(engine: Path) -> tuple[str, ...]:
    return (
        "--engineDir", str(engine / "thinker"), "--multimodalEngineDir", str(engine / "multimodal"),
        "--enableAudioOutput", "--talkerEngineDir", str(engine / "talker"),
        "--code2wavEngineDir", str(engine / "multimodal" / "code2wav"),
    )  # fmt: skip


def run(*args: str) -> Result:
    return CliRunner().invoke(llm, args)


def ask(text: str = "Hello there", **options: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **options}


def respond(
    engine: Path, requests: list[dict[str, Any]], *args: str, code: int = 0, **top: Any
) -> list[dict[str, Any]]:
    """Speak from an input file in the working folder; return the responses."""
    Path("input.json").write_text(json.dumps({"requests": requests, **top}))
    result = run(*audio_flags(engine), "--inputFile", "input.json", *args)
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)["responses"]  # type: ignore[no-any-return]


def codes_of(response: dict[str, Any]) -> NDArray[np.int32]:
    return load_file(response["rvq_file"])["rvq_codes"]


# ---- what is written ------------------------------------------------------------------------------------------------


def test_the_reference_is_met_from_json_to_files(omni: Any, work: Path) -> None:
    requests = [
        {
            "messages": prompt["messages"],
            "max_generate_length": prompt["thinker_max_new_tokens"],
            "max_audio_length": prompt["talker_max_new_tokens"] - 1,
        }
        for prompt in omni.golden["prompts"]
    ]
    document = {"requests": requests, "speaker": "Ethan", "batch_size": 2, **GREEDY}
    Path("input.json").write_text(json.dumps(document))
    args = ("--inputFile", "input.json", "--outputFile", "output.json", "--outputAudioDir", "audio")
    done = subprocess.run(
        [str(BIN / "llm_inference"), *audio_flags(omni.engine), *args, "--cpSpecVerifySize", "3"],
        capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    written = json.loads(Path("output.json").read_text())
    assert written["input_file"] == "input.json"
    for index, (prompt, response) in enumerate(zip(omni.golden["prompts"], written["responses"], strict=True)):
        assert set(response) == TEXT_KEYS | AUDIO_KEYS
        assert (response["request_idx"], response["batch_idx"]) == (0, index)
        assert (response["output_text"], response["finish_reason"]) == (prompt["text"], prompt["thinker_finish"])
        assert response["messages"] == prompt["messages"]
        assert response["formatted_complete_request"] == prompt["rendered"]
        system = prompt["messages"][0]["content"]
        assert response["formatted_system_prompt"] == f"<|im_start|>system\n{system}<|im_end|>\n"
        np.testing.assert_array_equal(codes_of(response), omni.arrays[f"p{index}_codes"])
        info = soundfile.info(response["audio_file"])
        assert (info.samplerate, info.channels, info.subtype, info.format) == (24000, 1, "PCM_16", "WAV")
        assert info.frames == response["audio_samples"] == prompt["samples"] == 1920 * prompt["frames"] - 555
        assert response["audio_duration_ms"] == pytest.approx(prompt["samples"] / 24)
        wave, _ = soundfile.read(response["audio_file"])
        np.testing.assert_allclose(wave, omni.arrays[f"p{index}_waveform"], atol=1e-4)
        assert (response["audio_finish_reason"], response["speaker"]) == (prompt["talker_finish"], "ethan")
        assert (response["cp_spec"]["verify_size"], response["cp_spec"]["frames"]) == (3, prompt["frames"])
        assert response["warnings"] == []
    assert files(work) == {"input.json", "output.json", "audio"} | {
        f"audio/{stem}_req0_batch{b}.{end}" for b in (0, 1) for stem, end in (("audio", "wav"), ("rvq", "safetensors"))
    }


def test_files_are_named_by_batch_and_place(omni: Any, work: Path) -> None:
    requests = [ask(seed=seed, max_generate_length=3, max_audio_length=2) for seed in range(3)]
    for flags, top in ((("--batchSize", "2"), {}), ((), {"batch_size": 2})):
        responses = respond(omni.engine, requests, *flags, **top)
        assert [(r["request_idx"], r["batch_idx"]) for r in responses] == [(0, 0), (0, 1), (1, 0)]
        assert [r["audio_file"] for r in responses] == [
            "audio/audio_req0_batch0.wav", "audio/audio_req0_batch1.wav", "audio/audio_req1_batch0.wav",
        ]  # fmt: skip
    assert [r["audio_file"] for r in respond(omni.engine, requests)][-1] == "audio/audio_req2_batch0.wav"


CHANGES: dict[str, Any] = {
    "seed": 2, "temperature": 0, "top_k": 1, "top_p": 1e-6, "max_generate_length": 2, "speaker": "aiden",
    "talker_temperature": 0, "talker_top_k": 1, "talker_top_p": 1e-6, "repetition_penalty": 0.01,
    "subtalker_temperature": 0, "subtalker_top_k": 1, "subtalker_top_p": 1e-6, "max_audio_length": 2,
}  # fmt: skip


@pytest.mark.parametrize("where", ["request", "top"])
def test_an_option_takes_effect(where: str, omni: Any, work: Path) -> None:
    base = {"seed": 1, "max_audio_length": 4, "max_generate_length": 8}
    changes = [base | {key: value} for key, value in CHANGES.items()]
    if where == "request":
        plain, *changed = respond(omni.engine, [ask(**options) for options in (base, *changes)], "--batchSize", "4")
    else:
        plain, *changed = (
            respond(omni.engine, [ask()], "--outputAudioDir", f"audio{i}", **options)[0]
            for i, options in enumerate((base, *changes))
        )
    for key, response in zip(CHANGES, changed, strict=True):
        assert not np.array_equal(codes_of(plain), codes_of(response)), key
        assert (response | response["sampling"])[key] == CHANGES[key]
        thinks = key in ("seed", "temperature", "top_k", "top_p", "max_generate_length")
        assert (response["output_text"] == plain["output_text"]) != thinks, key


@pytest.mark.parametrize("n", ["2", "3", "8"])
def test_coupled_mode_gives_the_codes_of_no_speculation(n: str, omni: Any, work: Path) -> None:
    requests = [ask(seed=seed, max_audio_length=6, max_generate_length=6) for seed in (1, 2)]
    plain = [codes_of(response) for response in respond(omni.engine, requests)]
    responses = respond(omni.engine, requests, "--cpSpecVerifySize", n, "--cpSpecMode", "coupled", "--batchSize", "2")
    for codes, response in zip(plain, responses, strict=True):
        np.testing.assert_array_equal(codes_of(response), codes)
        assert (response["cp_spec"]["verify_size"], response["cp_spec"]["mode"]) == (int(n), "coupled")


def test_a_seed_serves_requests_without_one_and_is_reported(omni: Any, work: Path) -> None:
    options = {"max_generate_length": 2, "max_audio_length": 1}
    own, theirs = respond(omni.engine, [ask(seed=3), ask()], "--seed", "9", **options)
    assert (own["sampling"]["seed"], theirs["sampling"]["seed"]) == (3, 9)
    drawn = respond(omni.engine, [ask()], **options)[0]
    codes, seed = codes_of(drawn), str(drawn["sampling"]["seed"])
    np.testing.assert_array_equal(codes_of(respond(omni.engine, [ask()], "--seed", seed, **options)[0]), codes)


def test_max_generate_length_of_the_command_line_goes_first(omni: Any, work: Path) -> None:
    args = ("--maxGenerateLength", "2", "--seed", "1")
    (response,) = respond(omni.engine, [ask(max_generate_length=9, max_audio_length=1)], *args)
    assert response["max_generate_length"] == 2


def test_a_narrow_engine_falls_back_and_says_so(omni_copy: Path, work: Path) -> None:
    path = omni_copy / "code_predictor" / "config.json"
    config = json.loads(path.read_text())
    config["builder_config"]["max_verify_size"] = 2
    path.write_text(json.dumps(config))
    (response,) = respond(omni_copy, [ask(seed=1, max_audio_length=2)], "--cpSpecVerifySize", "3")
    assert (response["cp_spec"]["requested_verify_size"], response["cp_spec"]["verify_size"]) == (3, 0)
    assert "--maxVerifySize 3" in response["cp_spec"]["fallback_reason"]


def test_auto_measures_speech_and_says_what_it_took(omni: Any, work: Path) -> None:
    result = run(*audio_flags(omni.engine), "--text", "Hi", "--seed", "1", "--maxGenerateLength", "3",
                 "--cpSpecVerifySize", "auto")  # fmt: skip
    document = json.loads(result.stdout)
    auto = document["cp_spec_auto"]
    assert document["responses"][0]["cp_spec"]["verify_size"] == auto["verify_size"]
    assert set(auto["frame_ms"]) == {"0", *map(str, range(2, 9))}
    assert f"--cpSpecVerifySize auto: {auto['reason']}" in result.stderr


def test_auto_without_speech_is_off(omni: Any, work: Path) -> None:
    args = ("--text", "Hi", "--maxGenerateLength", "2", "--cpSpecVerifySize", "auto")
    result = run("--engineDir", str(omni.engine / "thinker"), *args)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["cp_spec_auto"]["verify_size"] == 0
    assert "speculation is off: nothing is spoken" in result.stderr


# ---- text alone -----------------------------------------------------------------------------------------------------


def test_text_needs_no_engines_of_speech(omni: Any, work: Path) -> None:
    thinker = shutil.copytree(omni.engine / "thinker", work / "eng" / "thinker")
    Path("input.json").write_text(json.dumps({"requests": [ask(), ask("Hi")], **GREEDY}))
    result = run("--engineDir", str(thinker), "--inputFile", "input.json", "--maxGenerateLength", "4")
    assert result.exit_code == 0, result.output
    responses = json.loads(result.stdout)["responses"]
    assert [set(response) for response in responses] == [TEXT_KEYS, TEXT_KEYS]
    spoken = respond(omni.engine, [ask(), ask("Hi")], "--maxGenerateLength", "4", max_audio_length=1, **GREEDY)
    assert [r["output_text"] for r in responses] == [r["output_text"] for r in spoken]
    assert set(responses[0]["sampling"]) == {"temperature", "top_k", "top_p", "seed"}


def test_a_text_on_the_command_line(omni: Any, work: Path) -> None:
    args = ("--text", "Hi", "--seed", "6", "--maxGenerateLength", "3")
    document = json.loads(run("--engineDir", str(omni.engine / "thinker"), *args, "--dumpProfile").stdout)
    assert document["input_file"] == ""
    assert document["responses"][0]["messages"] == [{"role": "user", "content": "Hi"}]
    assert document["profile"]["talker"]["total_audio_outputs"] == 0
    assert document["profile"]["real_time_factor"] is None
    assert {stage["stage_id"] for stage in document["profile"]["stages"]} == {"thinker_prefill", "thinker_generation"}
    assert files(work) == set()
    spoken = json.loads(run(*audio_flags(omni.engine), *args, "--speaker", "Aiden").stdout)["responses"][0]
    assert (spoken["speaker"], spoken["output_text"]) == ("aiden", document["responses"][0]["output_text"])


def test_what_has_no_effect_without_speech_is_said(omni: Any, work: Path) -> None:
    done = subprocess.run(
        [str(BIN / "llm_inference"), "--engineDir", str(omni.engine / "thinker"), "--text", "Hi", "--seed", "1",
         "--maxGenerateLength", "2", "--cpSpecVerifySize", "3", "--cpExecutor", "engine", "--talkerEngineDir", "x"],
        capture_output=True, timeout=60, check=False, text=True,
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stderr == (
        "WARNING: ignored, as nothing is spoken without --enableAudioOutput: "
        "--talkerEngineDir, --cpSpecVerifySize, --cpExecutor\n"
    )


# ---- what is refused ------------------------------------------------------------------------------------------------

SAY = ("--text", "Hi")
REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "no text": ((), "give either --inputFile or --text"),
    "both": ((*SAY, "--inputFile", "in.json"), "give either --inputFile or --text"),
    "speaker of a file": (("--inputFile", "in.json", "--speaker", "x"), "--speaker goes with --text.*key 'speaker'"),
    "no file": (("--inputFile", "in.json"), "in.json: there is no such file"),
    "speaker": ((*SAY, "--speaker", "ethn"), "unknown speaker 'ethn'; did you mean 'ethan'"),
    **{f"N={n}": ((*SAY, "--cpSpecVerifySize", n), r"--cpSpecVerifySize.* 2 to 8") for n in ("1", "-1", "9")},
    "mode": ((*SAY, "--cpSpecMode", "greedy"), "'rejection', 'coupled'"),
    "device": ((*SAY, "--device", "tpu"), "'--device'.*'tpu'"),
    "batch": ((*SAY, "--batchSize", "5"), "batch size of 5 exceeds the engine's max_batch_size 4"),
    "length": ((*SAY, "--maxGenerateLength", "0"), "--maxGenerateLength.* 0"),
    "template token": (("--text", "a<|im_end|>"), r"messages\[0\].content contains '<\|im_end\|>'"),
    "long": (("--text", "river " * 2000), "takes .* tokens, the Thinker's max_input_len is 1024"),
    "spec decode": ((*SAY, "--specDecode"), "--specDecode: .* --cpSpecVerifySize is the CodePredictor's"),
    "log probabilities": ((*SAY, "--numLogprobs", "3"), "log probabilities are not supported yet"),
    "audio folder": ((*SAY, "--outputAudioDir", "file/audio"), "the folder file/audio cannot be written"),
    "output file": ((*SAY, "--outputFile", "file/out.json"), "the folder file cannot be written"),
    "thinker": ((*SAY, "--engineDir", "{eng}"), r"{eng} is no thinker folder; did you mean {eng}/thinker\?"),
    "talker": ((*SAY, "--talkerEngineDir", "{eng}"), r"{eng} is no talker folder; did you mean {eng}/talker\?"),
    "codec": ((*SAY, "--code2wavEngineDir", "{eng}"), r"did you mean {eng}/multimodal/code2wav\?"),
    "multimodal": ((*SAY, "--multimodalEngineDir", "nowhere"), "--multimodalEngineDir: nowhere is no folder"),
    "checkpoint": ((*SAY, "--engineDir", "{ckpt}"), "is a checkpoint, no engine folder: build it with cpspec-build"),
    "talker checkpoint": ((*SAY, "--talkerEngineDir", "{ckpt}"), "is a checkpoint, .* and name ENG/talker"),
    "tokenizer": ((*SAY, "--checkpointDir", "nowhere"), "nowhere is no folder"),
    "flag": ((*SAY, "--cpSpecVerifySise", "3"), "--cpSpecVerifySize"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_used_is_refused_before_any_work(case: str, omni: Any, work: Path) -> None:
    (work / "file").touch()
    args, message = REFUSED[case]
    names = {"{eng}": str(omni.engine), "{ckpt}": str(omni.checkpoint)}
    for name, path in names.items():
        args, message = tuple(arg.replace(name, path) for arg in args), message.replace(name, re.escape(path))
    result = run(*audio_flags(omni.engine), *args)
    assert result.exit_code == 2, result.output
    assert re.search(message, result.stderr.replace("\n", " "))
    assert result.stdout == ""
    assert files(work) == {"file"}


def test_speech_needs_a_talker(omni: Any, work: Path) -> None:
    Path("input.json").write_text(json.dumps({"requests": [ask()], "max_audio_length": 1}))
    flags = ("--engineDir", str(omni.engine / "thinker"), "--enableAudioOutput", "--inputFile", "input.json")
    result = run(*flags)
    assert result.exit_code == 2
    assert f"did you mean --talkerEngineDir {omni.engine}/talker?" in result.stderr
    spoken = run(*flags, "--talkerEngineDir", str(omni.engine / "talker"))
    assert spoken.exit_code == 0  # the codec is found beside the Talker


def test_the_codec_is_found_in_the_multimodal_folder(omni_copy: Path, work: Path) -> None:
    (omni_copy / "multimodal").rename(work / "media")
    Path("input.json").write_text(json.dumps({"requests": [ask()], "max_audio_length": 1}))
    flags = ("--engineDir", str(omni_copy / "thinker"), "--enableAudioOutput", "--inputFile", "input.json")
    result = run(*flags, "--talkerEngineDir", str(omni_copy / "talker"), "--multimodalEngineDir", "media")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"requests": [ask(), ask(speaker="et")]}, r"input.json: requests\[1\]: unknown speaker 'et'"),
        ({"requests": [ask()], "speeker": "x"}, "speeker is no known key; did you mean 'speaker'"),
        ({"requests": [ask(), ask("river " * 2000)]}, r"requests\[1\]: the conversation takes"),
        (
            {"requests": [{"messages": [{"role": "user", "content": [{"type": "video", "video": "v.mp4"}]}]}]},
            r"requests\[0\].messages\[0\].content\[0\].type is 'video'; video input is not supported",
        ),
    ],
)
def test_an_input_file_is_refused_as_a_whole(document: Any, message: str, omni: Any, work: Path) -> None:
    Path("input.json").write_text(json.dumps(document))
    result = run(*audio_flags(omni.engine), "--inputFile", "input.json", "--outputFile", "out/o.json")
    assert result.exit_code == 2
    assert re.search(message, result.stderr)
    assert files(work) == {"input.json"}


def test_the_other_command_names_this_one(omni: Any, work: Path) -> None:
    result = CliRunner().invoke(tts, ["--talkerEngineDir", str(omni.engine / "talker"), *SAY])
    assert (result.exit_code, "speak with llm_inference" in result.stderr) == (2, True)
    result = CliRunner().invoke(tts, ["--talkerEngineDir", str(omni.engine), *SAY])
    assert (result.exit_code, f"did you mean {omni.engine}/talker?" in result.stderr) == (2, True)


# ---- failures -------------------------------------------------------------------------------------------------------


def test_a_request_that_fails_leaves_the_others_alone(omni: Any, omni_copy: Path, work: Path) -> None:
    table = load_file(omni_copy / "thinker" / "embedding.safetensors")
    vocabulary = json.loads((omni.checkpoint / "vocab.json").read_text())
    table["embedding"][vocabulary["Z"]] = np.nan
    save_file(table, omni_copy / "thinker" / "embedding.safetensors")
    options = {"max_generate_length": 4, "max_audio_length": 2, "temperature": 0}
    requests = [ask(seed=1), ask("ZZ", seed=2), ask(seed=3)]
    respond(omni.engine, requests, **options)  # leaves a file for the one that is going to fail
    expected = [codes_of(response) for response in respond(omni.engine, [requests[0], requests[2]], **options)]
    responses = respond(omni_copy, requests, "--batchSize", "3", "--outputAudioDir", "new", code=1, **options)
    first, failed, last = responses
    for response, codes in zip((first, last), expected, strict=True):
        np.testing.assert_array_equal(codes_of(response), codes)
    assert (failed["output_text"], failed["request_idx"], failed["batch_idx"]) == ("FAILED", 0, 1)
    assert failed["error"].startswith("Thinker, token 0: the logits hold nan")
    assert not {"audio_file", "rvq_file", "finish_reason", "audio_finish_reason", "cp_spec"} & set(failed)
    assert "batch1" not in "".join(files(work / "new"))


def test_a_file_that_cannot_be_written_fails_its_request(
    omni: Any, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = outputs.save, iter(range(9))

    def second_fails(tensors: Any) -> bytes:
        if next(calls) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(tensors)

    monkeypatch.setattr(outputs, "save", second_fails)
    options = {"max_generate_length": 3, "max_audio_length": 2}
    requests = [ask(seed=seed) for seed in range(3)]
    responses = respond(omni.engine, requests, code=1, **options)
    assert [response["output_text"] == "FAILED" for response in responses] == [False, True, False]
    assert "No space left" in responses[1]["error"]
    assert not {"finish_reason", "audio_file"} & set(responses[1])
    assert len(files(work / "audio")) == 4
    monkeypatch.undo()
    monkeypatch.chdir(work)
    (again,) = respond(omni.engine, requests[1:2], **options)
    assert (responses[1]["text"], len(responses[1]["token_ids"])) == (again["output_text"], 3)
    np.testing.assert_array_equal(responses[1]["codes"], codes_of(again))


def test_an_answer_outlives_its_speech(omni: Any, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"max_generate_length": 3, "max_audio_length": 2}
    (whole,) = respond(omni.engine, [ask(seed=1)], **options)

    def fail(self: Code2Wav, codes: NDArray[np.int32]) -> NDArray[np.float32]:
        raise EngineError("out of memory")

    monkeypatch.setattr(Code2Wav, "decode", fail)
    (failed,) = respond(omni.engine, [ask(seed=1)], code=1, **options)
    assert (failed["output_text"], failed["error"]) == ("FAILED", "out of memory")
    assert (failed["text"], len(failed["token_ids"])) == (whole["output_text"], 3)
    assert not {"finish_reason", "audio_file", "codes"} & set(failed)


def test_an_answer_without_a_word_is_a_silent_file(omni_copy: Path, work: Path) -> None:
    head = load_file(omni_copy / "thinker" / "lm_head.safetensors")
    head["lm_head.weight"][:] = 0
    head["lm_head.weight"][0] = 1e-30  # all logits are about equal: greedy takes some token, which is the last
    save_file(head, omni_copy / "thinker" / "lm_head.safetensors")
    (response,) = respond(omni_copy, [ask(max_generate_length=1, seed=1, temperature=0)], "--cpSpecVerifySize", "3")
    assert (response["audio_samples"], response["audio_duration_ms"], response["audio_finish_reason"]) == (0, 0, "eos")
    assert response["warnings"] == ["the answer holds nothing to speak"]
    assert soundfile.info(response["audio_file"]).frames == 0
    assert codes_of(response).shape == (0, 16)
    assert response["cp_spec"]["frames"] == 0


def test_the_commands_share_their_options() -> None:
    shared = {
        "--outputFile", "--outputAudioDir", "--batchSize", "--cpSpecVerifySize", "--cpSpecMode", "--seed", "--device",
        "--threads", "--cpExecutor", "--timeLimit", "--strict", "--dumpOutput", "--dumpProfile", "--profileOutputFile",
        "--debug",
    }  # fmt: skip
    for command in (tts, llm):
        assert shared <= {option for parameter in command.params for option in parameter.opts}
