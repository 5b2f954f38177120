"""Time one audio frame of the CodePredictor for several verification windows, in one run.

    python benchmarks/frame.py --size released --random-weights
    python benchmarks/frame.py --engineDir ENG
    python benchmarks/frame.py --size released --random-weights --device cuda --precision fp16 --windows 0,2,3,4,8
    python benchmarks/frame.py --size released --random-weights --device cuda --precision bf16 --executors fused

Every window decodes the same frames in turn, so that a slow minute of the machine falls on all of them. The Talker is
a stand-in: hidden states drawn from a normal law. On a GPU the fused kernel stands beside the TensorRT engine, whose
frame as one launch stands beside the loop that the host drives; one pass of each is timed alone, by graph replay and
CUDA events. What sampling, drafting and accepting are of the fused kernel's frame is told by a build of it whose blocks
note times; what registers it takes and what it spills, by the compiler.
"""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import click
import numpy as np
from numpy.typing import NDArray
from synthetic_engine import built, code_predictor_only, spec_of
from trt_cpspec.builder.build import BuildOptions
from trt_cpspec.builder.engine import choose_backend

from trt_cpspec import __version__
from trt_cpspec.cli import reports_errors
from trt_cpspec.config import SamplingParams
from trt_cpspec.frame import CpSpecStats
from trt_cpspec.fused import NO_TIME, FusedFrames, FusedPlan, FusedSession
from trt_cpspec.nvrtc import resource_usage, spilled_bytes
from trt_cpspec.outputs import check_file
from trt_cpspec.predictor import CodePredictor

SIZES = {"tiny": "tiny", "demo": "demo", "released": "0b6", "released-1.7b": "1b7"}


@click.command()
@click.option("--engineDir", "engine_dir", type=click.Path(path_type=Path), help="A built engine folder.")
@click.option("--size", type=click.Choice(list(SIZES)), help="Instead: a generated checkpoint of this size.")
@click.option("--random-weights", is_flag=True, help="Says aloud that --size has random weights; required with it.")
@click.option(
    "--agreement",
    type=click.FloatRange(0, 1),
    default=0.75,
    show_default=True,
    help="Of drafts and targets, with --size.",
)
@click.option("--precision", type=click.Choice(["fp32", "fp16", "bf16"]), default="fp32", show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--executors", default="engine,fused", show_default=True, help="On a GPU: which, comma separated.")
@click.option("--windows", default="0,2,3,4", show_default=True, help="Verify sizes, comma separated.")
@click.option("--mode", type=click.Choice(["rejection", "coupled"]), default="rejection", show_default=True)
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Rows of a frame.")
@click.option("--frames", type=click.IntRange(min=1), default=20, show_default=True)
@click.option("--warmup", type=click.IntRange(min=0), default=2, show_default=True)
@click.option("--threads", type=click.IntRange(min=1))
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures there too.")
@reports_errors
def main(**options: Any) -> None:
    """Time one audio frame of the CodePredictor."""
    if options["json_file"] is not None:
        check_file(options["json_file"])
    if (options["engine_dir"] is None) == (options["size"] is None):
        raise click.UsageError("give either --engineDir or --size")
    if options["size"] and not options["random_weights"]:
        raise click.UsageError("--size generates random weights: say so with --random-weights")
    with ExitStack() as stack:
        engines = options["engine_dir"]
        if engines is None:
            spec = code_predictor_only(spec_of(SIZES[options["size"]], options["agreement"]))
            build = BuildOptions(precision=options["precision"], max_batch_size=max(4, options["batch"]))
            with_plan = options["device"] == "cuda" and "engine" in options["executors"].split(",")
            backend = choose_backend("tensorrt" if with_plan else "onnxruntime")
            engines = stack.enter_context(built(spec, ("talker", "code_predictor"), build, backend))
        folder = engines / "code_predictor"
        report: dict[str, Any] = {
            "machine": machine(),
            "options": {k: str(v) for k, v in options.items() if v is not None},
        }
        report |= {"rows": [], "pass_us": {}, "picks": []}
        if options["device"] == "cpu":
            report["rows"] = measure(
                CodePredictor.from_engine_dir(folder, device="cpu", threads=options["threads"]), options
            )
        else:
            for executor in options["executors"].split(","):
                measure_on_gpu(
                    CodePredictor.from_engine_dir(folder, device="cuda", executor=executor), executor, options, report
                )
    print(table(report))
    if options["json_file"]:
        options["json_file"].write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def measure_on_gpu(predictor: CodePredictor, executor: str, options: dict[str, Any], report: dict[str, Any]) -> None:
    """Add an executor's figures to the report; the engine's with the host-driven loop."""
    report["machine"] |= gpu(predictor)
    report["pass_us"][executor] = {length: pass_time(predictor, length) for length in (1, 2, 3, 4, 8)}
    rows = measure(predictor, options)
    for row in rows:
        row |= {"loop": executor, "host_us_alone": host_time(predictor, row["verify_size"], options["mode"])}
    if executor == "fused":
        report["picks"] = measure_picks(predictor, options)
        model = cast(FusedSession, predictor._session).model
        report["compiler"] = compiler_report(model.plan, model.device.compute_capability)
    report["rows"] += rows
    if executor == "engine":
        predictor.drive_from_host()
        report["rows"] += [row | {"loop": "host"} for row in measure(predictor, options)]


def host_time(predictor: CodePredictor, verify_size: int, mode: Any, frames: int = 60) -> float:
    """Return the median of the host's own microseconds a frame where one window runs alone, as it does in speech."""
    state = np.random.default_rng(1).standard_normal(predictor.spec.talker_hidden_size).astype(np.float32)
    own = []
    for index in range(frames + 5):
        before, started = predictor.run_seconds, time.perf_counter()
        predictor.decode_frame(state, 5, seeds=1, frames=index, verify_size=verify_size, mode=mode)
        own.append(1e6 * (time.perf_counter() - started - (predictor.run_seconds - before)))
    return statistics.median(own[5:])


def compiler_report(plan: FusedPlan, capability: tuple[int, int]) -> dict[str, dict[str, int]]:
    """Compile the fused kernel anew; return the registers of each kernel, and the bytes that each function spills."""
    text = resource_usage("fused_frame", plan.macros(), arch="sm_" + "".join(map(str, capability)))
    registers = re.findall(r"entry function '(\w+)'.*?Used (\d+) registers", text, re.DOTALL)
    return {"registers": {name: int(n) for name, n in registers}, "spilled": spilled_bytes(text)}


ENTERED, SCORED, PICKED = range(3)
"""What is noted of a pass: ``Stamp`` of the kernel."""


def measure_picks(predictor: CodePredictor, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Return for each window what sampling, drafting and accepting are of the fused kernel's frame."""
    session: Any = predictor._session
    device, (model, stamps) = session.device, session.model.stamped()
    frames, rows, found = FusedFrames(model), options["batch"], []
    blank, noted = np.full(stamps.shape, NO_TIME), np.empty(stamps.shape, np.uint64)
    for window in (predictor.window(int(word)) for word in options["windows"].split(",")):
        frames.prepare(rows, window, options["mode"])
        whole, between, since_first = [], [], []
        for index, state in enumerate(talker_states(predictor, options)):
            device.upload(stamps, blank)
            draws = [(SamplingParams(), seed, index) for seed in range(1, rows + 1)]
            frames.decode(state, np.full(rows, index, np.int32), draws, window=window, mode=options["mode"])
            device.download(noted, stamps)
            device.synchronize()
            if index >= options["warmup"]:
                times = microseconds(noted)
                whole.append(times[:, 0, SCORED].max())
                of_frame = between_passes(times)
                between.extend(of_frame[0])
                since_first.extend(of_frame[1])
        found.append(
            {
                "verify_size": window.requested,
                "us_per_frame": statistics.median(whole),
                "us_per_pass": sum(between) / len(between),
                "share": sum(between) / sum(whole),
                "share_since_first": sum(since_first) / sum(whole),
            }
        )
    return found


def microseconds(stamps: NDArray[np.uint64]) -> np.ma.MaskedArray[Any, Any]:
    """Return what a frame noted (``FusedModel.stamped``) in microseconds from its beginning; the rest is masked."""
    times = np.ma.masked_array(stamps, stamps == NO_TIME)
    return (times - times.min()) / 1000


def between_passes(times: np.ma.MaskedArray[Any, Any]) -> NDArray[np.float64]:
    """Return the microseconds behind each pass of a frame, ``[2, passes]``: since all, and since the first logits.

    They end where the last block has the rows of the next pass, or with the frame. They begin where the last block has
    stored its logits of the last target, or where the first block that picks has those of a target, though the heads of
    the other targets are still being applied then. The heads of drafts are in both, and what the stamps cost.
    """
    of_passes = times[:, 1 : times[:, 1:, ENTERED].any(0).sum() + 1]
    ends = np.append(of_passes[:, 1:, ENTERED].max(0), times[:, 0, SCORED].max())
    return np.asarray(ends - [of_passes[..., SCORED].max(0), of_passes[..., PICKED].min(0)])


def talker_states(predictor: CodePredictor, options: dict[str, Any]) -> NDArray[np.float32]:
    """Return hidden states that stand in for the Talker's, ``[warmup + frames, rows, Ht]``, the same for all."""
    shape = (options["warmup"] + options["frames"], options["batch"], predictor.spec.talker_hidden_size)
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def measure(predictor: CodePredictor, options: dict[str, Any]) -> list[dict[str, Any]]:
    windows = [int(word) for word in options["windows"].split(",")]
    rows = options["batch"]
    times: dict[int, list[float]] = {n: [] for n in windows}
    engine_ms: dict[int, list[float]] = {n: [] for n in windows}
    stats = {n: CpSpecStats(predictor.window(n), options["mode"], predictor.num_code_groups) for n in windows}
    for index, state in enumerate(talker_states(predictor, options)):
        for n in windows:
            before, started = predictor.run_seconds, time.perf_counter()
            result = predictor.decode_frame(
                state, [index] * rows, seeds=list(range(1, rows + 1)), frames=index, verify_size=n, mode=options["mode"]
            )
            elapsed = time.perf_counter() - started
            if index >= options["warmup"]:
                times[n].append(1000 * elapsed)
                engine_ms[n].append(1000 * (predictor.run_seconds - before))
                for rounds in result.rounds:
                    stats[n].add_frame(rounds)
    return [row(n, times[n], engine_ms[n], stats[n]) for n in windows]


def row(n: int, times: list[float], engine_ms: list[float], stats: CpSpecStats) -> dict[str, Any]:
    quarters = statistics.quantiles(times, n=4) if len(times) > 1 else [times[0]] * 3
    return {
        "verify_size": n,
        "ms_per_frame": statistics.median(times),
        "ms_quartiles": [quarters[0], quarters[2]],
        "passes_per_frame": stats.passes / stats.frames,
        "codes_per_round": stats.as_dict()["codes_per_round"],
        "share_outside_engine": 1 - sum(engine_ms) / sum(times),
        "host_us_per_frame": 1000 * statistics.median(np.subtract(times, engine_ms)),
    }


def gpu(predictor: CodePredictor) -> dict[str, Any]:
    session: Any = predictor._session
    major, minor = (
        session.device.call("cuDriverGetVersion") // 1000,
        session.device.call("cuDriverGetVersion") % 1000 // 10,
    )
    found = {"gpu": session.device.name, "cuda_driver": f"{major}.{minor}"}
    return found if isinstance(session, FusedSession) else found | {"tensorrt": session.plan.binding.__version__}


def pass_time(predictor: CodePredictor, length: int, replays: int = 200) -> dict[str, float]:
    """Time the engine's pass of one row and ``length`` positions, in microseconds."""
    session: Any = predictor._session
    device = session.device
    session.start(1, predictor.num_code_groups + predictor.spec.max_verify_size)
    if isinstance(session, FusedSession):
        width = predictor.spec.decoder.hidden_size
        session.forward(np.ones((1, length, width), np.float32), np.arange(5, 5 + length)[None])  # what is timed
        memory = session._memory
        graph = device.capture(lambda: memory.enqueue(length))
    else:
        session.buffers.positions.zero()
        session.buffers.enqueue(length)
        device.synchronize()
        graph = device.capture(lambda: session.buffers.enqueue(length))
    events = [device.call("cuEventCreate", 0) for _ in range(2)]
    times = []
    for _ in range(replays):
        device.call("cuEventRecord", events[0], device.stream)
        graph.launch()
        device.call("cuEventRecord", events[1], device.stream)
        device.synchronize()
        times.append(1000 * device.call("cuEventElapsedTime", *events))
    quarters = statistics.quantiles(times, n=4)
    return {"median": statistics.median(times), "low": quarters[0], "high": quarters[2]}


def machine() -> dict[str, Any]:
    import onnxruntime  # noqa: PLC0415, TID251  only its version

    return {
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "onnxruntime": onnxruntime.__version__,
        "trt_cpspec": __version__,
    }


def processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def table(report: dict[str, Any]) -> str:
    lines = [" ".join(f"{key}={value}" for key, value in report["machine"].items()), " ".join(sys.argv)]
    if report["options"]["batch"] != "1":
        lines.append(f"a frame is of {report['options']['batch']} rows; passes and codes are those of a row")
    for executor, passes in report["pass_us"].items():
        times = ", ".join(f"{t['median']:.1f} us at {n}" for n, t in passes.items())
        lines.append(f"one pass of the {executor}, by positions: {times}")
    if "compiler" in report:
        registers = ", ".join(f"{n} registers in {name}" for name, n in report["compiler"]["registers"].items())
        spilled = ", ".join(f"{n} in {name}" for name, n in report["compiler"]["spilled"].items() if n)
        lines.append(f"the compiler's report: {registers}; bytes spilled: {spilled or 'none'}")
    for r in report["picks"]:
        lines.append(
            f"sampling, drafting and accepting at N = {r['verify_size']}: {100 * r['share']:.1f} % of a frame, "
            f"{r['us_per_pass']:.1f} us a pass ({100 * r['share_since_first']:.1f} % since the first target's logits); "
            f"by stamps, with which a frame takes {r['us_per_frame']:.1f} us"
        )
    lines.append(
        "loop     N  ms/frame  quartiles          passes/frame  codes/round  outside the engine, us/frame, alone"
    )
    for r in report["rows"]:
        low, high = r["ms_quartiles"]
        times = f"{r['ms_per_frame']:8.3f}  {low:8.2f} - {high:8.2f}"
        counts = f"{r['passes_per_frame']:12.2f} {r['codes_per_round']:12.2f}"
        outside = f"{100 * r['share_outside_engine']:10.1f} % {r['host_us_per_frame']:12.1f}"
        alone = f"{r['host_us_alone']:12.1f}" if "host_us_alone" in r else ""
        lines.append(f"{r.get('loop', 'host'):6} {r['verify_size']:>3}  {times} {counts} {outside} {alone}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
