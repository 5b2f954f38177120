"""A stand-in for ``cuda.bindings.driver``: its memory is the host's, and it can run out of it, or go away."""

from __future__ import annotations

import ctypes
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

NAMES = {0: "SUCCESS", 2: "ERROR_OUT_OF_MEMORY", 201: "ERROR_INVALID_CONTEXT", 719: "ERROR_LAUNCH_FAILED"}


class Status(int):
    """A ``CUresult``."""

    @property
    def name(self) -> str:
        """Its name."""
        return f"CUDA_{NAMES[self]}"


OK = Status(0)


class FakeDriver:
    """One device of so many bytes.

    Attributes
    ----------
    total : int
    taken : dict of int to int
        Address to size of what is allocated.
    lost_after : int or None
        So many calls succeed from now on, and none behind them.
    """

    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=9, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=0
    )
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)

    def __init__(self, total: int = 2**30) -> None:
        self.total, self.lost_after = total, None
        self.taken: dict[int, int] = {}
        self.calls: list[str] = []
        self.allocations: list[int] = []
        self._held: dict[int, Any] = {}
        self._contexts = threading.local()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
        """Let ``from cuda.bindings import driver`` find it."""
        bindings = ModuleType("cuda.bindings")
        bindings.driver = self  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
        return self

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        return self._counted(name, value) if name.startswith("cu") else value

    def _counted(self, name: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            if self.lost_after is not None:
                if self.lost_after <= 0:
                    return (Status(719),)
                self.lost_after -= 1
            if name.startswith("cuMem") and not getattr(self._contexts, "stack", None):
                return (Status(201),)
            return function(*arguments)

        return call

    def cuInit(self, flags: int) -> Any:  # noqa: N802
        return (OK,)

    def cuDriverGetVersion(self) -> Any:  # noqa: N802
        return OK, 12040

    def cuDeviceGetCount(self) -> Any:  # noqa: N802
        return OK, 1

    def cuDeviceGet(self, ordinal: int) -> Any:  # noqa: N802
        return OK, ordinal

    def cuDevicePrimaryCtxRetain(self, device: int) -> Any:  # noqa: N802
        return OK, "context"

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> Any:  # noqa: N802
        return OK, attribute

    def cuDeviceGetName(self, length: int, device: int) -> Any:  # noqa: N802
        return OK, b"Fake GPU\0"

    def cuStreamCreate(self, flags: int) -> Any:  # noqa: N802
        return OK, 7

    def cuStreamDestroy(self, stream: int) -> Any:  # noqa: N802
        return (OK,)

    def cuStreamSynchronize(self, stream: int) -> Any:  # noqa: N802
        return (OK,)

    def cuCtxSetCurrent(self, context: Any) -> Any:  # noqa: N802
        self._contexts.stack = [context]
        return (OK,)

    def cuCtxPushCurrent(self, context: Any) -> Any:  # noqa: N802
        self._contexts.stack = [*getattr(self._contexts, "stack", []), context]
        return (OK,)

    def cuCtxPopCurrent(self) -> Any:  # noqa: N802
        return OK, self._contexts.stack.pop()

    def cuMemGetInfo(self) -> Any:  # noqa: N802
        return OK, self.total - sum(self.taken.values()), self.total

    def cuMemAlloc(self, nbytes: int) -> Any:  # noqa: N802
        if nbytes > self.total - sum(self.taken.values()):
            return (Status(2),)
        self.allocations.append(nbytes)
        memory = ctypes.create_string_buffer(nbytes)
        address = ctypes.addressof(memory)
        self.taken[address], self._held[address] = nbytes, memory
        return OK, address

    def cuMemFree(self, address: int) -> Any:  # noqa: N802
        del self.taken[address], self._held[address]
        return (OK,)

    def cuMemsetD8Async(self, address: int, value: int, nbytes: int, stream: int) -> Any:  # noqa: N802
        ctypes.memset(address, value, nbytes)
        return (OK,)
