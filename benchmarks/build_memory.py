"""Show the peak memory of cpspec-build on a generated checkpoint that is much larger.

    python benchmarks/build_memory.py --size 1b7 --dtype F32        # 7.7 GB

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
from trt_cpspec.builder.synthetic import write_checkpoint

from trt_cpspec.cli import reports_errors
from trt_cpspec.tensorfile import TensorFile

GIB = 2**30


@click.command()
@click.option("--size", type=click.Choice(["tiny", "demo", "0b6", "1b7"]), default="1b7", show_default=True)
@click.option("--dtype", type=click.Choice(["F32", "F16", "BF16"]), default="F32", show_default=True)
@click.option("--precision", type=click.Choice(["fp32", "fp16"]), default="fp32", show_default=True)
@click.option(
    "--workDir",
    "work_dir",
    type=click.Path(path_type=Path),
    help="Where the checkpoint and the engines may lie for a while.",
)
@reports_errors
def main(size: str, dtype: str, precision: str, work_dir: Path | None) -> None:
    """Generate a checkpoint, build it, and compare the peak memory with the promise."""
    folder = Path(tempfile.mkdtemp(dir=work_dir))
    try:
        checkpoint, engines = folder / "checkpoint", folder / "engines"
        write_checkpoint(checkpoint, replace(spec_of(size, 0.75), dtype=dtype))
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


def info_bytes(path: Path) -> int:
    file = TensorFile(path)
    return max(file.info(name).nbytes for name in file.names())


if __name__ == "__main__":
    main()
