"""Products with the weights of a checkpoint, and the float types in which a decoder's graph computes them."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from .checkpoint import Weights
from .graph import ELEMENT, GraphWriter, transposed


class Products:
    """Writes linear layers, and keeps track of which values are not FP32.

    Parameters
    ----------
    graph : GraphWriter
    weights : Weights
    dtype : str
        ``F32``, ``F16`` or ``BF16``: how weights are stored.
    narrow : bool
        Compute the products in that type too, unless one is asked for wide.

    Attributes
    ----------
    element : int
        ONNX's number of the stored type.
    """

    def __init__(self, graph: GraphWriter, weights: Weights, dtype: str, *, narrow: bool) -> None:
        self.graph, self.weights, self.dtype = graph, weights, dtype
        self.element = ELEMENT[dtype]
        self._product_element = self.element if narrow else TensorProto.FLOAT
        self._types: dict[str, int] = {}  # of the values that are not FP32
        self._casts: dict[tuple[str, int], str] = {}

    def linear(self, value: str, names: list[str], widths: list[int], inner: int, *, wide: bool = False) -> str:
        """Write one product with several ``[out, in]`` weights side by side; ``wide`` computes it in FP32."""

        def blocks() -> NDArray[np.float32]:
            parts = [self.weights.read(name, (width, inner)) for name, width in zip(names, widths, strict=True)]
            return parts[0] if len(parts) == 1 else np.concatenate(parts)

        label = "+".join([names[0], *(name.rsplit(".", 2)[1] for name in names[1:])])
        stored = self.typed(
            self.graph.weight(label, [inner, sum(widths)], transposed(blocks), self.dtype), self.element
        )
        return self.product(value, stored, wide=wide)

    def product(self, value: str, stored: str, *, wide: bool = False) -> str:
        """Write the FP32 result of a product with a matrix, or a stack of them, of any type."""
        element = TensorProto.FLOAT if wide else self._product_element
        product = self.graph.op("MatMul", self.cast(value, element), self.cast(stored, element))
        return self.cast(self.typed(product, element), TensorProto.FLOAT)

    def gated_mlp(self, value: str, name: str, outer: int, inner: int) -> str:
        """Write SwiGLU: ``down(silu(gate(x)) * up(x))``, ``[..., outer]`` to ``[..., outer]``."""
        names = [f"{name}.gate_proj.weight", f"{name}.up_proj.weight"]
        gate, up = self.graph.op_n("Split", [self.linear(value, names, [inner, inner], outer)], 2, axis=-1)
        return self.linear(self.activated(gate, up), [f"{name}.down_proj.weight"], [outer], inner, wide=True)

    def activated(self, gate: str, up: str) -> str:
        """Write ``silu(gate) * up``."""
        return self.graph.op("Mul", self.graph.op("Mul", gate, self.graph.op("Sigmoid", gate)), up)

    def typed(self, value: str, element: int) -> str:
        """Note the type of a value."""
        self._types[value] = element
        return value

    def cast(self, value: str, element: int) -> str:
        """Return the value in a float type; each value is cast to it once."""
        if self._types.get(value, TensorProto.FLOAT) == element:
            return value
        if (value, element) not in self._casts:
            self._casts[value, element] = self.typed(self.graph.op("Cast", value, to=element), element)
        return self._casts[value, element]


def rotated(graph: GraphWriter, heads: str, cos: str, sin: str) -> str:
    """Rotate ``[B, heads, T, headDim]`` by the angles of its rows, each ``[B or 1, 1, T, headDim / 2]``."""
    first, second = graph.op_n("Split", [heads], 2, axis=-1)
    left = graph.op("Sub", graph.op("Mul", first, cos), graph.op("Mul", second, sin))
    right = graph.op("Add", graph.op("Mul", second, cos), graph.op("Mul", first, sin))
    return graph.op("Concat", left, right, axis=-1)


def standardised(graph: GraphWriter, value: str, eps: float) -> str:
    """Bring the last axis to mean 0 and variance 1: a LayerNorm without its weights."""
    centred = graph.op("Sub", value, graph.op("ReduceMean", value, axes=[-1], keepdims=1))
    variance = graph.op("ReduceMean", graph.op("Mul", centred, centred), axes=[-1], keepdims=1)
    return graph.op("Div", centred, graph.op("Sqrt", graph.op("Add", variance, graph.constant(eps, np.float32))))


def gelu(graph: GraphWriter, value: str) -> str:
    """Apply the exact (erf) GELU."""
    erf = graph.op("Erf", graph.op("Mul", value, graph.constant(math.sqrt(0.5), np.float32)))
    half = graph.op("Mul", value, graph.constant(0.5, np.float32))
    return graph.op("Mul", half, graph.op("Add", erf, graph.constant(1.0, np.float32)))
