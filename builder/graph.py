"""Write ONNX graphs of opset 17 primitives whose weights stream into one external data file.

A graph written here holds no weight in memory: each initializer is read, converted and appended to
``model.onnx.data`` the moment it is declared. Source of the external data layout: the ONNX documentation,
"External data".
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from trt_cpspec.durable import fill, naming, sync, write_file
from trt_cpspec.runtime import GRAPH_FILE
from trt_cpspec.tensorfile import GRAPH_DATA_FILE, WEIGHT_INDEX, encode

OPSET = 17
"""The last opset that TensorRT 8.6's parser reads."""

IR_VERSION = 8
"""The IR version that goes with opset 17."""

_ALIGNMENT = 64
ELEMENT = {"F32": TensorProto.FLOAT, "F16": TensorProto.FLOAT16, "BF16": TensorProto.BFLOAT16}
"""ONNX's number of each stored type."""


Blocks = Iterable[NDArray[np.float32]]


class GraphWriter:
    """Build one graph: declare inputs, weights and nodes by name, then :meth:`save`.

    Every method that makes a value returns its name. Use it as a context manager: leaving it without :meth:`save`
    removes the files it began.

    Parameters
    ----------
    folder : Path
        Existing folder that receives ``model.onnx`` and ``model.onnx.data``.
    name : str
        Name of the graph.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._name = name
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._initializers: list[onnx.TensorProto] = []
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._counter = 0
        self._graph_path = folder / GRAPH_FILE
        self._data_path = folder / GRAPH_DATA_FILE
        self._partial_data = folder / (GRAPH_DATA_FILE + ".partial")
        self._partial_graph = folder / (GRAPH_FILE + ".partial")
        self._data: BinaryIO = self._partial_data.open("wb")

    def __enter__(self) -> GraphWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with suppress(OSError) if error is not None else naming(self._data_path):
            self._data.close()  # on a full disk it fails as the writing did, which has said so
        self._partial_data.unlink(missing_ok=True)
        self._partial_graph.unlink(missing_ok=True)

    def input(self, name: str, dtype: int, shape: Sequence[int | str]) -> str:
        """Declare a graph input; a string extent is a dynamic one of that name."""
        self._inputs.append(helper.make_tensor_value_info(name, dtype, list(shape)))
        return name

    def output(self, value: str, name: str, dtype: int, shape: Sequence[int | str]) -> None:
        """Declare ``value`` as the graph output ``name``."""
        self._nodes.append(helper.make_node("Identity", [value], [name], name=f"output_{name}"))
        self.rename_output(name, dtype, shape)

    def rename_output(self, name: str, dtype: int, shape: Sequence[int | str]) -> None:
        """Declare a value that already carries its output's name (see ``output=`` of :meth:`op`)."""
        self._outputs.append(helper.make_tensor_value_info(name, dtype, list(shape)))

    def op(self, kind: str, *inputs: str, output: str | None = None, **attributes: Any) -> str:
        """Append a node with one output and return that output's name."""
        return self.op_n(kind, inputs, [output or self._fresh(kind)], **attributes)[0]

    def op_n(self, kind: str, inputs: Sequence[str], outputs: int | Sequence[str], **attributes: Any) -> list[str]:
        """Append a node with several outputs (a count, or their names) and return the names."""
        names = [self._fresh(kind) for _ in range(outputs)] if isinstance(outputs, int) else list(outputs)
        self._nodes.append(helper.make_node(kind, list(inputs), names, name=f"node_{len(self._nodes)}", **attributes))
        return names

    def constant(self, value: Any, dtype: Any = None) -> str:
        """Return the name of a small constant kept inside the graph; equal constants share one initializer."""
        array = np.asarray(value, dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = name = self._fresh("constant")
            self._initializers.append(numpy_helper.from_array(array, name))
        return self._constants[key]

    def weight(self, name: str, shape: Sequence[int], blocks: Blocks, dtype: str = "F32") -> str:
        """Append a weight to the data file and return its name.

        Parameters
        ----------
        name : str
            Name of the initializer; also what an overflow error says.
        shape : sequence of int
        blocks : iterable of ndarray, float32
            Their values, in order, fill ``shape``.
        dtype : str
            ``F32``, ``F16`` or ``BF16``, as stored.
        """
        with naming(self._data_path):
            self._data.write(b"\0" * (-self._data.tell() % _ALIGNMENT))
            offset = self._data.tell()
            length = sum(self._data.write(encode(block, dtype, name)) for block in blocks)
        tensor = TensorProto(name=name, data_type=ELEMENT[dtype], dims=list(shape), data_location=TensorProto.EXTERNAL)
        for key, value in (("location", GRAPH_DATA_FILE), ("offset", offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
        if length != int(np.prod(shape, dtype=np.int64)) * (4 if dtype == "F32" else 2):
            raise ValueError(f"weight {name!r} gave {length} bytes for the shape {tuple(shape)} in {dtype}")
        self._initializers.append(tensor)
        return name

    def save(self, *, index: bool = False) -> None:
        """Write the graph, check it, and put both files in place.

        With ``index``, ``model.weights.json`` beside them says where each weight lies, for readers without ONNX.
        """
        graph = helper.make_graph(self._nodes, self._name, self._inputs, self._outputs, self._initializers)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
        model.producer_name = "trt_cpspec"
        with naming(self._data_path):
            sync(self._data)
        self._data.close()
        fill(self._partial_graph, model.SerializeToString(), self._graph_path)
        os.replace(self._partial_data, self._data_path)  # the checker looks the weights up by their final name
        onnx.checker.check_model(str(self._partial_graph))
        os.replace(self._partial_graph, self._graph_path)
        if index:
            text = json.dumps(self._weight_index(), indent=1) + "\n"
            write_file(self._graph_path.parent / WEIGHT_INDEX, text.encode())

    def _weight_index(self) -> dict[str, Any]:
        stored = {int(number): name for name, number in ELEMENT.items()}
        return {
            tensor.name: {
                "dtype": stored[tensor.data_type],
                "shape": list(tensor.dims),
                "offset": int(next(entry.value for entry in tensor.external_data if entry.key == "offset")),
            }
            for tensor in self._initializers
            if tensor.data_location == TensorProto.EXTERNAL
        }

    def _fresh(self, kind: str) -> str:
        self._counter += 1
        return f"{kind.lower()}_{self._counter}"


def write_heads_graph(path: Path) -> None:
    """Write the product of one hidden state and rows of heads, both inputs: ``[1, C]`` and ``[n, C]`` to ``[1, n]``.

    It holds no weights. On a CPU it runs the heads in the thread pool of the passes; a second pool beside it, that of
    numpy, would wait for the same cores.
    """
    product = helper.make_node("Gemm", ["hidden", "heads"], ["logits"], transB=1)
    values: dict[str, list[int | str]] = {"hidden": [1, "width"], "heads": ["rows", "width"], "logits": [1, "rows"]}
    hidden, heads, logits = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in values.items()
    )
    graph = helper.make_graph([product], "heads", [hidden, heads], [logits])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    onnx.checker.check_model(model)
    write_file(path, model.SerializeToString())


def transposed(read: Callable[[], NDArray[np.float32]]) -> Iterator[NDArray[np.float32]]:
    """Yield a ``[out, in]`` weight as the ``[in, out]`` block that ``MatMul`` wants, read when its turn comes."""
    yield np.ascontiguousarray(read().T)
