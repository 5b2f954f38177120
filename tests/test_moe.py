"""The mixture of experts: both ways of a graph against a layer written out in numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto
from trt_cpspec.builder.graph import GraphWriter
from trt_cpspec.builder.linear import Products
from trt_cpspec.builder.moe import MoeSpec, MoeWriter

from trt_cpspec.config import Section
from trt_cpspec.errors import ConfigError
from trt_cpspec.runtime import GRAPH_FILE
from trt_cpspec.session import GraphSession
from trt_cpspec.tensorfile import GRAPH_DATA_FILE

F32 = NDArray[np.float32]
HIDDEN, FEW = 12, 3
CONFIG = {
    "decoder_sparse_step": 1, "mlp_only_layers": [], "num_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 8, "norm_topk_prob": True,
}  # fmt: skip


class Tensors(dict[str, F32]):
    """Weights by name, as the builder reads them."""

    def read(self, name: str, shape: tuple[int, ...]) -> F32:
        assert self[name].shape == shape
        return self[name]


def tensors(spec: MoeSpec, seed: int = 0) -> Tensors:
    random = np.random.default_rng(seed)
    inner, shared = spec.moe_intermediate_size, spec.shared_expert_intermediate_size
    shapes = {"mlp.gate": (spec.num_experts, HIDDEN)}
    names = {f"mlp.experts.{index}": inner for index in range(spec.num_experts)}
    if shared:
        names["mlp.shared_expert"] = shared
        shapes["mlp.shared_expert_gate"] = (1, HIDDEN)
    for name, width in names.items():
        shapes |= {f"{name}.gate_proj": (width, HIDDEN), f"{name}.up_proj": (width, HIDDEN)}
        shapes[f"{name}.down_proj"] = (HIDDEN, width)
    made = {f"{name}.weight": random.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}
    return Tensors(made)


def write(folder: Path, spec: MoeSpec, weights: Tensors, dtype: str = "F32") -> GraphSession:
    """Write one layer, its routing given out too, and open it."""
    with GraphWriter(folder, "mixture") as graph:
        hidden = graph.input("hidden", TensorProto.FLOAT, ["batch", "length", HIDDEN])
        products: Any = Products(graph, weights, dtype, narrow=False)  # type: ignore[arg-type]
        mixed = MoeWriter(products, spec, hidden, HIDDEN, FEW).layer("mlp", hidden)
        graph.output(mixed, "mixed", TensorProto.FLOAT, ["batch", "length", HIDDEN])
        graph.output("mlp.experts", "experts", TensorProto.INT64, ["rows", spec.num_experts_per_tok])
        scores = "mlp.scores" if spec.norm_topk_prob else "mlp.probabilities"
        graph.output(scores, "scores", TensorProto.FLOAT, ["rows", spec.num_experts_per_tok])
        graph.save()
    return GraphSession(folder / GRAPH_FILE)


def silu(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return x / (1 + np.exp(-x))


def mlp(weights: Tensors, name: str, row: F32) -> NDArray[np.float64]:
    gate, up, down = (weights[f"{name}.{part}_proj.weight"].astype(np.float64) for part in ("gate", "up", "down"))
    return down @ (silu(gate @ row) * (up @ row))


def reference(spec: MoeSpec, weights: Tensors, row: F32) -> tuple[NDArray[np.float64], list[int], NDArray[np.float64]]:
    """Return a row's output, its experts and their scores: softmax over all, the k largest, lower index first."""
    logits = (weights["mlp.gate.weight"] @ row).astype(np.float64)
    probabilities = np.exp(logits - logits.max())
    probabilities /= probabilities.sum()
    experts = sorted(range(spec.num_experts), key=lambda e: (-np.float32(probabilities[e]), e))[
        : spec.num_experts_per_tok
    ]
    scores = probabilities[experts]
    if spec.norm_topk_prob:
        scores /= scores.sum()
    out = sum(s * mlp(weights, f"mlp.experts.{e}", row) for e, s in zip(experts, scores, strict=True))
    if spec.shared_expert_intermediate_size:
        opening = 1 / (1 + np.exp(-(weights["mlp.shared_expert_gate.weight"][0] @ row)))
        out = out + opening * mlp(weights, "mlp.shared_expert", row)
    return np.asarray(out), experts, scores


def rows(batch: int, length: int) -> F32:
    return np.random.default_rng([7, batch, length]).normal(size=(batch, length, HIDDEN)).astype(np.float32)


SHAPES = [(1, 1), (3, 1), (1, 3), (2, 2), (1, 4), (2, 9)]
"""Up to FEW rows and more."""


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("shared", [0, 10])
@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_both_ways_are_the_layer_in_numpy(tmp_path: Path, dtype: str, shared: int, normed: bool) -> None:
    config = CONFIG | {"norm_topk_prob": normed, "shared_expert_intermediate_size": shared}
    spec = MoeSpec.from_section(Section(config, "config"))
    weights = tensors(spec)
    if dtype == "F16":  # what is stored is what is computed with
        weights = Tensors({name: value.astype(np.float16).astype(np.float32) for name, value in weights.items()})
    session = write(tmp_path, spec, weights, dtype)
    for shape in SHAPES:
        given = rows(*shape)
        found = session.run({"hidden": given})
        assert found["mixed"].shape == given.shape
        for index, row in enumerate(given.reshape(-1, HIDDEN)):
            mixed, experts, scores = reference(spec, weights, row)
            assert found["experts"][index].tolist() == experts
            np.testing.assert_allclose(found["scores"][index], scores, rtol=0, atol=1e-6)
            np.testing.assert_allclose(found["mixed"].reshape(-1, HIDDEN)[index], mixed, rtol=0, atol=2e-5)


def test_a_row_does_not_depend_on_the_rows_beside_it(tmp_path: Path) -> None:
    spec = MoeSpec.from_section(Section(CONFIG, "config"))
    session = write(tmp_path, spec, tensors(spec))
    given = rows(2, 9)
    together = session.run({"hidden": given})["mixed"]
    alone = np.zeros_like(given)
    for place in np.ndindex(2, 9):
        alone[place] = session.run({"hidden": given[place][None, None]})["mixed"][0, 0]
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-5)


def test_of_equal_experts_the_lower_index_wins(tmp_path: Path) -> None:
    spec = MoeSpec.from_section(Section(CONFIG, "config"))
    weights = tensors(spec)
    weights["mlp.gate.weight"][:] = weights["mlp.gate.weight"][0]
    found = write(tmp_path, spec, weights).run({"hidden": rows(2, 5)})
    assert (found["experts"] == [0, 1]).all()
    np.testing.assert_array_equal(found["scores"], np.full((10, 2), 0.5, np.float32))


@pytest.mark.parametrize("shape", [(1, 1), (2, 9)])
def test_an_expert_that_nobody_chose_is_not_heard(tmp_path: Path, shape: tuple[int, int]) -> None:
    """It may hold weights whose products are not finite."""
    spec = MoeSpec.from_section(Section(CONFIG, "config"))
    weights = tensors(spec)
    given = rows(*shape)
    chosen = {e for row in given.reshape(-1, HIDDEN) for e in reference(spec, weights, row)[1]}
    if chosen == set(range(spec.num_experts)):
        given, chosen = given[:, :1], {e for row in given[:, 0] for e in reference(spec, weights, row)[1]}
        given = np.repeat(given, 6, axis=1)
    before = write(tmp_path, spec, weights).run({"hidden": given})["mixed"]
    for expert in set(range(spec.num_experts)) - chosen:
        weights[f"mlp.experts.{expert}.down_proj.weight"][:] = 3e38
    after = write(tmp_path, spec, weights).run({"hidden": given})["mixed"]
    assert np.isfinite(after).all()
    np.testing.assert_array_equal(after, before)


def test_rows_of_both_kinds_and_no_control_flow(tmp_path: Path) -> None:
    """A step is captured as a CUDA graph, and extents that only grow with the rows let TensorRT plan its memory."""
    spec = MoeSpec.from_section(Section(CONFIG, "config"))
    write(tmp_path, spec, tensors(spec))
    model = onnx.load(str(tmp_path / GRAPH_FILE), load_external_data=False)
    graph = model.graph
    assert not {node.op_type for node in graph.node} & {"If", "Loop", "Scan", "NonZero"}
    makers = {node.output[0]: node.op_type for node in graph.node}
    ((gathered, passed),) = (
        node.input
        for node in graph.node
        if node.op_type == "Concat" and [makers.get(name) for name in node.input] == ["ReduceSum", "MatMul"]
    )
    (needed,) = (node.output[0] for node in graph.node if node.op_type == "Range")
    for name, kind in ((gathered, TensorProto.FLOAT), (passed, TensorProto.FLOAT), (needed, TensorProto.INT32)):
        graph.output.append(onnx.helper.make_tensor_value_info(name, kind, None))
    (tmp_path / GRAPH_FILE).write_bytes(model.SerializeToString())
    session = GraphSession(tmp_path / GRAPH_FILE)
    for batch, length in SHAPES:
        found = session.run({"hidden": rows(batch, length)})
        assert len(found[gathered]) == min(batch * length, FEW)
        assert len(found[passed]) == max(batch * length - FEW, 0)
        assert found[needed].tolist() == list(range(spec.num_experts if batch * length > FEW else 0))


def test_the_layout_of_tensorrts_own_layer(tmp_path: Path) -> None:
    spec = MoeSpec.from_section(Section(CONFIG, "config"))
    write(tmp_path, spec, tensors(spec))
    graph = onnx.load(str(tmp_path / GRAPH_FILE), load_external_data=False).graph
    stacks = {item.name: list(item.dims) for item in graph.initializer if ".experts." in item.name}
    assert stacks == {
        "mlp.experts.gate_proj.weight": [6, HIDDEN, 8],
        "mlp.experts.up_proj.weight": [6, HIDDEN, 8],
        "mlp.experts.down_proj.weight": [6, 8, HIDDEN],
    }


def test_a_step_reads_the_chosen_experts_alone(tmp_path: Path) -> None:
    """Weights that are no numbers show who reads them."""
    spec = MoeSpec.from_section(Section(CONFIG, "config"))
    weights = tensors(spec)
    given = rows(1, 1)
    _, chosen, _ = reference(spec, weights, given[0, 0])
    before = write(tmp_path, spec, weights).run({"hidden": given})["mixed"]
    stacks = TensorPlaces(tmp_path)
    for expert in set(range(spec.num_experts)) - set(chosen):
        for part in ("gate_proj", "up_proj", "down_proj"):
            stacks.fill(f"mlp.experts.{part}.weight", expert, np.nan)
    after = GraphSession(tmp_path / GRAPH_FILE).run({"hidden": given})["mixed"]
    np.testing.assert_array_equal(after, before)
    stacks.fill("mlp.experts.up_proj.weight", chosen[0], np.nan)
    assert np.isnan(GraphSession(tmp_path / GRAPH_FILE).run({"hidden": given})["mixed"]).all()


class TensorPlaces:
    """Weights in a graph's data file, to be damaged: the builder itself refuses what is not finite."""

    def __init__(self, folder: Path) -> None:
        graph = onnx.load(str(folder / GRAPH_FILE), load_external_data=False).graph
        self.items = {item.name: item for item in graph.initializer}
        self.path = folder / GRAPH_DATA_FILE

    def fill(self, name: str, index: int, value: float) -> None:
        item = self.items[name]
        offset = next(int(entry.value) for entry in item.external_data if entry.key == "offset")
        np.memmap(self.path, np.float32, "r+", offset, tuple(item.dims))[index] = value


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("decoder_sparse_step", 2, "decoder_sparse_step is 2, only 1"),
        ("mlp_only_layers", [0], r"mlp_only_layers is \[0\], only \[\]"),
        ("num_experts_per_tok", 7, "num_experts_per_tok is 7, num_experts only 6"),
        ("num_experts_per_tok", 0, "num_experts_per_tok is 0, it must be at least 1"),
        ("norm_topk_prob", 1, "norm_topk_prob must be true or false"),
        ("moe_intermediate_size", None, "moe_intermediate_size must be an integer"),
    ],
)
def test_a_config_that_cannot_be_built_is_refused_by_key(key: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"config: {words}"):
        MoeSpec.from_section(Section(CONFIG | {key: value}, "config"))


@pytest.mark.parametrize(("batch", "few"), [(1, 1), (4, 4), (16, 16), (64, 16)])
def test_a_batch_gathers_while_it_reads_less_than_all(batch: int, few: int) -> None:
    spec = MoeSpec(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True)
    assert spec.gathered_rows(batch) == few
