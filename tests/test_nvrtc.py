"""The kernels compile for every supported GPU, with no GPU at hand, and errors say what to do."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fused_model import released_plan

from trt_cpspec import nvrtc
from trt_cpspec.cuda_sampling import KernelSizes
from trt_cpspec.errors import EngineError
from trt_cpspec.fused import FusedPlan

FOLDER = Path(__file__).parents[1] / "kernels"
DTYPES = {"weight_dtype": "BF16", "hidden_dtype": "F16", "input_dtype": "F16"}
RELEASED = KernelSizes(
    codebook_size=2048, num_code_groups=16, hidden_size=1024, talker_hidden_size=2048, **DTYPES
)  # fmt: skip
# What the released size does not reach: eight codes a thread, rows that are not whole float4s, other dtypes.
LARGEST = KernelSizes(codebook_size=4096, num_code_groups=16, hidden_size=1024, talker_hidden_size=1024)
ODD = KernelSizes(
    codebook_size=2049, num_code_groups=16, hidden_size=1032, talker_hidden_size=2048,
    weight_dtype="F16", hidden_dtype="BF16", input_dtype="BF16",
)  # fmt: skip


@pytest.fixture
def fresh_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A program cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    nvrtc._program_cache.cache_clear()
    yield tmp_path
    nvrtc._program_cache.cache_clear()


@pytest.mark.parametrize("arch", nvrtc.ARCHITECTURES)
@pytest.mark.parametrize("source", [source for source in nvrtc.SOURCES if source != "fused_frame"])
def test_every_kernel_compiles_without_spills(source: str, arch: str) -> None:
    sampling = source in ("select_sample", "accept")
    for sizes in (RELEASED, LARGEST, ODD) if sampling else (RELEASED,):
        report = nvrtc.resource_usage(source, sizes.macros(), arch=arch)
        compiled = re.findall(r"Compiling entry function '(\w+)' for '(\w+)'", report)
        assert sorted(compiled) == sorted((kernel, arch) for kernel in nvrtc.SOURCES[source])
        spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
        assert spills
        assert set(spills) == {("0", "0")}, report
        assert "warning" not in report, report


@pytest.mark.parametrize("arch", [arch for arch in nvrtc.ARCHITECTURES if arch != "sm_75"])
def test_the_fused_kernel_compiles(arch: str) -> None:
    spilled = spills_of_the_fused_kernel(released_plan(), arch)
    # A pass is all products and attention. A frame keeps some of a round's state for the calls of picks and decisions.
    assert spilled["fused_pass"] == 0, spilled
    assert spilled["fused_frame"] <= {"sm_80": 8}.get(arch, 0 if int(arch[3:]) <= 90 else 64), spilled
    assert max(spilled.values()) <= (8 if int(arch[3:]) <= 90 else 96), spilled


@pytest.mark.parametrize(("dtype", "rows"), [("F16", 1), ("BF16", 8)])
def test_the_fused_kernel_spills_nothing_on_hopper_whatever_the_batch(dtype: str, rows: int) -> None:
    limits = {"max_input_len": 8, "max_batch_size": rows, "max_kv_cache_capacity": 24, "max_verify_size": 8}
    spilled = spills_of_the_fused_kernel(released_plan(dtype=dtype, builder_config=limits), "sm_90")
    assert set(spilled.values()) == {0}, spilled


def spills_of_the_fused_kernel(plan: FusedPlan, arch: str) -> dict[str, int]:
    """Compile it without a warning, and return the bytes that each of its functions spills."""
    report = nvrtc.resource_usage("fused_frame", plan.macros(), arch=arch)
    compiled = re.findall(r"Compiling entry function '(\w+)' for '(\w+)'", report)
    assert set(compiled) == {("fused_frame", arch), ("fused_pass", arch)}
    assert "warning" not in report, report
    return nvrtc.spilled_bytes(report)


def test_a_large_codebook_compiles() -> None:
    sizes = KernelSizes(codebook_size=151_936, num_code_groups=16, hidden_size=1024, talker_hidden_size=2048)
    assert "0 bytes spill stores" in nvrtc.resource_usage("select_sample_general", sizes.macros(), arch="sm_90")
    with pytest.raises(EngineError, match=r"select_sample_general\.cu is for larger codebooks"):
        nvrtc.resource_usage("select_sample", sizes.macros(), arch="sm_90")


def test_a_second_compilation_is_read_from_the_program_cache(fresh_cache: Path) -> None:
    first = nvrtc.compile_source("sum_embeddings", RELEASED.macros(), arch="sm_90")
    written = {path: path.stat().st_mtime_ns for path in fresh_cache.rglob("*") if path.is_file()}
    assert written
    again = nvrtc.compile_source("sum_embeddings", RELEASED.macros(), arch="sm_90")
    assert bytes(again.code) == bytes(first.code)
    assert {path for path in fresh_cache.rglob("*") if path.is_file()} == set(written)
    other = nvrtc.compile_source("sum_embeddings", LARGEST.macros(), arch="sm_90")
    assert bytes(other.code) != bytes(first.code)


def test_a_compilation_error_names_file_line_and_target(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = '#line 1 "sum_embeddings.cu"\nKERNEL nothing() {}\n'
    monkeypatch.setattr(nvrtc, "source_text", lambda source: broken)
    with pytest.raises(EngineError, match=r"(?s)sum_embeddings\.cu for sm_90.*sum_embeddings\.cu\(1\): error"):
        nvrtc.compile_source("sum_embeddings", {"V": "1"}, arch="sm_90", on_disk_cache=False)


def test_an_architecture_that_nvrtc_does_not_know_is_an_engine_error() -> None:
    with pytest.raises(EngineError, match="sm_10 with"):
        nvrtc.compile_source("accept", RELEASED.macros(), arch="sm_10", on_disk_cache=False)


def test_without_cuda_python_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    nvrtc._cuda_core.cache_clear()
    with pytest.raises(EngineError, match=r'pip install "trt_cpspec\[cuda\]"'):
        nvrtc.compile_source("accept", RELEASED.macros(), arch="sm_90")


def test_sources_include_nothing_and_all_are_listed() -> None:
    assert {path.stem for path in FOLDER.glob("*.cu")} == set(nvrtc.SOURCES)
    for path in (*FOLDER.glob("*.cu"), *FOLDER.glob("*.cuh")):
        assert "#include" not in path.read_text(encoding="utf-8")
    for source, kernels in nvrtc.SOURCES.items():
        text = (FOLDER / f"{source}.cu").read_text(encoding="utf-8")
        defined = re.findall(r"KERNEL\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(", text)
        assert tuple(defined) == kernels
        assert text.startswith(f"// {kernels[0]}")


def test_only_intrinsic_wrappers_are_conditional() -> None:
    """What the CPU shim runs is what the device runs, save one-line wrappers."""
    for path in FOLDER.glob("*.cu"):
        assert not re.search(r"^#if", path.read_text(encoding="utf-8"), re.MULTILINE)
    conditions = {
        path.name: re.findall(r"^#if.*", path.read_text(encoding="utf-8"), re.MULTILINE)
        for path in FOLDER.glob("*.cuh")
    }
    assert conditions == {
        "common.cuh": ["#ifdef PARTICIPANTS", "#ifdef HOST_SHIM", "#if __CUDA_ARCH__ >= 800", "#ifdef HOST_SHIM"],
        "streaming.cuh": ["#ifdef WATCHDOG", "#ifdef HOST_SHIM", "#if BULK_COPIES"],
    }
