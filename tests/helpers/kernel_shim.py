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
FLAGS = ("-std=c++17", "-O1", "-shared", "-fPIC", "-U_FORTIFY_SOURCE", "-fno-strict-aliasing", "-w")


class HostKernels:
    """Kernels of one set of sizes; arguments are numpy arrays, read and written in place.

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

    def address(self, array: NDArray[np.generic] | None) -> int:
        """Return what stands for a device address."""
        return 0 if array is None else array.ctypes.data

    def run(self, call: Call, *, order: int = 0) -> None:
        """Run one launch; ``order`` changes in which order warps and lanes run."""
        source = source_of(call.kernel)
        if source not in self._libraries:
            self._libraries[source] = self._build(source)
        values = [ctypes.c_int(int(v)) if isinstance(v, np.int32) else ctypes.c_void_p(v) for v in call.arguments]
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        entry = self._libraries[source][f"launch_{call.kernel}"]
        entry.restype = ctypes.c_char_p
        fault = entry((ctypes.c_uint * 3)(*call.grid), call.block, pointers, order)
        assert fault is None, f"{call.kernel}: {fault.decode()}"

    def _build(self, source: str) -> ctypes.CDLL:
        entries = "\n".join(
            f'extern "C" const char* launch_{kernel}(const unsigned* grid, unsigned threads, void** arguments, '
            f"unsigned order) {{ return shim::launch({kernel}, grid, threads, arguments, order); }}"
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
