"""safetensors files larger than memory: read by row, write by stream.

The ``safetensors`` package loads a whole file, or maps it whole, and its numpy side knows no bfloat16. A builder that
must stay under 1 GiB while it converts 8 GB, and a runtime that looks up a few rows of a 1.2 GB text embedding, need
neither. The format is an 8-byte little-endian header length, a JSON header, and the raw bytes.
Source of the format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .durable import naming, replacing, sync
from .errors import ConfigError

MAX_HEADER_BYTES = 100 * 1024 * 1024
"""The format's own limit on the header."""

MAX_RANK = 8
MAX_ELEMENTS = 2**47
"""Of a tensor, an empty one's other extents included: beyond it no array of any type can be described."""

GRAPH_DATA_FILE = "model.onnx.data"
"""The weights of a component's graph."""

WEIGHT_INDEX = "model.weights.json"
"""Where each of them lies, for readers without ONNX."""

CHUNK_BYTES = 32 * 1024 * 1024
"""How much of a tensor is read at a time."""

# BF16 has no numpy dtype: its 16 bits are the upper half of a float32.
_STORED: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"),
    "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("i1"),
    "U8": np.dtype("u1"), "BOOL": np.dtype("?"),
}  # fmt: skip
_FLOATING = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Where one tensor lies in a file.

    Attributes
    ----------
    dtype : str
        The format's name of it: ``F32``, ``BF16``, ...
    shape : tuple of int
    offset : int
        First byte, from the start of the file.
    nbytes : int
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class TensorFile:
    """One safetensors file, opened for reading. Nothing but the header is kept in memory.

    Raises
    ------
    ConfigError
        The file is missing, cut short, or not a safetensors file.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        try:
            self._tensors = dict(_read_header(self.path))
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"{self.path} cannot be read as a safetensors file: {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def names(self) -> list[str]:
        """Return the names of the tensors, in the order of the file."""
        return list(self._tensors)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise a ConfigError when a tensor is absent or has another shape than its config asks for."""
        if self.info(name).shape != shape:
            raise ConfigError(
                f"{self.path}: tensor {name} has shape {list(self.info(name).shape)}, its config asks for {list(shape)}"
            )

    def read_weight(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Read a tensor of a known shape, and refuse one that is all zero or not finite."""
        self.check(name, shape)
        values = self.read(name)
        if not np.isfinite(values).all() or not values.any():
            raise ConfigError(f"{self.path}: tensor {name} is all zero or not finite; build the engine folder again")
        return values

    def info(self, name: str) -> TensorInfo:
        """Return dtype, shape and place of a tensor; a ConfigError names it when it is absent."""
        if name not in self._tensors:
            raise ConfigError(
                f"{self.path} has no tensor {name!r}; it holds {', '.join(sorted(self._tensors)[:8])}, ..."
            )
        return self._tensors[name]

    def chunks(self, name: str) -> Iterator[NDArray[np.float32]]:
        """Yield a floating-point tensor as float32 blocks of whole rows, about 32 MiB of file each.

        Yields
        ------
        ndarray, shape [rows, ...], float32
            Consecutive blocks along the first axis. A scalar or vector comes as one block of its own shape.
        """
        info = self.info(name)
        if info.dtype not in _FLOATING:
            raise ConfigError(f"{self.path}: tensor {name!r} is {info.dtype}, a floating-point type is needed")
        stored = _STORED[info.dtype]
        rows = info.shape[0] if info.shape else 1
        row_bytes = info.nbytes // max(rows, 1)
        step = max(1, CHUNK_BYTES // max(row_bytes, 1)) if len(info.shape) > 1 else max(rows, 1)
        with self.path.open("rb") as file:
            for start in range(0, rows, step):
                count = min(step, rows - start)
                file.seek(info.offset + start * row_bytes)
                flat = np.fromfile(file, dtype=stored, count=count * row_bytes // stored.itemsize)
                if flat.nbytes != count * row_bytes:
                    raise ConfigError(f"{self.path} was cut short while it was read, within the tensor {name!r:.80}")
                yield _to_float32(flat, info.dtype).reshape((count, *info.shape[1:]) if info.shape else ())

    def read(self, name: str) -> NDArray[np.float32]:
        """Read a whole floating-point tensor as float32, in the shape of the file."""
        info = self.info(name)
        out = np.empty(info.shape, np.float32)
        start = 0
        for block in self.chunks(name):
            if not info.shape:
                return block
            out[start : start + len(block)] = block
            start += len(block)
        return out

    def stored(self, name: str, dtype: str) -> NDArray[Any]:
        """Map a matrix that must be of this type, to be copied to a device as it is; a ConfigError names another."""
        if self.info(name).dtype != dtype:
            raise ConfigError(
                f"{self.path}: tensor {name} is {self.info(name).dtype}, the CodePredictor's weights are {dtype}: the "
                f"files are of different builds; build the engine folder again"
            )
        return self.rows(name).stored

    def rows(self, name: str) -> RowTable:
        """Map a floating-point matrix read-only: its rows are read from disk when they are looked up."""
        info = self.info(name)
        if info.dtype not in _FLOATING or len(info.shape) != 2 or not info.nbytes:
            raise ConfigError(
                f"{self.path}: tensor {name} is {info.dtype} {list(info.shape)}, a float matrix is needed"
            )
        # A plain view: indexing np.memmap itself costs several microseconds a row.
        stored = np.memmap(self.path, _STORED[info.dtype], "r", info.offset, info.shape).view(np.ndarray)
        return RowTable(stored, info.dtype)


class RowTable:
    """A matrix in its stored dtype, looked up by row.

    Attributes
    ----------
    stored : ndarray, shape [n, width]
        BF16 as the 16 bits of each value.
    dtype : str
        ``F32``, ``F16`` or ``BF16``.
    """

    def __init__(self, stored: NDArray[Any], dtype: str) -> None:
        self.stored, self.dtype = stored, dtype

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.stored)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return ``(n, width)``."""
        return self.stored.shape

    def __getitem__(self, rows: Any) -> NDArray[np.float32]:
        """Return one row, or several, as float32."""
        return _to_float32(self.stored[rows], self.dtype)


def _read_header(path: Path) -> Iterator[tuple[str, TensorInfo]]:
    if not path.is_file():  # opening a pipe would wait for its writer
        raise ValueError("there is no such file")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(MAX_HEADER_BYTES, max(size - 8, 0)):
            raise ValueError(f"a header of {length} bytes does not fit a file of {size}")
        header = json.loads(file.read(length), object_pairs_hook=_unique)
    if not isinstance(header, dict):
        raise ValueError("the header is no JSON object")
    _check_cover(header, size - 8 - length)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = (_natural(number) for number in entry["data_offsets"])
        shape = tuple(_natural(extent) for extent in entry["shape"])
        if entry["dtype"] not in _STORED:
            raise ValueError(f"tensor {name!r:.80} has the unknown dtype {entry['dtype']!r:.80}")
        wanted = math.prod(shape) * _STORED[entry["dtype"]].itemsize
        if len(shape) > MAX_RANK or math.prod(max(extent, 1) for extent in shape) > MAX_ELEMENTS:
            raise ValueError(f"tensor {name!r:.80} has the impossible shape {shape!r:.80}")
        if end - begin != wanted or 8 + length + end > size:
            raise ValueError(f"tensor {name!r:.80} does not fit: the file is cut short or damaged")
        yield name, TensorInfo(dtype=entry["dtype"], shape=shape, offset=8 + length + begin, nbytes=wanted)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("the header names a tensor, or a key of one, twice")
    return values


def _check_cover(header: Mapping[str, Any], size: int) -> None:
    """Refuse tensors that overlap, leave holes, or leave bytes over: the format allows none of that."""
    entries = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
    spans = sorted((_natural(begin), _natural(end)) for begin, end in entries)
    reached = 0
    for begin, end in spans:
        if begin != reached:
            raise ValueError(f"the tensors overlap or leave a hole at byte {min(begin, reached)} of the data")
        reached = max(end, reached)
    if reached != size:
        raise ValueError(f"its tensors take {reached} bytes, there are {size}: the file is cut short or damaged")


def _natural(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r:.40} stands where a size belongs")
    return value


def _to_float32(flat: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    if dtype == "BF16":
        return (flat.astype(np.uint32) << 16).view(np.float32)
    return flat.astype(np.float32, copy=False)


def to_bfloat16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round float32 to bfloat16, to the nearest, ties to even, and return the 16 bits of each value."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedTensor:
    """A tensor to be written: its type and shape now, its values when its turn comes.

    Attributes
    ----------
    dtype : str
        ``F32``, ``F16`` or ``BF16``.
    shape : tuple of int
    blocks : callable
        Returns an iterator of float32 arrays whose values, in order, fill the shape.
    source : str or None
        What an error calls it; None is its name in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    blocks: Callable[[], Iterator[NDArray[np.float32]]]
    source: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes it takes in a file."""
        return int(np.prod(self.shape, dtype=np.int64)) * _STORED[self.dtype].itemsize


def encode(values: NDArray[np.float32], dtype: str, name: str) -> bytes:
    """Return the bytes of float32 values in ``dtype`` (``F32``, ``F16``, ``BF16``).

    Raises
    ------
    ConfigError
        A finite value overflows FP16, or a value is not finite. The message names the tensor.
    """
    if not np.isfinite(values).all():
        raise ConfigError(f"tensor {name!r} holds a value that is not finite: the checkpoint is damaged")
    if dtype == "BF16":
        return to_bfloat16_bits(values).tobytes()
    with np.errstate(over="ignore"):
        cast = values.astype(_STORED[dtype])
    if not np.isfinite(cast).all():
        largest = float(np.abs(values).max())
        raise ConfigError(
            f"tensor {name!r} holds {largest:.6g}, beyond FP16's 65504; build with --precision fp32 instead"
        )
    return cast.tobytes()


def write_tensors(path: Path, tensors: Mapping[str, StreamedTensor]) -> None:
    """Write a safetensors file tensor by tensor, through a temporary file that replaces ``path`` at the end."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as partial, naming(path, partial), partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors.items():
            written = sum(file.write(encode(block, tensor.dtype, tensor.source or name)) for block in tensor.blocks())
            if written != tensor.nbytes:
                raise ValueError(f"tensor {name!r} gave {written} bytes, {tensor.nbytes} were announced")
        sync(file)
