"""The demo: from nothing to a wav, with the codes of plain and speculative decoding side by side."""

from __future__ import annotations

import shlex
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from trt_cpspec.cli import progress_bar
from trt_cpspec.errors import ConfigError
from trt_cpspec.outputs import check_folder, write_wav
from trt_cpspec.pipeline import Qwen3TTS, Speech
from trt_cpspec.text import check_text

from .build import BuildOptions
from .synthetic import SyntheticSpec, write_checkpoint
from .tts import TtsBuild

VOICE = Path(__file__).with_name("voice")
"""The trained checkpoint that is installed with the package."""

RANDOM_FRAMES = 60
"""Frames of speech with random weights: noise does not end where a text does."""

_MARKER = "cpspec_demo.txt"


def run_demo(
    output_dir: Path, *, text: str, seed: int, verify_size: int, checkpoint: Path = VOICE, random_weights: bool = False
) -> str:
    """Build and speak; return the report.

    Parameters
    ----------
    output_dir : Path
        Receives engines and wavs, and a checkpoint where one is generated.
    text : str
    seed : int
    verify_size : int
        Compared with none.
    checkpoint : Path
        What to speak with.
    random_weights : bool
        Speak with random weights instead: a checkpoint of them is generated.

    Raises
    ------
    ConfigError
        The text cannot be spoken, the checkpoint cannot be built, or the output folder holds something else than an
        earlier demo.
    """
    check_text(text)
    check_folder(output_dir)
    engines = output_dir / "engines"
    if random_weights:
        checkpoint = output_dir / "checkpoint"
        _provide_checkpoint(checkpoint)
    with TtsBuild(checkpoint, engines, BuildOptions()) as build:
        for name, steps, write in build.components:
            with progress_bar(name, steps) as update:
                write(partial(update, 1))
        build.commit()
    model = Qwen3TTS.from_engine_dir(engines)
    frames = RANDOM_FRAMES if random_weights else _most_frames(text)
    speeches = {n: _speak(model, text, seed, n, frames) for n in (0, verify_size)}
    plain, speculative = speeches[0], speeches[verify_size]
    if not np.array_equal(plain.codes, speculative.codes):
        raise AssertionError("coupled speculation gave other codes than plain decoding: a bug, please report it")
    if random_weights:
        voice = "random weights (the sound is noise)"
    else:
        voice = "the voice of the package" if checkpoint == VOICE else f"the checkpoint {checkpoint}"
    lines = [f'spoke "{text}" with {voice}, seed {seed}, coupled mode']
    for size, speech in speeches.items():
        path = output_dir / f"demo_n{size}.wav"
        write_wav(path, speech.waveform, speech.sample_rate)
        lines.append(_line(size, speech, path))
    lines.append(f"codes identical: yes, all {plain.codes.size}")
    rates = speculative.stats.as_dict()["acceptance_by_offset"]
    lines.append("acceptance by draft offset: " + ", ".join(f"{i + 1}: {_percent(r)}" for i, r in enumerate(rates)))
    lines += [f"warning: {warning}" for warning in plain.warnings if not random_weights]
    return "\n".join([*lines, "", *_next_steps(output_dir, engines, plain.speaker, seed, verify_size)])


def _most_frames(text: str) -> int:
    """Return frames that are ample for a text: 3 s, and 0.16 s a character."""
    return 38 + 2 * len(text)


def _provide_checkpoint(folder: Path) -> None:
    """Generate the checkpoint, or take the one that an earlier demo left; it appears complete or not at all."""
    spec = SyntheticSpec.demo()
    if folder.exists():
        marker = folder / _MARKER
        if not marker.is_file() or marker.read_text(encoding="utf-8") != f"{spec}\n":
            raise ConfigError(
                f"{folder} exists and is not this demo's checkpoint: it is left as it is, choose another --outputDir"
            )
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".checkpoint-", dir=folder.parent) as temporary:
        partial_folder = Path(temporary) / folder.name
        write_checkpoint(partial_folder, spec)
        (partial_folder / _MARKER).write_text(f"{spec}\n", encoding="utf-8")
        partial_folder.rename(folder)


def _speak(model: Qwen3TTS, text: str, seed: int, verify_size: int, frames: int) -> Speech:
    with progress_bar(f"speaking, N={verify_size}", frames) as update:
        return model.synthesize(
            text,
            verify_size=verify_size,
            mode="coupled",
            seed=seed,
            max_audio_length=frames,
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


def _next_steps(output_dir: Path, engines: Path, speaker: str | None, seed: int, verify_size: int) -> list[str]:
    """Return commands that run as they stand, also where the environment is not activated."""
    named = ["--speaker", speaker] if speaker is not None else []
    speak = [
        _command("qwen3_tts_inference"), "--talkerEngineDir", str(engines / "talker"), "--text", "Now say this.",
        *named, "--seed", str(seed), "--cpSpecVerifySize", str(verify_size),
        "--outputAudioDir", str(output_dir / "audio"),
    ]  # fmt: skip
    return ["next:", f"  {shlex.join([_command('cpspec'), 'inspect', str(engines)])}", f"  {shlex.join(speak)}"]


def _command(name: str) -> str:
    """Return a command of this installation, by the path its sibling was called with."""
    sibling = Path(sys.argv[0]).with_name(name)
    return str(sibling) if sibling.is_file() else name
