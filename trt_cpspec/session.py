"""One graph on one runtime. Only this module talks to ONNX Runtime.

:class:`GraphSession` runs a graph without state. :class:`DecoderSession` runs a decoder whose KV cache is bound to
the graph's past and present at one address, so that no pass copies it.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from .config import DecoderSpec
from .errors import EngineError

SCRATCH_SLOTS = 1
"""Slots of a cache that only padding rows write: the last one."""

PREFILL_CHUNK = 512
"""Rows of one prefill pass; bounds the memory of the attention scores."""

MIN_BUCKET = 64

KEPT_LENGTH = 8
"""Passes of up to this many positions keep their buffers: steps and verify passes."""

Float32 = NDArray[np.float32]


def open_graph(path: Path, *, threads: int | None = None) -> Any:
    """Open a graph file on the CPU; an EngineError says which file could not be used.

    Parameters
    ----------
    path : Path
        ``model.onnx``.
    threads : int or None
        Threads of one pass; None takes all cores.
    """
    if not path.is_file():
        raise EngineError(f"{path} is missing: build the engine folder with cpspec-build")
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if threads is not None:
        options.intra_op_num_threads = threads
    # numpy's threads work between passes: ONNX Runtime's must not spin against them.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime raises many types here, none of them a bug of ours
        hint = "; bf16 needs a GPU: build with --precision fp32 or fp16 for a CPU" if "bfloat16" in str(error) else ""
        raise EngineError(f"{path} cannot be loaded by ONNX Runtime {ort.__version__}: {error}{hint}") from error


def _reported(run: Any, *arguments: Any) -> Any:
    """Call ONNX Runtime; what it raises (no memory, an input it cannot take) is an EngineError."""
    try:
        return run(*arguments)
    except Exception as error:  # its many types share no base of their own
        raise EngineError(f"ONNX Runtime {ort.__version__} failed: {error}") from error


class GraphSession:
    """A graph without state.

    Parameters
    ----------
    path : Path
        ``model.onnx``.
    threads : int or None
    """

    def __init__(self, path: Path, *, threads: int | None = None) -> None:
        self._session = open_graph(path, threads=threads)
        self._outputs = [output.name for output in self._session.get_outputs()]

    @property
    def names(self) -> set[str]:
        """The names of its inputs and outputs."""
        return {item.name for item in self._session.get_inputs()} | set(self._outputs)

    def run(self, feeds: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Run the graph once and return its outputs by name."""
        values = _reported(self._session.run, self._outputs, feeds)
        return dict(zip(self._outputs, values, strict=True))


class HeadSession:
    """Applies heads to a hidden state, in ONNX Runtime's own thread pool.

    Parameters
    ----------
    path : Path
        ``heads.onnx``.
    threads : int or None

    Attributes
    ----------
    run_seconds : float
        Time spent inside ONNX Runtime so far.
    """

    def __init__(self, path: Path, *, threads: int | None = None) -> None:
        self._session = open_graph(path, threads=threads)
        self._io = self._session.io_binding()
        self.run_seconds = 0.0

    def apply(self, heads: Float32, hidden: Float32) -> Float32:
        """Multiply ``[n, C]`` by ``[C]``, without a copy of either; return ``[n]``."""
        logits = np.empty((1, len(heads)), np.float32)
        hidden = np.ascontiguousarray(hidden[None], np.float32)
        _bind(self._io.bind_input, "hidden", hidden)
        _bind(self._io.bind_input, "heads", heads)
        _bind(self._io.bind_output, "logits", logits)
        started = time.perf_counter()
        _reported(self._session.run_with_iobinding, self._io)
        self.run_seconds += time.perf_counter() - started
        row: Float32 = logits[0]
        return row


def decoder_inputs(spec: DecoderSpec) -> dict[str, tuple[int | None, ...]]:
    """Return the inputs of a decoder's graph and their shapes, None where an extent varies."""
    cache = (None, spec.num_key_value_heads, None, spec.head_dim)
    caches = {f"past_{kind}_{index}": cache for index in range(spec.num_hidden_layers) for kind in ("key", "value")}
    return {"inputs_embeds": (None, None, spec.hidden_size), "positions": (None, None), **caches}


def _check_inputs(path: Path, session: Any, expected: dict[str, tuple[int | None, ...]]) -> None:
    """Raise an EngineError when a graph has other inputs than its config asks for, before memory is taken for them."""
    given = {item.name: list(item.shape) for item in session.get_inputs()}
    for name in sorted(given.keys() | expected.keys()):
        wanted, found = expected.get(name), given.get(name)
        if wanted is None or found is None or len(wanted) != len(found):
            raise EngineError(
                f"{path} has not the inputs that config.json asks for: {name} is {found or 'missing'}, not "
                f"{list(wanted) if wanted else 'known'}; build the engine folder again with cpspec-build"
            )
        if any(isinstance(b, int) and a is not None and a != b for a, b in zip(wanted, found, strict=True)):
            raise EngineError(
                f"{path}: the input {name} has shape {found}, config.json asks for {list(wanted)}; build the engine "
                f"folder again with cpspec-build"
            )


def bucket_for(slots: int, capacity: int) -> int:
    """Return the smallest cache extent in use that holds ``slots``: 64, 96, 128, 192, 256, ... up to ``capacity``."""
    size = MIN_BUCKET
    while size < slots:
        size = size * 3 // 2 if size & (size - 1) == 0 else size // 3 * 4
    return min(size, capacity)


class DecoderSession:
    """A decoder graph with its KV cache.

    Parameters
    ----------
    path : Path
        ``model.onnx``, as :mod:`trt_cpspec.builder.decoder` writes it.
    spec : DecoderSpec
    capacity : int
        Positions that a row may use at most.
    threads : int or None

    Attributes
    ----------
    run_seconds : float
        Time spent inside ONNX Runtime so far.
    """

    def __init__(self, path: Path, spec: DecoderSpec, *, capacity: int, threads: int | None = None) -> None:
        self._session = open_graph(path, threads=threads)
        self._spec = spec
        _check_inputs(path, self._session, decoder_inputs(spec))
        self._max_slots = capacity + SCRATCH_SLOTS
        self._cache: dict[str, Float32] = {}
        self._bindings: dict[int, _Binding] = {}
        self.batch = 0
        self.slots = 0
        self.run_seconds = 0.0

    def start(self, batch: int, positions: int) -> None:
        """Begin new sequences: an empty cache for ``batch`` rows and at least ``positions`` positions each."""
        slots = bucket_for(positions + SCRATCH_SLOTS, self._max_slots)
        if (batch, slots) != (self.batch, self.slots):
            self._replace_cache(batch, slots)

    def max_positions(self) -> int | None:
        """Return the positions that one pass takes for each row; the portable graph has no limit."""
        return None

    def clear(self) -> None:
        """Zero the cache: what a NaN left behind must not reach the next sequence."""
        for array in self._cache.values():
            array.fill(0)

    def keep_rows(self, rows: NDArray[np.intp]) -> None:
        """Keep the sequences of these rows and drop the others."""
        old = self._cache
        self._replace_cache(len(rows), self.slots)
        for name, array in self._cache.items():
            array[...] = old[name][rows]

    def forward(self, embeds: Float32, positions: NDArray[np.int64]) -> Float32:
        """Run rows through the decoder, in chunks where they are many.

        Parameters
        ----------
        embeds : ndarray, shape [B, T, H], float32
        positions : ndarray, shape [B, T], int64
            The slot of each row; -1 is padding, whose output means nothing.

        Returns
        -------
        ndarray, shape [B, T, H], float32
            Hidden states after the final norm. The array is reused by the next pass of the same T.

        Raises
        ------
        EngineError
            A position beyond the capacity.
        """
        self._make_room(int(positions.max()))
        if positions.shape[1] <= PREFILL_CHUNK:
            return self._pass(embeds, positions)
        out = np.empty_like(embeds)
        for start in range(0, positions.shape[1], PREFILL_CHUNK):
            part = slice(start, start + PREFILL_CHUNK)
            out[:, part] = self._pass(embeds[:, part], positions[:, part])
        return out

    def _pass(self, embeds: Float32, positions: NDArray[np.int64]) -> Float32:
        binding = self._bindings.get(positions.shape[1])
        if binding is None:
            binding = self._bind(positions.shape[1])
            if positions.shape[1] <= KEPT_LENGTH:  # prompts come in every length, and are not kept
                self._bindings[positions.shape[1]] = binding
        np.copyto(binding.embeds, embeds)
        np.copyto(binding.positions, np.where(positions < 0, self.slots - 1, positions), casting="same_kind")
        started = time.perf_counter()
        _reported(self._session.run_with_iobinding, binding.io)
        self.run_seconds += time.perf_counter() - started
        return binding.hidden

    def _make_room(self, position: int) -> None:
        """Move to a larger cache when a position does not fit; the extents grow geometrically."""
        needed = position + 1 + SCRATCH_SLOTS
        if needed <= self.slots:
            return
        if needed > self._max_slots:
            raise EngineError(f"position {position} is beyond the KV capacity of {self._max_slots - SCRATCH_SLOTS}")
        old, used = self._cache, self.slots - SCRATCH_SLOTS
        self._replace_cache(self.batch, bucket_for(needed, self._max_slots))
        for name, array in self._cache.items():
            array[:, :, :used] = old[name][:, :, :used]

    def _replace_cache(self, batch: int, slots: int) -> None:
        shape = (batch, self._spec.num_key_value_heads, slots, self._spec.head_dim)
        names = [f"{kind}_{index}" for index in range(self._spec.num_hidden_layers) for kind in ("key", "value")]
        try:
            self._cache = {name: np.zeros(shape, np.float32) for name in names}
        except MemoryError as error:
            megabytes = len(names) * math.prod(shape) * 4 / 1e6
            raise EngineError(
                f"the KV cache of {batch} row(s) and {slots} positions takes {megabytes:,.1f} MB, which this machine "
                f"does not have: give a smaller --batchSize; cpspec inspect --memory says what an engine takes"
            ) from error
        self._bindings = {}
        self.batch, self.slots = batch, slots

    def _bind(self, length: int) -> _Binding:
        return _Binding(self._session.io_binding(), self._cache, self.batch, length, self._spec.hidden_size)


class _Binding:
    """The buffers of one pass length; ONNX Runtime reads and writes them in place."""

    def __init__(self, io: Any, cache: dict[str, Float32], batch: int, length: int, width: int) -> None:
        self.io = io
        self.embeds = np.zeros((batch, length, width), np.float32)
        self.positions = np.zeros((batch, length), np.int32)
        self.hidden = np.zeros((batch, length, width), np.float32)
        _bind(io.bind_input, "inputs_embeds", self.embeds)
        _bind(io.bind_input, "positions", self.positions)
        _bind(io.bind_output, "hidden_states", self.hidden)
        for name, array in cache.items():
            _bind(io.bind_input, f"past_{name}", array)
            _bind(io.bind_output, f"present_{name}", array)


def _bind(bind: Any, name: str, array: NDArray[Any]) -> None:
    _reported(bind, name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
