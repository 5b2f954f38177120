"""The commands that measure an engine: ``cpspec verify`` and ``cpspec bench``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import click

from . import outputs
from .cli import (
    EXIT_FAILED_REQUEST,
    PathOption,
    declared,
    place_of,
    place_options,
    print_json,
    progress_bar,
    reports_errors,
    set_up_logging,
)
from .config import MODES, TRIAL_TEXT, Mode
from .errors import ConfigError

logger = logging.getLogger(__name__)


_measured = declared(
    click.option("--text", default=TRIAL_TEXT, help="Spoken to have Talker states. [default: a built-in sentence]"),
    click.option("--randomStates", "random_states", is_flag=True, help="Random Talker states, no text."),
    place_options,
    click.option("--json", "as_json", is_flag=True, help="Print JSON."),
)
"""Declares what both commands take."""


@click.command("verify")
@click.argument("engine_dir", type=PathOption)
@click.option("--frames", metavar="N", type=int, default=400, show_default=True, help="Frames of each mode.")
@click.option(
    "--cpSpecVerifySize",
    "windows",
    metavar="N",
    type=int,
    multiple=True,
    help="A verify size; may be repeated. [default: 2, 3 and the widest]",
)
@click.option("--seed", metavar="N", type=int, default=1, show_default=True, help="Other random numbers.")
@_measured
@reports_errors
def verify(engine_dir: Path, frames: int, windows: tuple[int, ...], seed: int, as_json: bool, **options: Any) -> None:
    """Show that speculation changes nothing on an engine.

    ENGINE_DIR is what cpspec-build wrote, or its code_predictor alone. Compares the law of rejection mode with that of
    autoregressive decoding, coupled mode with N = 0 code for code, rows alone with rows in a batch, and makes every
    decision of the sampler again. The exit code is 1 when an error is found; what an engine rounds otherwise is
    reported, and no error.
    """
    from .contexts import load_engines  # noqa: PLC0415  ONNX Runtime is loaded when it is needed
    from .hardware import describe_machine  # noqa: PLC0415
    from .verify import VerifyOptions, format_report  # noqa: PLC0415
    from .verify import verify as run_verify  # noqa: PLC0415

    set_up_logging(debug=False)
    chosen = VerifyOptions(frames=frames, windows=windows, seed=seed)
    loaded = load_engines(engine_dir, **place_of(options))
    contexts = loaded.contexts(options["text"], 64, spoken=not options["random_states"])
    with progress_bar("verifying", frames) as update:
        report = run_verify(loaded.predictor, contexts, chosen, reference=loaded.graph(), progress=update)
    report["machine"] = describe_machine(loaded.predictor)
    if as_json:
        print_json(report)
    else:
        click.echo(", ".join(f"{key} {value}" for key, value in report["machine"].items()))
        click.echo(format_report(report))
    if report["verdict"] != "pass":
        raise SystemExit(EXIT_FAILED_REQUEST)


@click.command("bench")
@click.argument("engine_dir", type=PathOption)
@click.option(
    "--frames", metavar="N", type=click.IntRange(min=2), default=40, show_default=True, help="Frames of each window."
)
@click.option("--batchSize", "batch", metavar="N", type=click.IntRange(min=1), default=1, help="Rows of a frame.")
@click.option(
    "--cpSpecMode", "mode", type=click.Choice(MODES), default="rejection", show_default=True, help="As in speaking."
)
@click.option("--picture", type=PathOption, help="Write acceptance and times there, as SVG.")
@_measured
@reports_errors
def bench(engine_dir: Path, frames: int, batch: int, mode: Mode, picture: Path | None, **options: Any) -> None:
    """Measure what speculation is worth on an engine.

    ENGINE_DIR is what cpspec-build wrote, or its code_predictor alone. Times a frame, counts passes and accepted
    drafts, and with Talker and codec times speech, for N = 0 and every verify size in one run.
    """
    from .bench import bench as run_bench  # noqa: PLC0415  ONNX Runtime is loaded when it is needed
    from .bench import bench_steps, format_bench  # noqa: PLC0415
    from .contexts import load_engines  # noqa: PLC0415
    from .picture import bench_picture  # noqa: PLC0415

    set_up_logging(debug=False)
    if picture is not None:
        outputs.check_file(picture)
    loaded = load_engines(engine_dir, **place_of(options))
    limit = loaded.predictor.spec.limits.max_batch_size
    if batch > limit:
        raise ConfigError(f"a batch size of {batch} exceeds the engine's max_batch_size {limit}")
    warmup, spoken = 3, not options["random_states"]
    with progress_bar("measuring", bench_steps(loaded, frames, warmup, spoken=spoken)) as update:
        report = run_bench(
            loaded, frames=frames, warmup=warmup, text=options["text"], mode=mode, batch=batch, spoken=spoken,
            progress=update,
        )  # fmt: skip
    if picture is not None:
        outputs.write_text(picture, bench_picture(report))
    if options["as_json"]:
        print_json(report)
    else:
        click.echo(format_bench(report))
