"""Engines of a generated checkpoint, for benchmarks that need sizes and not voices."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from trt_cpspec.builder.build import ONNX_RUNTIME, BuildOptions
from trt_cpspec.builder.engine import Backend
from trt_cpspec.builder.synthetic import SyntheticSpec, write_checkpoint
from trt_cpspec.builder.tts import TtsBuild


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
