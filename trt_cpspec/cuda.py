"""The CUDA driver, as far as sessions need it: memory, one stream, copies and graphs, through cuda-python.

Nothing is imported from cuda-python before a :class:`Device` is made.
"""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .errors import EngineError

_OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"

_LOST = frozenset({4, 214, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 999})
"""Statuses behind which no call of the process succeeds: the device has gone, or its context is spoilt."""

_LOST_HINT = "the GPU cannot be used by this process any more: start it again, and see the driver's log if that recurs"

INSTALL_HINT = 'pip install "trt_cpspec[cuda]"'


class Device:
    """The first CUDA device of the process, its primary context made current, and one stream of it.

    Parameters
    ----------
    ordinal : int

    Attributes
    ----------
    name : str
    compute_capability : tuple of int
    stream : int
        Handle of the stream on which everything runs.

    Raises
    ------
    EngineError
        No cuda-python, no driver, or no device; the message says which.
    """

    def __init__(self, ordinal: int = 0) -> None:
        try:
            from cuda.bindings import driver  # noqa: PLC0415  an optional extra
        except ImportError as error:
            raise EngineError(f"CUDA needs cuda-python: {INSTALL_HINT} ({error})") from error
        self.driver = driver
        try:
            self.call("cuInit", 0)
            count = self.call("cuDeviceGetCount")
        except (EngineError, RuntimeError) as error:
            raise EngineError(f"no CUDA device can be used: {error}") from error
        if ordinal >= count:
            raise EngineError(f"CUDA device {ordinal} does not exist, there are {count}")
        device = self.call("cuDeviceGet", ordinal)
        self._device = device
        self.context = self.call("cuDevicePrimaryCtxRetain", device)
        self._current = threading.local()
        self.make_current()
        self.compute_capability = (
            self.attribute("COMPUTE_CAPABILITY_MAJOR"),
            self.attribute("COMPUTE_CAPABILITY_MINOR"),
        )
        self.name = self.call("cuDeviceGetName", 128, device).split(b"\0")[0].decode().strip()
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self.stream = int(self.call("cuStreamCreate", flags))
        weakref.finalize(self, _release, driver, self.context, "cuStreamDestroy", self.stream)

    def attribute(self, name: str) -> int:
        """Return a number of the device, by the driver's name of it without ``CU_DEVICE_ATTRIBUTE_``."""
        attribute = getattr(self.driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.call("cuDeviceGetAttribute", attribute, self._device))

    def make_current(self) -> None:
        """Make its context the calling thread's: the thread that uses a device need not be the one that opened it."""
        # Not by the thread's number, which the next thread takes over when one has ended.
        if not getattr(self._current, "is_set", False):
            self.call("cuCtxSetCurrent", self.context)
            self._current.is_set = True

    def call(self, function: str, *arguments: Any) -> Any:
        """Call a driver function and return its result; any status but success is an EngineError."""
        status, *results = getattr(self.driver, function)(*arguments)
        if int(status) != 0:
            hint = f"; {_LOST_HINT}" if int(status) in _LOST else ""
            raise EngineError(f"{function} failed: {status.name} ({int(status)}){hint}")
        return results[0] if len(results) == 1 else tuple(results)

    def free_bytes(self) -> int:
        """Return how much device memory is free."""
        return int(self.call("cuMemGetInfo")[0])

    def require(self, nbytes: int, what: str) -> None:
        """Compare what is about to be allocated with what is free.

        Raises
        ------
        EngineError
            It does not fit; the message has both numbers.
        """
        free = self.free_bytes()
        if nbytes > free:
            raise EngineError(
                f"{what} needs {nbytes / 1e6:,.1f} MB of device memory, {free / 1e6:,.1f} MB are free on {self.name}: "
                f"close other programs, give a smaller --batchSize, or build with a smaller --maxBatchSize or "
                f"--maxKVCacheCapacity; cpspec inspect --memory says what an engine takes"
            )

    def allocate(self, nbytes: int) -> int:
        """Allocate device memory and return its address; where there is too little, the error has both numbers."""
        try:
            return int(self.call("cuMemAlloc", nbytes))
        except EngineError as error:
            if _OUT_OF_MEMORY in str(error):
                self.require(nbytes, "an array")
            raise

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> DeviceArray:
        """Allocate device memory, not initialised."""
        return DeviceArray(self, shape, np.dtype(dtype))

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> DeviceArray:
        """Allocate device memory that is zero."""
        array = self.empty(shape, dtype)
        array.zero()
        return array

    def pinned(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Allocate page-locked host memory, zeroed, that copies can read and write asynchronously."""
        kind = np.dtype(dtype)
        nbytes = max(int(np.prod(shape)) * kind.itemsize, 1)
        address = int(self.call("cuMemHostAlloc", nbytes, 0))
        buffer = (ctypes.c_byte * nbytes).from_address(address)
        weakref.finalize(buffer, _release, self.driver, self.context, "cuMemFreeHost", address)
        flat: NDArray[Any] = np.frombuffer(memoryview(buffer), kind, int(np.prod(shape)))
        array = flat.reshape(shape)
        array[...] = 0
        return array

    def upload(self, target: DeviceArray, source: NDArray[Any]) -> None:
        """Copy host memory to the device, on the stream. The source must live until the copy is done."""
        self.upload_at(target.address, source)

    def upload_at(self, address: int, source: NDArray[Any]) -> None:
        """Copy host memory to an address on the device, on the stream."""
        self.call("cuMemcpyHtoDAsync", address, source.ctypes.data, source.nbytes, self.stream)

    def download(self, target: NDArray[Any], source: DeviceArray) -> None:
        """Copy device memory to the host, on the stream."""
        self.download_at(target, source.address)

    def download_at(self, target: NDArray[Any], address: int) -> None:
        """Copy what lies at an address on the device to the host, on the stream."""
        self.call("cuMemcpyDtoHAsync", target.ctypes.data, address, target.nbytes, self.stream)

    def synchronize(self) -> None:
        """Wait for the stream."""
        self.call("cuStreamSynchronize", self.stream)  # host sync

    def capture(self, work: Callable[[], None]) -> Graph:
        """Record what ``work`` puts on the stream as a graph, without running it."""
        return Graph(self, self._captured(work))

    def capture_loop(self, before: Callable[[], None], body: Callable[[int], None], after: Callable[[], None]) -> Graph:
        """Record ``before``, a body that repeats for as long as its kernels say so, and ``after``, as one graph.

        Parameters
        ----------
        before, after : callable
            Put work on the stream.
        body : callable
            Takes the handle that a kernel of it passes to ``cudaGraphSetConditional``: 1 repeats the body, 0 ends it.

        Raises
        ------
        EngineError
            The driver has no conditional nodes (CUDA 12.4 brought them).
        """
        driver = self.driver
        if not hasattr(driver, "cuGraphConditionalHandleCreate"):
            raise EngineError("this cuda-python has no conditional graph nodes")
        graph = self.call("cuGraphCreate", 0)
        try:
            self._fill_loop(graph, before, body, after)
        except BaseException:
            driver.cuGraphDestroy(graph)
            raise
        return Graph(self, graph)

    def _fill_loop(
        self, graph: Any, before: Callable[[], None], body: Callable[[int], None], after: Callable[[], None]
    ) -> None:
        driver = self.driver
        handle = self.call("cuGraphConditionalHandleCreate", graph, self.context, 1, 1)  # 1 at each launch
        first = self._add_child(graph, [], before)
        parameters = driver.CUgraphNodeParams()
        parameters.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        parameters.conditional.handle = handle
        parameters.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
        parameters.conditional.size = 1
        parameters.conditional.ctx = self.context
        # cuda-python 12 has the call with edge data under a name of its own, 13 under the plain one.
        add_node = "cuGraphAddNode_v2" if hasattr(driver, "cuGraphAddNode_v2") else "cuGraphAddNode"
        loop = self.call(add_node, graph, [first], None, 1, parameters)
        inner = parameters.conditional.phGraph_out[0]
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self.call("cuStreamBeginCaptureToGraph", self.stream, inner, None, None, 0, mode)
        self._end_capture(lambda: body(int(handle)))
        self._add_child(graph, [loop], after)

    def _add_child(self, graph: Any, dependencies: list[Any], work: Callable[[], None]) -> Any:
        child = self._captured(work)
        node = self.call("cuGraphAddChildGraphNode", graph, dependencies, len(dependencies), child)
        self.call("cuGraphDestroy", child)  # the node holds a copy
        return node

    def _captured(self, work: Callable[[], None]) -> Any:
        mode = self.driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self.call("cuStreamBeginCapture", self.stream, mode)
        return self._end_capture(work)

    def _end_capture(self, work: Callable[[], None]) -> Any:
        """Do what is captured and end the capture; what ended it before is what is told."""
        try:
            work()
        except BaseException:
            self.driver.cuStreamEndCapture(self.stream)
            raise
        return self.call("cuStreamEndCapture", self.stream)


class DeviceArray:
    """Device memory with a shape and a dtype; freed with the object."""

    def __init__(self, device: Device, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.device, self.shape, self.dtype = device, shape, dtype
        self.nbytes = math.prod(shape) * dtype.itemsize
        self.address = device.allocate(max(self.nbytes, 1))
        weakref.finalize(self, _release, device.driver, device.context, "cuMemFree", self.address)

    def zero(self) -> None:
        """Zero it, on the stream."""
        self.device.call("cuMemsetD8Async", self.address, 0, self.nbytes, self.device.stream)


class Graph:
    """An instantiated CUDA graph."""

    def __init__(self, device: Device, graph: Any) -> None:
        self._device = device
        self._executable = device.call("cuGraphInstantiate", graph, 0)
        weakref.finalize(self, _release, device.driver, device.context, "cuGraphExecDestroy", self._executable)
        device.call("cuGraphDestroy", graph)

    def launch(self) -> None:
        """Run it, on the stream."""
        self._device.call("cuGraphLaunch", self._executable, self._device.stream)


def _release(driver: Any, context: Any, function: str, handle: Any) -> None:
    # The thread that drops the last reference may never have used the device, and without its context frees nothing.
    # At interpreter exit the driver may be gone: nothing is left to free then, and nobody to tell.
    driver.cuCtxPushCurrent(context)
    getattr(driver, function)(handle)
    driver.cuCtxPopCurrent()
