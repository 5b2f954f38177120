"""The portable decoder graph: one transformer with its KV cache, for Thinker, Talker and CodePredictor.

Inputs ``inputs_embeds [B, T, H]`` float32, ``positions [B, T]`` int32, ``past_key_i`` / ``past_value_i``
``[B, kvHeads, S, headDim]`` float32; outputs ``hidden_states [B, T, H]`` float32 (after the final norm, every row)
and ``present_key_i`` / ``present_value_i`` of the same shape as the past, meant to be bound to the same address.
Row ``t`` writes slot ``positions[b, t]`` and reads the slots up to it, so a rewind is nothing but smaller positions.
A Thinker also gives ``accept_hidden_states [B, T, H]`` float32, the residual stream behind one of its layers.

The architecture is Qwen3's decoder: RMSNorm, RMSNorm of each query and key head, rotary embedding, grouped-query
attention, SwiGLU or a mixture of experts (:mod:`.moe`). The multimodal rotary embedding of Thinker and Talker turns
each pair of channels by one of three positions; for text, speech and audio the three are equal and count the slots, so
``positions`` serves as slot and as angle. A model that sees takes the three apart, as ``rotary_positions [B, T, 3]``
int32, for images have height and width; its Thinker adds ``deepstack_embeds [B, T, D * H]`` float32, zero but in the
rows of images, behind its first D layers. Only :meth:`_LayerWriter._write_rotary` knows the angles.

Types: a strongly typed TensorRT network computes each node in the types written here. The residual
stream, norms, rotary angles, softmax, ``silu(gate) * up`` and the ``down_proj`` product are FP32; the other products
take their input in the weights' type and give it back in FP32 where ``narrow`` is set. Without it they widen their
weights, which ONNX Runtime does once, when it loads the graph: a CPU has no FP16 product, and would convert at every
pass. The cache, and with it the two products of attention, has a type of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from onnx import TensorProto

from trt_cpspec.config import DecoderSpec
from trt_cpspec.rotary import rotary_frequencies

from .checkpoint import Weights
from .graph import ELEMENT, GraphWriter
from .linear import Products, rotated
from .moe import MoeSpec, MoeWriter

MASKED = np.float32(-1e30)
"""Added to the score of a slot that a row must not see."""


def write_decoder(
    graph: GraphWriter,
    spec: DecoderSpec,
    weights: Weights,
    prefix: str,
    *,
    dtype: str,
    narrow: bool = False,
    cache_dtype: str = "F32",
    moe: MoeSpec | None = None,
    gathered_rows: int = 1,
    accept_hidden_layer: int | None = None,
    rotary_sections: Sequence[int] | None = None,
    deepstack_layers: int = 0,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Write the nodes and weights of a decoder.

    Parameters
    ----------
    graph : GraphWriter
    spec : DecoderSpec
    weights : Weights
    prefix : str
        Of the tensor names: ``thinker.model``, ``talker.model`` or ``talker.code_predictor.model``.
    dtype : str
        ``F32``, ``F16`` or ``BF16``: the type in which weights are stored.
    narrow : bool
        Compute the products with them in that type too, but for ``down_proj``: for TensorRT.
    cache_dtype : str
        The same for the KV cache: the type of its inputs and outputs.
    moe : MoeSpec or None
        The mixture that stands in every layer; None is one MLP.
    gathered_rows : int
        How many rows of a pass gather their experts in a mixture.
    accept_hidden_layer : int or None
        After how many layers ``accept_hidden_states`` is taken; None is no such output.
    rotary_sections : sequence of int or None
        How many pairs of channels turn by time, height and width (``mrope_section``); None is no such input.
    deepstack_layers : int
        Layers behind which ``deepstack_embeds`` is added, D; 0 is no such input.
    progress : callable
        Called after each layer.
    """
    products = Products(graph, weights, dtype, narrow=narrow)
    layer_writer = _LayerWriter(products, spec, prefix, cache_dtype, rotary_sections)
    shape: list[int | str] = ["batch", "length", spec.hidden_size]
    hidden = graph.input("inputs_embeds", TensorProto.FLOAT, shape)
    if moe is not None:
        layer_writer.experts = MoeWriter(products, moe, hidden, spec.hidden_size, gathered_rows)
    seen: list[str] = []
    if deepstack_layers:
        width = deepstack_layers * spec.hidden_size
        stack = graph.input("deepstack_embeds", TensorProto.FLOAT, ["batch", "length", width])
        seen = graph.op_n("Split", [stack], deepstack_layers, axis=-1) if deepstack_layers > 1 else [stack]
    for index in range(spec.num_hidden_layers):
        hidden = layer_writer.layer(index, hidden)
        if index < len(seen):
            hidden = graph.op("Add", hidden, seen[index])
        if index + 1 == accept_hidden_layer:
            graph.output(hidden, "accept_hidden_states", TensorProto.FLOAT, shape)
        progress()
    layer_writer.norm(hidden, f"{prefix}.norm.weight", spec.hidden_size, output="hidden_states")
    graph.rename_output("hidden_states", TensorProto.FLOAT, shape)


def rotary_axes(sections: Sequence[int]) -> list[int]:
    """Return for each pair of channels the axis of a position that turns it: 0 time, 1 height, 2 width.

    The axes are interleaved: pairs 1, 4, 7, ... are height's and 2, 5, 8, ... width's, as many as their sections say.
    Source: ``transformers`` 4.57, ``Qwen3OmniMoeThinkerTextRotaryEmbedding``.
    """
    axes = [0] * sum(sections)
    for axis in (1, 2):
        for pair in range(axis, 3 * sections[axis], 3):
            axes[pair] = axis
    return axes


class _LayerWriter:
    """What the layers share: position-dependent values, and how products and mixtures are written."""

    def __init__(
        self,
        products: Products,
        spec: DecoderSpec,
        prefix: str,
        cache_dtype: str,
        rotary_sections: Sequence[int] | None,
    ) -> None:
        self.products, self.graph, self.weights = products, products.graph, products.weights
        self.spec, self.prefix = spec, prefix
        self.experts: MoeWriter | None = None
        graph = self.graph
        self.cache_element = ELEMENT[cache_dtype]
        self.group = spec.num_attention_heads // spec.num_key_value_heads
        self.cache_shape: list[int | str] = ["batch", spec.num_key_value_heads, "slots", spec.head_dim]
        positions = graph.input("positions", TensorProto.INT32, ["batch", "length"])
        self._write_rotary(positions, rotary_sections)
        self._positions = positions
        self._mask: str | None = None
        self._slots: str | None = None

    def layer(self, index: int, hidden: str) -> str:
        """Write one decoder layer and return its output."""
        name = f"{self.prefix}.layers.{index}"
        normed = self.norm(hidden, f"{name}.input_layernorm.weight", self.spec.hidden_size)
        hidden = self.graph.op("Add", hidden, self._attention(index, f"{name}.self_attn", normed))
        normed = self.norm(hidden, f"{name}.post_attention_layernorm.weight", self.spec.hidden_size)
        if self.experts is not None:
            return self.graph.op("Add", hidden, self.experts.layer(f"{name}.mlp", normed))
        sizes = self.spec.hidden_size, self.spec.intermediate_size
        return self.graph.op("Add", hidden, self.products.gated_mlp(normed, f"{name}.mlp", *sizes))

    def norm(self, hidden: str, name: str, width: int, output: str | None = None) -> str:
        """Write an RMSNorm over the last axis, in the form that ONNX Runtime fuses into one node."""
        scale = self.graph.weight(name, [width], [self.weights.read(name, (width,))])
        return self.graph.op("Mul", self._normalised(hidden), scale, output=output)

    def _normalised(self, value: str) -> str:
        graph = self.graph
        square = graph.op("Pow", value, graph.constant(2, np.float32))
        mean = graph.op("ReduceMean", square, axes=[-1], keepdims=1)
        root = graph.op("Sqrt", graph.op("Add", mean, graph.constant(self.spec.rms_norm_eps, np.float32)))
        return graph.op("Div", value, root)

    def _write_rotary(self, positions: str, sections: Sequence[int] | None) -> None:
        graph, half = self.graph, self.spec.head_dim // 2
        frequencies = rotary_frequencies(self.spec.head_dim, self.spec.rope_theta)
        if sections is None:
            column = graph.op("Unsqueeze", positions, graph.constant([1, 3], np.int64))
        else:
            three = graph.input("rotary_positions", TensorProto.INT32, ["batch", "length", 3])
            own = graph.op("Gather", three, graph.constant(rotary_axes(sections), np.int32), axis=2)
            column = graph.op("Unsqueeze", own, graph.constant([1], np.int64))
        column = graph.op("Cast", column, to=TensorProto.FLOAT)
        angles = graph.op("Mul", column, graph.constant(frequencies.reshape(1, 1, 1, half)))  # [B, 1, T, hd/2]
        self._cos, self._sin = graph.op("Cos", angles), graph.op("Sin", angles)

    def _attention(self, index: int, name: str, hidden: str) -> str:
        graph, spec = self.graph, self.spec
        queries, keys, values = self._query_key_value(name, hidden)
        keys = self._cached("key", index, keys)
        values = self._cached("value", index, values)
        # Heads of one group share keys: [B, kv, group * T, headDim] makes grouped attention one plain product.
        folded = graph.op(
            "Reshape", queries, graph.constant([0, spec.num_key_value_heads, -1, spec.head_dim], np.int64)
        )
        folded = self.products.cast(folded, self.cache_element)
        scores = graph.op("MatMul", folded, graph.op("Transpose", keys, perm=[0, 1, 3, 2]))
        scores = self.products.cast(self.products.typed(scores, self.cache_element), TensorProto.FLOAT)
        shares = graph.op("Softmax", graph.op("Add", scores, self._mask_of(keys)), axis=-1)
        mixed = graph.op("MatMul", self.products.cast(shares, self.cache_element), values)
        unfolded = graph.op(
            "Reshape", mixed, graph.constant([0, spec.num_attention_heads, -1, spec.head_dim], np.int64)
        )
        rows = graph.op("Transpose", unfolded, perm=[0, 2, 1, 3])
        width = spec.num_attention_heads * spec.head_dim
        flat = self.products.typed(
            graph.op("Reshape", rows, graph.constant([0, 0, width], np.int64)), self.cache_element
        )
        return self.products.linear(flat, [f"{name}.o_proj.weight"], [spec.hidden_size], width)

    def _query_key_value(self, name: str, hidden: str) -> tuple[str, str, str]:
        """Return queries (scaled) and keys, normed and rotated, and values, each ``[B, heads, T, headDim]``."""
        graph, spec = self.graph, self.spec
        heads, kv_heads, size = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
        names = [f"{name}.{part}_proj.weight" for part in "qkv"]
        product = self.products.linear(
            hidden, names, [heads * size, kv_heads * size, kv_heads * size], spec.hidden_size
        )
        split = graph.op("Reshape", product, graph.constant([0, 0, heads + 2 * kv_heads, size], np.int64))
        by_head = graph.op("Transpose", split, perm=[0, 2, 1, 3])
        sizes = graph.constant([heads + kv_heads, kv_heads], np.int64)
        both, values = graph.op_n("Split", [by_head, sizes], 2, axis=1)
        turned = rotated(graph, graph.op("Mul", self._normalised(both), self._head_scales(name)), self._cos, self._sin)
        sizes = graph.constant([heads, kv_heads], np.int64)
        queries, keys = graph.op_n("Split", [turned, sizes], 2, axis=1)
        return queries, keys, values

    def _head_scales(self, name: str) -> str:
        """Store the norms' weights of all query and key heads; the queries' hold the softmax scale too."""
        size = self.spec.head_dim
        query = self.weights.read(f"{name}.q_norm.weight", (size,)) / np.float32(np.sqrt(size))
        key = self.weights.read(f"{name}.k_norm.weight", (size,))
        rows = [query] * self.spec.num_attention_heads + [key] * self.spec.num_key_value_heads
        return self.graph.weight(f"{name}.qk_norm", [len(rows), 1, size], [np.stack(rows).astype(np.float32)])

    def _cached(self, kind: str, index: int, rows: str) -> str:
        """Write the rows ``[B, kv, T, headDim]`` into their slots and return the whole cache."""
        past = self.graph.input(f"past_{kind}_{index}", self.cache_element, self.cache_shape)
        rows = self.products.cast(rows, self.cache_element)
        if self._slots is None:
            column = self.graph.op("Unsqueeze", self._positions, self.graph.constant([1, 3], np.int64))
            self._slots = self.graph.op("Expand", column, self.graph.op("Shape", rows))
        name = f"present_{kind}_{index}"
        self.graph.op("ScatterElements", past, self._slots, rows, output=name, axis=2)
        self.graph.rename_output(name, self.cache_element, self.cache_shape)
        return self.products.typed(name, self.cache_element)

    def _mask_of(self, cache: str) -> str:
        """Return the additive mask ``[B, 1, group * T, S]``: 0 up to the row's own slot, else a large negative."""
        if self._mask is None:
            graph = self.graph
            extent = graph.op("Gather", graph.op("Shape", cache), graph.constant(2, np.int64))
            slots = graph.op("Cast", extent, to=TensorProto.INT32)
            slots = graph.op("Range", graph.constant(0, np.int32), slots, graph.constant(1, np.int32))
            own = graph.op("Unsqueeze", self._positions, graph.constant([1, 3], np.int64))  # [B, 1, T, 1]
            hidden = graph.op("Greater", slots, own)  # [B, 1, T, S]
            mask = graph.op("Where", hidden, graph.constant(MASKED), graph.constant(0, np.float32))
            self._mask = graph.op("Concat", *([mask] * self.group), axis=2) if self.group > 1 else mask
        return self._mask
