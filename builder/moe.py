"""A mixture-of-experts layer in opset 17 primitives: exact top-k routing, and two ways to apply the chosen experts.

The first few rows of a pass (all those of a step of a batch) gather the weights of their own experts: nothing else is
read. The rows behind them (the rest of a prefill) pass all experts, as one wide MLP in which what a row did not choose
is zero: the weights are read once however many rows there are, and the memory in use is that of one layer's weights and
of ``E * I`` activations a row. Where a pass has no such rows, all of that is empty.

There is no control flow: a step can be captured as a CUDA graph, and the extents of both parts only grow with the rows,
as TensorRT needs to plan its memory. Nor is there ``NonZero``, by which rows would be sorted to experts: TensorRT-RTX
has none.

The values in between are those of TensorRT's own layer (``IMoELayer``: hidden states, chosen experts, their scores,
and weights stacked as ``[E, H, I]``, ``[E, H, I]`` and ``[E, I, H]``), which can take the place of both ways where a
GPU has it.

Source of the arithmetic: ``transformers`` 4.57, ``Qwen3OmniMoeThinkerTextSparseMoeBlock`` and
``Qwen3OmniMoeTalkerTextSparseMoeBlock``. The router is FP32; of equal probabilities the expert of the lower index wins,
as ONNX defines ``TopK`` (TensorRT leaves it open).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from trt_cpspec.config import Section
from trt_cpspec.errors import ConfigError

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
        """Return how many rows of a pass gather: a step of the largest batch, unless that would read more than all."""
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
        So many rows of a pass gather their experts' weights, the others pass all experts.
    """

    def __init__(self, products: Products, spec: MoeSpec, inputs: str, hidden_size: int, gathered_rows: int) -> None:
        self._graph, self._products, self._spec = products.graph, products, spec
        self._hidden_size, self._gathered_rows = hidden_size, gathered_rows
        # Of the inputs, for all layers: TensorRT-RTX follows shapes that depend on one another a few steps far.
        self._shape = self._graph.op("Shape", inputs)
        self._all, self._width = self._needed_experts()

    def _needed_experts(self) -> tuple[str, str]:
        """Return the experts that rows behind the gathered ones pass, ``[E]``, and their widths' sum, ``[1]``.

        Where there are no such rows it is no experts, and 0.
        """
        graph = self._graph
        batch, length = (graph.op("Gather", self._shape, graph.constant([axis], np.int64)) for axis in (0, 1))
        rest = graph.op("Sub", graph.op("Mul", batch, length), graph.constant([self._gathered_rows], np.int64))
        some = graph.op("Min", graph.op("Max", rest, graph.constant([0], np.int64)), graph.constant([1], np.int64))
        count = graph.op("Mul", some, graph.constant([self._spec.num_experts], np.int64))
        end = graph.op("Cast", graph.op("Squeeze", count), to=TensorProto.INT32)
        experts = graph.op("Range", graph.constant(0, np.int32), end, graph.constant(1, np.int32))
        return experts, graph.op("Mul", count, graph.constant([self._spec.moe_intermediate_size], np.int64))

    def layer(self, name: str, hidden: str) -> str:
        """Write the mixture whose tensors begin with ``name``: ``[B, T, H]`` to ``[B, T, H]``."""
        graph, split = self._graph, self._gathered_rows
        rows = graph.op("Reshape", hidden, graph.constant([-1, self._hidden_size], np.int64))  # [N, H]
        routed = (rows, *self._routed(name, rows))
        stacks = self._stacks(name)
        few, rest = ([self._sliced(value, *ends) for value in routed] for ends in ((0, split), (split, _END)))
        parts = self._gathered(few, stacks), self._passed(rest, stacks)
        mixed = graph.op("Reshape", graph.op("Concat", *parts, axis=0), self._shape)
        if self._spec.shared_expert_intermediate_size:
            mixed = graph.op("Add", mixed, self._shared(name, hidden))
        return mixed

    def _routed(self, name: str, rows: str) -> tuple[str, str]:
        """Return the experts that each row chose and their scores, both ``[N, k]``."""
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
        return experts, scores

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

    def _gathered(self, routed: Sequence[str], stacks: Sequence[str]) -> str:
        """Apply to each row the weights that it chose, read for it alone: ``[n, H]`` to ``[n, H]``."""
        graph, products, (rows, experts, scores) = self._graph, self._products, routed
        column = graph.op("Unsqueeze", rows, graph.constant([1, 2], np.int64))  # [n, 1, 1, H]
        inner, down = self._activated(column, experts, stacks)
        outputs = products.product(inner, down, wide=True)  # [n, k, 1, H]
        shares = graph.op("Unsqueeze", scores, graph.constant([2, 3], np.int64))
        return graph.op("ReduceSum", graph.op("Mul", outputs, shares), graph.constant([1, 2], np.int64), keepdims=0)

    def _passed(self, routed: Sequence[str], stacks: Sequence[str]) -> str:
        """Apply every expert to every row and keep what each row chose: ``[n, H]`` to ``[n, H]``."""
        graph, products, (rows, experts, scores) = self._graph, self._products, routed
        count = graph.op("Slice", graph.op("Shape", rows), *(graph.constant([end], np.int64) for end in (0, 1)))
        # By number, although these are all: TensorRT would keep a copy of the constant, laid out for the product.
        inner, down = self._activated(rows, self._all, stacks)  # [E, n, I]
        shares = graph.op("Unsqueeze", self._shares(count, experts, scores), graph.constant([2], np.int64))
        # Not a product with zero: an expert that a row did not choose may overflow FP16, and 0 * inf is no number.
        chosen, zero = graph.op("Greater", shares, graph.constant(0, np.float32)), graph.constant(0, np.float32)
        kept = graph.op("Where", chosen, graph.op("Mul", inner, shares), zero)
        # The experts side by side are one wide MLP, and its down product adds them up.
        wide = graph.op("Concat", count, self._width, axis=0)
        flat = graph.op("Reshape", graph.op("Transpose", kept, perm=[1, 0, 2]), wide)  # [n, E * I]
        tall = graph.op("Concat", self._width, graph.constant([self._hidden_size], np.int64), axis=0)
        stack = products.typed(graph.op("Reshape", down, tall), products.element)  # [E * I, H]
        return products.product(flat, stack, wide=True)

    def _shares(self, count: str, experts: str, scores: str) -> str:
        """Spread the scores of ``count`` rows over all experts, 0 where a row did not choose one: ``[E, n]``."""
        graph = self._graph
        extents = graph.op("Concat", count, graph.constant([self._spec.num_experts], np.int64), axis=0)
        spread = graph.op("ScatterElements", graph.op("ConstantOfShape", extents), experts, scores, axis=1)
        return graph.op("Gather", graph.op("Transpose", spread, perm=[1, 0]), self._all)

    def _activated(self, value: str, experts: str, stacks: Sequence[str]) -> tuple[str, str]:
        """Return ``silu(gate(x)) * up(x)`` of some experts, and their down weights, all read by number."""
        products = self._products
        gate, up, down = (
            products.typed(self._graph.op("Gather", stack, experts), products.element) for stack in stacks
        )
        return products.activated(products.product(value, gate), products.product(value, up)), down

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
