"""A decoder plan on TensorRT or TensorRT-RTX. Only this module talks to them at run time.

The binding module is passed as a value; nothing is imported before a plan is opened.

A plan's execution contexts share their activation memory, and everything runs on one stream, so executions are
serialised. TensorRT may take more than a second to create a context of a deep decoder and takes little to bind one to
other shapes and addresses, so contexts are bound anew. A graph captured from a context is undefined once the context
has changed: each length that is captured has a context of its own, and who binds it anew drops its graph.
"""

from __future__ import annotations

import importlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .config import DecoderSpec
from .cuda import Device, DeviceArray, Graph
from .errors import EngineError
from .session import (
    NO_EXTRAS,
    PAST,
    PREFILL_CHUNK,
    SCRATCH_SLOTS,
    Float32,
    PassExtras,
    Shapes,
    bucket_for,
    check_extras,
    check_shapes,
    present_name,
    rotary_of,
)

logger = logging.getLogger(__name__)

CONTEXT_PROFILE, GENERATION_PROFILE = 0, 1
BINDINGS = {"tensorrt": "tensorrt", "tensorrt_rtx": "tensorrt_rtx"}
"""Flavour, as the sidecar names it, to the module that reads its plans."""

GRAPH_ROWS = 8
"""Where buffers are kept, passes of up to this many positions are captured as CUDA graphs; elsewhere those of one."""

ACCEPTED = "accept_hidden_states"
"""An output ``[B, T, H]`` of a Thinker's plan, read for prompts with media alone; TensorRT wants an address always."""

ROTARY, DEEPSTACK = "rotary_positions", "deepstack_embeds"
"""Inputs ``[B, T, 3]`` and ``[B, T, D * H]`` that plans of a model that sees have."""

CODEC_TENSORS: Shapes = {"codes": None, "waveform": None}
"""What the codec's plan binds."""

_STATE_BYTES, _STATE_ALIGNMENT = 4, 256
"""Of a number in the state of a codec, which is FP32; TensorRT wants tensors so aligned."""


def import_binding(flavour: str) -> Any:
    """Return the Python module of a flavour, or an EngineError that names the extra to install."""
    extra = "rtx" if flavour == "tensorrt_rtx" else "tensorrt"
    if flavour not in BINDINGS:
        raise EngineError(f"unknown engine flavour {flavour!r}; known: {', '.join(BINDINGS)}")
    try:
        return importlib.import_module(BINDINGS[flavour])
    except Exception as error:  # its package runs loaders of its own, which raise what they like
        raise EngineError(f'{flavour} is not installed: pip install "trt_cpspec[{extra}]" ({error})') from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeRange:
    """Smallest, best and largest shape of a tensor in one optimisation profile."""

    minimum: tuple[int, ...]
    optimum: tuple[int, ...]
    maximum: tuple[int, ...]


class Plan:
    """A deserialized plan.

    Parameters
    ----------
    path : Path
    binding : module
        ``tensorrt`` or ``tensorrt_rtx``.
    data : bytes
        What :func:`plan_bytes` read from ``path``.

    Raises
    ------
    EngineError
        The plan is cut short, or of another version, flavour or device. The message repeats what TensorRT said, and
        says how to build it again.
    """

    def __init__(self, path: Path, binding: Any, data: bytes) -> None:
        self.path, self.binding = path, binding
        self.errors: list[str] = []
        self._runtime = binding.Runtime(_logger(binding, self.errors))
        self.engine = self._runtime.deserialize_cuda_engine(data)
        if self.engine is None:
            raise EngineError(
                f"{path} cannot be used by {binding.__name__} {binding.__version__}: "
                f"{self.said()}; build it again on this machine with cpspec-build --engineDir {path.parent}"
            )
        self.errors.clear()
        self.names = [self.engine.get_tensor_name(index) for index in range(self.engine.num_io_tensors)]
        self.capturable = True  # until a capture fails

    def said(self) -> str:
        """Return what TensorRT has complained of, for a message."""
        return " / ".join(self.errors) or "it gave no reason"

    def require(self, done: Any, what: str) -> None:
        """Raise an EngineError that repeats TensorRT's words when a call of it was not done."""
        if not done:
            said = self.said()
            self.errors.clear()
            raise EngineError(f"{self.path}: {what} failed: {said}")

    def dtype(self, name: str) -> np.dtype[Any]:
        """Return the numpy type of a tensor."""
        kind: np.dtype[Any] = np.dtype(self.binding.nptype(self.engine.get_tensor_dtype(name)))
        return kind

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, -1 where it is dynamic."""
        return tuple(self.engine.get_tensor_shape(name))

    def range(self, name: str, profile: int) -> ShapeRange:
        """Return what a profile admits for an input."""
        low, best, high = self.engine.get_tensor_profile_shape(name, profile)
        return ShapeRange(minimum=tuple(low), optimum=tuple(best), maximum=tuple(high))

    def check_names(self, expected: set[str]) -> None:
        """Raise an EngineError that names every missing and every unknown tensor."""
        missing, extra = sorted(expected - set(self.names)), sorted(set(self.names) - expected)
        if missing or extra:
            raise EngineError(
                f"{self.path} has not the tensors that config.json asks for: missing {missing or 'none'}, "
                f"unknown {extra or 'none'}; build it again with cpspec-build"
            )


def plan_bytes(path: Path) -> bytes:
    """Read a plan; an EngineError says that it is missing, empty, or an ONNX graph."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error}; build it with cpspec-build") from error
    if not data:
        raise EngineError(f"{path} is empty: the build was cut short; build it again with cpspec-build")
    # An ONNX ModelProto begins with its ir_version (field 1, a varint).
    if data[:1] == b"\x08":
        raise EngineError(f"{path} is an ONNX graph, not a plan; build the plan with cpspec-build --onnxDir")
    return data


def _logger(binding: Any, errors: list[str]) -> Any:
    class Logger(binding.ILogger):  # type: ignore[misc]
        def log(self, severity: Any, message: str) -> None:
            if severity in (binding.ILogger.ERROR, binding.ILogger.INTERNAL_ERROR):
                errors.append(message.strip())

    return Logger()


@dataclass(slots=True)
class ExecutionContext:
    """An execution context of TensorRT, and what it is bound to.

    Attributes
    ----------
    inner : tensorrt.IExecutionContext
    profile : int or None
        The optimisation profile that was selected; None where none is for certain.
    bound_to : tuple of object and int, or None
        The layout and the pass length of all its shapes and addresses; None where they are not of one pass.
    """

    inner: Any
    profile: int | None = None
    bound_to: tuple[object, int] | None = None


class ExecutionContexts:
    """The execution contexts of a plan: one for each pass length up to ``graph_rows``, and one for all longer passes.

    Parameters
    ----------
    plan : Plan
    activations : DeviceArray
        The memory in which all of them work.
    graph_rows : int
        Passes of up to this many positions may be captured as CUDA graphs.
    """

    def __init__(self, plan: Plan, activations: DeviceArray, graph_rows: int) -> None:
        self._plan, self._activations, self.graph_rows = plan, activations, graph_rows
        self._contexts: dict[int, ExecutionContext] = {}

    def of(self, length: int) -> ExecutionContext:
        """Return the context for passes of ``length`` positions, created when it is first asked for."""
        key = min(length, self.graph_rows + 1)
        if key not in self._contexts:
            self._contexts[key] = ExecutionContext(_new_context(self._plan, self._activations))
        return self._contexts[key]


class DecoderBuffers:
    """Device memory of one batch and cache extent, and passes on it.

    Attributes
    ----------
    embeds, positions, hidden : DeviceArray
        ``[B, T, H]`` float32, ``[B, T]`` int32, ``[B, T, H]``, with room for the longest pass.
    extra : dict of str to DeviceArray
        Inputs and outputs that only some plans have, by name.
    layout : object
        Another one whenever arrays move: what was bound or captured under an earlier one is of memory that is gone.
    """

    def __init__(
        self, plan: Plan, device: Device, spec: DecoderSpec, contexts: ExecutionContexts, batch: int, slots: int
    ) -> None:
        self.plan, self._device, self._spec, self.contexts = plan, device, spec, contexts
        self.batch, self.slots = batch, slots
        cache_shape = (batch, spec.num_key_value_heads, slots, spec.head_dim)
        kinds = [plan.dtype(f"past_{name}") for name in _cache_names(spec)]
        device.require(
            math.prod(cache_shape) * sum(kind.itemsize for kind in kinds) + self._pass_bytes(GRAPH_ROWS),
            f"{plan.path}: the KV cache of {batch} row(s) and {slots} positions",
        )
        self.cache = {name: device.zeros(cache_shape, plan.dtype(f"past_{name}")) for name in _cache_names(spec)}
        self._reserve(GRAPH_ROWS)

    def _pass_bytes(self, length: int) -> int:
        """Return the bytes of inputs and outputs of a pass of ``length`` positions."""
        names = [name for name in (ACCEPTED, ROTARY, DEEPSTACK) if name in self.plan.names]
        widths = 2 * self._spec.hidden_size + 1 + sum(self._extra_width(name) for name in names)
        return self.batch * length * widths * 4

    def _extra_width(self, name: str) -> int:
        return self._spec.hidden_size if name == ACCEPTED else self.plan.shape(name)[2]

    def _reserve(self, length: int) -> None:
        """Allocate the buffers of a pass for up to ``length`` positions: all of them, or none where one fails."""
        width = self._spec.hidden_size
        self.embeds, self.positions, self.hidden, self.extra = (
            self._device.zeros((self.batch, length, width), np.float32),
            self._device.zeros((self.batch, length), np.int32),
            self._device.zeros((self.batch, length, width), np.float32),
            {
                name: self._device.zeros((self.batch, length, self._extra_width(name)), dtype)
                for name, dtype in ((ACCEPTED, np.float32), (ROTARY, np.int32), (DEEPSTACK, np.float32))
                if name in self.plan.names
            },
        )
        self.length, self.layout = length, object()

    def reserve(self, length: int) -> None:
        """Make sure that a pass of ``length`` positions has room."""
        if length > self.length:
            self._device.require(self._pass_bytes(length), f"{self.plan.path}: a pass of {length} positions")
            self._reserve(length)

    def enqueue(self, length: int) -> None:
        """Put one pass of ``length`` positions a row on the stream."""
        context = self.contexts.of(length)
        if context.bound_to != (self.layout, length):
            self._bind(context, length)
        done = context.inner.execute_async_v3(self._device.stream)
        self.plan.require(done, f"a pass of {self.batch} x {length} positions")

    def _bind(self, context: ExecutionContext, length: int) -> None:
        shapes = self._shapes(length)
        profile = self._profile(shapes)
        context.bound_to = None
        if context.profile != profile:
            context.profile = None
            done = context.inner.set_optimization_profile_async(profile, self._device.stream)
            self.plan.require(done, f"selecting profile {profile}")
            context.profile = profile
        for name, shape in shapes.items():
            self.plan.require(context.inner.set_input_shape(name, shape), f"binding {name} of shape {list(shape)}")
        addresses = {
            "inputs_embeds": self.embeds.address,
            "positions": self.positions.address,
            "hidden_states": self.hidden.address,
        }
        addresses |= {name: array.address for name, array in self.extra.items()}
        for name, array in self.cache.items():
            addresses |= {f"past_{name}": array.address, f"present_{name}": array.address}
        for name, address in addresses.items():
            self.plan.require(context.inner.set_tensor_address(name, address), f"binding the address of {name}")
        context.bound_to = self.layout, length

    def _shapes(self, length: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the inputs of a pass of ``length`` positions."""
        shapes = {
            "inputs_embeds": (self.batch, length, self._spec.hidden_size),
            "positions": (self.batch, length),
        } | {f"past_{name}": array.shape for name, array in self.cache.items()}
        for name in (ROTARY, DEEPSTACK):
            if name in self.extra:
                shapes[name] = (self.batch, length, self.extra[name].shape[2])
        return shapes

    def _profile(self, shapes: dict[str, tuple[int, ...]]) -> int:
        """Return the profile of a pass; an EngineError names a shape that it does not admit."""
        narrow = any(
            not _admits(self.plan.range(name, GENERATION_PROFILE), shapes[name])
            for name in ("inputs_embeds", "positions")
        )
        profile = CONTEXT_PROFILE if narrow else GENERATION_PROFILE
        for name, shape in shapes.items():
            limits = self.plan.range(name, profile)
            if not _admits(limits, shape):
                raise EngineError(
                    f"{self.plan.path}: {name} of shape {list(shape)} is outside the profile's {list(limits.minimum)} "
                    f"to {list(limits.maximum)}; build the engine with larger limits"
                )
        return profile


class TensorRTDecoderSession:
    """A decoder plan with its KV cache: the same methods as :class:`~trt_cpspec.session.DecoderSession`.

    Parameters
    ----------
    plan : Plan
    device : Device
    spec : DecoderSpec
    capacity : int
        Positions that a row may use at most.
    use_graphs : bool
        Capture short passes as CUDA graphs.
    keep_buffers : bool
        Keep the memory, contexts and graphs of every (batch, cache extent) that was used. Else there is one context
        for single positions and one for prompts, which serve every batch and cache extent.

    Attributes
    ----------
    run_seconds : float
        Time spent in copies and passes so far, as the host sees it.

    Notes
    -----
    The two contexts are created here: every request needs both, and the first one does not wait for them. Those of
    kept buffers are created when a pass first needs them.
    """

    def __init__(
        self,
        plan: Plan,
        device: Device,
        spec: DecoderSpec,
        *,
        capacity: int,
        use_graphs: bool = True,
        keep_buffers: bool = False,
    ) -> None:
        plan.check_names(
            {"inputs_embeds", "positions", "hidden_states"}
            | ({ACCEPTED, ROTARY, DEEPSTACK} & set(plan.names))
            | {f"{time}_{name}" for name in _cache_names(spec) for time in ("past", "present")}
        )
        self.plan, self.device = plan, device
        self._max_positions = min(
            plan.range(name, GENERATION_PROFILE).maximum[1] for name in ("inputs_embeds", "positions")
        )
        self._spec, self._max_slots, self._use_graphs = spec, capacity + SCRATCH_SLOTS, use_graphs
        device.require(_activation_bytes(plan), f"{plan.path}: its workspace")
        self._activations = device.empty((_activation_bytes(plan),), np.uint8)
        self._buffers: DecoderBuffers | None = None
        self._staging: dict[int, _Staging] = {}
        self._kept: dict[tuple[int, int], tuple[DecoderBuffers, dict[int, _Staging]]] | None = (
            {} if keep_buffers else None
        )
        self._contexts = None if keep_buffers else ExecutionContexts(plan, self._activations, graph_rows=1)
        if self._contexts is not None:
            for length in (1, 2):  # a single position, and a prompt
                self._contexts.of(length)
        self.run_seconds = 0.0

    @property
    def batch(self) -> int:
        """Rows of the cache."""
        return self._buffers.batch if self._buffers else 0

    @property
    def slots(self) -> int:
        """Slots of a row, the scratch slot included."""
        return self._buffers.slots if self._buffers else 0

    @property
    def buffers(self) -> DecoderBuffers:
        """The device memory of the sequences at hand."""
        if self._buffers is None:
            raise EngineError("start() must be called before a pass")
        return self._buffers

    def max_positions(self) -> int | None:
        """Return how many positions a generation pass takes for each row: the least over all token-aligned inputs."""
        return self._max_positions

    def start(self, batch: int, positions: int) -> None:
        """Begin new sequences (see :class:`~trt_cpspec.session.DecoderSession`)."""
        self.device.make_current()
        slots = bucket_for(positions + SCRATCH_SLOTS, self._max_slots)
        if (batch, slots) != (self.batch, self.slots):
            if self._kept is None:  # what the last batch left is freed before the next is asked for
                self._buffers, self._staging = None, {}
            self._replace(batch, slots)

    def clear(self) -> None:
        """Zero the cache."""
        for array in self.buffers.cache.values():
            array.zero()

    def keep_rows(self, rows: NDArray[np.intp]) -> None:
        """Keep the sequences of these rows and drop the others."""
        old = self.buffers
        self._replace(len(rows), old.slots)
        for name, target in self.buffers.cache.items():
            row_bytes = target.nbytes // len(rows)
            for place, row in enumerate(rows.tolist()):
                source = old.cache[name].address + row * row_bytes
                self.device.call(
                    "cuMemcpyDtoDAsync", target.address + place * row_bytes, source, row_bytes, self.device.stream
                )
        self.device.synchronize()  # the old buffers are freed next

    def forward(self, embeds: Float32, positions: NDArray[np.int64], extras: PassExtras = NO_EXTRAS) -> Float32:
        """Run rows through the decoder (see :class:`~trt_cpspec.session.DecoderSession`)."""
        started = time.perf_counter()
        check_extras(self.plan.path, self.plan.names, extras)
        self.device.make_current()
        self._make_room(int(positions.max()))
        length = positions.shape[1]
        context_limit = self.plan.range("inputs_embeds", CONTEXT_PROFILE).maximum[1]
        longest = max(min(PREFILL_CHUNK, context_limit), self.max_positions() or 0)
        if length <= longest:
            out = self._pass(embeds, positions, extras)
        else:
            out = np.concatenate(
                [
                    self._pass(embeds[:, part], positions[:, part], extras.part(part)).copy()
                    for part in (slice(at, at + longest) for at in range(0, length, longest))
                ],
                axis=1,
            )
        self.run_seconds += time.perf_counter() - started
        return out

    def _pass(self, embeds: Float32, positions: NDArray[np.int64], extras: PassExtras) -> Float32:
        length = positions.shape[1]
        self.buffers.reserve(length)
        staging = self._staging.get(length)
        if staging is None or staging.layout is not self.buffers.layout:
            staging = _Staging(self.device, self.buffers, length, graphs=self._use_graphs)
            if length <= self.buffers.contexts.graph_rows:  # prompts come in every length: not kept, not captured
                self._staging[length] = staging
        np.copyto(staging.embeds, embeds)
        np.copyto(staging.positions, np.where(positions < 0, self.slots - 1, positions), casting="same_kind")
        if ROTARY in staging.extra:
            np.copyto(staging.extra[ROTARY], rotary_of(positions, extras), casting="same_kind")
        if DEEPSTACK in staging.extra:
            np.copyto(staging.extra[DEEPSTACK], 0 if extras.deepstack is None else extras.deepstack)
        staging.run()
        if extras.accepted is not None:
            extras.accepted[:] = staging.accepted()
        return staging.hidden

    def _make_room(self, position: int) -> None:
        needed, old = position + 1 + SCRATCH_SLOTS, self.buffers
        if needed <= old.slots:
            return
        if needed > self._max_slots:
            raise EngineError(f"position {position} is beyond the KV capacity of {self._max_slots - SCRATCH_SLOTS}")
        self._replace(old.batch, bucket_for(needed, self._max_slots))
        for name, target in self.buffers.cache.items():
            self._copy_rows(old.cache[name], target)
        self.device.synchronize()  # the old buffers are freed next

    def _copy_rows(self, source: DeviceArray, target: DeviceArray) -> None:
        """Copy ``[B, kv, S, hd]`` into the front of a cache with more slots: a strided copy of B x kv pieces."""
        driver = self.device.driver
        copy = driver.CUDA_MEMCPY2D()
        old_pitch = source.nbytes // (source.shape[0] * source.shape[1])
        copy.srcMemoryType = copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        copy.srcDevice, copy.dstDevice = source.address, target.address
        copy.srcPitch, copy.dstPitch = old_pitch, target.nbytes // (target.shape[0] * target.shape[1])
        copy.WidthInBytes = old_pitch // source.shape[2] * (source.shape[2] - SCRATCH_SLOTS)
        copy.Height = source.shape[0] * source.shape[1]
        self.device.call("cuMemcpy2DAsync", copy, self.device.stream)

    def _replace(self, batch: int, slots: int) -> None:
        if self._kept is not None and (batch, slots) in self._kept:
            self._buffers, self._staging = self._kept[batch, slots]
            return
        self._staging = {}
        contexts = self._contexts or ExecutionContexts(self.plan, self._activations, GRAPH_ROWS)
        self._buffers = DecoderBuffers(self.plan, self.device, self._spec, contexts, batch, slots)
        if self._kept is not None:
            self._kept[batch, slots] = self._buffers, self._staging


class TensorRTGraphSession:
    """A plan without state, or the codec's, whose state is carried where it was built to (see :meth:`begin`).

    Parameters
    ----------
    plan : Plan
    device : Device
    tensors : Shapes
        Its inputs and outputs.
    """

    def __init__(self, plan: Plan, device: Device, tensors: Shapes = CODEC_TENSORS) -> None:
        past = [name for name in plan.names if name.startswith(PAST)] if "codes" in plan.names else []
        carried = {"position", *past, *map(present_name, past)} if past else set()
        plan.check_names({*tensors} | carried)
        check_shapes(plan.path, {name: plan.shape(name) for name in plan.names}, {**tensors, **dict.fromkeys(carried)})
        self._plan, self._device = plan, device
        device.require(_activation_bytes(plan), f"{plan.path}: its workspace")
        self._activations = device.empty((_activation_bytes(plan),), np.uint8)
        self._context = _new_context(plan, self._activations)
        plan.require(self._context.set_optimization_profile_async(0, device.stream), "selecting profile 0")
        self.state_shapes = {name: (1, *plan.shape(name)[1:]) for name in past}

    @property
    def path(self) -> Path:
        """The file of the plan."""
        return self._plan.path

    @property
    def carries_state(self) -> bool:
        """Whether the plan takes what an earlier call left."""
        return bool(self.state_shapes)

    def begin(self) -> TensorRTCarriedCalls:
        """Return what runs calls that follow each other, from an empty state."""
        return TensorRTCarriedCalls(self, self._device)

    def run(self, feeds: dict[str, NDArray[Any]], /, state: dict[str, int] | None = None) -> dict[str, NDArray[Any]]:
        """Run it once, from and to host memory; ``state`` says where on the device the tensors lie that stay there."""
        plan, device, state = self._plan, self._device, state or {}
        device.make_current()
        outputs = [name for name in plan.names if name not in feeds and name not in state]
        held = []
        for name, array in feeds.items():
            values = np.ascontiguousarray(array, plan.dtype(name))
            target = device.empty(values.shape, values.dtype)
            device.upload(target, values)
            self._bind_shape(name, values.shape)
            self._bind(name, target.address)
            held += [values, target]
        for name, address in state.items():
            if name in self.state_shapes:
                self._bind_shape(name, self.state_shapes[name])
            self._bind(name, address)
        results, sources = {}, {}
        for name in outputs:
            shape = tuple(self._context.get_tensor_shape(name))
            sources[name] = device.empty(shape, plan.dtype(name))
            results[name] = np.empty(shape, plan.dtype(name))
            self._bind(name, sources[name].address)
        plan.require(self._context.execute_async_v3(device.stream), "a run")
        for name, source in sources.items():
            device.download(results[name], source)
        device.synchronize()
        return results

    def _bind_shape(self, name: str, shape: tuple[int, ...]) -> None:
        limits = self._plan.range(name, 0)
        if not _admits(limits, shape):
            raise EngineError(
                f"{self._plan.path}: {name} of shape {list(shape)} is outside the profile's "
                f"{list(limits.minimum)} to {list(limits.maximum)}"
            )
        self._plan.require(self._context.set_input_shape(name, shape), f"binding {name} of {list(shape)}")

    def _bind(self, name: str, address: int) -> None:
        self._plan.require(self._context.set_tensor_address(name, address), f"binding the address of {name}")


class TensorRTCarriedCalls:
    """Calls of a codec's plan that follow each other. The state stays on the device, in two sets that change places.

    Parameters
    ----------
    session : TensorRTGraphSession
    device : Device
    """

    def __init__(self, session: TensorRTGraphSession, device: Device) -> None:
        device.make_current()
        self._session = session
        offsets, size = {}, 0
        for name, shape in session.state_shapes.items():
            offsets[name] = size
            size += -(-int(np.prod(shape)) * _STATE_BYTES // _STATE_ALIGNMENT) * _STATE_ALIGNMENT
        device.require(2 * size, f"{session.path}: the state of an utterance")
        # One allocation a set: an utterance begins with every chunk of the offline decode, and each call costs time.
        self._memory = [device.zeros((size,), np.uint8), device.empty((size,), np.uint8)]
        self._sets = [{name: memory.address + at for name, at in offsets.items()} for memory in self._memory]

    def run(self, feeds: dict[str, NDArray[Any]], /) -> dict[str, NDArray[Any]]:
        """Run the next call and return the waveform."""
        past, present = self._sets
        outputs = self._session.run(feeds, past | {present_name(name): at for name, at in present.items()})
        self._sets.reverse()
        return outputs


class _Staging:
    """Page-locked host buffers of one pass length, and its CUDA graph once it has run."""

    def __init__(self, device: Device, buffers: DecoderBuffers, length: int, *, graphs: bool) -> None:
        self._device, self._buffers, self._length, self._graphs = device, buffers, length, graphs
        self.layout = buffers.layout
        width = buffers.embeds.shape[-1]
        self.embeds = device.pinned((buffers.batch, length, width), np.float32)
        self.positions = device.pinned((buffers.batch, length), np.int32)
        self.hidden = device.pinned((buffers.batch, length, width), np.float32)
        self.extra = {
            name: device.pinned((buffers.batch, length, buffers.extra[name].shape[2]), kind)
            for name, kind in ((ROTARY, np.int32), (DEEPSTACK, np.float32))
            if name in buffers.extra
        }
        self._graph: Graph | None = None
        self._warm = False

    def run(self) -> None:
        """Run the pass and wait for it. The first run enqueues, which TensorRT needs before a capture."""
        if self._graph is not None:
            self._graph.launch()
        else:
            self._enqueue()
            if self._graphs and self._warm and self._buffers.plan.capturable:
                self._device.synchronize()
                self._graph = self._captured()
            self._warm = True
        self._device.synchronize()

    def accepted(self) -> Float32:
        """Return the pass's ``accept_hidden_states``, ``[B, T, H]``."""
        accepted = np.empty_like(self.hidden)
        self._device.download(accepted, self._buffers.extra[ACCEPTED])
        self._device.synchronize()
        return accepted

    def _captured(self) -> Graph | None:
        """Capture the pass; None, said once, of a plan that cannot be captured (TensorRT 8.6: a mixture of experts)."""
        try:
            return self._device.capture(self._enqueue)
        except EngineError as error:
            self._buffers.plan.capturable = False
            logger.warning("its passes are put on the stream one by one, not as CUDA graphs: %s", error)
            return None

    def _enqueue(self) -> None:
        # Rows of a shorter pass lie densely in the front of the buffers, which is how the context sees them.
        self._device.upload(self._buffers.embeds, self.embeds)
        self._device.upload(self._buffers.positions, self.positions)
        for name, values in self.extra.items():
            self._device.upload(self._buffers.extra[name], values)
        self._buffers.enqueue(self._length)
        self._device.download(self.hidden, self._buffers.hidden)


def _cache_names(spec: DecoderSpec) -> list[str]:
    return [f"{kind}_{index}" for index in range(spec.num_hidden_layers) for kind in ("key", "value")]


def _admits(limits: ShapeRange, shape: tuple[int, ...]) -> bool:
    return all(low <= extent <= high for low, extent, high in zip(limits.minimum, shape, limits.maximum, strict=True))


def _activation_bytes(plan: Plan) -> int:
    newer = getattr(plan.engine, "device_memory_size_v2", None)
    return int(newer if newer is not None else plan.engine.device_memory_size)


def _new_context(plan: Plan, activations: DeviceArray) -> Any:
    """Create a context that works in memory of ours, by the call that the version has."""
    strategy = getattr(plan.binding, "ExecutionContextAllocationStrategy", None)
    make: Callable[[], Any] = (
        plan.engine.create_execution_context_without_device_memory
        if strategy is None
        else (lambda: plan.engine.create_execution_context(strategy.USER_MANAGED))
    )
    context = make()
    plan.require(context is not None, "creating an execution context")
    if hasattr(context, "set_device_memory"):
        context.set_device_memory(activations.address, activations.nbytes)
    else:
        context.device_memory = activations.address
    return context
