"""The portable graphs: which operators they hold, how they are stored, and what their writer refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from trt_cpspec.builder.graph import OPSET, GraphWriter

from trt_cpspec.errors import ConfigError
from trt_cpspec.runtime import GRAPH_FILE
from trt_cpspec.session import GraphSession
from trt_cpspec.tensorfile import GRAPH_DATA_FILE

DECODERS = ("talker", "code_predictor")
COMPONENTS = (*DECODERS, "code2wav")


@pytest.fixture(scope="session")
def half(variants: dict[str, Any], build: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(variants["tts_b"].checkpoint, tmp_path_factory.mktemp("half") / "engine", precision="fp16")


@pytest.fixture(scope="session")
def graphs(variants: dict[str, Any], half: Path) -> dict[tuple[str, str], Path]:
    """Every graph that is written here, by precision and component."""
    engines = {"fp32": variants["tts_b"].engine, "fp16": half}
    return {(kind, name): engine / name / GRAPH_FILE for kind, engine in engines.items() for name in COMPONENTS}


def load(path: Path) -> onnx.ModelProto:
    return onnx.load(str(path), load_external_data=False)


def shapes(values: Any) -> dict[str, tuple[int, list[int | str]]]:
    return {
        value.name: (
            value.type.tensor_type.elem_type,
            [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim],
        )
        for value in values
    }


# -- what is in a graph -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("component", COMPONENTS)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_only_operators_of_opset_17(graphs: dict[tuple[str, str], Path], precision: str, component: str) -> None:
    path = graphs[precision, component]
    onnx.checker.check_model(str(path), full_check=True)
    model = load(path)
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", OPSET)] == [("", 17)]
    assert not model.functions
    for node in model.graph.node:
        assert node.domain == ""
        assert node.op_type not in ("NonZero", "Clip", "If", "Loop", "Scan")
        schema = onnx.defs.get_schema(node.op_type, OPSET, "")  # raises for an operator that opset 17 lacks
        assert not schema.deprecated


@pytest.mark.parametrize("component", COMPONENTS)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_weights_lie_in_the_data_file(graphs: dict[tuple[str, str], Path], precision: str, component: str) -> None:
    path = graphs[precision, component]
    external = [item for item in load(path).graph.initializer if item.data_location == TensorProto.EXTERNAL]
    end = 0
    for item in external:
        place = {entry.key: entry.value for entry in item.external_data}
        assert place["location"] == GRAPH_DATA_FILE
        assert int(place["offset"]) >= end
        assert int(place["offset"]) % 64 == 0
        end = int(place["offset"]) + int(place["length"])
    assert end == (path.parent / GRAPH_DATA_FILE).stat().st_size
    assert len(external) > 10
    assert path.stat().st_size < 200_000  # what stays inside is small


@pytest.mark.parametrize("component", DECODERS)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_signature_of_a_decoder(graphs: dict[tuple[str, str], Path], precision: str, component: str) -> None:
    graph = load(graphs[precision, component]).graph
    hidden, layers = (24, 3) if component == "talker" else (16, 2)
    given, made = shapes(graph.input), shapes(graph.output)
    assert given.pop("inputs_embeds") == (TensorProto.FLOAT, ["batch", "length", hidden])
    assert given.pop("positions") == (TensorProto.INT32, ["batch", "length"])
    assert made.pop("hidden_states") == (TensorProto.FLOAT, ["batch", "length", hidden])
    cache = (TensorProto.FLOAT, ["batch", 2, "slots", 16])
    names = [f"{kind}_{index}" for index in range(layers) for kind in ("key", "value")]
    assert given == {f"past_{name}": cache for name in names}
    assert made == {f"present_{name}": cache for name in names}
    written = [node for node in graph.node if node.op_type == "ScatterElements"]
    assert [(node.input[0], node.output[0]) for node in written] == [(f"past_{n}", f"present_{n}") for n in names]


@pytest.mark.parametrize("component", DECODERS)
def test_fp16_stores_matrices_and_computes_in_fp32(graphs: dict[tuple[str, str], Path], component: str) -> None:
    graph = load(graphs["fp16", component]).graph
    weights = {item.name: item for item in graph.initializer if item.data_location == TensorProto.EXTERNAL}
    halves = {name for name, item in weights.items() if item.data_type == TensorProto.FLOAT16}
    assert halves == {name for name in weights if "_proj.weight" in name}
    assert all("norm" in name for name in set(weights) - halves)
    # Each half is cast before anything computes with it.
    readers = [node for node in graph.node if halves & set(node.input)]
    assert len(readers) == len(halves)
    assert {(node.op_type, node.attribute[0].i) for node in readers} == {("Cast", TensorProto.FLOAT)}


# -- the writer -------------------------------------------------------------------------------------------------------


def write(folder: Path, blocks: list[np.ndarray], shape: tuple[int, ...], dtype: str = "F32") -> None:
    with GraphWriter(folder, "test") as graph:
        value = graph.input("x", TensorProto.FLOAT, ["n", shape[0]])
        graph.weight("small", [3], [np.ones(3, np.float32)])  # makes the next offset need its padding
        weight = graph.weight("layer.weight", shape, blocks, dtype)
        if dtype == "F16":
            weight = graph.op("Cast", weight, to=TensorProto.FLOAT)
        graph.output(graph.op("MatMul", value, weight), "y", TensorProto.FLOAT, ["n", shape[1]])
        graph.save()


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_a_weight_in_blocks_is_the_whole_weight(tmp_path: Path, dtype: str) -> None:
    weight = np.arange(12, dtype=np.float32).reshape(4, 3)
    write(tmp_path, [weight[:1], weight[1:3], weight[3:]], weight.shape, dtype)
    assert sorted(path.name for path in tmp_path.iterdir()) == [GRAPH_FILE, GRAPH_DATA_FILE]
    given = np.eye(4, dtype=np.float32)[:2]
    np.testing.assert_array_equal(GraphSession(tmp_path / GRAPH_FILE).run({"x": given})["y"], weight[:2])


@pytest.mark.parametrize(
    ("weight", "dtype", "error", "words"),
    [
        (np.full((4, 3), 1e5), "F16", ConfigError, "'layer.weight' holds 100000, beyond FP16's 65504"),
        (np.full((4, 3), np.nan), "F32", ConfigError, "'layer.weight' holds a value that is not finite"),
        (np.ones((3, 3)), "F32", ValueError, "'layer.weight' gave 36 bytes"),
    ],
)
def test_a_weight_that_cannot_be_stored_leaves_no_file(
    tmp_path: Path, weight: np.ndarray, dtype: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        write(tmp_path, [weight.astype(np.float32)], (4, 3), dtype)
    assert not list(tmp_path.iterdir())


def test_the_largest_half_is_no_overflow(tmp_path: Path) -> None:
    write(tmp_path, [np.full((4, 3), -65504, np.float32)], (4, 3), "F16")
    with pytest.raises(ConfigError, match="beyond FP16"):
        write(tmp_path, [np.full((4, 3), -65520, np.float32)], (4, 3), "F16")


def test_equal_constants_are_shared_and_others_are_not(tmp_path: Path) -> None:
    with GraphWriter(tmp_path, "test") as graph:
        assert graph.constant(1, np.int64) == graph.constant(1, np.int64)
        others = [graph.constant(1, np.int64), graph.constant([1], np.int64), graph.constant(1, np.int32)]
        assert len({*others, graph.constant(2, np.int64)}) == 4
    assert not list(tmp_path.iterdir())


def test_an_invalid_graph_is_refused(tmp_path: Path) -> None:
    with GraphWriter(tmp_path, "test") as graph:
        graph.output(graph.op("Add", "missing", "absent"), "y", TensorProto.FLOAT, [1])
        with pytest.raises(onnx.checker.ValidationError):
            graph.save()
