"""The demo: from nothing to a wav, with the codes of plain and speculative decoding side by side."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from trt_cpspec.cli import progress_bar
from trt_cpspec.errors import EngineError
from trt_cpspec.outputs import writable_folder, write_wav
from trt_cpspec.pipeline import Qwen3TTS, Speech

from .synthetic import SyntheticSpec, write_checkpoint
from .tts import BuildOptions, TtsBuild

MAX_FRAMES = 60


def run_demo(output_dir: Path, *, text: str, seed: int, verify_size: int) -> str:
    """Generate, build and speak; return the report.

    Raises
    ------
    EngineError
        Coupled speculation gave other codes than plain decoding.
    """
    checkpoint, engines = writable_folder(output_dir) / "checkpoint", output_dir / "engines"
    write_checkpoint(checkpoint, SyntheticSpec.demo())
    with TtsBuild(checkpoint, engines, BuildOptions()) as build:
        for name, steps, write in build.components:
            with progress_bar(name, steps) as update:
                write(partial(update, 1))
        build.commit()
    model = Qwen3TTS.from_engine_dir(engines)
    speeches = {n: _speak(model, text, seed, n) for n in (0, verify_size)}
    plain, speculative = speeches[0], speeches[verify_size]
    if not np.array_equal(plain.codes, speculative.codes):
        raise EngineError("the codes differ: speculation in coupled mode must not change them; please report this")
    lines = [f'spoke "{text}" with random weights (the sound is noise), seed {seed}, coupled mode']
    for size, speech in speeches.items():
        path = output_dir / f"demo_n{size}.wav"
        write_wav(path, speech.waveform, speech.sample_rate)
        lines.append(_line(size, speech, path))
    lines.append(f"codes identical: yes, all {plain.codes.size}")
    rates = speculative.stats.as_dict()["acceptance_by_offset"]
    lines.append("acceptance by draft offset: " + ", ".join(f"{i + 1}: {_percent(r)}" for i, r in enumerate(rates)))
    return "\n".join(lines)


def _speak(model: Qwen3TTS, text: str, seed: int, verify_size: int) -> Speech:
    with progress_bar(f"speaking, N={verify_size}", MAX_FRAMES) as update:
        return model.synthesize(
            text,
            verify_size=verify_size,
            mode="coupled",
            seed=seed,
            max_audio_length=MAX_FRAMES,
            progress=update,
        )


def _line(size: int, speech: Speech, path: Path) -> str:
    stats = speech.stats
    return (
        f"N={size}: {stats.frames} frames, {stats.passes / stats.frames:.2f} passes a frame, "
        f"{stats.accepted} of {stats.proposed} drafts accepted, {speech.duration_ms / 1000:.2f} s in {path}"
    )


def _percent(rate: float | None) -> str:
    return "untested" if rate is None else f"{100 * rate:.0f} %"
