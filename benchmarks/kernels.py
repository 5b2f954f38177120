"""Times the sampling kernels by CUDA-graph replay and writes the figures as JSON.

    python benchmarks/kernels.py --out kernels.json --commit "$(git rev-parse HEAD)"

Needs a CUDA device and the ``cuda`` extra. Every figure is a median over replays of one graph that holds many launches,
divided by their number, with the 10th and 90th percentile beside it. What a figure is compared with (a device copy, the
select that rescans the row) is measured in the same run. Inputs are random, rotated where a cache would flatter.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trt_cpspec.config import SamplingParams
from trt_cpspec.cuda_sampling import NO_ERROR, KernelCalls, KernelSizes, request_array
from trt_cpspec.nvrtc import Call, KernelLibrary
from trt_cpspec.sampling import Use

LAUNCHES = 200
REPLAYS = 60
SIZES = KernelSizes(
    codebook_size=2048,
    num_code_groups=1024,  # far more than a frame has, so that a graph of many rounds does not end
    hidden_size=1024,
    talker_hidden_size=2048,
    weight_dtype="BF16",
    hidden_dtype="F16",
    input_dtype="F16",
)
HEADS = 15
PARAMS = SamplingParams(temperature=0.9, top_k=50, top_p=0.8)
Array = NDArray[Any]


class Gpu:
    """One device, its kernels, and what a benchmark needs of the driver."""

    def __init__(self, sizes: KernelSizes) -> None:
        self.driver: Any = importlib.import_module("cuda.bindings.driver")
        self.library = KernelLibrary(sizes.macros())
        self.stream = self.library.device.create_stream()
        self.handle = int(self.stream.handle)

    def check(self, result: tuple[Any, ...]) -> Any:
        """Return the value of a driver call, or raise."""
        if int(result[0]):
            raise RuntimeError(f"the CUDA driver says {result[0]}")
        return result[1] if len(result) == 2 else result[1:]

    def empty(self, nbytes: int) -> int:
        """Allocate device memory, for the length of the run."""
        return int(self.check(self.driver.cuMemAlloc(nbytes)))

    def upload(self, array: Array) -> int:
        """Return the address of a copy of an array."""
        array = np.ascontiguousarray(array)
        address = self.empty(array.nbytes)
        self.check(self.driver.cuMemcpyHtoD(address, array.ctypes.data, array.nbytes))
        return address

    def run(self, call: Call) -> None:
        """Put a launch on the stream."""
        self.library.run(self.stream, call)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Put a device copy on the stream."""
        self.check(self.driver.cuMemcpyDtoDAsync(target, source, nbytes, self.handle))

    def fill(self, target: int, value: int, count: int) -> None:
        """Put a fill with a 32-bit value on the stream."""
        self.check(self.driver.cuMemsetD32Async(target, value, count, self.handle))

    def time_us(self, enqueue: Callable[[int], None], launches: int = LAUNCHES) -> dict[str, float]:
        """Capture ``enqueue(0), enqueue(1), ...`` in one graph and time its replays, per call."""
        driver, check = self.driver, self.check
        enqueue(0)  # loads the module outside of the capture
        check(driver.cuStreamSynchronize(self.handle))
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        check(driver.cuStreamBeginCapture(self.handle, mode))
        for index in range(launches):
            enqueue(index)
        graph = check(driver.cuGraphInstantiate(check(driver.cuStreamEndCapture(self.handle)), 0))
        start, end = check(driver.cuEventCreate(0)), check(driver.cuEventCreate(0))
        times = []
        for _ in range(REPLAYS + 5):
            check(driver.cuEventRecord(start, self.handle))
            check(driver.cuGraphLaunch(graph, self.handle))
            check(driver.cuEventRecord(end, self.handle))
            check(driver.cuStreamSynchronize(self.handle))
            times.append(check(driver.cuEventElapsedTime(start, end)) * 1000 / launches)
        check(driver.cuGraphExecDestroy(graph))
        low, median, high = np.percentile(times[5:], (10, 50, 90))
        return {"median_us": round(float(median), 3), "p10_us": round(float(low), 3), "p90_us": round(float(high), 3)}


class Sampling:
    """Buffers of select_sample and accept for a batch, and their launches."""

    def __init__(self, gpu: Gpu, batch: int, drafts: int, params: Sequence[SamplingParams]) -> None:
        self.gpu, self.batch, self.drafts, self.calls = gpu, batch, drafts, KernelCalls(SIZES)
        size, groups = SIZES.codebook_size, SIZES.num_code_groups
        random = np.random.default_rng(1)
        # Draft and target share most of what they say, as in a trained model.
        target = random.normal(0, 3, (batch, drafts + 1, size)).astype(np.float32)
        draft = target[:, : max(drafts, 1)] + random.normal(0, 0.7, (batch, max(drafts, 1), size)).astype(np.float32)
        self.target_logits, self.draft_logits = gpu.upload(target), gpu.upload(draft)
        self.requests = gpu.upload(request_array([(p, 7 + row, 0) for row, p in enumerate(params)]))
        self.target_laws, self.draft_laws = gpu.empty(target.nbytes), gpu.empty(draft.nbytes)
        self.last, self.rounds, self.states, self.errors = (gpu.upload(np.zeros(batch, np.int32)) for _ in range(4))
        self.picks, self.codes_drafted = gpu.empty(4 * batch * (drafts + 1)), gpu.empty(4 * batch * (drafts + 1))
        self.codes, self.history = gpu.empty(4 * batch * groups), gpu.empty(12 * batch * groups)
        gpu.fill(self.errors, NO_ERROR, batch)

    def select(self, *, draft: bool, width: int) -> Call:
        """Return one launch of select_sample."""
        return self.calls.select_sample(
            logits=self.draft_logits if draft else self.target_logits,
            requests=self.requests, last=self.last, codes=self.codes_drafted if draft else self.picks,
            laws=self.draft_laws if draft else self.target_laws, errors=self.errors, rows=self.batch, width=width,
            use=Use.DRAFT if draft else Use.TARGET, deepest=SIZES.num_code_groups - (2 if draft else 1),
        )  # fmt: skip

    def accept(self, *, coupled: bool = False) -> Call:
        """Return one launch of accept."""
        return self.calls.accept(
            drafts=self.codes_drafted, draft_laws=self.draft_laws, picks=self.picks, target_laws=self.target_laws,
            requests=self.requests, last=self.last, codes=self.codes, states=self.states, rounds=self.rounds,
            history=self.history, rows=self.batch, drafts_per_row=self.drafts, coupled=coupled,
        )  # fmt: skip

    def restart(self) -> None:
        """Begin a frame again."""
        self.gpu.fill(self.last, 0, self.batch)
        self.gpu.fill(self.rounds, 0, self.batch)

    def time(self, *calls: Call) -> dict[str, float]:
        """Time a sequence of launches."""

        def enqueue(index: int) -> None:
            if index == 0:
                self.restart()
            for call in calls:
                self.gpu.run(call)

        return self.gpu.time_us(enqueue)


def time_round(gpu: Gpu) -> dict[str, Any]:
    """One round's sampling work at N = 3 and batch 1: two draft rows, three verify rows, accept."""
    work = Sampling(gpu, 1, 2, [PARAMS])
    draft, verify, accept = work.select(draft=True, width=2), work.select(draft=False, width=3), work.accept()
    return {
        "round": work.time(draft, verify, accept),
        "draft_select_2_rows": work.time(draft),
        "verify_select_3_rows": work.time(verify),
        # Three launches less two: accept alone would read the same round over and over.
        "draft_and_verify": work.time(draft, verify),
        "round_coupled": work.time(draft, verify, work.accept(coupled=True)),
        "limit_us": 12,
    }


def time_select(gpu: Gpu) -> dict[str, Any]:
    """select_sample over top-k, top-p and rows, and the select that rescans the row."""
    figures: dict[str, Any] = {}
    for top_p in (0.8, 1.0):
        for top_k in (0, 1, 50, 385, 512, 1024, SIZES.codebook_size):
            work = Sampling(gpu, 1, 0, [SamplingParams(temperature=0.9, top_k=top_k, top_p=top_p)])
            figures[f"top_k={top_k},top_p={top_p}"] = work.time(work.select(draft=False, width=1))
    for rows in (1, 2, 8, 64):
        work = Sampling(gpu, rows, 0, [PARAMS] * rows)
        figures[f"rows={rows}"] = work.time(work.select(draft=False, width=1))
    work = Sampling(gpu, 1, 0, [PARAMS])
    select = work.select(draft=False, width=1)
    figures["rescan"] = work.time(Call("select_rescan", select.grid, 256, select.arguments))
    figures["general"] = work.time(Call("select_sample_general", select.grid, 1024, select.arguments))
    at_50 = figures["top_k=50,top_p=0.8"]["median_us"]
    figures["ratio_top_k_all_to_50"] = round(figures["top_k=2048,top_p=0.8"]["median_us"] / at_50, 3)
    figures["ratio_8_rows_to_1"] = round(figures["rows=8"]["median_us"] / figures["rows=1"]["median_us"], 3)
    figures["ratio_rescan_to_select"] = round(figures["rescan"]["median_us"] / at_50, 3)
    return figures


def time_heads(gpu: Gpu) -> dict[str, Any]:
    """draft_heads of two heads, rotated over more weights than the L2 cache holds, and copies of as many bytes."""
    size, hidden, calls = SIZES.codebook_size, SIZES.hidden_size, KernelCalls(SIZES)
    head_bytes, stacks = 2 * size * hidden, 16
    weights = np.random.default_rng(2).normal(0, 0.05, HEADS * size * hidden).astype(np.float32)
    bits = (weights.view(np.uint32) >> 16).astype(np.uint16)
    heads = [gpu.upload(bits) for _ in range(stacks)]
    states, logits = gpu.upload(np.zeros(1, np.int32)), gpu.empty(4 * 8 * size)
    vector = gpu.upload(np.random.default_rng(3).normal(0, 1, 8 * hidden).astype(np.float16))
    depths = [gpu.upload(np.array([depth], np.int32)) for depth in range(HEADS)]

    def heads_call(index: int, width: int) -> Call:
        depth = index // stacks * width % (HEADS - width)
        return calls.draft_heads(
            heads=heads[index % stacks], hidden=vector, states=states, last=depths[depth], logits=logits,
            rows=1, width=width, rows_of_hidden=1, deepest=HEADS,
        )  # fmt: skip

    read = 2 * head_bytes
    target, many = gpu.empty(HEADS * head_bytes), 1 << 30
    big = [gpu.empty(many) for _ in range(2)]
    large_copy = gpu.time_us(lambda index: gpu.copy(big[0], big[1], many), launches=4)
    bandwidth = 2 * many / large_copy["median_us"]  # bytes a microsecond, read and written
    figures: dict[str, Any] = {
        f"heads={width}": gpu.time_us(lambda index, width=width: gpu.run(heads_call(index, width)))  # type: ignore[misc]
        for width in (1, 2, 3, 8)
    }
    # A copy that reads half of the bytes and writes as many moves what the heads read.
    figures["copy_of_the_same_bytes"] = gpu.time_us(
        lambda index: gpu.copy(target + read * (index % 7), heads[index % stacks], read // 2)
    )
    floor = read / bandwidth
    figures["copy_terabytes_per_second"] = round(bandwidth / 1e6, 3)
    figures["floor_us_2_heads"] = round(floor, 3)
    figures["ratio_2_heads_to_floor"] = round(figures["heads=2"]["median_us"] / floor, 3)
    figures["ratio_2_heads_to_copy"] = round(
        figures["heads=2"]["median_us"] / figures["copy_of_the_same_bytes"]["median_us"], 3
    )
    return figures


def time_embeddings(gpu: Gpu) -> dict[str, Any]:
    """embed_project of three rows with the projection, and the sum of a frame's embeddings (G = 16)."""
    sizes = KernelSizes(
        codebook_size=2048, num_code_groups=16, hidden_size=1024, talker_hidden_size=2048,
        weight_dtype="BF16", hidden_dtype="F16", input_dtype="F16",
    )  # fmt: skip
    small, calls = Gpu(sizes), KernelCalls(sizes)
    table_bytes = 2 * 2048 * 2048
    tables, projection = gpu.empty(15 * table_bytes), gpu.empty(2 * 1024 * 2048)
    for address, count in ((tables, 15 * table_bytes // 4), (projection, 1024 * 2048 // 2)):
        gpu.fill(address, 0x3C003C00, count)
    codes = gpu.upload(np.arange(16, dtype=np.int32)[None])
    last, drafts, out = gpu.upload(np.ones(1, np.int32)), gpu.upload(np.arange(8, dtype=np.int32)), gpu.empty(1 << 20)
    bias = gpu.upload(np.zeros(1024, np.float32))
    embed = calls.embed_project(
        tables=tables, projection=projection, bias=bias, codes=codes, drafts=drafts, last=last, embeds=out,
        positions=gpu.empty(64), rows=1, drafts_per_row=2, padding=31,
    )  # fmt: skip
    total = calls.sum_embeddings(talker_table=tables, tables=tables, codes=codes, sums=out, rows=1)
    return {
        "embed_project_3_rows": small.time_us(lambda index: small.run(embed)),
        "sum_embeddings": small.time_us(lambda index: small.run(total)),
    }


def environment(gpu: Gpu, commit: str | None) -> dict[str, Any]:
    """Say where the figures come from."""
    names = ("cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "numpy")
    versions: dict[str, str | None] = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")
    return {
        "gpu": gpu.library.device.name,
        "compute_capability": gpu.library.device.arch,
        "cuda_driver": gpu.check(gpu.driver.cuDriverGetVersion()),
        "nvrtc": ".".join(str(part) for part in gpu.check(nvrtc.nvrtcVersion())),
        "python": platform.python_version(),
        **versions,
        "commit": commit,
        "command": " ".join(sys.argv),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write the JSON; it is printed in any case")
    parser.add_argument("--commit", help="what the figures were measured on")
    arguments = parser.parse_args()
    if arguments.out is not None and not arguments.out.parent.is_dir():
        parser.error(f"--out {arguments.out}: there is no folder {arguments.out.parent}")
    gpu = Gpu(SIZES)
    report = {
        "environment": environment(gpu, arguments.commit),
        "round": time_round(gpu),
        "select": time_select(gpu),
        "heads": time_heads(gpu),
        "embeddings": time_embeddings(gpu),
    }
    text = json.dumps(report, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
