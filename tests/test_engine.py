"""Building engines: real TensorRT-RTX builds without a GPU, a stand-in for TensorRT 8.6, and what is refused."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from enum import IntEnum
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from trt_cpspec.builder import engine as engine_module
from trt_cpspec.builder.engine import (
    EngineOptions,
    OnnxGraph,
    Plan,
    ProgressTree,
    build_plan,
    check_precision,
    choose_backend,
    layer_types,
    load_plugins,
    strongly_typed,
    title_of,
)
from trt_cpspec.builder.graph import GraphWriter
from trt_cpspec.builder.profile import Kind, Limits, Profile, ShapeRange, profiles_for
from trt_cpspec.builder.tts import BuildOptions, TtsBuild

from trt_cpspec.errors import ConfigError, EngineError

GOLDEN = Path(__file__).parent / "golden"
COMPONENTS = {"talker": Kind.DECODER, "code_predictor": Kind.CODE_PREDICTOR, "code2wav": Kind.CODEC}


@pytest.fixture(scope="session")
def rtx(rtx_binding: Any) -> Any:
    return rtx_binding


@pytest.fixture(scope="session")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Return the engine folder of a golden checkpoint at a precision, built once."""
    made: dict[tuple[str, str], Path] = {}

    def of(name: str, precision: str) -> Path:
        if (name, precision) not in made:
            folder = tmp_path_factory.mktemp(f"{name}_{precision}") / "engines"
            with TtsBuild(GOLDEN / name / "checkpoint", folder, BuildOptions(precision=precision)) as build:
                for _, _, write in build.components:
                    write(lambda: None)
                build.commit()
            made[name, precision] = folder
        return made[name, precision]

    return of


def limits_of(component: str, width: int) -> Limits:
    if component == "code_predictor":
        return Limits(max_input_len=2, max_kv_cache_capacity=24, max_batch_size=4, max_verify_size=width)
    return Limits(max_input_len=1024, max_kv_cache_capacity=4096, max_batch_size=4, max_verify_size=width)


@cache
def built(rtx: Any, folder: Path, component: str, width: int, *capabilities: str) -> Plan:
    graph = OnnxGraph(folder / component / "model.onnx")
    wanted = profiles_for(COMPONENTS[component], graph.inputs, limits_of(component, width))
    options = EngineOptions(compute_capabilities=capabilities, optimization_level=0)
    return build_plan(rtx, graph, wanted.profiles, options)


# ---- real builds ----------------------------------------------------------------------------------------------------


def span(low: tuple[int, ...], best: tuple[int, ...], high: tuple[int, ...]) -> ShapeRange:
    return ShapeRange(low, best, high)


def expected(component: str, width: int, layers: int) -> dict[str, Profile]:
    """Return the profiles of a golden component, in numbers written down by hand."""
    if component == "code2wav":
        # What is carried from call to call has one shape: keys of the 71 frames before, 6 samples for each dilation.
        tails = [(8, 2), (24, 6), (24, 6), (24, 6)]
        for wide in (32, 16, 8, 4):
            tails += [(wide, 1), (wide // 2, 6), (wide // 2, 18), (wide // 2, 54)]
        shapes = {f"past_tail_{i}": (1, *tail) for i, tail in enumerate([*tails, (2, 6)])}
        shapes |= {f"past_{kind}_{i}": (1, 4, 71, 8) for kind in ("key", "value") for i in range(layers)}
        state = {name: span(shape, shape, shape) for name, shape in shapes.items()}
        return {
            "frames": {
                "codes": span((1, 16, 1), (1, 16, 300), (1, 16, 2000)), "position": span((1,), (1,), (1,)), **state
            }
        }  # fmt: skip
    if component == "code_predictor":
        context = {"positions": span((1, 1), (1, 2), (4, 2)), "inputs_embeds": span((1, 1, 16), (1, 2, 16), (4, 2, 16))}
        generation = {
            "positions": span((1, 1), (1, 1), (4, width)),
            "inputs_embeds": span((1, 1, 16), (1, 1, 16), (4, width, 16)),
        }
        cache = [span((1, 2, 25, 16), (1, 2, 25, 16), (4, 2, 25, 16))] * 2
    else:
        context = {
            "positions": span((1, 1), (1, 256), (4, 512)),
            "inputs_embeds": span((1, 1, 16), (1, 256, 16), (4, 512, 16)),
        }
        generation = {
            "positions": span((1, 1), (1, 1), (4, 1)),
            "inputs_embeds": span((1, 1, 16), (1, 1, 16), (4, 1, 16)),
        }
        low, high = (1, 2, 64, 16), (4, 2, 4097, 16)
        cache = [span(low, (1, 2, 384, 16), high), span(low, (1, 2, 256, 16), high)]
    for profile, found in ((context, cache[0]), (generation, cache[1])):
        profile.update({f"past_{kind}_{i}": found for kind in ("key", "value") for i in range(layers)})
    return {"context": context, "generation": generation}


@pytest.mark.parametrize(
    ("name", "precision", "capability"),
    [("tts_a", "fp32", "8.6"), ("tts_a", "fp16", "12.0"), ("tts_b", "fp16", "8.6"), ("tts_b", "fp32", "12.0")],
)
def test_profiles_of_real_builds_input_by_input(
    rtx: Any, graphs: Callable[[str, str], Path], name: str, precision: str, capability: str
) -> None:
    folder = graphs(name, precision)
    for component in COMPONENTS:
        graph = OnnxGraph(folder / component / "model.onnx")
        layers = sum(item.name.startswith("past_key_") for item in graph.inputs)
        wide = built(rtx, folder, component, 8, capability)
        # Plan.profiles is what the builder's IOptimizationProfile objects say.
        assert wide.profiles == resized(expected(component, 8, layers), graph)
        assert memoryview(wide.content).nbytes > 10_000
        assert wide.record["compute_capabilities"] == [capability]
        assert wide.record["precision"] == ("fp32" if component == "code2wav" else precision)
        assert wide.record["tensorrt_version"] == rtx.__version__


def resized(profiles: dict[str, Profile], graph: OnnxGraph) -> dict[str, Profile]:
    """Give each input the extents that its graph fixes: the checkpoints differ in widths and heads."""
    shapes = {item.name: item.shape for item in graph.inputs}

    def fit(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(size if fixed < 0 else fixed for size, fixed in zip(shape, shapes[name], strict=True))

    return {
        label: {name: span(*(fit(name, s) for s in (r.min, r.opt, r.max))) for name, r in profile.items()}
        for label, profile in profiles.items()
    }


def test_widening_changes_two_inputs_of_one_engine(rtx: Any, graphs: Callable[[str, str], Path]) -> None:
    folder = graphs("tts_a", "fp32")
    differing = set()
    for component in COMPONENTS:
        narrow, wide = (built(rtx, folder, component, width, "8.6").profiles for width in (1, 8))
        assert narrow.keys() == wide.keys()
        for label, profile in wide.items():
            assert profile.keys() == narrow[label].keys()
            for name, found in profile.items():
                if found != narrow[label][name]:
                    differing.add((component, label, name))
                    assert (found.min, found.opt) == (narrow[label][name].min, narrow[label][name].opt)
    assert differing == {
        ("code_predictor", "generation", "positions"),
        ("code_predictor", "generation", "inputs_embeds"),
    }


def test_two_capabilities_in_one_plan_and_options_in_the_record(rtx: Any, graphs: Callable[[str, str], Path]) -> None:
    graph = OnnxGraph(graphs("tts_a", "fp32") / "code_predictor" / "model.onnx")
    wanted = profiles_for(Kind.CODE_PREDICTOR, graph.inputs, limits_of("code_predictor", 3))
    options = EngineOptions(compute_capabilities=("12.0", "8.6"), optimization_level=1, workspace_mib=64)
    seen: list[tuple[str, float | None]] = []
    plan = build_plan(rtx, graph, wanted.profiles, options, report=lambda *event: seen.append(event))
    assert plan.record["compute_capabilities"] == ["8.6", "12.0"]
    assert plan.record["options"] == {"optimization_level": 1, "workspace_mib": 64, "plugin_libraries": []}
    assert plan.record["flavour"] == "tensorrt_rtx"
    assert plan.record["strongly_typed"] is True
    shares = [share for _, share in seen if share is not None]
    assert shares == sorted(shares)
    assert (seen[0], seen[-1]) == (("reading the graph", 0.0), ("built", 1.0))
    assert len({phase for phase, _ in seen}) > 5  # the progress monitor speaks


def test_an_interrupt_in_the_progress_callback_cancels_the_build(rtx: Any, graphs: Callable[[str, str], Path]) -> None:
    graph = OnnxGraph(graphs("tts_a", "fp32") / "code_predictor" / "model.onnx")
    wanted = profiles_for(Kind.CODE_PREDICTOR, graph.inputs, limits_of("code_predictor", 3))

    def interrupt(phase: str, done: float | None) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_plan(rtx, graph, wanted.profiles, EngineOptions(compute_capabilities=("8.6",)), report=interrupt)


# ---- types ----------------------------------------------------------------------------------------------------------


def write_mixed(folder: Path, element: int = TensorProto.FLOAT16) -> OnnxGraph:
    """Write an FP16 product between FP32 islands: norm, softmax, and a product with a weight that is cast up."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    with GraphWriter(folder, "mixed") as graph:
        x = graph.input("inputs_embeds", TensorProto.FLOAT, ["batch", "length", 8])
        square = graph.op("ReduceMean", graph.op("Pow", x, graph.constant(2, np.float32)), axes=[-1], keepdims=1)
        normed = graph.op("Div", x, graph.op("Sqrt", graph.op("Add", square, graph.constant(1e-6, np.float32))))
        weight = graph.weight("w", [8, 8], [rng.standard_normal((8, 8), np.float32)], "F16")
        narrow = graph.op("MatMul", graph.op("Cast", normed, to=TensorProto.FLOAT16), weight)
        shares = graph.op("Softmax", graph.op("Cast", narrow, to=TensorProto.FLOAT), axis=-1)
        up = graph.op("Cast", graph.weight("down", [8, 8], [rng.standard_normal((8, 8), np.float32)], "F16"), to=1)
        graph.output(graph.op("MatMul", shares, up), "hidden_states", TensorProto.FLOAT, ["batch", "length", 8])
        graph.save()
    return OnnxGraph(folder / "model.onnx")


def test_types_by_name_are_the_types_of_the_parsed_network(
    rtx: Any, graphs: Callable[[str, str], Path], tmp_path: Path
) -> None:
    """What TensorRT 8.6 is told of each layer is what a strongly typed network says of it."""
    names = {"FLOAT": "fp32", "HALF": "fp16", "BF16": "bf16"}
    log = engine_module._log_of(rtx)
    for graph in (
        write_mixed(tmp_path),
        *(OnnxGraph(graphs(name, "fp16") / part / "model.onnx") for name in ("tts_a", "tts_b") for part in COMPONENTS),
    ):
        network, _parser = engine_module._parse(rtx, rtx.Builder(log), log, graph)
        assert network.num_layers > 5
        for layer, outputs in layer_types(network, graph.float_types()):
            actual = [names.get(layer.get_output(i).dtype.name) for i in range(layer.num_outputs)]
            assert outputs == actual, f"{graph.path}: {layer.name}"


def test_graph_structure(tmp_path: Path) -> None:
    graph = write_mixed(tmp_path)
    assert graph.precision == "fp16"
    assert [(item.name, item.shape) for item in graph.inputs] == [("inputs_embeds", (-1, -1, 8))]
    assert graph.outputs == ("hidden_states",)
    assert graph.operators()["MatMul"][0] == 2
    types = graph.float_types()
    assert (types["w"], types["hidden_states"]) == ("fp16", "fp32")


# ---- a stand-in for TensorRT 8.6: no strongly typed networks, no progress monitor, no BF16 ---------------------------


class FakeConfig:
    builder_optimization_level = 3

    def __init__(self) -> None:
        self.flags: set[str] = {"TF32"}
        self.sources = -1
        self.profiles: list[Any] = []
        self.cache = b""

    def set_flag(self, flag: Any) -> None:
        self.flags.add(flag.name)

    def clear_flag(self, flag: Any) -> None:
        self.flags.discard(flag.name)

    def set_tactic_sources(self, sources: int) -> None:
        self.sources = sources

    def set_memory_pool_limit(self, pool: Any, size: int) -> None:
        self.workspace = size

    def add_optimization_profile(self, profile: Any) -> int:
        self.profiles.append(profile)
        return len(self.profiles) - 1

    def create_timing_cache(self, content: bytes) -> Any:
        return None if content == b"of another GPU" else SimpleNamespace(serialize=lambda: content + b"+")

    def set_timing_cache(self, cache: Any, ignore_mismatch: bool) -> bool:
        self.timing = cache
        return not ignore_mismatch

    def get_timing_cache(self) -> Any:
        return self.timing


class FakeProfile:
    def __init__(self) -> None:
        self.shapes: dict[str, Any] = {}

    def set_shape(self, name: str, *shapes: Any) -> None:
        self.shapes[name] = shapes

    def get_shape(self, name: str) -> Any:
        return list(self.shapes[name])


class FakeLayer:
    def __init__(self, kind: str, inputs: list[Any], name: str, dtype: str) -> None:
        self.type = SimpleNamespace(name=kind)
        self.inputs, self.num_inputs, self.num_outputs = inputs, len(inputs), 1
        self.output = SimpleNamespace(name=name, dtype=SimpleNamespace(name=dtype))
        self.precision: Any = None
        self.set: dict[int, Any] = {}

    def get_input(self, index: int) -> Any:
        return self.inputs[index]

    def get_output(self, index: int) -> Any:
        return self.output

    def set_output_type(self, index: int, dtype: Any) -> None:
        self.set[index] = dtype

    def reset_precision(self) -> None:
        self.precision = None

    def reset_output_type(self, index: int) -> None:
        self.set.pop(index, None)


class FakeNetwork:
    """Holds one layer for each node of the graph, and an unnamed shuffle before the softmax."""

    def __init__(self, flags: int) -> None:
        self.flags, self.layers = flags, list[FakeLayer]()
        tensor = SimpleNamespace(name="inputs_embeds", shape=(-1, -1, 8), is_shape_tensor=False)
        self.tensors = {"inputs_embeds": tensor}
        self.num_inputs = 1

    num_layers = property(lambda self: len(self.layers))

    def get_layer(self, index: int) -> FakeLayer:
        return self.layers[index]

    def get_input(self, index: int) -> Any:
        return self.tensors["inputs_embeds"]

    def add(self, kind: str, inputs: list[str], name: str, dtype: str = "FLOAT") -> None:
        layer = FakeLayer(kind, [self.tensors[item] for item in inputs], name, dtype)
        self.layers.append(layer)
        self.tensors[name] = layer.output


KINDS = {
    "Pow": "ELEMENTWISE", "Div": "ELEMENTWISE", "Add": "ELEMENTWISE", "ReduceMean": "REDUCE", "Sqrt": "UNARY",
    "MatMul": "MATRIX_MULTIPLY", "Cast": "CAST", "Softmax": "SOFTMAX", "Identity": "IDENTITY",
}  # fmt: skip


class FakeParser:
    num_errors = 0

    def __init__(self, network: FakeNetwork, log: Any) -> None:
        self.network = network

    def parse_from_file(self, path: str) -> bool:
        graph = onnx.load(path, load_external_data=False).graph
        for item in graph.initializer:
            dtype = "HALF" if item.data_type == TensorProto.FLOAT16 else "FLOAT"
            self.network.add("CONSTANT", [], item.name, dtype)
        for node in graph.node:
            inputs = list(node.input)
            if node.op_type == "Softmax":
                self.network.add("SHUFFLE", inputs, "(Unnamed Layer* 9) [Shuffle]_output")
                inputs = ["(Unnamed Layer* 9) [Shuffle]_output"]
            self.network.add(KINDS[node.op_type], inputs, node.output[0])
        return True


class FakeBuilder:
    last: FakeBuilder

    def __init__(self, log: Any) -> None:
        FakeBuilder.last = self
        self.config = FakeConfig()

    def create_builder_config(self) -> FakeConfig:
        return self.config

    def create_network(self, flags: int) -> FakeNetwork:
        self.network = FakeNetwork(flags)
        return self.network

    def create_optimization_profile(self) -> FakeProfile:
        return FakeProfile()

    def build_serialized_network(self, network: Any, config: Any) -> bytes | None:
        return b"plan"


class FakeLogger:
    Severity = SimpleNamespace(INTERNAL_ERROR=0, ERROR=1)


@pytest.fixture
def trt86() -> Any:
    flags = IntEnum(
        "BuilderFlag", {"FP16": 0, "TF32": 7, "OBEY_PRECISION_CONSTRAINTS": 11, "PREFER_PRECISION_CONSTRAINTS": 12}
    )
    sources = IntEnum(
        "TacticSource", {"CUBLAS": 0, "CUBLAS_LT": 1, "CUDNN": 2, "EDGE_MASK_CONVOLUTIONS": 3, "JIT_CONVOLUTIONS": 4}
    )
    return SimpleNamespace(
        __name__="tensorrt",
        __version__="8.6.0",
        NetworkDefinitionCreationFlag=IntEnum("NetworkDefinitionCreationFlag", {"EXPLICIT_BATCH": 0}),
        BuilderFlag=flags,
        DataType=IntEnum("DataType", {"FLOAT": 0, "HALF": 1, "INT8": 2, "INT32": 3, "BOOL": 4}),
        TacticSource=sources,
        MemoryPoolType=SimpleNamespace(WORKSPACE=0),
        ILogger=FakeLogger,
        Builder=FakeBuilder,
        OnnxParser=FakeParser,
        get_plugin_registry=lambda: SimpleNamespace(plugin_creator_list=[]),
    )


MIXED_PROFILE = {"generation": {"inputs_embeds": span((1, 1, 8), (1, 1, 8), (4, 8, 8))}}


def test_without_strong_types_every_layer_is_constrained(trt86: Any, tmp_path: Path) -> None:
    assert not strongly_typed(trt86)
    graph = write_mixed(tmp_path)
    seen: list[tuple[str, float | None]] = []
    plan = build_plan(trt86, graph, MIXED_PROFILE, EngineOptions(), report=lambda *event: seen.append(event))
    assert (plan.content, plan.profiles) == (b"plan", MIXED_PROFILE)
    assert plan.record["strongly_typed"] is False
    config, network = FakeBuilder.last.config, FakeBuilder.last.network
    assert network.flags == 1  # explicit batch
    assert config.flags == {"FP16", "OBEY_PRECISION_CONSTRAINTS"}  # no TF32
    assert config.sources == 0b11000  # neither cuBLAS nor cuDNN
    found: dict[str, set[str | None]] = {}
    for layer in network.layers:
        found.setdefault(layer.type.name, set()).add(None if layer.precision is None else layer.precision.name)
    first, second = (layer for layer in network.layers if layer.type.name == "MATRIX_MULTIPLY")
    assert (first.precision.name, first.set[0].name) == ("HALF", "HALF")
    assert (second.precision.name, second.set[0].name) == ("FLOAT", "FLOAT")  # the weight is cast up
    assert [found[kind] for kind in ("ELEMENTWISE", "REDUCE", "UNARY", "SOFTMAX", "SHUFFLE")] == [{"FLOAT"}] * 5
    assert [found[kind] for kind in ("CONSTANT", "CAST", "IDENTITY")] == [{None}] * 3
    assert ("building (this version tells no progress)", None) in seen


@pytest.mark.parametrize("refused", [1, 2, 3])
def test_constraints_are_relaxed_step_by_step(
    trt86: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    """TensorRT 8.6 finds no implementation of some fused regions whose every layer is held to its type."""
    asked: list[tuple[set[str], int]] = []

    def build(self: Any, network: Any, config: Any) -> bytes | None:
        asked.append((set(config.flags), config.builder_optimization_level))
        return b"plan" if len(asked) > refused else None

    monkeypatch.setattr(FakeBuilder, "build_serialized_network", build)
    plan = build_plan(trt86, write_mixed(tmp_path), MIXED_PROFILE, EngineOptions())
    assert (plan.record["constraints"], plan.record["relaxed_optimization_level"]) == (
        ("obey", "prefer", "islands")[refused - 1], 0,
    )  # fmt: skip
    obey, prefer = {"FP16", "OBEY_PRECISION_CONSTRAINTS"}, {"FP16", "PREFER_PRECISION_CONSTRAINTS"}
    assert asked == [(obey, 3), (obey, 0), (prefer, 0), (prefer, 0)][: refused + 1]
    found: dict[str, set[str | None]] = {}
    for layer in FakeBuilder.last.network.layers:
        found.setdefault(layer.type.name, set()).add(None if layer.precision is None else layer.precision.name)
    # The FP32 arithmetic keeps its type to the last; what only moves values, and the FP16 products, are let go.
    assert [found[kind] for kind in ("ELEMENTWISE", "REDUCE", "UNARY", "SOFTMAX")] == [{"FLOAT"}] * 4
    assert found["SHUFFLE"] == ({None} if refused == 3 else {"FLOAT"})
    assert found["MATRIX_MULTIPLY"] == ({None, "FLOAT"} if refused == 3 else {"HALF", "FLOAT"})


def test_a_named_level_is_kept_while_constraints_are_relaxed(
    trt86: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels: list[int] = []
    monkeypatch.setattr(
        FakeBuilder,
        "build_serialized_network",
        lambda self, network, config: levels.append(config.builder_optimization_level),
    )
    with pytest.raises(EngineError, match="cannot build the engine"):
        build_plan(trt86, write_mixed(tmp_path), MIXED_PROFILE, EngineOptions(optimization_level=2))
    assert levels == [2, 2, 2]


def test_an_fp32_graph_needs_no_constraints(trt86: Any, tmp_path: Path) -> None:
    with GraphWriter(tmp_path, "plain") as writer:
        x = writer.input("inputs_embeds", TensorProto.FLOAT, ["batch", "length", 8])
        writer.output(writer.op("Sqrt", x), "hidden_states", TensorProto.FLOAT, ["batch", "length", 8])
        writer.save()
    build_plan(trt86, OnnxGraph(tmp_path / "model.onnx"), MIXED_PROFILE, EngineOptions())
    assert FakeBuilder.last.config.flags == set()
    assert all(layer.precision is None for layer in FakeBuilder.last.network.layers)


def test_options_reach_the_builder(trt86: Any, tmp_path: Path) -> None:
    cache = tmp_path / "timing.cache"
    options = EngineOptions(workspace_mib=256, optimization_level=5, timing_cache=cache)
    for content in (b"+", b"++"):
        build_plan(trt86, write_mixed(tmp_path), MIXED_PROFILE, options)
        assert cache.read_bytes() == content
    config = FakeBuilder.last.config
    assert (config.workspace, config.builder_optimization_level) == (256 << 20, 5)


def test_what_a_version_lacks_is_refused_by_name(trt86: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = write_mixed(tmp_path)
    with pytest.raises(EngineError, match=r"precision bf16 is not possible: TensorRT 8\.6\.0 has no BF16"):
        check_precision(trt86, "bf16")
    with pytest.raises(EngineError, match=r"computeCapability is for TensorRT-RTX only: TensorRT 8\.6\.0"):
        build_plan(trt86, graph, MIXED_PROFILE, EngineOptions(compute_capabilities=("8.6",)))
    (tmp_path / "old.cache").write_bytes(b"of another GPU")
    with pytest.raises(EngineError, match=r"timingCache .*old\.cache does not fit"):
        build_plan(trt86, graph, MIXED_PROFILE, EngineOptions(timing_cache=tmp_path / "old.cache"))
    monkeypatch.delattr(FakeConfig, "builder_optimization_level")
    with pytest.raises(EngineError, match=r"TensorRT 8\.6\.0 has no builderOptimizationLevel"):
        build_plan(trt86, graph, MIXED_PROFILE, EngineOptions(optimization_level=2))


def test_what_tensorrt_says_is_part_of_the_message(trt86: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, network: Any, config: Any) -> None:
        engine_module._log_of(trt86).log(FakeLogger.Severity.ERROR, "no tactic for node_7\nmore")

    monkeypatch.setattr(FakeBuilder, "build_serialized_network", fail)
    with pytest.raises(EngineError, match=r"TensorRT 8\.6\.0 cannot build the engine: no tactic for node_7$"):
        build_plan(trt86, write_mixed(tmp_path), MIXED_PROFILE, EngineOptions())

    def no_gpu(self: Any, log: Any) -> None:
        raise TypeError("pybind11::init(): factory function returned nullptr")

    monkeypatch.setattr(FakeBuilder, "__init__", no_gpu)
    with pytest.raises(EngineError, match="cannot create a builder; TensorRT builds on a machine with an NVIDIA GPU"):
        build_plan(trt86, write_mixed(tmp_path), MIXED_PROFILE, EngineOptions())


# ---- refusals -------------------------------------------------------------------------------------------------------


def write_custom(folder: Path) -> OnnxGraph:
    """Write a graph with an operator that only a plugin library has."""
    x = helper.make_tensor_value_info("inputs_embeds", TensorProto.FLOAT, ["tokens", 8])
    y = helper.make_tensor_value_info("hidden_states", TensorProto.FLOAT, ["tokens", 8])
    node = helper.make_node("AttentionPlugin", ["inputs_embeds"], ["hidden_states"], "attention_0", domain="trt")
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("trt", 1)]
    model = helper.make_model(helper.make_graph([node], "custom", [x], [y]), opset_imports=opsets, ir_version=8)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return OnnxGraph(folder / "model.onnx")


def test_custom_operators_are_named_with_the_flag(rtx: Any, tmp_path: Path) -> None:
    with pytest.raises(
        EngineError,
        match=r"unsupported operators: AttentionPlugin \(1 node\(s\), first 'attention_0'\).*--pluginLibrary",
    ):
        build_plan(rtx, write_custom(tmp_path), MIXED_PROFILE, EngineOptions(compute_capabilities=("8.6",)))


def test_plugin_libraries(rtx: Any, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"pluginLibrary .*none\.so does not exist"):
        load_plugins(rtx, [tmp_path / "none.so"])
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(EngineError, match=r"pluginLibrary .*text\.so cannot be loaded: "):
        load_plugins(rtx, [tmp_path / "text.so"])
    known = _some_library()
    if known is not None:
        load_plugins(rtx, [known])


def _some_library() -> Path | None:
    """Return a shared library that this process uses already."""
    words = Path("/proc/self/maps").read_text().split() if Path("/proc/self/maps").is_file() else []
    return next((Path(word) for word in words if word.endswith("libc.so.6")), None)


def test_rtx_refusals(rtx: Any, graphs: Callable[[str, str], Path], tmp_path: Path) -> None:
    graph = write_mixed(tmp_path)
    with pytest.raises(EngineError, match=r"does not build for compute capability 9\.0; allowed: .*8\.6.*12\.0"):
        build_plan(rtx, graph, MIXED_PROFILE, EngineOptions(compute_capabilities=("9.0",)))
    with pytest.raises(EngineError, match="keeps no timing cache"):
        build_plan(rtx, graph, MIXED_PROFILE, EngineOptions(timing_cache=tmp_path / "cache"))
    with pytest.raises(EngineError, match="profile generation lacks input inputs_embeds"):
        build_plan(rtx, graph, {"generation": {}}, EngineOptions(compute_capabilities=("8.6",)))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"optimization_level": 6}, "builderOptimizationLevel is 6"),
        ({"workspace_mib": 0}, "workspaceMiB is 0"),
        ({"compute_capabilities": ("86",)}, "computeCapability is '86'; give major.minor"),
        ({"compute_capabilities": ("8.6", "8.6")}, "names one twice"),
    ],
)
def test_options_are_checked(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineOptions(**values)


@pytest.mark.parametrize(("content", "words"), [(None, "is missing"), (b"", "is no ONNX graph"), (b"ftrt", "no ONNX")])
def test_files_that_are_no_graph(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "model.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(EngineError, match=words):
        OnnxGraph(path)


# ---- choosing a backend ---------------------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Let the test say which bindings there are: a module, or the exception that its import raises."""
    modules: dict[str, Any] = {}

    def import_module(name: str) -> Any:
        if isinstance(modules.get(name), Exception):
            raise modules[name]
        if name not in modules:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return modules[name]

    monkeypatch.setattr(importlib, "import_module", import_module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: modules.get(name))
    return modules


def test_first_installed_backend(installed: dict[str, Any]) -> None:
    assert choose_backend().name == "onnxruntime"
    assert choose_backend().title == "ONNX Runtime"
    installed["tensorrt_rtx"] = SimpleNamespace(__name__="tensorrt_rtx", __version__="1.4.0")
    assert choose_backend().title == "TensorRT-RTX 1.4.0"
    installed["tensorrt"] = SimpleNamespace(__name__="tensorrt", __version__="10.9.0")
    assert choose_backend().title == "TensorRT 10.9.0"
    assert choose_backend("tensorrt_rtx").name == "tensorrt_rtx"
    installed["tensorrt"] = OSError("libnvinfer.so.10: cannot open shared object file")
    assert choose_backend().name == "tensorrt_rtx"
    with pytest.raises(EngineError, match=r'libnvinfer.*install it with pip install "trt_cpspec\[tensorrt\]"'):
        choose_backend("tensorrt")


def test_backends_that_cannot_be_had(installed: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match=r'TensorRT-RTX cannot be imported .*"trt_cpspec\[rtx\]"'):
        choose_backend("tensorrt_rtx")
    with pytest.raises(ConfigError, match="unknown backend 'tensorrtx'; did you mean"):
        choose_backend("tensorrtx")


def test_title(trt86: Any) -> None:
    assert title_of(trt86) == "TensorRT 8.6.0"


# ---- progress -------------------------------------------------------------------------------------------------------


def test_progress_is_one_number_that_never_falls() -> None:
    seen: list[float | None] = []
    tree = ProgressTree(lambda _, done: seen.append(done))
    tree.start("build", None, 2)
    tree.start("inner", "build", 4)
    tree.step("inner", 0)
    tree.step("inner", 3)
    tree.finish("inner")
    tree.step("build", 0)
    tree.start("inner", "build", 2)  # the same phase again, in the next step
    tree.step("inner", 0)
    tree.step("build", 1)
    tree.step("unknown", 1)
    tree.start("loop", "loop", 1)
    assert seen[:8] == [0, 0, 0.125, 0.5, 0.5, 0.5, 0.75, 1]
    assert all(0 <= share <= 1 for share in seen if share is not None)
