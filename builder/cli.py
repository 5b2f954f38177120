"""The command lines ``cpspec-build`` and ``cpspec``, which gathers all of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from trt_cpspec import __version__
from trt_cpspec.cli import PathOption, inspect, progress_bar, reports_errors, tts

from .demo import run_demo
from .tts import BuildOptions, TtsBuild


@click.command("cpspec-build", context_settings={"help_option_names": ["--help", "-h"]})
@click.option(
    "--checkpointDir",
    "checkpoint_dir",
    required=True,
    type=PathOption,
    help="Official Hugging Face Qwen3-TTS checkpoint.",
)
@click.option(
    "--engineDir", "engine_dir", required=True, type=PathOption, help="Receives talker, code_predictor and code2wav."
)
@click.option(
    "--precision",
    default="fp32",
    show_default=True,
    help="How weights are stored: fp32 or fp16. The codec is always FP32.",
)
@click.option(
    "--maxInputLen", "max_input_len", type=int, default=1024, show_default=True, help="Rows of the Talker's prefill."
)
@click.option(
    "--maxKVCacheCapacity",
    "max_kv_cache_capacity",
    type=int,
    default=4096,
    show_default=True,
    help="Positions of the Talker: prefill rows and frames.",
)
@click.option("--maxBatchSize", "max_batch_size", type=int, default=4, show_default=True)
@click.option(
    "--maxVerifySize",
    "max_verify_size",
    type=int,
    default=8,
    show_default=True,
    help="Positions of one CodePredictor pass; 1 builds an engine that cannot verify.",
)
@reports_errors
def build(checkpoint_dir: Path, engine_dir: Path, **options: Any) -> None:
    """Build the engines of a checkpoint."""
    with TtsBuild(checkpoint_dir, engine_dir, BuildOptions(**options)) as run:
        for name, steps, write in run.components:
            with progress_bar(name, steps) as update:
                write(partial(update, 1))
        run.commit()
    click.echo(f"{engine_dir}")


@click.command("demo")
@click.option(
    "--outputDir",
    "output_dir",
    type=PathOption,
    default=Path("demo_out"),
    show_default=True,
    help="Receives checkpoint, engines and wavs.",
)
@click.option("--text", default="Hello there, this is a short test.", show_default=True)
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), default=7, show_default=True)
@click.option("--cpSpecVerifySize", "verify_size", type=click.IntRange(2, 8), default=3, show_default=True)
@reports_errors
def demo(output_dir: Path, text: str, seed: int, verify_size: int) -> None:
    """Generate a small checkpoint, build it, and speak a sentence without and with speculation.

    The weights are random, so the sound is noise; codes, passes and acceptance are real.
    """
    click.echo(run_demo(output_dir, text=text, seed=seed, verify_size=verify_size))


@click.group(context_settings={"help_option_names": ["--help", "-h"]})
@click.version_option(__version__)
def main() -> None:
    """Exact speculative decoding of the CodePredictor in Qwen3-TTS."""


main.add_command(build, "build")
main.add_command(tts, "tts")
main.add_command(demo)
main.add_command(inspect)
