"""Show the peak memory of cpspec-build on a generated checkpoint that is much larger.

    python benchmarks/build_memory.py --size 1b7 --dtype F32                          # 8.3 GB
    python benchmarks/build_memory.py --size omni-30b-a3b --layers 4 --dtype BF16     # 8.2 GB
    python benchmarks/build_memory.py --size omni-30b-a3b-narrow                      # as many tensors, all small

The build runs in a process of its own; its peak resident memory is the kernel's own count (ru_maxrss).
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import click
from synthetic_engine import spec_of
from trt_cpspec.builder.synthetic import DecoderSize, OmniSpec, SyntheticSpec, write_checkpoint

from trt_cpspec.cli import reports_errors
from trt_cpspec.tensorfile import TensorFile

GIB = 2**30


@click.command()
@click.option(
    "--size",
    type=click.Choice(["tiny", "demo", "0b6", "1b7", "omni-tiny", "omni-30b-a3b", "omni-30b-a3b-narrow"]),
    default="1b7",
    show_default=True,
)
@click.option("--layers", type=click.IntRange(min=2), help="Of Thinker and Talker, at most.  [default: all]")
@click.option("--dtype", type=click.Choice(["F32", "F16", "BF16"]), default="F32", show_default=True)
@click.option("--precision", type=click.Choice(["fp32", "fp16"]), default="fp32", show_default=True)
@click.option(
    "--workDir",
    "work_dir",
    type=click.Path(path_type=Path),
    help="Where the checkpoint and the engines may lie for a while.",
)
@reports_errors
def main(size: str, layers: int | None, dtype: str, precision: str, work_dir: Path | None) -> None:
    """Generate a checkpoint, build it, and compare the peak memory with the promise."""
    folder = Path(tempfile.mkdtemp(dir=work_dir))
    try:
        checkpoint, engines = folder / "checkpoint", folder / "engines"
        write_checkpoint(checkpoint, checkpoint_spec(size, layers, dtype))
        largest = max(info_bytes(path) for path in checkpoint.rglob("*.safetensors"))
        command = [sys.executable, "-m", "trt_cpspec.builder.cli", "--checkpointDir", str(checkpoint)]
        command += ["--engineDir", str(engines), "--precision", precision, "--backend", "onnxruntime"]
        started = time.perf_counter()
        subprocess.run(command, check=True)
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        report = {
            "backend": "onnxruntime",
            "checkpoint_bytes": sum(path.stat().st_size for path in checkpoint.rglob("*.safetensors")),
            "largest_tensor_bytes": largest,
            "peak_resident_bytes": peak,
            "promise_bytes": GIB + 2 * largest,
            "kept": peak < GIB + 2 * largest,
            "seconds": time.perf_counter() - started,
        }
        print(json.dumps(report, indent=2))
    finally:
        shutil.rmtree(folder)
    sys.exit(not report["kept"])


def checkpoint_spec(size: str, layers: int | None, dtype: str) -> SyntheticSpec | OmniSpec:
    """Return what to generate, cut to a number of layers."""
    presets = {
        "omni-tiny": OmniSpec.tiny,
        "omni-30b-a3b": OmniSpec.released_30b_a3b,
        "omni-30b-a3b-narrow": narrow_30b_a3b,
    }
    spec = presets[size](dtype=dtype) if size in presets else replace(spec_of(size, 0.75), dtype=dtype)
    if layers is None:
        return spec
    spec = replace(spec, talker=shallow(spec.talker, layers))
    if isinstance(spec, OmniSpec):
        spec = replace(spec, thinker=shallow(spec.thinker, layers), accept_hidden_layer=1)
    return spec


def narrow_30b_a3b(dtype: str) -> OmniSpec:
    """Return the layers and experts of the released model with narrow matrices: names and nodes are what costs."""
    spec, tiny = OmniSpec.released_30b_a3b(dtype=dtype), OmniSpec.tiny()
    assert spec.thinker_experts is not None
    assert spec.talker_experts is not None
    return replace(
        tiny,
        dtype=dtype,
        thinker=replace(tiny.thinker, layers=spec.thinker.layers),
        thinker_experts=replace(spec.thinker_experts, intermediate=16),
        talker=replace(tiny.talker, layers=spec.talker.layers),
        talker_experts=replace(spec.talker_experts, intermediate=16, shared=16),
        accept_hidden_layer=spec.accept_hidden_layer,
    )


def shallow(size: DecoderSize, layers: int) -> DecoderSize:
    return replace(size, layers=min(layers, size.layers))


def info_bytes(path: Path) -> int:
    file = TensorFile(path)
    return max(file.info(name).nbytes for name in file.names())


if __name__ == "__main__":
    main()
