"""One graph on one runtime. Only this module talks to ONNX Runtime.

:class:`GraphSession` runs any graph, and carries the codec's state from call to call. :class:`DecoderSession` runs a
decoder whose KV cache is bound to the graph's past and present at one address, so that no pass copies it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
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

PAST = "past_"
"""How the inputs begin that a graph left as ``present_*`` in the call before."""
KEPT_LENGTH = 8
"""Passes of up to this many positions keep their buffers: steps and verify passes."""

Float32 = NDArray[np.float32]

Shapes = Mapping[str, Sequence[int | None] | None]
"""Tensors by name: their shapes, None where an extent varies, or None where the shape is no matter."""

_MAX_STATE_BYTES = 2**30
_AGAIN = "build the engine folder again with cpspec-build"


@dataclass(frozen=True, slots=True, kw_only=True)
class PassExtras:
    """What a pass takes and gives beyond embeddings and hidden states, where a prompt holds more than text.

    Attributes
    ----------
    rotary : ndarray, shape [B, T, 3], int64, or None
        Time, height and width of each row; None is its slot, three times.
    deepstack : ndarray, shape [B, T, D * H], float32, or None
        Added behind the first D layers; None is zero.
    accepted : ndarray, shape [B, T, H], float32, or None
        Receives ``accept_hidden_states``.
    """

    rotary: NDArray[np.int64] | None = None
    deepstack: Float32 | None = None
    accepted: Float32 | None = None

    def part(self, rows: slice) -> PassExtras:
        """Return the extras of some of the rows."""
        return PassExtras(
            rotary=None if self.rotary is None else self.rotary[:, rows],
            deepstack=None if self.deepstack is None else self.deepstack[:, rows],
            accepted=None if self.accepted is None else self.accepted[:, rows],
        )


NO_EXTRAS = PassExtras()


def check_extras(where: Path, names: Collection[str], extras: PassExtras) -> None:
    """Raise an EngineError where a decoder, by the names of its tensors, has no place for what a pass brings."""
    needs = {"rotary_positions": extras.rotary, "deepstack_embeds": extras.deepstack}
    needs["accept_hidden_states"] = extras.accepted
    missing = [name for name, array in needs.items() if array is not None and name not in names]
    if missing:
        raise EngineError(
            f"{where} has no {', '.join(missing)}: it was built without the vision encoder; build the whole engine "
            f"folder again with cpspec-build"
        )


def check_shapes(where: Path, given: Mapping[str, Sequence[Any]], expected: Shapes) -> None:
    """Raise an EngineError where tensors have other names or shapes than expected; extents that vary fit any."""
    for name in sorted(given.keys() | expected.keys()):
        if name not in expected or name not in given:
            missing, extra = sorted(expected.keys() - given.keys()), sorted(given.keys() - expected.keys())
            raise EngineError(
                f"{where} has not the tensors that config.json asks for: missing {missing or 'none'}, unknown "
                f"{extra or 'none'}; {_AGAIN}"
            )
        wanted, found = expected[name], list(given[name])
        if wanted is not None and (
            len(wanted) != len(found)
            or any(is_fixed(b) and a is not None and a != b for a, b in zip(wanted, found, strict=True))
        ):
            raise EngineError(f"{where}: {name} has shape {found}, config.json asks for {list(wanted)}; {_AGAIN}")


def is_fixed(extent: Any) -> bool:
    """Whether an extent of a graph or a plan is a number, not a name or -1."""
    return isinstance(extent, int) and extent >= 0


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
    """A graph without state, or one whose state is carried from call to call (see :meth:`begin`).

    Parameters
    ----------
    path : Path
        ``model.onnx``.
    threads : int or None
    """

    def __init__(self, path: Path, *, threads: int | None = None) -> None:
        self._session = open_graph(path, threads=threads)
        self._outputs = [output.name for output in self._session.get_outputs()]
        self._path = path
        self._inputs = {item.name: list(item.shape) for item in self._session.get_inputs()}
        self._state_shapes = {name: (1, *shape[1:]) for name, shape in self._inputs.items() if name.startswith(PAST)}

    def check_tensors(self, expected: Shapes) -> None:
        """Raise an EngineError where a graph has other inputs and outputs; a state may be among them."""
        self._check_state()
        past = list(self._state_shapes)
        state = dict.fromkeys(["position", *past, *map(present_name, past)] if past else [])
        outputs = {item.name: list(item.shape) for item in self._session.get_outputs()}
        check_shapes(self._path, {**self._inputs, **outputs}, {**expected, **state})

    @property
    def carries_state(self) -> bool:
        """Whether the graph takes what an earlier call left."""
        return bool(self._state_shapes)

    def run(self, feeds: dict[str, NDArray[Any]], /) -> dict[str, NDArray[Any]]:
        """Run the graph once and return its outputs by name."""
        values = _reported(self._session.run, self._outputs, feeds)
        return dict(zip(self._outputs, values, strict=True))

    def begin(self) -> CarriedCalls:
        """Return what runs calls that follow each other, from an empty state."""
        return CarriedCalls(self, {name: np.zeros(shape, np.float32) for name, shape in self._state_shapes.items()})

    def _check_state(self) -> None:
        """Raise an EngineError where a state has no shape, or takes more than any codec's."""
        shapes = list(self._state_shapes.values())
        if not all(is_fixed(extent) for shape in shapes for extent in shape):
            raise EngineError(f"{self._path}: an input {PAST}* has no fixed shape; {_AGAIN}")
        if 4 * sum(map(math.prod, shapes)) > _MAX_STATE_BYTES:
            raise EngineError(f"{self._path}: its state takes more than {_MAX_STATE_BYTES // 2**20} MiB; {_AGAIN}")


class CarriedCalls:
    """Calls of a graph that follow each other: what one leaves as ``present_*`` is ``past_*`` of the next."""

    def __init__(self, graph: GraphSession, state: dict[str, Float32]) -> None:
        self._graph, self._state = graph, state

    def run(self, feeds: dict[str, NDArray[Any]], /) -> dict[str, NDArray[Any]]:
        """Run the next call and return its outputs by name, but for the state."""
        outputs = self._graph.run({**feeds, **self._state})
        self._state = {name: outputs.pop(present_name(name)) for name in self._state}
        return outputs


def present_name(past: str) -> str:
    """Return the output that is the next call's input ``past_*``."""
    return "present_" + past.removeprefix(PAST)


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


def _check_inputs(path: Path, given: Mapping[str, Sequence[Any]], spec: DecoderSpec) -> None:
    """Raise an EngineError when a graph has other inputs than its config asks for, before memory is taken for them."""
    expected: dict[str, Sequence[int | None] | None] = {**decoder_inputs(spec)}
    if "rotary_positions" in given:  # a model that sees has these two
        expected["rotary_positions"] = (None, None, 3)
    if "deepstack_embeds" in given:
        width, extents = spec.hidden_size, list(given["deepstack_embeds"])
        expected["deepstack_embeds"] = (None, None, None)
        if len(extents) == 3 and extents[2] not in range(width, width * spec.num_hidden_layers + 1, width):
            raise EngineError(
                f"{path}: the input deepstack_embeds has shape {extents}, its last extent must be hidden_size {width} "
                f"times the number of layers behind which it is added; build the engine folder again with cpspec-build"
            )
    check_shapes(path, given, expected)


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
        self._path, self._spec = path, spec
        self._inputs = {item.name: item.shape for item in self._session.get_inputs()}
        self._names = {*self._inputs, *(item.name for item in self._session.get_outputs())}
        _check_inputs(path, self._inputs, spec)
        self._max_slots = capacity + SCRATCH_SLOTS
        self._cache: dict[str, Float32] = {}
        self._bindings: dict[tuple[int, bool], _Binding] = {}
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

    def forward(self, embeds: Float32, positions: NDArray[np.int64], extras: PassExtras = NO_EXTRAS) -> Float32:
        """Run rows through the decoder, in chunks where they are many.

        Parameters
        ----------
        embeds : ndarray, shape [B, T, H], float32
        positions : ndarray, shape [B, T], int64
            The slot of each row; -1 is padding, whose output means nothing.
        extras : PassExtras

        Returns
        -------
        ndarray, shape [B, T, H], float32
            Hidden states after the final norm. The array is reused by the next pass of the same T.

        Raises
        ------
        EngineError
            A position beyond the capacity, or extras that the graph has no place for.
        """
        check_extras(self._path, self._names, extras)
        self._make_room(int(positions.max()))
        if positions.shape[1] <= PREFILL_CHUNK:
            return self._pass(embeds, positions, extras)
        out = np.empty_like(embeds)
        for start in range(0, positions.shape[1], PREFILL_CHUNK):
            part = slice(start, start + PREFILL_CHUNK)
            out[:, part] = self._pass(embeds[:, part], positions[:, part], extras.part(part))
        return out

    def _pass(self, embeds: Float32, positions: NDArray[np.int64], extras: PassExtras) -> Float32:
        key = positions.shape[1], extras.accepted is not None
        binding = self._bindings.get(key)
        if binding is None:
            binding = self._bind(*key)
            if positions.shape[1] <= KEPT_LENGTH:  # prompts come in every length, and are not kept
                self._bindings[key] = binding
        np.copyto(binding.embeds, embeds)
        np.copyto(binding.positions, np.where(positions < 0, self.slots - 1, positions), casting="same_kind")
        if binding.rotary is not None:
            np.copyto(binding.rotary, rotary_of(positions, extras), casting="same_kind")
        if binding.deepstack is not None:
            np.copyto(binding.deepstack, 0 if extras.deepstack is None else extras.deepstack)
        started = time.perf_counter()
        _reported(self._session.run_with_iobinding, binding.io)
        self.run_seconds += time.perf_counter() - started
        if extras.accepted is not None and binding.accepted is not None:
            np.copyto(extras.accepted, binding.accepted)
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

    def _bind(self, length: int, accepted: bool) -> _Binding:
        io, shape = self._session.io_binding(), (self.batch, length, self._spec.hidden_size)
        return _Binding(io, self._cache, shape, self._inputs, accepted=accepted)


def rotary_of(positions: NDArray[np.int64], extras: PassExtras) -> NDArray[np.int64]:
    """Return the three-axis positions of a pass: its extras', else its slots, ``[B, T, 1 or 3]``."""
    return positions[..., None] if extras.rotary is None else extras.rotary


class _Binding:
    """The buffers of one pass length; ONNX Runtime reads and writes them in place."""

    def __init__(
        self,
        io: Any,
        cache: dict[str, Float32],
        shape: tuple[int, int, int],
        inputs: Mapping[str, Sequence[Any]],
        *,
        accepted: bool,
    ) -> None:
        self.io = io
        self.embeds, self.hidden = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self.positions = np.zeros(shape[:2], np.int32)
        self.rotary = self.deepstack = self.accepted = None
        if "rotary_positions" in inputs:
            self.rotary = np.zeros((*shape[:2], 3), np.int32)
            _bind(io.bind_input, "rotary_positions", self.rotary)
        if "deepstack_embeds" in inputs:
            self.deepstack = np.zeros((*shape[:2], inputs["deepstack_embeds"][2]), np.float32)
            _bind(io.bind_input, "deepstack_embeds", self.deepstack)
        if accepted:
            self.accepted = np.zeros(shape, np.float32)
            _bind(io.bind_output, "accept_hidden_states", self.accepted)
        _bind(io.bind_input, "inputs_embeds", self.embeds)
        _bind(io.bind_input, "positions", self.positions)
        _bind(io.bind_output, "hidden_states", self.hidden)
        for name, array in cache.items():
            _bind(io.bind_input, f"past_{name}", array)
            _bind(io.bind_output, f"present_{name}", array)


def _bind(bind: Any, name: str, array: NDArray[Any]) -> None:
    _reported(bind, name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
