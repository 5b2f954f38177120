"""``cpspec bench``: what it counts is what the frames did, and ``auto`` follows it."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from trt_cpspec.builder.cli import main

from trt_cpspec import bench as bench_module
from trt_cpspec.bench import choose_verify_size, time_windows, usable_windows
from trt_cpspec.cli import tts
from trt_cpspec.contexts import random_contexts, spoken_contexts
from trt_cpspec.omni import Qwen3Omni
from trt_cpspec.pipeline import Qwen3TTS, SpeechModel
from trt_cpspec.predictor import CodePredictor

Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def engines(variants: dict[str, Any]) -> Path:
    return variants["tts_a"].engine  # type: ignore[no-any-return]


def report_of(engines: Path, *args: str) -> dict[str, Any]:
    result = CliRunner().invoke(main, ["bench", str(engines), "--frames", "3", "--json", *args])
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def test_every_window_is_measured_on_the_same_frames(demo_engines: Path) -> None:
    report = report_of(demo_engines)
    assert [row["verify_size"] for row in report["windows"]] == [0, 2, 3, 4, 5, 6, 7, 8]
    plain = report["windows"][0]
    assert (plain["passes_per_frame"], plain["codes_per_round"], plain["speedup"]) == (15, 1, 1)
    for row in report["windows"]:
        low, high = row["frame_ms_quartiles"]
        assert low <= row["frame_ms"] <= high
        assert row["real_time_factor"] > 0
        assert row["first_audio_ms"] > 0
        assert len(row["acceptance_by_offset"]) == max(row["verify_size"] - 1, 0)
        assert sum(row["commit_histogram"]) == 3 * (row["passes_per_frame"] - 1)
    assert {"device", "processor", "cores", "numpy", "onnxruntime", "python"} <= set(report["machine"])
    assert report["sampling"] == {"temperature": 0.9, "top_k": 50, "top_p": 1.0}


def test_the_table_and_the_picture(engines: Path, tmp_path: Path) -> None:
    picture = tmp_path / "made" / "bench.svg"
    result = CliRunner().invoke(main, ["bench", str(engines), "--frames", "2", "--picture", str(picture)])
    assert (result.exit_code, result.stderr) == (0, "")
    for pattern in ("^N  ms a frame", "^by offset", "^by depth", r"^0 +\d+\.\d\d \(", "^   N = 8 "):
        assert re.search(pattern, result.stdout, re.MULTILINE)
    root = ElementTree.parse(picture).getroot()
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "accepted drafts by offset in the round" in words
    assert {f"N={n}" for n in range(2, 9)} <= set(words)
    bars = [e for e in root.iter("{http://www.w3.org/2000/svg}rect") if e.get("width") == "28"]
    assert len(bars) == 8


def test_a_code_predictor_alone_is_measured_without_speech(engines: Path) -> None:
    report = report_of(engines / "code_predictor", "--batchSize", "2")
    assert report["contexts"] == "6 random hidden states"
    assert "real_time_factor" not in report["windows"][0]
    assert report["windows"][0]["passes_per_frame"] == 15


def test_a_batch_beyond_the_engine_and_a_bad_folder_are_refused(engines: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for args, message in (
        ((str(engines), "--batchSize", "9"), "batch size of 9 exceeds"),
        (("nowhere",), "nowhere"),
        ((str(engines), "--picture", str(tmp_path / "file" / "x.svg")), "cannot be written"),
    ):
        result = CliRunner().invoke(main, ["bench", *args])
        assert (result.exit_code, message in result.stderr) == (2, True)


def test_contexts_are_what_the_predictor_is_asked_for(lively: Qwen3TTS) -> None:
    contexts = spoken_contexts(lively, lively.saying("Hello."), count=5, seed=3)
    codes = lively.synthesize("Hello.", seed=3, max_audio_length=5).codes
    np.testing.assert_array_equal(contexts.code0[: len(codes)], codes[:5, 0])
    assert contexts.talker_hidden.shape == (5, lively.predictor.spec.talker_hidden_size)


def test_an_omni_engine_is_measured_at_random_states(omni: Any) -> None:
    report = report_of(omni.engine)
    assert report["contexts"].endswith("random hidden states")
    assert [row["verify_size"] for row in report["windows"]] == [0, 2, 3, 4, 5, 6, 7, 8]


def test_an_omni_says_a_text_as_its_answer(omni: Any) -> None:
    voice = omni.model.voice
    contexts = spoken_contexts(voice, omni.model.saying(voice, "Hello."), count=5, seed=3)
    assert contexts.source == "5 frames of a spoken text"
    assert contexts.talker_hidden.shape == (5, voice.predictor.spec.talker_hidden_size)


# ---- auto -----------------------------------------------------------------------------------------------------------


def dialled(patch: Patch, frame_ms: dict[int, float]) -> None:
    """Let a clock run that gives each verify size its own time."""
    now = [0.0]
    real = CodePredictor.decode_frame

    def decode_frame(self: CodePredictor, *args: Any, **kwargs: Any) -> Any:
        now[0] += frame_ms.get(kwargs["verify_size"], 50.0) / 1000
        return real(self, *args, **kwargs)

    patch.setattr(CodePredictor, "decode_frame", decode_frame)
    patch.setattr(bench_module.time, "perf_counter", lambda: now[0])


@pytest.mark.parametrize(
    ("frame_ms", "chosen", "words"),
    [
        ({0: 10.0, 3: 6.0, 4: 7.0}, 3, "N = 3: a frame takes 10.00 ms without speculation and 6.00 ms with it"),
        ({0: 10.0, 3: 11.0}, 0, "speculation is off, it does not pay: .* and 11.00 ms with N = 3"),
        ({0: 10.0, 2: 9.9}, 0, "does not pay"),
    ],
)
def test_auto_takes_the_fastest_or_none(
    frame_ms: dict[int, float], chosen: int, words: str, lively: Qwen3TTS, monkeypatch: Patch
) -> None:
    dialled(monkeypatch, frame_ms)
    choice = choose_verify_size(lively.predictor, random_contexts(lively.predictor, 4))
    assert choice["verify_size"] == chosen
    assert re.search(words, choice["reason"])
    assert choice["frame_ms"]["0"] == pytest.approx(10.0)


def test_auto_says_why_an_engine_cannot(lively: Qwen3TTS, monkeypatch: Patch) -> None:
    monkeypatch.setattr(CodePredictor, "max_verify_size", 1)
    predictor = CodePredictor(
        lively.predictor.spec, lively.predictor._session, lively.predictor._tables, lively.predictor._code0_embedding
    )
    assert usable_windows(predictor) == (0,)
    choice = choose_verify_size(predictor, random_contexts(predictor, 4))
    assert (choice["verify_size"], "--maxVerifySize 2" in choice["reason"]) == (0, True)


def test_auto_in_python_is_measured_once(lively: Qwen3TTS, monkeypatch: Patch) -> None:
    calls = []

    def choose(*args: Any, **kwargs: Any) -> dict[str, Any]:
        calls.append(kwargs)
        return {"verify_size": 4, "reason": ""}

    monkeypatch.setattr(bench_module, "choose_verify_size", choose)
    model = Qwen3TTS(lively.talker, lively.predictor, lively.codec, lively.tokenizer)
    speeches = [model.synthesize("Hi.", seed=1, max_audio_length=2, verify_size="auto") for _ in range(2)]
    assert [speech.stats.window.verify_size for speech in speeches] == [4, 4]
    assert calls == [{"mode": "rejection", "batch": 1, "params": lively.talker.spec.defaults.subtalker}]


def test_auto_answers_in_python(omni: Any, monkeypatch: Patch) -> None:
    monkeypatch.setattr(bench_module, "choose_verify_size", lambda *args, **how: {"verify_size": 4, "reason": ""})
    model = Qwen3Omni(omni.model.thinker, omni.model.tokenizer, SpeechModel(*speaking_parts(omni)))
    reply = model.respond("Hi", seed=1, max_generate_length=2, max_audio_length=2, verify_size="auto")
    assert reply.speech is not None
    assert reply.speech.stats.window.verify_size == 4


def speaking_parts(omni: Any) -> tuple[Any, Any, Any]:
    return omni.model.voice.talker, omni.model.voice.predictor, omni.model.voice.codec


def test_auto_on_the_command_line_says_what_it_took(engines: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(
        tts,
        [
            "--talkerEngineDir", str(engines / "talker"), "--text", "Hello.", "--seed", "1", "--cpSpecVerifySize",
            "auto", "--outputAudioDir", str(tmp_path),
        ],
    )  # fmt: skip
    document = json.loads(result.stdout)
    auto = document["cp_spec_auto"]
    assert result.exit_code == 0
    assert document["responses"][0]["cp_spec"]["verify_size"] == auto["verify_size"]
    assert set(auto["frame_ms"]) == {"0", *map(str, range(2, 9))}
    assert f"--cpSpecVerifySize auto: {auto['reason']}" in result.stderr


def test_times_are_counted_behind_the_warm_up(lively: Qwen3TTS) -> None:
    contexts = random_contexts(lively.predictor, 4)
    found = time_windows(lively.predictor, contexts, (0, 3), frames=3, warmup=2, batch=2)
    assert [(len(window.frame_ms), window.stats.frames) for window in found] == [(3, 6), (3, 6)]
