"""The command lines ``cpspec-build`` and ``cpspec``, which gathers all of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click

from trt_cpspec import __version__
from trt_cpspec.cli import (
    SEED,
    PathOption,
    inspect,
    llm,
    progress_bar,
    reports_errors,
    set_up_logging,
    tts,
    verify_size_option,
)
from trt_cpspec.config import MAX_VERIFY_SIZE
from trt_cpspec.errors import ConfigError
from trt_cpspec.measure_cli import bench, verify

from .build import BuildOptions
from .checkpoint import MODEL_TYPE, read_config
from .demo import VOICE, run_demo
from .engine import Backend, EngineOptions, Report, choose_backend
from .omni import OmniBuild
from .omni_checkpoint import MODEL_TYPES as OMNI_TYPES
from .rebuild import RebuildOptions, rebuild
from .tts import TtsBuild

logger = logging.getLogger(__name__)

_REPORT_STEPS = 1000


@click.command("cpspec-build", context_settings={"help_option_names": ["--help", "-h"]})
@click.option(
    "--checkpointDir",
    "checkpoint_dir",
    type=PathOption,
    help="Official Hugging Face checkpoint of Qwen3-TTS or Qwen3-Omni.",
)
@click.option(
    "--onnxDir",
    "onnx_dir",
    type=PathOption,
    help="Instead: a folder of exported graphs, one component or a tree, of cpspec-build or Edge-LLM.",
)
@click.option(
    "--engineDir",
    "engine_dir",
    required=True,
    type=PathOption,
    help="Receives the components. Without --checkpointDir and --onnxDir, the plans of its own graphs are built again.",
)
@click.option(
    "--backend",
    "backend_name",
    metavar="tensorrt|tensorrt_rtx|onnxruntime",
    help="What the engines are for.  [default: the first that is installed]",
)
@click.option(
    "--precision",
    metavar="fp32|fp16|bf16",
    help="How weights are stored; the codec is always FP32.  [default: fp16, and fp32 for onnxruntime]",
)
@click.option(
    "--maxInputLen",
    "max_input_len",
    metavar="N",
    type=int,
    help="Rows of a prefill: longest text or conversation, in tokens.  [default: 1024]",
)
@click.option(
    "--maxKVCacheCapacity",
    "max_kv_cache_capacity",
    metavar="N",
    type=int,
    help="Positions of Talker and Thinker: prefill rows and what is made behind them.  [default: 4096]",
)
@click.option(
    "--maxBatchSize",
    "max_batch_size",
    metavar="N",
    type=int,
    help="Texts that can be spoken at once.  [default: 4]",
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
@click.option(
    "--onlyCodePredictor", "only_code_predictor", is_flag=True, help="Build that plan and touch nothing else."
)
@click.option("--dryRun", "dry_run", is_flag=True, help="Print the profiles before and after, and build nothing.")
@click.option("--noBackup", "no_backup", is_flag=True, help="Do not keep the former plan as llm.engine.bak.")
@click.option("--timingCache", "timing_cache", type=PathOption, help="File of TensorRT's timings, read and updated.")
@click.option("--builderOptimizationLevel", "optimization_level", metavar="N", type=int, help="TensorRT's own, 0 to 5.")
@click.option("--workspaceMiB", "workspace_mib", metavar="N", type=int, help="Memory a tactic may use.")
@click.option(
    "--computeCapability",
    "compute_capabilities",
    metavar="X.Y",
    multiple=True,
    help="Of the GPU to build for, as 8.6; TensorRT-RTX builds without a GPU. May be repeated.",
)
@click.option(
    "--pluginLibrary",
    "plugin_libraries",
    type=PathOption,
    multiple=True,
    help="Library of custom operators that a graph uses. May be repeated.",
)
@reports_errors
def build(
    checkpoint_dir: Path | None,
    onnx_dir: Path | None,
    engine_dir: Path,
    backend_name: str | None,
    precision: str | None,
    max_verify_size: int,
    only_code_predictor: bool,
    dry_run: bool,
    no_backup: bool,
    **options: Any,
) -> None:
    """Build the engines of a Qwen3-TTS or Qwen3-Omni checkpoint, or the plans of graphs that exist already.

    Engines of an earlier build in the same folder are replaced when the new ones are complete.
    """
    set_up_logging(debug=False)
    limit_names = ("max_input_len", "max_kv_cache_capacity", "max_batch_size")
    limits = {name: value for name in limit_names if (value := options.pop(name)) is not None}
    engine = EngineOptions(
        **options | {key: tuple(options[key]) for key in ("compute_capabilities", "plugin_libraries")}
    )
    if checkpoint_dir is not None:
        for given, name in (
            (onnx_dir, "--onnxDir"),
            (only_code_predictor, "--onlyCodePredictor"),
            (dry_run, "--dryRun"),
        ):
            if given:
                raise ConfigError(f"{name} builds from graphs and --checkpointDir from a checkpoint: give one of them")
        if engine_dir.resolve() == checkpoint_dir.resolve():
            raise ConfigError(
                f"--engineDir {engine_dir} is the checkpoint itself, and engines are not written into it: name another"
            )
        backend = _chosen(backend_name)
        _check_plan_options(engine, backend)
        precision = precision or ("fp32" if backend.binding is None else "fp16")
        choices = BuildOptions(precision=precision, max_verify_size=max_verify_size, **limits)
        _build_checkpoint(checkpoint_dir, engine_dir, choices, backend, engine)
        click.echo(f"{engine_dir}")
        return
    if precision is not None:
        raise ConfigError(
            "--precision goes with --checkpointDir: an exported graph has the types that it was written in"
        )
    rebuild_options = RebuildOptions(
        max_verify_size=max_verify_size,
        limits=limits,
        engine=engine,
        only_code_predictor=only_code_predictor,
        dry_run=dry_run,
        backup=not no_backup,
    )
    if onnx_dir is None and not engine_dir.is_dir():
        raise ConfigError(
            f"{engine_dir} does not exist, so there are no graphs in it: say with --checkpointDir or --onnxDir what to "
            f"build from"
        )
    plan_backend = _chosen(backend_name)
    with _reporting("plans") as report:
        outcomes = rebuild(onnx_dir, engine_dir, plan_backend, rebuild_options, report=report)
    for outcome in outcomes:
        click.echo(str(outcome))
        if dry_run and outcome.table:
            click.echo(outcome.table)


def _check_plan_options(engine: EngineOptions, backend: Backend) -> None:
    """Refuse options that nothing would heed: without a plan, a wish for a GPU or for its tuning has no effect."""
    if backend.binding is None and engine != EngineOptions():
        raise ConfigError(
            "--computeCapability, --builderOptimizationLevel, --workspaceMiB, --timingCache and --pluginLibrary shape "
            "a plan, and ONNX Runtime runs the graph without one: leave them out, or name another --backend"
        )


def _build_checkpoint(
    checkpoint_dir: Path, engine_dir: Path, choices: BuildOptions, backend: Backend, engine: EngineOptions
) -> None:
    family = _family_of(checkpoint_dir)
    with family(checkpoint_dir, engine_dir, choices, backend=backend, engine_options=engine) as run:
        for name, steps, write in run.components:
            with progress_bar(name, steps) as update:
                write(partial(update, 1))
            if backend.binding is not None:
                with _reporting(f"{name} plan") as report:
                    run.build_plan(name, report)
        run.commit()


def _family_of(checkpoint_dir: Path) -> type[TtsBuild] | type[OmniBuild]:
    """Say by its ``config.json`` how a checkpoint is built."""
    config = read_config(checkpoint_dir)
    model_type = config.values.get("model_type")
    if model_type == MODEL_TYPE:
        return TtsBuild
    if model_type in OMNI_TYPES:
        return OmniBuild
    known = ", ".join((MODEL_TYPE, *OMNI_TYPES))
    raise ConfigError(f"{config.where}: model_type is {model_type!r}; what can be built is one of {known}")


def _chosen(name: str | None) -> Backend:
    """Choose the backend and say which it is."""
    backend = choose_backend(name)
    click.echo(f"backend: {backend.title}", err=True)
    return backend


@contextmanager
def _reporting(label: str) -> Iterator[Report]:
    """Show what TensorRT reports: a bar where its version measures progress, else a line for each phase."""
    with progress_bar(label, _REPORT_STEPS) as update:
        done_steps = 0

        def report(phase: str, done: float | None) -> None:
            nonlocal done_steps
            if done is None:
                logger.info("%s: %s", label, phase)
                return
            steps = int(done * _REPORT_STEPS)
            update(steps - done_steps, phase)
            done_steps = steps

        yield report


@click.command("demo")
@click.option(
    "--outputDir",
    "output_dir",
    type=PathOption,
    default=Path("demo_out"),
    show_default=True,
    help="Receives engines and wavs, and the checkpoint where one is generated.",
)
@click.option(
    "--checkpointDir",
    "checkpoint_dir",
    type=PathOption,
    help="Speak with this Qwen3-TTS checkpoint, not with the voice of the package.",
)
@click.option("--randomWeights", "random_weights", is_flag=True, help="Speak with random weights, that is noise.")
@click.option("--text", default="Hello there, this is a short test.", show_default=True, help="What is spoken.")
@click.option("--seed", metavar="N", type=SEED, default=7, show_default=True, help="Another seed, other codes.")
@click.option(
    "--cpSpecVerifySize",
    "verify_size",
    metavar="N",
    type=str,
    callback=verify_size_option(auto=False),
    default="3",
    show_default=True,
    help=f"Positions that one CodePredictor pass verifies, 2 to {MAX_VERIFY_SIZE}; compared with none.",
)
@reports_errors
def demo(
    *, output_dir: Path, checkpoint_dir: Path | None, random_weights: bool, text: str, seed: int, verify_size: int
) -> None:
    """Try everything on a small voice.

    Builds the engines of the voice that is installed with the package and speaks a text without and with speculation.
    With --randomWeights it generates a small checkpoint (or takes that of an earlier demo): the sound is noise; codes,
    passes and acceptance are real.
    """
    if verify_size == 0:
        raise ConfigError(f"--cpSpecVerifySize 0 is what the demo compares with: give 2 to {MAX_VERIFY_SIZE}")
    if random_weights and checkpoint_dir is not None:
        raise ConfigError("--checkpointDir and --randomWeights exclude each other: give one of them, or neither")
    click.echo(
        run_demo(
            output_dir,
            text=text,
            seed=seed,
            verify_size=verify_size,
            checkpoint=checkpoint_dir or VOICE,
            random_weights=random_weights,
        )
    )


@click.group("cpspec", context_settings={"help_option_names": ["--help", "-h"]})
@click.version_option(__version__)
def main() -> None:
    """Exact speculative decoding of the CodePredictor in Qwen3-TTS and Qwen3-Omni."""


main.add_command(build, "build")
main.add_command(tts, "tts")
main.add_command(llm, "llm")
main.add_command(demo)
main.add_command(inspect)
main.add_command(verify)
main.add_command(bench)


if __name__ == "__main__":
    build()
