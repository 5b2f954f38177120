"""What a graph's file may ask for: sizes that exist, and weights that lie beside it.

A parser that is given an ONNX file reads whatever path stands in it and takes memory for whatever shape. So the file is
looked through first: every tensor of it, those of sub-graphs, attributes and functions included.
Source of the layout: the ONNX documentation, "External data".
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onnx import TensorProto

from trt_cpspec.config import MAX_INTEGER
from trt_cpspec.durable import check_inside
from trt_cpspec.errors import EngineError
from trt_cpspec.tensorfile import MAX_ELEMENTS, MAX_RANK

_BITS = {
    **dict.fromkeys((TensorProto.DOUBLE, TensorProto.INT64, TensorProto.UINT64, TensorProto.COMPLEX64), 64),
    **dict.fromkeys((TensorProto.FLOAT, TensorProto.INT32, TensorProto.UINT32), 32),
    **dict.fromkeys((TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.INT16, TensorProto.UINT16), 16),
    **dict.fromkeys((TensorProto.INT8, TensorProto.UINT8, TensorProto.BOOL), 8),
    **dict.fromkeys((TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2), 8),
    TensorProto.COMPLEX128: 128,
}
"""Bits of an element; a type that is not here is not checked against its bytes."""

_MAX_DEPTH = 64
"""Of graphs within graphs."""


def check_files(path: Path, model: Any) -> None:
    """Refuse a graph whose tensors are impossible, or lie outside of its folder.

    Parameters
    ----------
    path : Path
        ``model.onnx``.
    model : ModelProto
        What was read from it, without external data.

    Raises
    ------
    EngineError
        The message names the tensor, and what it asks for.
    """
    check_inside(path, path.parent)
    _check_names(path, model.graph)
    for item in (*model.graph.input, *model.graph.output):
        for dim in item.type.tensor_type.shape.dim:
            if dim.HasField("dim_value") and not 0 <= dim.dim_value <= MAX_INTEGER:
                raise EngineError(f"{path}: {item.name!r:.80} has an extent of {dim.dim_value}, no tensor can have it")
    for tensor in _tensors_of(model):
        _check_tensor(path, tensor)


def _check_names(path: Path, graph: Any) -> None:
    """Refuse names that are no UTF-8: protobuf hands them out as bytes, which nothing here expects."""
    names = [item.name for item in (*graph.input, *graph.output, *graph.initializer)]
    for node in graph.node:
        names += [node.name, node.op_type, *node.input, *node.output, *(item.name for item in node.attribute)]
    for name in names:
        if not isinstance(name, str):
            raise EngineError(f"{path}: the name {name!r:.80} is not UTF-8: the file is damaged")


def _check_tensor(path: Path, tensor: Any) -> None:
    where, dims = f"{path}: the weight {tensor.name!r:.80}", list(tensor.dims)
    if len(dims) > MAX_RANK or min(dims, default=0) < 0 or math.prod(max(dim, 1) for dim in dims) > MAX_ELEMENTS:
        raise EngineError(f"{where} has the impossible shape {dims!r:.80}")
    needed = -(-math.prod(dims) * _BITS.get(tensor.data_type, 0) // 8)
    if tensor.data_location != TensorProto.EXTERNAL:
        if tensor.HasField("raw_data") and needed and len(tensor.raw_data) != needed:
            raise EngineError(f"{where} has {len(tensor.raw_data)} bytes, its shape {dims} takes {needed}")
        return
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    if (
        not isinstance(location, str)
        or not location
        or "\0" in location
        or Path(location).is_absolute()
        or ".." in Path(location).parts
    ):
        raise EngineError(f"{where} lies at {location!r:.80}: only files of the graph's own folder are read")
    file = path.parent / location
    check_inside(file, path.parent)
    if not file.is_file():
        raise EngineError(f"{where} lies in {file}, which does not exist")
    offset, length = (_natural(where, key, entries.get(key)) for key in ("offset", "length"))
    taken = needed if length is None else length
    if (offset or 0) + taken > file.stat().st_size or (needed and taken != needed):
        raise EngineError(
            f"{where} takes {needed} bytes of {file}, {taken} are announced from byte {offset or 0} of "
            f"{file.stat().st_size}: the file is cut short or damaged"
        )


def _natural(where: str, key: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise EngineError(f"{where} has the {key} {text!r:.40}, which is no size")
    return int(text)


def _tensors_of(model: Any) -> Iterator[Any]:
    """Yield every tensor of a model."""
    yield from _tensors_in(model.graph, 0)
    for function in model.functions:
        for node in function.node:
            yield from _tensors_at(node, 0)


def _tensors_in(graph: Any, depth: int) -> Iterator[Any]:
    if depth > _MAX_DEPTH:
        raise EngineError(f"graphs are nested more than {_MAX_DEPTH} deep")
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        yield from _tensors_at(node, depth)


def _tensors_at(node: Any, depth: int) -> Iterator[Any]:
    for attribute in node.attribute:
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
        for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
            yield from (sparse.values, sparse.indices)
        for graph in ([attribute.g] if attribute.HasField("g") else []) + list(attribute.graphs):
            yield from _tensors_in(graph, depth + 1)
