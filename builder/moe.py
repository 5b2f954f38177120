"""A mixture-of-experts layer in opset 17 primitives: exact top-k routing, and two ways to apply the chosen experts.

Few rows (a step of a batch) gather the weights of their own experts: nothing else is read. Many rows (a prefill) walk
through all experts, each applied to every row and added with the row's share of it, which is zero where the row did
not choose it: one expert's weights and products are in flight at a time, however many rows there are. An ``If`` on the
number of rows takes one of the two. TensorRT and TensorRT-RTX parse both; neither knows ``NonZero``, by which rows
would be sorted to experts.

The values in between are those of TensorRT's own layer (``IMoELayer``: hidden states, chosen experts, their scores,
and weights stacked as ``[E, H, I]``, ``[E, H, I]`` and ``[E, I, H]``), which can take the place of the ``If`` where a
GPU has it.

Source of the arithmetic: ``transformers`` 4.57, ``Qwen3OmniMoeThinkerTextSparseMoeBlock`` and
``Qwen3OmniMoeTalkerTextSparseMoeBlock``. The router is FP32; of equal probabilities the expert of the lower index wins,
as ONNX defines ``TopK`` (TensorRT leaves it open).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from trt_cpspec.config import Section
from trt_cpspec.errors import ConfigError

from .graph import Value
from .linear import Products


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """Sizes of a mixture of experts; the field names are the keys of the official config.

    Attributes
    ----------
    num_experts, num_experts_per_tok : int
        E, and k of them for each row.
    moe_intermediate_size : int
        Width of one expert, I.
    norm_topk_prob : bool
        Whether the k probabilities are scaled to a sum of 1.
    shared_expert_intermediate_size : int
        Width of the expert that every row takes, gated by a sigmoid; 0 is none.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    shared_expert_intermediate_size: int = 0

    @classmethod
    def from_section(cls, section: Section) -> MoeSpec:
        """Read the sizes; a missing or contradictory key is a ConfigError that names it."""
        section.require("decoder_sparse_step", 1)
        section.require("mlp_only_layers", [])
        experts = section.integer("num_experts", minimum=1)
        chosen = section.integer("num_experts_per_tok", minimum=1)
        if chosen > experts:
            raise ConfigError(f"{section.where}: num_experts_per_tok is {chosen}, num_experts only {experts}")
        shared = "shared_expert_intermediate_size"
        return cls(
            num_experts=experts,
            num_experts_per_tok=chosen,
            moe_intermediate_size=section.integer("moe_intermediate_size", minimum=1),
            norm_topk_prob=section.boolean("norm_topk_prob"),
            shared_expert_intermediate_size=section.integer(shared, minimum=0) if section.has(shared) else 0,
        )

    def gathered_rows(self, max_batch_size: int) -> int:
        """Return up to how many rows gather: a step of the largest batch, unless that would read more than all."""
        return max(1, min(max_batch_size, self.num_experts // self.num_experts_per_tok))


class MoeWriter:
    """Writes the mixtures of one decoder.

    Parameters
    ----------
    products : Products
    spec : MoeSpec
    inputs : str
        The decoder's input, ``[B, T, H]``.
    hidden_size : int
        H.
    gathered_rows : int
        Up to so many rows gather their experts' weights; more walk through all of them.
    """

    def __init__(self, products: Products, spec: MoeSpec, inputs: str, hidden_size: int, gathered_rows: int) -> None:
        self._graph, self._products, self._spec = products.graph, products, spec
        self._hidden_size, self._gathered_rows = hidden_size, gathered_rows
        self._few: str | None = None
        # One value for all layers: TensorRT-RTX follows shapes that depend on one another a few steps far.
        self._shape = self._graph.op("Shape", inputs)

    def layer(self, name: str, hidden: str) -> str:
        """Write the mixture whose tensors begin with ``name``: ``[B, T, H]`` to ``[B, T, H]``."""
        graph = self._graph
        rows = graph.op("Reshape", hidden, graph.constant([-1, self._hidden_size], np.int64))  # [N, H]
        experts, scores, shares = self._routed(name, rows)
        stacks = self._stacks(name)
        self._products.narrowed(rows)  # written here, where both ways see it
        mixed = graph.choose(
            self._are_few(rows),
            lambda: self._unfolded(self._gathered(rows, experts, scores, stacks)),
            lambda: self._unfolded(self._walked(rows, shares, stacks)),
            Value(TensorProto.FLOAT, ("batch", "length", self._hidden_size)),
        )
        if self._spec.shared_expert_intermediate_size:
            mixed = graph.op("Add", mixed, self._shared(name, hidden))
        return mixed

    def _routed(self, name: str, rows: str) -> tuple[str, str, str]:
        """Return the chosen experts ``[N, k]``, their scores ``[N, k]``, and the scores of all ``[E, N, 1]``."""
        graph, spec = self._graph, self._spec
        router = self._products.weights.read(f"{name}.gate.weight", (spec.num_experts, self._hidden_size))
        stored = graph.weight(f"{name}.gate.weight", router.shape[::-1], [np.ascontiguousarray(router.T)])
        logits = graph.op("MatMul", rows, stored, output=f"{name}.router_logits")
        probabilities = graph.op("Softmax", logits, axis=-1)
        count = graph.constant([spec.num_experts_per_tok], np.int64)
        outputs = [f"{name}.probabilities", f"{name}.experts"]
        scores, experts = graph.op_n("TopK", [probabilities, count], outputs, axis=-1)
        if spec.norm_topk_prob:
            total = graph.op("ReduceSum", scores, graph.constant([1], np.int64), keepdims=1)
            scores = graph.op("Div", scores, total, output=f"{name}.scores")
        zeros = graph.op("ConstantOfShape", graph.op("Shape", probabilities))
        spread = graph.op("ScatterElements", zeros, experts, scores, axis=1)  # [N, E]
        shares = graph.op("Unsqueeze", graph.op("Transpose", spread, perm=[1, 0]), graph.constant([2], np.int64))
        return experts, scores, shares

    def _stacks(self, name: str) -> tuple[str, str, str]:
        """Store gate and up ``[E, H, I]`` and down ``[E, I, H]``; one expert's matrix is in memory at a time."""
        outer, inner = self._hidden_size, self._spec.moe_intermediate_size
        shapes = {"gate_proj": (inner, outer), "up_proj": (inner, outer), "down_proj": (outer, inner)}
        gate, up, down = (self._stack(name, part, shape) for part, shape in shapes.items())
        return gate, up, down

    def _stack(self, name: str, part: str, shape: tuple[int, int]) -> str:
        products, experts = self._products, self._spec.num_experts

        def blocks() -> Iterator[NDArray[np.float32]]:
            for index in range(experts):
                yield np.ascontiguousarray(products.weights.read(f"{name}.experts.{index}.{part}.weight", shape).T)

        label = f"{name}.experts.{part}.weight"
        stored = self._graph.weight(label, [experts, *shape[::-1]], blocks(), products.dtype)
        return products.typed(stored, products.element)

    def _are_few(self, rows: str) -> str:
        """Return the boolean scalar by which rows gather; it is the same in every layer."""
        if self._few is None:
            graph = self._graph
            extent = graph.op("Gather", graph.op("Shape", rows), graph.constant(0, np.int64))
            self._few = graph.op("LessOrEqual", extent, graph.constant(self._gathered_rows, np.int64))
        return self._few

    def _gathered(self, rows: str, experts: str, scores: str, stacks: tuple[str, str, str]) -> str:
        """Apply to each row the weights that it chose, read for it alone."""
        graph, products = self._graph, self._products
        # The bound is for TensorRT, which plans memory for the longest pass of a profile, taken this way or not.
        few, experts, scores = (self._sliced(value, 0, self._gathered_rows) for value in (rows, experts, scores))
        gate, up, down = (products.typed(graph.op("Gather", stack, experts), products.element) for stack in stacks)
        column = graph.op("Unsqueeze", few, graph.constant([1, 2], np.int64))  # [n, 1, 1, H]
        inner = products.activated(products.product(column, gate), products.product(column, up))  # [n, k, 1, I]
        outputs = products.product(inner, down, wide=True)  # [n, k, 1, H]
        shares = graph.op("Unsqueeze", scores, graph.constant([2, 3], np.int64))
        mixed = graph.op("ReduceSum", graph.op("Mul", outputs, shares), graph.constant([1, 2], np.int64), keepdims=0)
        # No row is left over where this way is taken; both ways must give the extent of the input.
        return graph.op("Concat", mixed, self._sliced(rows, self._gathered_rows, _END), axis=0)

    def _walked(self, rows: str, shares: str, stacks: tuple[str, str, str]) -> str:
        """Apply every expert to all rows, one after another, and add up each row's shares."""
        graph, products, spec = self._graph, self._products, self._spec
        outer, inner = self._hidden_size, spec.moe_intermediate_size
        value = products.narrowed(rows)

        def step(carried: str, gate: str, up: str, down: str, share: str) -> str:
            for weight in (gate, up, down):
                products.typed(weight, products.element)
            activated = products.activated(products.product(value, gate), products.product(value, up))
            part = graph.op("Mul", products.product(activated, down, wide=True), share)
            # Not a product with zero: an expert that a row did not choose may overflow FP16, and 0 * inf is no number.
            chosen = graph.op("Greater", share, graph.constant(0, np.float32))
            return graph.op("Add", carried, graph.op("Where", chosen, part, graph.constant(0, np.float32)))

        start = graph.op("ConstantOfShape", graph.op("Shape", rows))
        carried, share = Value(TensorProto.FLOAT, ("rows", outer)), Value(TensorProto.FLOAT, ("rows", 1))
        wide, narrow = Value(products.element, (outer, inner)), Value(products.element, (inner, outer))
        walked = dict(zip((*stacks, shares), (wide, wide, narrow, share), strict=True))
        return graph.accumulate(step, start, carried, walked)

    def _unfolded(self, rows: str) -> str:
        """Return rows ``[N, H]`` as ``[B, T, H]``: both ways of an ``If`` must visibly give one shape."""
        return self._graph.op("Reshape", rows, self._shape)

    def _shared(self, name: str, hidden: str) -> str:
        """Write the expert that every row takes, scaled by a sigmoid of the row: ``[B, T, H]`` to ``[B, T, H]``."""
        graph, products, outer = self._graph, self._products, self._hidden_size
        gate = products.weights.read(f"{name}.shared_expert_gate.weight", (1, outer))
        stored = graph.weight(f"{name}.shared_expert_gate.weight", (outer, 1), [np.ascontiguousarray(gate.T)])
        opening = graph.op("Sigmoid", graph.op("MatMul", hidden, stored))  # [B, T, 1]
        inner = self._spec.shared_expert_intermediate_size
        return graph.op("Mul", products.gated_mlp(hidden, f"{name}.shared_expert", outer, inner), opening)

    def _sliced(self, value: str, start: int, stop: int) -> str:
        """Slice the rows of a value."""
        first, last, axis = (self._graph.constant([number], np.int64) for number in (start, stop, 0))
        return self._graph.op("Slice", value, first, last, axis)


_END = 2**31 - 1
"""Beyond the last row; TensorRT's indices have 32 bits."""
