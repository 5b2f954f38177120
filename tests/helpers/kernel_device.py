"""Runs kernels/*.cu on a CUDA device for tests, and replays them as CUDA graphs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trt_cpspec.nvrtc import Call, KernelLibrary

ALIGNMENT = 256


class DeviceKernels:
    """The kernels of one set of sizes on the first device; the interface of ``kernel_shim.HostKernels``."""

    def __init__(self, macros: Mapping[str, str]) -> None:
        self._driver: Any = importlib.import_module("cuda.bindings.driver")
        self._library = KernelLibrary(macros)
        self._stream = self._library.device.create_stream()
        self._handle = int(self._stream.handle)
        self._sizes: dict[int, int] = {}

    def upload(self, array: NDArray[np.generic]) -> int:
        """Copy an array to the device and return its address."""
        whole = np.ascontiguousarray(array)  # a name of its own: a copy must live until it has been read
        address = int(self._check(self._driver.cuMemAlloc(max(whole.nbytes, 1) + ALIGNMENT)))
        self._check(self._driver.cuMemcpyHtoD(address, whole.ctypes.data, whole.nbytes))
        return address

    def download(self, address: int, like: NDArray[np.generic]) -> NDArray[np.generic]:
        """Return what stands at an address, in the shape of ``like``."""
        self.synchronize()
        array = np.empty_like(like)
        self._check(self._driver.cuMemcpyDtoH(array.ctypes.data, address, array.nbytes))
        return array

    def free(self, address: int) -> None:
        """Give memory back."""
        self._check(self._driver.cuMemFree(address))

    def run(self, call: Call, *, order: int = 0) -> None:
        """Run one launch (the device orders its warps itself)."""
        del order
        self._library.run(self._stream, call)

    def graph(self, calls: Sequence[Call]) -> Callable[[], None]:
        """Capture launches in a graph and return what replays it."""
        driver, check = self._driver, self._check
        for call in calls:
            self._library.kernel(call.kernel)
        check(driver.cuStreamBeginCapture(self._handle, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
        for call in calls:
            self._library.run(self._stream, call)
        graph = check(driver.cuGraphInstantiate(check(driver.cuStreamEndCapture(self._handle)), 0))
        return lambda: check(driver.cuGraphLaunch(graph, self._handle))

    def synchronize(self) -> None:
        """Wait until everything has run; a fault of a kernel is raised here."""
        self._check(self._driver.cuStreamSynchronize(self._handle))

    def _check(self, result: tuple[Any, ...]) -> Any:
        if int(result[0]):
            raise RuntimeError(f"the CUDA driver says {result[0]}")
        return result[1] if len(result) == 2 else None
