"""Engines of a generated checkpoint, for benchmarks that need sizes and not voices.

python benchmarks/synthetic_engine.py 0b6 ENG --random-weights
cpspec bench ENG
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import click
from trt_cpspec.builder.build import ONNX_RUNTIME, BuildOptions
from trt_cpspec.builder.engine import Backend, choose_backend
from trt_cpspec.builder.synthetic import SyntheticSpec, write_checkpoint
from trt_cpspec.builder.tts import TtsBuild

from trt_cpspec.cli import reports_errors

SIZES = ("tiny", "demo", "0b6", "1b7")


def spec_of(size: str, agreement: float) -> SyntheticSpec:
    """Return a size's spec: ``tiny``, ``demo``, ``0b6`` or ``1b7``."""
    presets = {
        "tiny": SyntheticSpec.tiny,
        "demo": SyntheticSpec.demo,
        "0b6": SyntheticSpec.released_0b6,
        "1b7": SyntheticSpec.released_1b7,
    }
    return presets[size](agreement=agreement)


def code_predictor_only(spec: SyntheticSpec) -> SyntheticSpec:
    """Return the spec with the smallest Talker and codec beside the same CodePredictor."""
    tiny = SyntheticSpec.tiny()
    return replace(spec, talker=replace(spec.talker, layers=1), text_hidden=32, text_vocab=512, codec=tiny.codec)


@contextmanager
def built(
    spec: SyntheticSpec, components: tuple[str, ...], options: BuildOptions, backend: Backend = ONNX_RUNTIME
) -> Iterator[Path]:
    """Yield an engine folder of a generated checkpoint, which is removed behind it."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, engines = Path(folder) / "checkpoint", Path(folder) / "engines"
        write_checkpoint(checkpoint, spec)
        with TtsBuild(checkpoint, engines, options, backend=backend) as build:
            for name, _, write in build.components:
                if name not in components:
                    continue
                write()
                if backend.binding is not None and name == "code_predictor":
                    build.build_plan(name, lambda phase, done: None)
            build.commit()
        yield engines


@click.command()
@click.argument("size", type=click.Choice(SIZES))
@click.argument("engine_dir", type=click.Path(path_type=Path))
@click.option("--random-weights", is_flag=True, required=True, help="Says aloud that the weights are random.")
@click.option(
    "--agreement", type=click.FloatRange(0, 1), default=0.75, show_default=True, help="Of drafts and targets."
)
@click.option("--precision", type=click.Choice(["fp32", "fp16", "bf16"]), default="fp32", show_default=True)
@click.option("--backend", default="onnxruntime", show_default=True)
@reports_errors
def main(size: str, engine_dir: Path, agreement: float, precision: str, backend: str, **_: bool) -> None:
    """Build the engines of a generated checkpoint of a SIZE in ENGINE_DIR."""
    chosen, options = choose_backend(backend), BuildOptions(precision=precision)
    with tempfile.TemporaryDirectory(dir=engine_dir.parent) as folder:
        write_checkpoint(Path(folder) / "checkpoint", spec_of(size, agreement))
        with TtsBuild(Path(folder) / "checkpoint", engine_dir, options, backend=chosen) as build:
            for name, _steps, write in build.components:
                write()
                if chosen.binding is not None:
                    build.build_plan(name, lambda phase, done: None)
            build.commit()


if __name__ == "__main__":
    main()
