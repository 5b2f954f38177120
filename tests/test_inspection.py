"""What ``cpspec inspect`` says of folders, and that it says the same as the runtime does."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file
from trt_cpspec.builder.cli import main
from trt_cpspec.builder.tts import BuildOptions, TtsBuild

from trt_cpspec import CodePredictor

CHECKPOINT = Path(__file__).parent / "golden" / "tts_a" / "checkpoint"


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines") / "eng"
    with TtsBuild(CHECKPOINT, folder, BuildOptions()) as build:
        for _, _, write in build.components:
            write(lambda: None)
        build.commit()
    return folder


def inspect(folder: Path) -> tuple[list[dict[str, Any]], str]:
    """Return what both forms say."""
    as_json, text = (CliRunner().invoke(main, ["inspect", str(folder), *flag]) for flag in (["--json"], []))
    assert (as_json.exit_code, text.exit_code) == (0, 0)
    return json.loads(as_json.stdout), text.stdout


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["builder_config"] |= changes
    path.write_text(json.dumps(config))


def test_a_whole_engine_folder(engines: Path) -> None:
    entries, text = inspect(engines)
    by_folder = {entry["folder"]: entry for entry in entries}
    assert {name: entry["kind"] for name, entry in by_folder.items()} == {
        "talker": "talker", "code_predictor": "code predictor", "code2wav": "codec decoder",
    }  # fmt: skip
    assert by_folder["talker"]["limits"] == {
        "max_input_len": 1024, "max_batch_size": 4, "max_kv_cache_capacity": 4096,
    }  # fmt: skip
    assert {"serena", "vivian", "ryan"} < set(by_folder["talker"]["speakers"])
    assert "chinese" in by_folder["talker"]["languages"]
    assert "sichuan_dialect" not in by_folder["talker"]["languages"]
    assert by_folder["code_predictor"]["verify"] == {
        "can_verify": True, "max_verify_size": 8, "codebook_size": 2048, "residual_depths": 15, "reason": None,
    }  # fmt: skip
    assert by_folder["code2wav"]["limits"]["max_code_len"] >= 300
    assert by_folder["code2wav"]["streaming"] is True
    assert re.search(r"^  streaming +yes$", text, re.MULTILINE)
    for line in (
        "code_predictor: code predictor",
        "  verify     yes, --cpSpecVerifySize 2 to 8",
        "  codebook   2048 codes, 15 residual depths",
        "  precision  fp32",
        "  limits     max_input_len 1024, max_batch_size 4, max_kv_cache_capacity 4096",
    ):
        assert line in text.splitlines()


def test_one_component_by_itself(engines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries, text = inspect(engines / "code_predictor")
    assert [entry["folder"] for entry in entries] == ["code_predictor"]
    assert text.startswith("code_predictor: code predictor\n")
    monkeypatch.chdir(engines / "code_predictor")
    assert inspect(Path()) == (entries, text)


def few_heads(folder: Path) -> None:
    save_file({"lm_head_0.weight": np.zeros((2048, 16), np.float32)}, folder / "lm_heads.safetensors")


def wide_heads(folder: Path) -> None:
    heads = {f"lm_head_{i}.weight": np.zeros((4097, 1), np.float32) for i in range(15)}
    save_file(heads, folder / "lm_heads.safetensors")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda folder: change_config(folder, max_verify_size=1),
            "at most 1 position.* cpspec-build --engineDir ENG --onlyCodePredictor --maxVerifySize 2",
        ),
        (lambda folder: change_config(folder, max_verify_size=None), "does not say max_verify_size"),
        (lambda folder: (folder / "model.onnx").unlink(), "neither model.onnx nor a plan"),
        (lambda folder: (folder / "lm_heads.safetensors").unlink(), "there is no lm_heads.safetensors"),
        (few_heads, "leave no draft slot"),
        (wide_heads, "codebook of 4097 exceeds the largest supported one, 4096"),
    ],
)
def test_why_an_engine_cannot_verify(change: Any, reason: str, engines: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(engines / "code_predictor", tmp_path / "code_predictor")
    change(folder)
    (entry,), text = inspect(folder)
    assert not entry["verify"]["can_verify"]
    assert entry["verify"]["reason"] in text
    assert len(entry["verify"]["reason"].split("; ")) <= 2
    assert re.search(reason, entry["verify"]["reason"])


def test_the_runtime_agrees(engines: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(engines, tmp_path / "eng")
    for width in (1, 2, 5, 8):
        change_config(copy / "code_predictor", max_verify_size=width)
        verify = inspect(copy / "code_predictor")[0][0]["verify"]
        predictor = CodePredictor.from_engine_dir(copy / "code_predictor")
        served = [n for n in range(2, 9) if predictor.window(n).verify_size]
        assert served == (list(range(2, verify["max_verify_size"] + 1)) if verify["can_verify"] else [])


def test_a_folder_of_edge_llm(tmp_path: Path) -> None:
    folder = tmp_path / "code_predictor"
    folder.mkdir()
    config = {
        "model": "qwen3_omni_moe_talker_code_predictor", "num_code_groups": 16, "vocab_size": 2048,
        "builder_config": {"max_input_len": 16, "max_batch_size": 1, "max_kv_cache_capacity": 32},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "llm.engine").touch()
    (entry, *missing), text = inspect(tmp_path)
    assert [other["folder"] for other in missing] == ["talker", "code2wav"]
    assert (entry["kind"], entry["files"], entry["verify"]["can_verify"]) == ("code predictor", ["llm.engine"], False)
    assert "max_verify_size" in entry["verify"]["reason"]
    assert "neither model.onnx nor a plan that config.json describes" in entry["verify"]["reason"]
    assert "  files      llm.engine" in text
    assert "  limits     max_input_len 16, max_batch_size 1, max_kv_cache_capacity 32" in text


def test_a_plan_of_our_own_needs_no_graph(engines: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(engines / "code_predictor", tmp_path / "code_predictor")
    (folder / "model.onnx").rename(folder / "llm.engine")
    assert not inspect(folder)[0][0]["verify"]["can_verify"]
    change_config(folder, engine={"flavour": "tensorrt"})
    assert inspect(folder)[0][0]["verify"]["can_verify"]


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ({"model": "qwen3_omni_moe_talker_text"}, "talker"),
        ({"model": "qwen3_omni_moe_text"}, "thinker"),
        ({"model_type": "qwen3_omni_code2wav"}, "codec decoder"),
        ({"model_type": "qwen3_tts_speaker_encoder"}, "encoder"),
        ({"model": "qwen3_tts_Code_predictor"}, "other"),  # the suffix rule knows upper from lower case
        ({"model": 3}, "unknown: config.json has neither model nor model_type"),
        ({"speaker_id": 3, "builder_config": []}, "unknown: config.json has neither model nor model_type"),
    ],
)
def test_kinds_by_the_rule_of_the_original(model: dict[str, Any], kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model))
    (entry,), text = inspect(tmp_path)
    assert entry["kind"] == kind
    assert "no graph and no plan" in text


def test_a_checkpoint_is_no_engine() -> None:
    assert "checkpoint: a checkpoint, no engine; build it with cpspec-build" in inspect(CHECKPOINT)[1]


def test_a_build_that_is_under_way_is_not_shown(engines: Path, tmp_path: Path) -> None:
    shutil.copytree(engines / "talker", tmp_path / "talker")
    shutil.copytree(engines / "code2wav", tmp_path / ".partial" / "code2wav")
    entries, text = inspect(tmp_path)
    assert {entry["folder"]: entry["kind"].split(":")[0] for entry in entries} == {
        "talker": "talker", "code_predictor": "missing", "code2wav": "missing",
    }  # fmt: skip
    assert "\n\ncode2wav: missing: speech needs it; build it with cpspec-build\n" in text


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "does not exist"), ({}, "holds no config.json"), ({"config.json": "{"}, "cannot be read as JSON")],
)
def test_what_is_no_engine_folder(content: dict[str, str] | None, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "x"
    if content is not None:
        folder.mkdir()
        for name, text in content.items():
            (folder / name).write_text(text)
    result = CliRunner().invoke(main, ["inspect", str(folder)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


@pytest.mark.parametrize("gone", ["thinker", "talker", "code_predictor", "multimodal/code2wav"])
def test_what_an_omni_engine_lacks_is_named(gone: str, omni_copy: Path) -> None:
    kinds = {entry["folder"]: entry["kind"] for entry in inspect(omni_copy)[0]}
    components = {"thinker", "talker", "code_predictor", "multimodal/code2wav", "multimodal/audio", "multimodal/visual"}
    assert set(kinds) == components
    assert not [kind for kind in kinds.values() if kind.startswith("missing")]
    shutil.rmtree(omni_copy / gone)
    entries, text = inspect(omni_copy)
    assert [entry["folder"] for entry in entries if entry["kind"].startswith("missing")] == [gone]
    assert f"{gone}: missing: speech needs it" in text


@pytest.mark.parametrize("place", ["multimodal", "thinker"])
def test_a_part_of_an_omni_engine_lacks_nothing(place: str, omni: Any) -> None:
    entries = inspect(omni.engine / place)[0]
    assert len(entries) == {"multimodal": 3, "thinker": 1}[place]
    assert not [entry for entry in entries if entry["kind"].startswith("missing")]
