"""Rebuilding plans: only where needed, one engine at a time, and never at the price of the old one."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from trt_cpspec.builder import rebuild as rebuild_module
from trt_cpspec.builder import sidecar
from trt_cpspec.builder.engine import Backend, EngineOptions, Plan
from trt_cpspec.builder.profile import GENERATION, profiles_from_json
from trt_cpspec.builder.rebuild import Outcome, RebuildOptions, build_component, rebuild
from trt_cpspec.builder.tts import BuildOptions, TtsBuild

from trt_cpspec.errors import ConfigError, EngineError

GOLDEN = Path(__file__).parent / "golden"
ENGINE = EngineOptions(compute_capabilities=("8.6", "12.0"), optimization_level=0)


@pytest.fixture(scope="session")
def rtx(rtx_binding: Any) -> Backend:
    return Backend(name="tensorrt_rtx", binding=rtx_binding)


@pytest.fixture(scope="session")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the portable graphs of a golden checkpoint, for one position a pass."""
    folder = tmp_path_factory.mktemp("tts_a") / "engines"
    with TtsBuild(GOLDEN / "tts_a" / "checkpoint", folder, BuildOptions(max_verify_size=1)) as build:
        for _, _, write in build.components:
            write(lambda: None)
        build.commit()
    return folder


@pytest.fixture(scope="session")
def narrow(rtx: Backend, graphs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the plans of all three components; the CodePredictor takes one position a pass."""
    folder = tmp_path_factory.mktemp("narrow") / "engines"
    shutil.copytree(graphs, folder)
    outcomes = rebuild(None, folder, rtx, options(max_verify_size=1))
    assert [outcome.action for outcome in outcomes] == ["built"] * 3
    return folder


@pytest.fixture
def engines(narrow: Path, tmp_path: Path) -> Path:
    shutil.copytree(narrow, tmp_path / "engines")
    return tmp_path / "engines"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Backend:
    """Stand in for a backend where what TensorRT does is not the question; plans are counted bytes."""
    count = iter(range(100))

    def build_plan(trt: Any, graph: Any, profiles: Any, options: EngineOptions, *, report: Any) -> Plan:
        content = b"plan %d" % next(count)
        return Plan(content=content, profiles=dict(profiles), record=expected_record(trt, graph.precision, options))

    def expected_record(trt: Any, precision: str, options: EngineOptions) -> dict[str, Any]:
        return {"flavour": "fake", "tensorrt_version": trt, "precision": precision, "options": options.as_json()}

    monkeypatch.setattr(rebuild_module, "build_plan", build_plan)
    monkeypatch.setattr(rebuild_module, "expected_record", expected_record)
    return Backend(name="tensorrt", binding="1.0")


def options(**values: Any) -> RebuildOptions:
    return RebuildOptions(**{"engine": ENGINE, **values})


def only(**values: Any) -> RebuildOptions:
    return options(only_code_predictor=True, **values)


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def one(outcomes: list[Outcome]) -> Outcome:
    assert len(outcomes) == 1
    return outcomes[0]


# ---- with TensorRT-RTX ----------------------------------------------------------------------------------------------


def test_only_code_predictor_is_widened_once(rtx: Backend, engines: Path) -> None:
    before = contents(engines)
    outcome = one(rebuild(None, engines, rtx, only()))
    assert (outcome.folder, outcome.action) == (engines / "code_predictor", "built")
    assert "takes 1 position(s) a pass, 8 are wanted" in outcome.reason
    after = contents(engines)
    plan = "code_predictor/llm.engine"
    assert changed(before, after) == {plan, f"{plan}.bak", "code_predictor/config.json"}
    assert after[f"{plan}.bak"] == before[plan]

    again = one(rebuild(None, engines, rtx, only()))
    assert again.action == "unchanged"
    narrower = one(rebuild(None, engines, rtx, only(max_verify_size=3)))
    assert narrower.action == "unchanged"
    assert contents(engines) == after


def test_sidecar_tells_everything_about_the_plan(rtx: Backend, engines: Path) -> None:
    rebuild(None, engines, rtx, only(backup=False))
    folder = engines / "code_predictor"
    assert not (folder / "llm.engine.bak").exists()
    limits = json.loads((folder / "config.json").read_text())["builder_config"]
    record = limits["engine"]
    assert limits["max_verify_size"] == record["verify_size"] == 8
    assert record["flavour"] == "tensorrt_rtx"
    assert record["tensorrt_version"] == rtx.binding.__version__
    assert record["precision"] == "fp32"
    assert record["compute_capabilities"] == ["8.6", "12.0"]
    assert record["contract"] == "portable"
    assert record["options"]["optimization_level"] == 0
    hashes = contents(folder)
    assert record["plan"] == {
        "file": "llm.engine",
        "bytes": (folder / "llm.engine").stat().st_size,
        "sha256": hashes["llm.engine"],
    }
    assert record["graph"] == {name: hashes[name] for name in ("model.onnx", "model.onnx.data")}
    names = ("codec_embeddings.safetensors", "heads.onnx", "lm_heads.safetensors", "model.weights.json")
    assert record["side_files"] == {name: hashes[name] for name in names}
    profiles = profiles_from_json(record["profiles"])
    assert list(profiles) == ["context", "generation"]
    assert profiles[GENERATION]["inputs_embeds"].max == (4, 8, 16)
    text = (folder / "config.json").read_text()
    assert "[[1, 1, 16], [1, 1, 16], [4, 8, 16]]" in text  # a range is one line


def test_a_kill_while_tensorrt_builds_leaves_the_engine(rtx: Backend, engines: Path) -> None:
    before = contents(engines)
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from trt_cpspec.builder.engine import EngineOptions, choose_backend\n"
        "from trt_cpspec.builder.rebuild import RebuildOptions, rebuild\n"
        "def report(phase, done):\n"
        "    if done and done > 0.4: os.kill(os.getpid(), signal.SIGKILL)\n"
        "options = RebuildOptions(only_code_predictor=True, engine=EngineOptions(compute_capabilities=('8.6',)))\n"
        "rebuild(None, Path(sys.argv[1]), choose_backend('tensorrt_rtx'), options, report=report)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(engines)], capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert contents(engines) == before
    assert one(rebuild(None, engines, rtx, only())).action == "built"


# ---- Edge-LLM's ONNX folders ----------------------------------------------------------------------------------------

F16, F32, I32, I64, I8 = (getattr(TensorProto, name) for name in ("FLOAT16", "FLOAT", "INT32", "INT64", "INT8"))
PAGED: dict[str, tuple[int, list[int | str]]] = {
    "past_key_values_0": (F16, [2, "pool", 128, 2, 16]),
    "kv_page_table": (I32, ["n", 2, "pages"]),
    "lm_heads": (F16, [15, 32, 16]),
    "lm_head_idx": (I32, [1]),
}
EDGE: dict[str, dict[str, tuple[int, list[int | str]]]] = {
    "padded": PAGED
    | {
        "inputs_embeds": (F16, ["b", "s", 16]),
        "rope_rotary_cos_sin": (F32, ["b", "c", 16]),
        "context_lengths": (I32, ["b"]),
        "kvcache_start_index": (I32, ["k"]),
        "last_token_ids": (I64, ["b", 1]),
    },
    "ragged": PAGED
    | {
        "inputs_embeds": (F16, ["t", 16]),
        "positions": (I32, ["t"]),
        "rope_rotary_cos_sin": (F32, ["t", 16]),
        "query_start_offsets": (I32, ["n1"]),
        "context_sequence_count_carrier": (I32, ["c"]),
        "execution_phase_marker": (I32, ["p"]),
        "logits_indices": (I64, ["n"]),
        **{
            name: (I32, ["n"])
            for name in ("query_lengths", "past_lengths", "attention_sequence_lengths", "state_indices")
        },
    },
    "dense": {
        "inputs_embeds": (F16, ["b", "s", 16]),
        "context_lengths": (I32, ["b"]),
        "kvcache_start_index": (I32, ["k"]),
        "past_key_values_0": (F16, ["b", 2, 2, "c", 16]),
        "lm_head_weight": (F16, [32, 16]),
    },
}
GENERATION_MAX = {
    "padded": {"inputs_embeds": ((2, 1, 16), (2, 8, 16))},
    "ragged": {
        "inputs_embeds": ((2, 16), (16, 16)),
        "positions": ((2,), (16,)),
        "rope_rotary_cos_sin": ((2, 16), (16, 16)),
        "context_sequence_count_carrier": ((0,), (2,)),
    },
}


def write_edge(folder: Path, contract: str, model: str, *, hidden: str = "hidden_states") -> None:
    """Write a component with a contract's inputs; every input goes to an output of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {"inputs_embeds": hidden, "past_key_values_0": "present_key_values_0"}
    inputs, outputs, nodes = [], [], []
    for name, (dtype, shape) in EDGE[contract].items():
        output = names.get(name, f"out_{name}")
        inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        outputs.append(helper.make_tensor_value_info(output, dtype, shape))
        nodes.append(helper.make_node("Identity", [name], [output], f"node_{name}"))
    graph = helper.make_graph(nodes, contract, inputs, outputs)
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), str(folder / "model.onnx"))
    config = {"model": model, "num_code_groups": 16, "hidden_size": 16, "kv_cache_dtype": "fp16"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "lm_heads.safetensors").write_bytes(model.encode())


@pytest.mark.parametrize("contract", ["padded", "ragged"])
def test_edge_tree_is_built_and_widened(rtx: Backend, tmp_path: Path, contract: str) -> None:
    onnx_dir, engine_dir = tmp_path / "onnx", tmp_path / "engines"
    write_edge(onnx_dir / "llm", contract, "qwen3_tts_talker")
    write_edge(onnx_dir / "code_predictor", contract, "qwen3_tts_code_predictor")
    (onnx_dir / "clone").mkdir()
    shutil.copy(onnx_dir / "llm" / "model.onnx", onnx_dir / "clone")
    (onnx_dir / "clone" / "config.json").write_text('{"model_type": "qwen3_tts_speaker_encoder"}')
    limits = {"max_batch_size": 2, "max_kv_cache_capacity": 256, "max_input_len": 64}

    outcomes = rebuild(onnx_dir, engine_dir, rtx, options(max_verify_size=1, limits=limits))
    assert {(item.folder.name, item.action) for item in outcomes} == {
        ("talker", "built"), ("code_predictor", "built"), ("clone", "skipped"),
    }  # fmt: skip
    assert contents(engine_dir).keys() == {
        f"{folder}/{name}"
        for folder in ("talker", "code_predictor")
        for name in ("llm.engine", "config.json", "lm_heads.safetensors")
    }
    narrow, before = generation(engine_dir / "code_predictor"), contents(engine_dir)
    talker = generation(engine_dir / "talker")
    assert talker == narrow

    outcome = one(rebuild(onnx_dir, engine_dir, rtx, only()))
    assert outcome.action == "built"
    wide = generation(engine_dir / "code_predictor")
    differing = {name: (narrow[name].max, wide[name].max) for name in wide if narrow[name] != wide[name]}
    assert differing == GENERATION_MAX[contract]
    assert all((narrow[name].min, narrow[name].opt) == (wide[name].min, wide[name].opt) for name in wide)
    plan = "code_predictor/llm.engine"
    assert changed(before, contents(engine_dir)) == {plan, f"{plan}.bak", "code_predictor/config.json"}
    assert one(rebuild(onnx_dir, engine_dir, rtx, only())).action == "unchanged"


def generation(folder: Path) -> Any:
    config = json.loads((folder / "config.json").read_text())
    return profiles_from_json(config["builder_config"]["engine"]["profiles"])[GENERATION]


def test_edge_refusals(fake: Backend, tmp_path: Path) -> None:
    write_edge(tmp_path / "dense", "dense", "qwen3_tts_code_predictor")
    with pytest.raises(EngineError, match=r"dense contract of 0\.6"):
        rebuild(tmp_path / "dense", tmp_path / "out", fake, options())
    write_edge(tmp_path / "blind", "ragged", "qwen3_tts_code_predictor", hidden="logits")
    with pytest.raises(EngineError, match=r"must give hidden_states, its outputs are .*logits"):
        rebuild(tmp_path / "blind", tmp_path / "out", fake, options())
    assert not (tmp_path / "out").exists()


def test_one_component_goes_where_its_like_lies(fake: Backend, tmp_path: Path) -> None:
    source = tmp_path / "code_predictor"
    write_edge(source, "ragged", "qwen3_tts_code_predictor")
    assert one(rebuild(source, tmp_path / "alone", fake, options())).folder == tmp_path / "alone"
    write_edge(tmp_path / "tree" / "speech", "ragged", "qwen3_tts_talker")
    assert one(rebuild(source, tmp_path / "tree", fake, options())).folder == tmp_path / "tree" / "code_predictor"
    (tmp_path / "tree" / "code_predictor").rename(tmp_path / "tree" / "cp")
    assert one(rebuild(source, tmp_path / "tree", fake, options(max_verify_size=7))).folder == tmp_path / "tree" / "cp"


def test_limits_come_from_user_then_engine_then_graph(fake: Backend, tmp_path: Path) -> None:
    source, target = tmp_path / "onnx", tmp_path / "engine"
    write_edge(source, "ragged", "qwen3_tts_code_predictor")

    def batch() -> int:
        value: int = json.loads((target / "config.json").read_text())["builder_config"]["max_batch_size"]
        return value

    rebuild(source, target, fake, options())
    assert batch() == 4
    rebuild(source, target, fake, only(limits={"max_batch_size": 2}))
    assert batch() == 2
    assert one(rebuild(source, target, fake, only())).action == "unchanged"
    assert one(rebuild(source, target, fake, only(limits={"max_batch_size": 3}))).reason == "its limits changed"
    with pytest.raises(ConfigError, match=r"max_kv_cache_capacity 15 cannot hold a frame.*16 positions"):
        rebuild(source, target, fake, only(limits={"max_kv_cache_capacity": 15}))


def test_only_code_predictor_keeps_the_engine_folders_own_config_and_files(fake: Backend, tmp_path: Path) -> None:
    source, target = tmp_path / "onnx", tmp_path / "engine"
    write_edge(source, "ragged", "qwen3_tts_code_predictor")
    write_edge(target, "ragged", "qwen3_tts_code_predictor")
    (target / "model.onnx").unlink()
    config = json.loads((target / "config.json").read_text()) | {"edgellm_version": "0.10"}
    config["builder_config"] = {"max_batch_size": 1, "max_lora_rank": 0}
    (target / "config.json").write_text(json.dumps(config))
    (source / "notes.json").write_text("{}")
    before = contents(target)
    assert one(rebuild(source, target, fake, only())).action == "built"
    assert changed(before, contents(target)) == {"llm.engine", "config.json"}
    found = json.loads((target / "config.json").read_text())
    assert found["edgellm_version"] == "0.10"
    assert (found["builder_config"]["max_batch_size"], found["builder_config"]["max_lora_rank"]) == (1, 0)


# ---- when to build --------------------------------------------------------------------------------------------------


@pytest.fixture
def component(fake: Backend, graphs: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "code_predictor"
    shutil.copytree(graphs / "code_predictor", folder)
    assert build_component(folder, folder, fake, options(max_verify_size=2)).action == "built"
    return folder


def test_dry_run_prints_the_table_and_writes_nothing(component: Path) -> None:
    before = contents(component)
    outcome = one(rebuild(None, component, None, only(dry_run=True)))
    assert (outcome.action, contents(component)) == ("would build", before)
    assert "it takes 2 position(s) a pass, 8 are wanted" in str(outcome)
    marked = [line.split() for line in outcome.table.splitlines() if line.startswith("*")]
    assert [(line[2], line[-1]) for line in marked] == [("positions", "4x8"), ("inputs_embeds", "4x8x16")]
    assert one(rebuild(None, component, None, only(dry_run=True, max_verify_size=2))).action == "unchanged"


def damage_plan(folder: Path) -> None:
    (folder / "llm.engine").write_bytes(b"plan X")


def drop_plan(folder: Path) -> None:
    (folder / "llm.engine").unlink()


def change_heads(folder: Path) -> None:
    (folder / "lm_heads.safetensors").write_bytes(b"others")


def change_weights(folder: Path) -> None:
    path = folder / "model.onnx.data"
    path.write_bytes(path.read_bytes()[:-4] + np.float32(2).tobytes())


def drop_record(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["builder_config"]["engine"]
    (folder / "config.json").write_text(json.dumps(config))


def spoil_profiles(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["builder_config"]["engine"]["profiles"] = 7
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (damage_plan, "is not the plan that config.json describes"),
        (drop_plan, "there is no plan yet"),
        (change_heads, "side files changed: lm_heads.safetensors"),
        (change_weights, "graph changed: model.onnx.data"),
        (drop_record, "does not say how its plan was built"),
        (spoil_profiles, "its limits changed"),
    ],
)
def test_what_makes_a_plan_stale(fake: Backend, component: Path, spoil: Any, reason: str) -> None:
    spoil(component)
    outcome = build_component(component, component, fake, options(max_verify_size=2))
    assert outcome.action == "built"
    assert reason in outcome.reason
    assert build_component(component, component, fake, options(max_verify_size=2)).action == "unchanged"


def test_another_tensorrt_or_other_options_make_it_stale(component: Path) -> None:
    newer = Backend(name="tensorrt", binding="2.0")
    outcome = build_component(component, component, newer, options(max_verify_size=2))
    assert outcome.reason == "tensorrt_version was '1.0', it is now '2.0'"
    other = options(max_verify_size=2, engine=EngineOptions(optimization_level=5))
    assert "options was" in build_component(component, component, newer, other).reason


def test_backup_is_the_previous_plan(fake: Backend, component: Path) -> None:
    plan, backup = component / "llm.engine", component / "llm.engine.bak"
    previous = plan.read_bytes()
    for width in (4, 5):
        build_component(component, component, fake, options(max_verify_size=width))
        assert backup.read_bytes() == previous
        previous = plan.read_bytes()
    build_component(component, component, fake, options(max_verify_size=6, backup=False))
    assert backup.read_bytes() == b"plan 1"  # as it was


def test_a_failing_build_changes_nothing(component: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(component)

    def fail(*_: Any, **__: Any) -> None:
        raise EngineError("no tactic")

    monkeypatch.setattr(rebuild_module, "build_plan", fail)
    with pytest.raises(EngineError, match="no tactic"):
        build_component(component, component, Backend(name="tensorrt", binding="1.0"), options())
    monkeypatch.undo()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        sidecar.install(component, "llm.engine", b"new", {}, backup=True)
    assert contents(component) == before


def test_refusals(fake: Backend, component: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the ONNX folder .*nowhere does not exist"):
        rebuild(tmp_path / "nowhere", component, fake, options())
    with pytest.raises(
        ConfigError, match="nowhere does not exist: --onlyCodePredictor rebuilds inside an existing one"
    ):
        rebuild(component, tmp_path / "nowhere", fake, only())
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no component"):
        rebuild(tmp_path / "empty", component, fake, options())
    with pytest.raises(ConfigError, match=r"must hold exactly one CodePredictor .*it holds 0"):
        rebuild(component, tmp_path / "empty", fake, only())
    shutil.copytree(component, tmp_path / "second")
    with pytest.raises(ConfigError, match=r"must hold exactly one CodePredictor .*it holds 2"):
        rebuild(tmp_path, tmp_path, fake, only())
    change_heads(tmp_path / "second")
    with pytest.raises(EngineError, match=r"lm_heads\.safetensors differs .*another model"):
        rebuild(tmp_path / "second", component, fake, only())
    with pytest.raises(EngineError, match="ONNX Runtime runs the graph as it is"):
        rebuild(component, component, Backend(name="onnxruntime"), options())
    (component / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"config\.json must be a JSON object"):
        rebuild(component, component, fake, options())
    with pytest.raises(ConfigError, match="widest window is 8"):
        RebuildOptions(max_verify_size=9)


# ---- crashes --------------------------------------------------------------------------------------------------------

INSTALL = """
import json, os, signal, sys
from pathlib import Path
from trt_cpspec.builder import sidecar
folder, left = Path(sys.argv[1]), int(sys.argv[2])
def counted(function):
    def call(*args, **kwargs):
        global left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return function(*args, **kwargs)
    return call
for name in ("fsync", "replace", "link"):
    setattr(os, name, counted(getattr(os, name)))
plan = b"the new plan" * 1000
config = sidecar.read_config(folder)
config["builder_config"]["engine"]["plan"] = sidecar.plan_record("llm.engine", plan)
sidecar.install(folder, "llm.engine", plan, config, backup=True)
"""


def test_a_kill_at_every_moment_of_the_installation(component: Path, tmp_path: Path) -> None:
    """Whatever the moment: the old pair is in place, or the new plan is and a second run completes it."""
    old, config = (component / "llm.engine").read_bytes(), (component / "config.json").read_bytes()
    seen = set()
    for moment in range(30):
        folder = tmp_path / f"moment_{moment}"
        shutil.copytree(component, folder)
        run = subprocess.run(
            [sys.executable, "-c", INSTALL, str(folder), str(moment)], capture_output=True, check=False
        )
        plan = (folder / "llm.engine").read_bytes()
        if run.returncode == 0:
            break
        assert run.returncode == -signal.SIGKILL, run.stderr
        state = "old" if plan == old else "new"
        assert plan in (old, b"the new plan" * 1000)
        backup = folder / "llm.engine.bak"
        assert not backup.exists() or backup.read_bytes() == old
        if state == "old":
            assert (folder / "config.json").read_bytes() == config
        sidecar.recover(folder)
        assert sidecar.plan_fault(folder, "llm.engine", sidecar.read_config(folder)) is None
        assert (folder / "llm.engine").read_bytes() == plan
        extra = {name for name in contents(folder) if name not in contents(component)}
        assert extra <= {"llm.engine.bak"}
        seen.add(state)
    else:
        pytest.fail("the installation never ended")
    assert seen == {"old", "new"}
    assert moment > 7
    assert sidecar.plan_fault(folder, "llm.engine", sidecar.read_config(folder)) is None


def test_a_plan_without_its_sidecar_is_noticed(component: Path) -> None:
    config = sidecar.read_config(component)
    assert sidecar.plan_fault(component, "llm.engine", config) is None
    damage_plan(component)
    assert "SHA-256 differs" in str(sidecar.plan_fault(component, "llm.engine", config))
    assert "no record of code2wav.engine" in str(
        sidecar.plan_fault(copied_as_codec(component), "code2wav.engine", config)
    )
    drop_plan(component)
    assert "does not exist" in str(sidecar.plan_fault(component, "llm.engine", config))


def copied_as_codec(folder: Path) -> Path:
    shutil.copy(folder / "llm.engine", folder / "code2wav.engine")
    return folder


def test_a_broken_pending_sidecar_is_dropped(component: Path) -> None:
    before = contents(component)
    for text in ("", "[]", "{}", '{"builder_config": {"engine": {"plan": {"file": "llm.engine"}}}}'):
        (component / "config.json.next").write_text(text)
        (component / ".llm.engine.abc.partial").write_text("half")
        sidecar.recover(component)
        assert contents(component) == before


def test_without_hard_links_the_backup_is_a_copy(component: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    old = (component / "llm.engine").read_bytes()
    sidecar.install(component, "llm.engine", b"new", sidecar.read_config(component), backup=True)
    assert (component / "llm.engine.bak").read_bytes() == old
    assert (component / "llm.engine").read_bytes() == b"new"
