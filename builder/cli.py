"""The command lines ``cpspec-build`` and ``cpspec``, which gathers all of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from trt_cpspec import __version__
from trt_cpspec.cli import SEED, PathOption, inspect, progress_bar, reports_errors, tts
from trt_cpspec.config import MAX_VERIFY_SIZE

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
    metavar="fp32|fp16",
    default="fp32",
    show_default=True,
    help="How weights are stored. The codec is always FP32.",
)
@click.option(
    "--maxInputLen",
    "max_input_len",
    metavar="N",
    type=int,
    default=1024,
    show_default=True,
    help="Rows of the Talker's prefill: longest text, in tokens.",
)
@click.option(
    "--maxKVCacheCapacity",
    "max_kv_cache_capacity",
    metavar="N",
    type=int,
    default=4096,
    show_default=True,
    help="Positions of the Talker: prefill rows and frames.",
)
@click.option(
    "--maxBatchSize",
    "max_batch_size",
    metavar="N",
    type=int,
    default=4,
    show_default=True,
    help="Texts that can be spoken at once.",
)
@click.option(
    "--maxVerifySize",
    "max_verify_size",
    metavar="N",
    type=int,
    default=MAX_VERIFY_SIZE,
    show_default=True,
    help="Positions of one CodePredictor pass; 1 builds an engine that cannot verify.",
)
@reports_errors
def build(checkpoint_dir: Path, engine_dir: Path, **options: Any) -> None:
    """Build the engines of a Qwen3-TTS checkpoint.

    Engines of an earlier build in the same folder are replaced when the new ones are complete.
    """
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
@click.option("--text", default="Hello there, this is a short test.", show_default=True, help="What is spoken.")
@click.option("--seed", metavar="N", type=SEED, default=7, show_default=True, help="Another seed, other codes.")
@click.option(
    "--cpSpecVerifySize",
    "verify_size",
    metavar="N",
    type=click.IntRange(2, MAX_VERIFY_SIZE),
    default=3,
    show_default=True,
    help=f"Positions that one CodePredictor pass verifies, 2 to {MAX_VERIFY_SIZE}; compared with none.",
)
@reports_errors
def demo(output_dir: Path, text: str, seed: int, verify_size: int) -> None:
    """Try everything on a generated checkpoint.

    Generates a small checkpoint (or takes that of an earlier demo), builds its engines, and speaks a text without and
    with speculation. The weights are random, so the sound is noise; codes, passes and acceptance are real.
    """
    click.echo(run_demo(output_dir, text=text, seed=seed, verify_size=verify_size))


@click.group("cpspec", context_settings={"help_option_names": ["--help", "-h"]})
@click.version_option(__version__)
def main() -> None:
    """Exact speculative decoding of the CodePredictor in Qwen3-TTS."""


main.add_command(build, "build")
main.add_command(tts, "tts")
main.add_command(demo)
main.add_command(inspect)


if __name__ == "__main__":
    build()
