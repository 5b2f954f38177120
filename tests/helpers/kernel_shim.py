"""Runs kernels/*.cu on a CPU: the same sources, compiled by g++ behind ``kernel_shim.h``."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trt_cpspec.nvrtc import SOURCES, Call, source_of, source_text

HEADER = Path(__file__).with_name("kernel_shim.h")
# A kernel is called accept, and so is a function of the C library: -Bsymbolic binds ours.
FLAGS = (
    *("-std=c++17", "-O1", "-shared", "-fPIC", "-Wl,-Bsymbolic", "-U_FORTIFY_SOURCE", "-fno-strict-aliasing", "-w"),
    *("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"),  # as a device would, which CI has not
)
GUARD, GUARD_BYTE = 4096, 0x5A
LATE = 1000
"""Orders from here on hold one block back (``kernel_shim.h``)."""


class HostKernels:
    """Kernels of one set of sizes; what stands for device memory are copies of numpy arrays.

    Parameters
    ----------
    macros : mapping
    folder : Path
        Where libraries are built; a library that is there is used again.
    arch : int
        ``__CUDA_ARCH__``: below 800 the warp reductions are made of shuffles.
    """

    def __init__(self, macros: Mapping[str, str], folder: Path, *, arch: int = 800) -> None:
        self._macros = {**macros, "__CUDA_ARCH__": str(arch)}
        self._folder = folder
        self._libraries: dict[str, ctypes.CDLL] = {}
        self._memory: dict[int, tuple[NDArray[np.uint8], NDArray[np.generic]]] = {}

    def upload(self, array: NDArray[np.generic]) -> int:
        """Copy an array, aligned as device memory is and with guards around it, and return its address."""
        raw = np.full(array.nbytes + 2 * GUARD + 16, GUARD_BYTE, np.uint8)
        start = GUARD + -(raw.ctypes.data + GUARD) % 16
        copy = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        copy[...] = array
        address = int(raw.ctypes.data) + start
        self._memory[address] = raw, copy
        return address

    def download(self, address: int, like: NDArray[np.generic]) -> NDArray[np.generic]:
        """Return what stands at an address."""
        copy = self._memory[address][1]
        assert copy.shape == like.shape
        return copy.copy()

    def free(self, address: int) -> None:
        """Give memory back; a kernel must not have written around it."""
        raw, copy = self._memory.pop(address)
        start = address - int(raw.ctypes.data)
        outside = np.concatenate([raw[:start], raw[start + copy.nbytes :]])
        assert (outside == GUARD_BYTE).all(), "a kernel wrote outside of its array"

    def run(self, call: Call, *, order: int = 0) -> None:
        """Run one launch; ``order`` changes in which order warps and lanes run, or names a block that is ``LATE``."""
        source = source_of(call.kernel)
        if source not in self._libraries:
            self._libraries[source] = self._build(source)
        values = [
            ctypes.c_int(int(value)) if isinstance(value, np.int32) else ctypes.c_uint64(int(value))
            for value in call.arguments
        ]
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        entry = self._libraries[source][f"launch_{call.kernel}"]
        entry.restype = ctypes.c_char_p
        fault = entry((ctypes.c_uint * 3)(*call.grid), call.block, pointers, order, call.shared_bytes, call.cooperative)
        assert fault is None, f"{call.kernel}: {fault.decode()}"

    def _build(self, source: str) -> ctypes.CDLL:
        entries = "\n".join(
            f'extern "C" const char* launch_{kernel}(const unsigned* grid, unsigned threads, void** arguments, '
            f"unsigned order, unsigned shared_bytes, bool cooperative) "
            f"{{ return shim::launch({kernel}, grid, threads, arguments, order, shared_bytes, cooperative); }}"
            for kernel in SOURCES[source]
        )
        text = f"{HEADER.read_text(encoding='utf-8')}\n{source_text(source)}\n{entries}\n"
        defines = [f"-D{name}={value}" for name, value in sorted(self._macros.items())]
        name = hashlib.sha256("\n".join([text, *defines, *FLAGS]).encode()).hexdigest()[:20]
        library = self._folder / f"{source}-{name}.so"
        if not library.is_file():
            path = library.with_suffix(".cpp")
            path.write_text(text, encoding="utf-8")
            compiler = shutil.which("g++")
            assert compiler, "the CPU run of the kernels needs g++"
            subprocess.run([compiler, *FLAGS, *defines, str(path), "-o", str(library)], check=True)
        return ctypes.CDLL(str(library))
