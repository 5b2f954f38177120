"""What runs the CodePredictor: what ``--cpExecutor`` and ``executor`` do where there is no GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner

from trt_cpspec import CodePredictor, ConfigError, EngineError, Qwen3Omni, Qwen3TTS
from trt_cpspec import omni as omni_module
from trt_cpspec import pipeline as pipeline_module
from trt_cpspec.cli import llm, tts
from trt_cpspec.fused import FusedSession
from trt_cpspec.measure_cli import bench, verify

Load = Callable[..., Any]


@pytest.fixture
def folders(variants: dict[str, Any], omni: Any) -> dict[str, Path]:
    return {"tts": variants["tts_a"].engine, "omni": omni.engine}


COMMANDS: dict[str, tuple[click.Command, tuple[str, ...]]] = {
    "tts": (tts, ("{tts}", "Hi.", "--outputAudioDir", "audio")),
    "llm": (
        llm,
        ("--engineDir", "{omni}/thinker", "--enableAudioOutput", "--talkerEngineDir", "{omni}/talker", "--text", "Hi",
         "--maxGenerateLength", "2", "--outputAudioDir", "audio"),
    ),
    "verify": (verify, ("{tts}", "--frames", "3", "--randomStates")),
    "bench": (bench, ("{tts}/code_predictor", "--frames", "2")),
}  # fmt: skip


@pytest.mark.parametrize(("executor", "code"), [("fused", 2), ("engine", 0), ("both", 2)])
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_that_runs_engines_takes_it(
    name: str, executor: str, code: int, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command, args = COMMANDS[name]
    given = [arg.format(**folders) for arg in args]
    result = CliRunner().invoke(command, [*given, "--device", "cpu", "--cpExecutor", executor])
    assert result.exit_code == code, result.output
    if code:
        words = {"fused": "the fused executor needs a CUDA device", "both": "'auto', 'fused', 'engine'"}
        assert words[executor] in result.stderr
        assert result.stdout == ""
        assert list(tmp_path.iterdir()) == []


LOADERS: dict[str, Load] = {
    "tts": lambda folders, **how: Qwen3TTS.from_engine_dir(folders["tts"], device="cpu", **how),
    "omni": lambda folders, **how: Qwen3Omni.from_engine_dir(folders["omni"], device="cpu", **how),
    "predictor": lambda folders, **how: CodePredictor.from_engine_dir(
        folders["tts"] / "code_predictor", device="cpu", **how
    ),
}


@pytest.mark.parametrize("name", LOADERS)
def test_python_refuses_what_the_commands_refuse(name: str, folders: dict[str, Path]) -> None:
    with pytest.raises(EngineError, match="the fused executor needs a CUDA device"):
        LOADERS[name](folders, executor="fused")
    with pytest.raises(ConfigError, match="unknown executor 'fusd'; did you mean 'fused'"):
        LOADERS[name](folders, executor="fusd")


def test_a_cpu_has_one_executor(folders: dict[str, Path]) -> None:
    hidden = np.random.default_rng(0).standard_normal((1, 16), np.float32)
    frames = [
        LOADERS["predictor"](folders, executor=name).decode_frame(hidden, np.array([1]), seeds=1, frames=0)
        for name in ("auto", "engine")
    ]
    np.testing.assert_array_equal(frames[0].codes, frames[1].codes)


def test_the_fused_kernel_is_named_where_a_measurement_ran(folders: dict[str, Path]) -> None:
    """Where it runs, ``cpspec verify`` compares with the graph, and figures say what was measured."""
    predictor = LOADERS["predictor"](folders)
    assert predictor.device_facts() == {}
    device = SimpleNamespace(name="a GPU", call=lambda name: 12040)
    predictor._session = FusedSession(SimpleNamespace(device=device))  # type: ignore[arg-type]
    assert predictor.device_facts() == {
        "device": "a GPU", "cuda_driver": "12.4", "engine": "fused kernel", "loop": "host",
    }  # fmt: skip


@pytest.mark.parametrize(("name", "module"), [("tts", pipeline_module), ("omni", omni_module)])
def test_the_place_is_chosen_with_the_executor_in_mind(
    name: str, module: Any, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its plan the CodePredictor may keep a model on the GPU, if the fused kernel runs it."""
    seen: list[dict[str, Any]] = []
    real = module.open_runtime

    def open_runtime(*args: Any, **how: Any) -> Any:
        seen.append(how)
        return real(*args, **how)

    monkeypatch.setattr(module, "open_runtime", open_runtime)
    LOADERS[name](folders, executor="engine")
    assert [(how["code_predictor"], how["executor"]) for how in seen] == [(folders[name] / "code_predictor", "engine")]


@pytest.mark.parametrize("command", [verify, bench])
def test_what_is_no_engine_folder_is_said(command: click.Command, folders: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = Path(__file__).parent / "golden" / "tts_a" / "checkpoint"
    for folder in (checkpoint, folders["tts"] / "code2wav"):
        result = CliRunner().invoke(command, [str(folder)])
        assert result.exit_code == 2
        assert f"{folder} is no engine folder" in result.stderr


def test_the_response_file_says_what_ran_the_code_predictor(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = [str(folders["tts"]), "Hi.", "--seed", "1", "--outputAudioDir", str(tmp_path / "audio")]
    args += ["--outputFile", str(tmp_path / "out.json"), "--device", "cpu"]
    assert CliRunner().invoke(tts, args).exit_code == 0
    assert "cp_device" not in json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    monkeypatch.setattr(CodePredictor, "device_facts", lambda self: {"engine": "fused kernel"})
    assert CliRunner().invoke(tts, args).exit_code == 0
    document = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert document["cp_device"] == {"engine": "fused kernel"}
