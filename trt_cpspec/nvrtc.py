"""Compiles the CUDA sources of :mod:`trt_cpspec.kernels` with NVRTC and launches them.

The only module that uses ``cuda.core`` for kernels. Importing it needs no CUDA; using it without the ``cuda`` extra is
an :class:`~trt_cpspec.errors.EngineError`. Compiling needs no GPU.
"""

from __future__ import annotations

import importlib
import io
import re
from collections.abc import Mapping
from functools import cache, lru_cache
from importlib import resources
from typing import Any, NamedTuple

from .errors import EngineError

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_110", "sm_120")
"""GPUs that every kernel is compiled for in CI."""

SOURCES: dict[str, tuple[str, ...]] = {
    "draft_heads": ("draft_heads",),
    "select_sample": ("select_sample",),
    "select_sample_general": ("select_sample_general",),
    "select_rescan": ("select_rescan",),
    "accept": ("accept",),
    "embed_project": ("embed_project", "start_frame"),
    "sum_embeddings": ("sum_embeddings", "advance_frame"),
    "repeat_round": ("repeat_round",),
    "fused_frame": ("fused_frame", "fused_pass"),
}
"""The kernels of each source file."""

_HEADERS = {"fused_frame": ("common.cuh", "streaming.cuh")}
"""What stands in front of a source file; of those that are not named it is ``common.cuh`` alone."""

_PARTS = {"fused_frame": ("select_sample", "accept")}
"""Source files that stand between the headers and another, each in its namespace; their kernels are not compiled."""

_WITHOUT_KERNELS = "#undef KERNEL\n#define KERNEL template <int> __global__ void\n"
_WITH_KERNELS = "#undef KERNEL\n#define KERNEL COMPILED_KERNEL\n"

_PLAIN_SHARED_BYTES = 48 * 1024
"""Shared memory of a block that needs no leave."""


class Call(NamedTuple):
    """One launch: a kernel, its shape and its arguments.

    Attributes
    ----------
    kernel : str
    grid : tuple of 3 int
        Blocks.
    block : int
        Threads of a block.
    arguments : tuple
        ``int`` for a device address (0 is null), ``numpy.int32`` or ``numpy.uint64`` for a number.
    shared_bytes : int
        Dynamic shared memory of a block.
    cooperative : bool
        Whether all blocks run at once, or the launch fails.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: int
    arguments: tuple[Any, ...]
    shared_bytes: int = 0
    cooperative: bool = False


def source_of(kernel: str) -> str:
    """Return the source file that defines a kernel."""
    return next(source for source, kernels in SOURCES.items() if kernel in kernels)


@cache
def source_text(source: str) -> str:
    """Return the text of one source file with what stands in front of it, which is what is compiled."""
    folder = resources.files(f"{__package__}.kernels")

    def text_of(name: str) -> str:
        # NVRTC names the file and the line of the part that an error is in.
        return f'#line 1 "{name}"\n{(folder / name).read_text(encoding="utf-8")}\n'

    parts = [f"namespace {part}_part {{\n{text_of(f'{part}.cu')}}}\n" for part in _PARTS.get(source, ())]
    headers = [text_of(header) for header in _HEADERS.get(source, ("common.cuh",))]
    return "".join([*headers, _WITHOUT_KERNELS, *parts, _WITH_KERNELS, text_of(f"{source}.cu")])


def compile_source(source: str, macros: Mapping[str, str], *, arch: str, on_disk_cache: bool = True) -> Any:
    """Compile one source file to a cubin.

    Parameters
    ----------
    source : str
        A key of ``SOURCES``.
    macros : mapping
        The sizes and dtypes that the source's header comment names.
    arch : str
        ``sm_90`` for example.
    on_disk_cache : bool
        Look the result up in, and add it to, cuda-python's program cache (``~/.cache/cuda-python``).

    Returns
    -------
    cuda.core.ObjectCode

    Raises
    ------
    EngineError
        cuda-python is missing, or NVRTC refused the source; the message holds its log.
    """
    program_cache = _program_cache() if on_disk_cache else None
    return _compile(source, macros, arch=arch, program_cache=program_cache, log=None)


def resource_usage(source: str, macros: Mapping[str, str], *, arch: str) -> str:
    """Compile one source file and return what the assembler says of registers, shared memory and spills."""
    log = io.StringIO()
    _compile(source, macros, arch=arch, program_cache=None, log=log)
    return log.getvalue()


def spilled_bytes(report: str) -> dict[str, int]:
    """Return how many bytes each function of a :func:`resource_usage` report spills."""
    stores = re.findall(r"Function properties for (\w+)\s.*?(\d+) bytes spill stores", report, re.DOTALL)
    return {name: int(nbytes) for name, nbytes in stores}


class KernelLibrary:
    """The kernels of one set of sizes on one GPU; each source is compiled when it is first used.

    Parameters
    ----------
    macros : mapping
        See :func:`compile_source`.
    device : int
        Ordinal of the GPU, which becomes the thread's current one.

    Raises
    ------
    EngineError
        cuda-python is missing, or there is no such GPU.
    """

    def __init__(self, macros: Mapping[str, str], *, device: int = 0) -> None:
        self._core = _cuda_core()
        self._macros = dict(macros)
        try:
            self.device = self._core.Device(device)
            self.device.set_current()
        except Exception as error:  # the driver's own types; what is missing is said by the message
            raise EngineError(f"CUDA device {device} cannot be used: {error}") from error
        self.kernel = lru_cache(maxsize=None)(self._load)
        self._streams: dict[int, Any] = {}
        self._roomy: set[str] = set()  # kernels that may use more dynamic shared memory than all may

    def _load(self, name: str) -> Any:
        code = compile_source(source_of(name), self._macros, arch=f"sm_{self.device.arch}")
        try:
            return code.get_kernel(name)
        except Exception as error:  # cuda.core's CUDAError is no public name
            raise EngineError(f"the kernel {name} cannot be loaded: {error}") from error

    def load(self, name: str) -> None:
        """Compile a kernel and load its code, so that a later launch of it can be captured."""
        driver = _import("cuda.bindings.driver")
        status, *_ = driver.cuKernelGetFunction(driver.CUkernel(int(self.kernel(name).handle)))
        if int(status) != 0:
            raise EngineError(f"the kernel {name} cannot be loaded: {status.name}")

    def run_on(self, handle: int, call: Call) -> None:
        """Put one launch on the stream with this driver handle, which may be capturing a graph."""
        if handle not in self._streams:
            self._streams[handle] = self._core.Stream.from_handle(handle)
        self.run(self._streams[handle], call)

    def run(self, stream: Any, call: Call) -> None:
        """Put one launch on a stream of ``cuda.core``, which may be capturing a graph."""
        config = self._core.LaunchConfig(
            grid=call.grid, block=call.block, shmem_size=call.shared_bytes, is_cooperative=call.cooperative
        )
        if call.shared_bytes > _PLAIN_SHARED_BYTES and call.kernel not in self._roomy:
            self._allow_shared(call)
        try:
            self._core.launch(stream, config, self.kernel(call.kernel), *call.arguments)
        except Exception as error:  # cuda.core's CUDAError is no public name; a cooperative grid may not fit
            raise EngineError(f"the kernel {call.kernel} cannot be launched: {error}") from error

    def _allow_shared(self, call: Call) -> None:
        driver = _import("cuda.bindings.driver")
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        kernel = driver.CUkernel(int(self.kernel(call.kernel).handle))
        ordinal = driver.CUdevice(self.device.device_id)
        (status,) = driver.cuKernelSetAttribute(attribute, call.shared_bytes, kernel, ordinal)
        if int(status) != 0:
            raise EngineError(f"the kernel {call.kernel} cannot have {call.shared_bytes} bytes: {status.name}")
        self._roomy.add(call.kernel)


def _compile(source: str, macros: Mapping[str, str], *, arch: str, program_cache: Any, log: io.StringIO | None) -> Any:
    core = _cuda_core()
    options = core.ProgramOptions(
        name=f"{source}.cu",
        arch=arch,
        std="c++17",
        define_macro=sorted(macros.items()),
        ptxas_options=["-v"] if log else None,
    )
    try:
        return core.Program(source_text(source), "c++", options).compile("cubin", logs=log, cache=program_cache)
    except Exception as error:  # cuda.core's CUDAError is no public name
        raise EngineError(f"NVRTC cannot compile {source}.cu for {arch} with {dict(macros)}:\n{error}") from error


@cache
def _cuda_core() -> Any:
    return _import("cuda.core")


@cache
def _program_cache() -> Any:
    return _import("cuda.core.utils").FileStreamProgramCache()


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise EngineError(
            f'the CUDA kernels need cuda-python ({error}): pip install "trt_cpspec[cuda]", '
            "or decode with the ONNX Runtime backend"
        ) from error
