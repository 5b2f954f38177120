"""The CUDA kernels against their numpy twins: on every CPU through a host shim, and on a device where there is one.

``CPSPEC_REQUIRE_GPU=1 pytest -m gpu tests/test_kernels.py`` runs the device half; without the variable it is skipped
where no CUDA device is found.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import kernel_shim
import numpy as np
import pytest
from kernel_cases import (
    SHAPES,
    TOP_K,
    TOP_P,
    Kernels,
    Tally,
    accept_near,
    logits_of,
    pick_near,
    requests,
    top_p_near,
)
from kernel_shim import HostKernels
from numpy.typing import NDArray

from trt_cpspec import cuda_sampling as twin
from trt_cpspec.config import SamplingParams
from trt_cpspec.cuda_sampling import NO_ERROR, REQUEST, FrameState, KernelCalls, KernelSizes
from trt_cpspec.errors import ConfigError
from trt_cpspec.nvrtc import Call
from trt_cpspec.sampling import Use, law, uniforms

Array = NDArray[Any]
MakeKernels = Callable[..., Kernels]

CODEBOOKS = (2, 31, 1000, 1024, 2048, 2049, 4096)
LARGE_CODEBOOKS = (4097, 10_007)
GROUPS = 16
UNTOUCHED = -7


def sizes_of(codebook: int = 2048, **changes: Any) -> KernelSizes:
    """Return sizes that differ from small ones where a test says so."""
    defaults = {"num_code_groups": GROUPS, "hidden_size": 64, "talker_hidden_size": 96}
    return KernelSizes(codebook_size=codebook, **(defaults | changes))


@cache
def device_problem() -> str | None:
    """Say why no CUDA device can be used, or None."""
    try:
        driver = importlib.import_module("cuda.bindings.driver")
        result = driver.cuInit(0)
    except (ImportError, RuntimeError) as error:  # cuda-python, or the driver's library, is not installed
        return str(error)
    return str(result[0]) if int(result[0]) else None


@pytest.fixture(scope="session", params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MakeKernels:
    """``make(sizes)`` gives the kernels of these sizes, on the CPU shim and on a device."""
    if request.param == "gpu":
        problem = device_problem()
        if problem and os.environ.get("CPSPEC_REQUIRE_GPU") != "1":
            pytest.skip(f"no CUDA device: {problem}")
        device_kernels = importlib.import_module("kernel_device").DeviceKernels
        return cache(lambda sizes: Kernels(sizes, device_kernels(sizes.macros())))
    return host_kernels(tmp_path_factory.mktemp("kernels"))


def host_kernels(folder: Path, arch: int = 800) -> MakeKernels:
    """Return what makes kernels of the shim."""
    return cache(lambda sizes: Kernels(sizes, HostKernels(sizes.macros(), folder, arch=arch)))


@pytest.fixture
def on_device(make: MakeKernels) -> bool:
    """Whether the kernels run on a device."""
    return not isinstance(make(sizes_of()).backend, HostKernels)


# ------------------------------------------------------------------------------------------------------ select_sample


def select(kernels: Kernels, logits: Array, rows: Array, last: Array, *, use: Use = Use.TARGET, **changes: Any) -> Any:
    """Run select_sample on ``[B, W, V]`` logits; what it does not write holds UNTOUCHED."""
    batch, width, size = logits.shape
    arrays = {
        "logits": logits, "requests": rows, "last": last,
        "codes": np.full((batch, width), UNTOUCHED, np.int32),
        "laws": np.full((batch, width, size), UNTOUCHED, np.float32), "errors": np.full(batch, NO_ERROR, np.int32),
    }  # fmt: skip
    numbers = {"rows": batch, "width": width, "use": use, "deepest": kernels.sizes.num_code_groups - 1}
    after = kernels("select_sample", arrays, **(numbers | changes))
    return twin.Selection(after["codes"], after["laws"], after["errors"])


def same_support(law_of_kernel: Array, law_of_twin: Array) -> bool:
    """Whether the same codes are in both; float32 underflows where float64 does not."""
    lost = (law_of_kernel == 0) & (law_of_twin > 1e-30)
    return not lost.any() and not ((law_of_kernel > 0) & (law_of_twin == 0)).any()


def compare(tally: Tally, logits: Array, rows: Array, last: Array, got: twin.Selection, *, use: Use, what: str) -> None:
    """Compare codes and laws with the twin's, row by row."""
    expected = twin.select_sample(logits, rows, last, use=use, deepest=GROUPS - 1)
    np.testing.assert_array_equal(got.errors, expected.errors)
    for row, entry in np.ndindex(expected.codes.shape):
        name = f"{what} {rows[row]} entry {entry}"
        same_set = same_support(got.laws[row, entry], expected.laws[row, entry])
        near_top_p = lambda row=row, entry=entry: top_p_near(logits[row, entry], rows[row])  # noqa: E731
        tally.add(same_set, near_top_p, f"{name}: support")
        if not same_set:
            continue
        np.testing.assert_allclose(got.laws[row, entry], expected.laws[row, entry], rtol=0, atol=1e-6, err_msg=name)
        depth = int(last[row]) + 1 + entry
        near_pick = lambda row=row, entry=entry, depth=depth: pick_near(  # noqa: E731
            expected.laws[row, entry], rows[row], depth, use
        )
        tally.add(got.codes[row, entry] == expected.codes[row, entry], near_pick, f"{name}: code")


def grid_of(codebook: int) -> list[tuple[int, float, float]]:
    """Every top_k and top_p of the grid; the temperatures go round."""
    temperatures = (0.9, 1.0, 0.35, 2.5)
    pairs = [(top_k, top_p) for top_k in (*TOP_K, codebook) for top_p in TOP_P]
    return [(top_k, top_p, temperatures[index % 4]) for index, (top_k, top_p) in enumerate(pairs)]


def test_select_sample_equals_its_twin(make: MakeKernels, on_device: bool) -> None:
    tally = Tally()
    for codebook in CODEBOOKS:
        kernels = make(sizes_of(codebook))
        rows = requests(grid_of(codebook))
        last = np.arange(len(rows), dtype=np.int32) % (GROUPS - 1)
        for shape in SHAPES:
            for seed in range(8 if on_device else 1):
                logits = logits_of(shape, len(rows), codebook, seed=seed)[:, None]
                got = select(kernels, logits, rows, last)
                compare(tally, logits, rows, last, got, use=Use.TARGET, what=f"{shape} V={codebook}")
    tally.check()


def test_select_sample_of_a_large_codebook_equals_its_twin(make: MakeKernels) -> None:
    tally = Tally()
    for codebook in LARGE_CODEBOOKS:
        kernels = make(sizes_of(codebook))
        rows = requests([*grid_of(codebook)[2::3], (0, 0.5, 0.0)])
        last = np.arange(len(rows), dtype=np.int32) % (GROUPS - 1)
        for shape in SHAPES:
            logits = logits_of(shape, len(rows), codebook)[:, None]
            got = select(kernels, logits, rows, last)
            compare(tally, logits, rows, last, got, use=Use.TARGET, what=f"{shape} V={codebook}")
    tally.check()


@pytest.mark.parametrize("batch", [1, 2, 3, 8, 21, 64])
def test_a_row_does_not_depend_on_its_neighbours(make: MakeKernels, batch: int) -> None:
    kernels = make(sizes_of(1000))
    rows = requests([grid_of(1000)[7 * row % 36] for row in range(batch)])
    last = np.arange(batch, dtype=np.int32) % 12
    logits = logits_of("bfloat16", 3 * batch, 1000).reshape(batch, 3, 1000)
    together = select(kernels, logits, rows, last, use=Use.DRAFT)
    tally = Tally()
    compare(tally, logits, rows, last, together, use=Use.DRAFT, what="batch")
    tally.check()
    for row in range(0, batch, 7):
        alone = select(kernels, logits[row : row + 1], rows[row : row + 1], last[row : row + 1], use=Use.DRAFT)
        np.testing.assert_array_equal(alone.laws[0], together.laws[row])
        np.testing.assert_array_equal(alone.codes[0], together.codes[row])


def test_entries_beyond_the_last_depth_are_left_alone(make: MakeKernels) -> None:
    kernels = make(sizes_of(31))
    last = np.array([3, GROUPS - 4, GROUPS - 2, GROUPS - 1], np.int32)
    logits = logits_of("normal", 12, 31).reshape(4, 3, 31)
    got = select(kernels, logits, requests([(0, 1.0, 1.0)] * 4), last, deepest=GROUPS - 2)
    np.testing.assert_array_equal(got.codes == UNTOUCHED, [[0, 0, 0], [0, 0, 1], [1, 1, 1], [1, 1, 1]])
    np.testing.assert_array_equal((got.laws == UNTOUCHED).all(axis=2), got.codes == UNTOUCHED)


@pytest.mark.parametrize("codebook", [2, 1000, 2049, 4097])
def test_temperature_0_is_argmax_and_ties_go_to_the_lower_code(make: MakeKernels, codebook: int) -> None:
    logits = np.full((3, 1, codebook), -2.0, np.float32)
    logits[0, 0, codebook // 2 :] = 1.5
    logits[1, 0, [0, codebook - 1]] = [-0.0, 0.0]
    logits[2, 0, : codebook - 1] = -np.inf
    got = select(
        make(sizes_of(codebook)), logits, requests([(1, 0.3, 0.0), (0, 1.0, 0.0), (9, 0.5, 0.0)]), np.zeros(3, np.int32)
    )
    np.testing.assert_array_equal(got.codes[:, 0], [codebook // 2, 0, codebook - 1])
    np.testing.assert_array_equal(got.laws[:, 0], np.eye(codebook)[got.codes[:, 0]])


def test_a_tie_at_top_k_keeps_the_lower_codes(make: MakeKernels) -> None:
    logits = np.array([[[1, 2, 2, 2, 3, 2, 0, 2]]], np.float32)
    got = select(make(sizes_of(8)), logits, requests([(3, 1.0, 1.0)]), np.zeros(1, np.int32))
    np.testing.assert_array_equal(np.flatnonzero(got.laws), [1, 2, 4])


def test_top_p_one_half_of_two_equal_codes_keeps_the_first(make: MakeKernels) -> None:
    got = select(make(sizes_of(2)), np.zeros((1, 1, 2), np.float32), requests([(0, 0.5, 1.0)]), np.zeros(1, np.int32))
    np.testing.assert_array_equal(got.laws, [[[1, 0]]])


@pytest.mark.parametrize("codebook", [31, 2048, 4097])
def test_logits_of_no_law_are_reported_and_stay_in_bounds(make: MakeKernels, codebook: int) -> None:
    logits = logits_of("normal", 10, codebook).reshape(5, 2, codebook)
    logits[0, 1, -1] = np.nan
    logits[1, :, 3] = np.inf
    logits[2, 0] = -np.inf
    logits[3] = np.nan
    rows, last = (
        requests([(5, 0.8, 1.0), (0, 1.0, 1.0), (50, 0.5, 0.0), (1, 1.0, 1.0), (9, 0.8, 1.0)]),
        np.arange(5, dtype=np.int32),
    )
    got = select(make(sizes_of(codebook)), logits, rows, last)
    np.testing.assert_array_equal(got.errors, [2, 2, 3, 4, NO_ERROR])
    compare(Tally(), logits, rows, last, got, use=Use.TARGET, what="no law")


@pytest.mark.parametrize("codebook", [31, 2048, 4097])
def test_scores_a_millionth_apart_are_told_apart(make: MakeKernels, codebook: int) -> None:
    """The noise of the most favoured code of each row is met by a logit of another code, up to a few float32 steps.

    A float32 logarithm of a uniform number near 1 would be wrong in the third digit.
    """
    batch, codes = 64, np.arange(codebook)
    rows, last = requests([(0, 1.0, 1.0)] * batch), np.zeros(batch, np.int32)
    logits = np.full((batch, 1, codebook), -40, np.float32)
    expected = np.zeros(batch, np.int32)
    for row in range(batch):
        noise = -np.log(-np.log(uniforms(int(rows[row]["seed"]), int(rows[row]["frame"]), 1, Use.TARGET, codes)))
        first, other = int(np.argmax(noise)), int(np.argmin(noise))
        logits[row, 0, first] = 0
        logits[row, 0, other] = noise[first] - noise[other] + (4e-6 if row % 2 else -4e-6)
        expected[row] = other if row % 2 else first
    got = select(make(sizes_of(codebook)), logits, rows, last)
    np.testing.assert_array_equal(got.codes[:, 0], expected)


def test_laws_are_optional(make: MakeKernels) -> None:
    for codebook in (1000, 4097):
        kernels, logits = make(sizes_of(codebook)), logits_of("normal", 2, codebook)[:, None]
        rows, last = requests([(50, 0.8, 0.9)] * 2), np.zeros(2, np.int32)
        arrays = {
            "logits": logits, "requests": rows, "last": last, "codes": np.zeros((2, 1), np.int32), "laws": None,
            "errors": np.full(2, NO_ERROR, np.int32),
        }  # fmt: skip
        after = kernels("select_sample", arrays, rows=2, width=1, use=Use.TARGET, deepest=GROUPS - 1)
        np.testing.assert_array_equal(after["codes"], select(kernels, logits, rows, last).codes)


def test_runs_repeat_bit_by_bit(make: MakeKernels, on_device: bool) -> None:
    """100 times on a device; on the shim, in several orders of warps and lanes, which brings out missing barriers."""
    for codebook in (1024, 4097):
        kernels, rows = (
            make(sizes_of(codebook)),
            requests([(50, 0.8, 0.9), (0, 0.8, 0.9), (512, 1.0, 0.9), (7, 0.5, 0.9)]),
        )
        logits = np.concatenate([logits_of("normal", 2, codebook), logits_of("tied", 2, codebook)])[:, None]
        first = select(kernels, logits, rows, np.zeros(4, np.int32))
        for order in range(100 if on_device else 4):
            again = select(kernels, logits, rows, np.zeros(4, np.int32), order=order)
            np.testing.assert_array_equal(again.laws, first.laws)
            np.testing.assert_array_equal(again.codes, first.codes)


def test_warp_reductions_of_older_devices(tmp_path: Path) -> None:
    """Below compute capability 8.0 reductions are made of shuffles."""
    make_old, tally = host_kernels(tmp_path, arch=750), Tally()
    rows, last = requests(grid_of(1000)), np.zeros(36, np.int32)
    for shape in ("normal", "tied"):
        logits = logits_of(shape, 36, 1000)[:, None]
        got = select(make_old(sizes_of(1000)), logits, rows, last)
        compare(tally, logits, rows, last, got, use=Use.TARGET, what=shape)
    tally.check()


def test_the_baseline_samples_the_same_codes(make: MakeKernels) -> None:
    """What the benchmark compares with must do the same work."""
    kernels, rows, last = make(sizes_of(2048)), requests([(50, 0.8, 0.9), (50, 1.0, 0.9)] * 4), np.zeros(8, np.int32)
    logits = logits_of("normal", 8, 2048)[:, None]

    class Rescan(KernelCalls):
        def select_sample(self, **arguments: Any) -> Any:
            return super().select_sample(**arguments)._replace(kernel="select_rescan", block=256)

    arrays = {
        "logits": logits, "requests": rows, "last": last, "codes": np.zeros((8, 1), np.int32),
        "laws": np.zeros((8, 1, 2048), np.float32), "errors": np.zeros(8, np.int32),
    }  # fmt: skip
    addresses = {name: kernels.backend.upload(array) for name, array in arrays.items()}
    call = Rescan(kernels.sizes).select_sample(**addresses, rows=8, width=1, use=Use.TARGET, deepest=GROUPS - 1)
    kernels.backend.run(call)
    expected = select(kernels, logits, rows, last)
    np.testing.assert_array_equal(kernels.backend.download(addresses["codes"], arrays["codes"]), expected.codes)
    laws = kernels.backend.download(addresses["laws"], arrays["laws"])
    np.testing.assert_allclose(laws, expected.laws, rtol=0, atol=1e-6)


FEW = """
struct LawAlone { __device__ void weighed(const Kept&) const {} };
KERNEL few(const float* logits, const Request* requests, float* laws, int* found) {
  __shared__ Shared s;
  const u64 row = u64(blockIdx.x) * V;
  found[blockIdx.x] = few_row(s, Logits{logits + row}, requests[blockIdx.x], laws + row, LawAlone{});
}
"""
"""A kernel for the part of select_sample.cu that only the fused kernel uses."""


@pytest.mark.parametrize("codebook", [1000, 2048])
def test_the_way_by_a_bar_keeps_what_the_law_keeps(
    codebook: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It finds the law, ties at the border of top-k and all, or says that it does not."""
    sizes, text = sizes_of(codebook), kernel_shim.source_text("select_sample")
    monkeypatch.setattr(kernel_shim, "source_text", lambda _: text + FEW)
    monkeypatch.setattr(kernel_shim, "source_of", lambda _: "select_sample")
    monkeypatch.setitem(kernel_shim.SOURCES, "select_sample", ("few",))
    backend = HostKernels(sizes.macros(), tmp_path)
    random = np.random.default_rng(codebook)
    plain = random.standard_normal((6, codebook)).astype(np.float32) * 3
    tied = np.round(plain * 4) / 4  # a dozen codes share each of the values around the border
    hidden = np.where(random.random(plain.shape) < 0.98, np.float32(-np.inf), plain)  # fewer than top-k are left
    far = plain.copy()
    far[:, 7] = 3e38
    no_law = np.stack([np.full(codebook, -np.inf), np.full(codebook, np.nan), np.full(codebook, np.inf)])
    flat = np.zeros((1, codebook))
    logits = np.concatenate([plain, tied, hidden, far, no_law, flat]).astype(np.float32)
    found_once = 0
    for params in (
        *(SamplingParams(top_k=top_k) for top_k in (1, 2, 20, 50, 63, 64)),
        SamplingParams(temperature=0), SamplingParams(temperature=40), SamplingParams(top_k=65),
        SamplingParams(top_p=0.9), SamplingParams(top_k=0),
    ):  # fmt: skip
        arrays = {
            "logits": logits, "requests": requests([(params.top_k, params.top_p, params.temperature)] * len(logits)),
            "laws": np.full(logits.shape, np.nan, np.float32), "found": np.full(len(logits), UNTOUCHED, np.int32),
        }  # fmt: skip
        places = {name: backend.upload(array) for name, array in arrays.items()}
        backend.run(Call("few", (len(logits), 1, 1), sizes.threads, tuple(places.values())))
        laws, found = (backend.download(places[name], arrays[name]) for name in ("laws", "found"))
        assert set(found.tolist()) <= {0, 1}
        assert not found[-4:].any()
        assert found[:6].all() or params.top_p < 1 or params.top_k in (0, 64, 65)
        found_once += found.sum()
        for row in np.flatnonzero(found):
            wanted = law(logits[row].astype(np.float64), params)
            assert same_support(laws[row], wanted), (params, row)
            np.testing.assert_allclose(laws[row], wanted, rtol=1e-5, atol=1e-12)
    assert found_once > 120


# -------------------------------------------------------------------------------------------------------------- accept


def law_pair(kind: str, random: np.random.Generator, size: int) -> tuple[Array, Array]:
    """Return a target and a draft law, float32."""
    params = SamplingParams(temperature=0.9, top_k=min(50, size), top_p=0.8)
    if kind == "wide":  # more codes than are listed
        params = SamplingParams(temperature=0.9, top_k=0, top_p=1.0)
    target = random.normal(0, 3, size)
    draft = target + random.normal(0, 0.7, size)
    if kind == "equal":
        draft = target
    if kind == "disjoint":
        half = random.random(size) < 0.5
        half[:2] = True, False
        draft, target = np.where(half, draft, -np.inf), np.where(half, -np.inf, target)
    if kind == "certain":
        draft = np.where(np.arange(size) == random.integers(size), 9.0, -np.inf)
    return law(target, params).astype(np.float32), law(draft, params).astype(np.float32)


KINDS = ("close", "equal", "disjoint", "certain", "wide")


def proposals(size: int, batch: int, drafts: int, rows: Array, last: Array, *, coupled: bool) -> dict[str, Array]:
    """Return drafts, their laws, target laws and target picks of a batch; rows take the kinds of laws in turn."""
    random = np.random.default_rng([size, batch, drafts])
    target_laws = np.zeros((batch, drafts + 1, size), np.float32)
    draft_laws = np.zeros((batch, max(drafts, 1), size), np.float32)
    codes, picks = np.zeros((batch, max(drafts, 1)), np.int32), np.zeros((batch, drafts + 1), np.int32)
    for row, entry in np.ndindex(batch, drafts + 1):
        target, draft = law_pair(KINDS[(row + entry) % len(KINDS)], random, size)
        noise, depth = twin._noise(rows[row]), int(last[row]) + 1 + entry
        target_laws[row, entry] = target
        picks[row, entry] = noise.pick(target.astype(np.float64), depth, Use.TARGET)
        if entry < drafts:
            draft_laws[row, entry] = draft
            use = Use.TARGET if coupled else Use.DRAFT
            codes[row, entry] = noise.pick(draft.astype(np.float64), depth, use)
    return {"drafts": codes, "draft_laws": draft_laws, "picks": picks, "target_laws": target_laws}


def fresh_state(last: Array) -> FrameState:
    """Return the state of frames whose last committed depths are these."""
    batch = len(last)
    codes = np.tile(np.arange(GROUPS, dtype=np.int32) + 100, (batch, 1))
    return FrameState(
        codes, last, np.zeros(batch, np.int32), np.ones(batch, np.int32), np.zeros((batch, GROUPS, 3), np.int32)
    )


def run_accept(
    kernels: Kernels, made: dict[str, Array], rows: Array, state: FrameState, drafts: int, **changes: Any
) -> FrameState:
    """Run accept and return the state it leaves."""
    arrays = {**made, "requests": rows, **state._asdict()}
    after = kernels("accept", arrays, rows=len(rows), drafts_per_row=drafts, **changes)
    return FrameState(**{name: after[name] for name in FrameState._fields})


def accept_excused(made: dict[str, Array], rows: Array, last: Array, row: int) -> bool:
    """Whether any test or residual pick of a row's round is too close to call."""
    for entry in range(made["drafts"].shape[1]):
        target, draft = (made[name][row, entry].astype(np.float64) for name in ("target_laws", "draft_laws"))
        depth, code = int(last[row]) + 1 + entry, int(made["drafts"][row, entry])
        excess = np.maximum(target - draft, 0)
        if accept_near(target, draft, code, rows[row], depth):
            return True
        if excess.any() and pick_near(excess, rows[row], depth, Use.RESIDUAL):
            return True
    return False


@pytest.mark.parametrize("coupled", [False, True], ids=["rejection", "coupled"])
@pytest.mark.parametrize("drafts", [0, 1, 2, 3, 7])
def test_accept_equals_its_twin(make: MakeKernels, drafts: int, coupled: bool) -> None:
    tally = Tally()
    for codebook in (2, 31, 2048, 2049, 4096):
        kernels, batch = make(sizes_of(codebook)), 64 if codebook == 31 else 20
        rows = requests([(50, 0.8, 0.9)] * batch, seed=1000 * drafts + 1)
        last = np.arange(batch, dtype=np.int32) % GROUPS
        made, state = proposals(codebook, batch, drafts, rows, last, coupled=coupled), fresh_state(last)
        got = run_accept(kernels, made, rows, state, drafts, coupled=coupled)
        expected = twin.accept(
            made["drafts"][:, :drafts],
            made["draft_laws"][:, :drafts],
            made["target_laws"],
            rows,
            state,
            coupled=coupled,
        )
        for row in range(batch):
            same = all(np.array_equal(a[row], b[row]) for a, b in zip(got, expected, strict=True))
            near = lambda row=row, made=made, rows=rows, last=last: accept_excused(made, rows, last, row)  # noqa: E731
            tally.add(same, near, f"V={codebook} row {row}")
        assert (got.last[last < GROUPS - 1] > last[last < GROUPS - 1]).all()
    tally.check()


def test_a_code_of_target_probability_0_is_never_accepted(make: MakeKernels) -> None:
    batch, size = 64, 31
    rows, last = requests([(0, 1.0, 1.0)] * batch), np.zeros(batch, np.int32)
    target, draft = np.zeros((batch, 2, size), np.float32), np.zeros((batch, 1, size), np.float32)
    target[:, :, 7], draft[:, :, 3] = 1, 1
    made = {
        "drafts": np.full((batch, 1), 3, np.int32), "draft_laws": draft, "target_laws": target,
        "picks": np.full((batch, 2), 7, np.int32),
    }  # fmt: skip
    got = run_accept(make(sizes_of(size)), made, rows, fresh_state(last), 1, coupled=False)
    np.testing.assert_array_equal(got.codes[:, 1], 7)
    np.testing.assert_array_equal(got.last, 1)


def test_a_residual_without_mass_takes_the_target_law(make: MakeKernels) -> None:
    """A draft that its own law forbids is refused; where both laws are equal nothing else is left to draw from."""
    rows, last = requests([(0, 1.0, 1.0)] * 16), np.zeros(16, np.int32)
    both = np.tile(np.array([0.5, 0.5, 0], np.float32), (16, 1, 1))
    made = {
        "drafts": np.full((16, 1), 2, np.int32), "draft_laws": both, "target_laws": np.repeat(both, 2, axis=1),
        "picks": np.zeros((16, 2), np.int32),
    }  # fmt: skip
    got = run_accept(make(sizes_of(3)), made, rows, fresh_state(last), 1, coupled=False)
    expected = [twin._noise(row).pick(np.array([0.5, 0.5, 0]), 1, Use.RESIDUAL) for row in rows]
    np.testing.assert_array_equal(got.codes[:, 1], expected)
    assert set(expected) == {0, 1}


def test_accept_without_drafts_commits_the_first_pick_and_records_nothing(make: MakeKernels) -> None:
    rows, last = requests([(0, 1.0, 1.0)] * 3), np.zeros(3, np.int32)
    state = fresh_state(last)
    arrays = {
        "drafts": None, "draft_laws": None, "picks": np.array([[4], [5], [6]], np.int32), "target_laws": None,
        "requests": rows, "last": last, "codes": state.codes, "states": state.states, "rounds": None, "history": None,
    }  # fmt: skip
    after = make(sizes_of(31))("accept", arrays, rows=3, drafts_per_row=0, coupled=False)
    np.testing.assert_array_equal(after["codes"][:, 1], [4, 5, 6])
    np.testing.assert_array_equal(after["last"], 1)


def chi_square_z(counts: Array, expected_law: Array) -> float:
    """Return how many standard deviations a chi-square statistic is above its mean (Wilson-Hilferty)."""
    expected = expected_law * counts.sum()
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    ratio = ((observed - expected) ** 2 / expected).sum() / freedom
    return float((ratio ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5)


@pytest.mark.parametrize("coupled", [False, True], ids=["rejection", "coupled"])
def test_committed_codes_follow_the_target_law(make: MakeKernels, on_device: bool, coupled: bool) -> None:
    """Draft, verify, accept: 200,000 rounds on a device, 20,000 of a smaller codebook on the shim."""
    size, batch, repeats = (2048, 10_000, 20) if on_device else (31, 2_000, 10)
    kernels, calls = make(sizes_of(size)), KernelCalls(sizes_of(size))
    random = np.random.default_rng(5)
    target = random.normal(0, 2, (3, size)).astype(np.float32)
    draft = (target[:2] + random.normal(0, 0.8, (2, size))).astype(np.float32)
    params = SamplingParams(temperature=0.9, top_k=50, top_p=0.9)
    rows = twin.request_array([(params, 12345 + row, 0) for row in range(batch)])
    arrays = {
        "target": np.tile(target, (batch, 1, 1)), "draft": np.tile(draft, (batch, 1, 1)), "requests": rows,
        "target_laws": np.zeros((batch, 3, size), np.float32), "draft_laws": np.zeros((batch, 2, size), np.float32),
        "drafts": np.zeros((batch, 2), np.int32), "picks": np.zeros((batch, 3), np.int32),
        "errors": np.full(batch, NO_ERROR, np.int32), **fresh_state(np.zeros(batch, np.int32))._asdict(),
    }  # fmt: skip
    at = {name: kernels.backend.upload(array) for name, array in arrays.items()}
    common = {"requests": at["requests"], "last": at["last"], "rows": batch}
    select_calls = [
        calls.select_sample(
            logits=at[name], codes=at[codes], laws=at[f"{name}_laws"], errors=at["errors"], width=width, use=use,
            deepest=GROUPS - 1, **common,
        )
        for name, codes, width, use in (
            ("draft", "drafts", 2, Use.TARGET if coupled else Use.DRAFT), ("target", "picks", 3, Use.TARGET),
        )
    ]  # fmt: skip
    accept = calls.accept(
        **{name: at[name] for name in ("drafts", "draft_laws", "picks", "target_laws", "codes", "states", "history")},
        rounds=at["rounds"], drafts_per_row=2, coupled=coupled, **common,
    )  # fmt: skip
    counts, accepted = np.zeros((3, size), np.int64), 0
    for _ in range(repeats):
        for call in (*select_calls, accept, calls.advance_frame(requests=at["requests"], rows=batch)):
            kernels.backend.run(call)
        codes, last = (kernels.backend.download(at[name], arrays[name]) for name in ("codes", "last"))
        for entry in range(3):
            counts[entry] += np.bincount(codes[last > entry, entry + 1], minlength=size)
        accepted += int((last - 1).sum())
        for name in ("last", "rounds"):  # the next frame: the same memory, a frame number further
            kernels.backend.free(at[name])
            at[name] = kernels.backend.upload(arrays[name])
        for index, call in enumerate(select_calls):
            select_calls[index] = call._replace(arguments=(*call.arguments[:2], at["last"], *call.arguments[3:]))
        old = accept.arguments
        accept = accept._replace(arguments=(*old[:5], at["last"], *old[6:8], at["rounds"], *old[9:]))
    assert counts[0].sum() == batch * repeats
    assert 0.2 < accepted / (2 * batch * repeats) < 0.95
    for entry in range(3):
        assert chi_square_z(counts[entry], law(target[entry], params)) < 4.5


# -------------------------------------------------------------------------------------------------- embeddings, heads

DTYPES = ("F32", "F16", "BF16")


def stored(array: Array, dtype: str) -> Array:
    """Return an array as it lies in memory, rounded to nearest even; BF16 as its 16 bits."""
    if dtype == "BF16":
        bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return array.astype({"F32": np.float32, "F16": np.float16}[dtype])


def loaded(array: Array, dtype: str) -> Array:
    """Return stored values as float32."""
    if dtype == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


@pytest.mark.parametrize(("weight", "hidden"), [("BF16", "F16"), ("F16", "F32"), ("F32", "BF16")])
@pytest.mark.parametrize("width_of_hidden", [64, 1032])
def test_draft_heads_equals_its_twin(make: MakeKernels, weight: str, hidden: str, width_of_hidden: int) -> None:
    size, batch, random = 50, 5, np.random.default_rng(0)
    sizes = sizes_of(size, hidden_size=width_of_hidden, weight_dtype=weight, hidden_dtype=hidden)
    heads = stored(random.normal(0, 0.1, (GROUPS - 1, size, width_of_hidden)), weight)
    vectors = stored(random.normal(0, 1, (batch, 3, width_of_hidden)), hidden)
    last = np.array([0, 5, GROUPS - 4, GROUPS - 2, GROUPS - 1], np.int32)
    for states in (np.array([2, 0, 1, 1, 0], np.int32), None):
        logits = np.full((batch, 3, size), np.nan, np.float32)
        arrays = {"heads": heads, "hidden": vectors, "states": states, "last": last, "logits": logits}
        after = make(sizes)("draft_heads", arrays, rows=batch, width=3, rows_of_hidden=3, deepest=GROUPS - 1)["logits"]
        expected = twin.draft_heads(loaded(heads, weight), loaded(vectors, hidden), last, width=3, states=states)
        np.testing.assert_allclose(after, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtypes", [("BF16", "F16"), ("F16", "BF16"), ("F32", "F32")], ids="-".join)
@pytest.mark.parametrize("projected", [True, False])
def test_pass_inputs_equal_their_twins(make: MakeKernels, dtypes: tuple[str, str], projected: bool) -> None:
    weight, inputs = dtypes
    talker, hidden, size, batch, random = 96, 64 if projected else 96, 40, 4, np.random.default_rng(1)
    sizes = sizes_of(
        size,
        hidden_size=hidden,
        talker_hidden_size=talker,
        weight_dtype=weight,
        hidden_dtype=inputs,
        input_dtype=inputs,
    )
    tables = stored(random.normal(0, 1, (GROUPS - 1, size, talker)), weight)
    talker_table = stored(random.normal(0, 1, (70, talker)), weight)
    talker_hidden = stored(random.normal(0, 1, (batch, talker)), inputs)
    matrix, bias = (
        stored(random.normal(0, 0.1, (hidden, talker)), weight),
        random.normal(0, 1, hidden).astype(np.float32),
    )
    projection = (loaded(matrix, weight), bias) if projected else None
    shared = {"projection": matrix if projected else None, "bias": bias if projected else None}
    codes = random.integers(0, size, (batch, GROUPS)).astype(np.int32)
    drafts = random.integers(0, size, (batch, 2)).astype(np.int32)
    last = np.array([1, GROUPS - 3, GROUPS - 2, GROUPS - 1], np.int32)
    blank = stored(np.full((batch, 3, hidden), 9.0), inputs)
    kernels, tolerance = make(sizes), {"F32": 1e-5, "F16": 4e-3, "BF16": 3e-2}[inputs]

    arrays = {
        "tables": tables, **shared, "codes": codes, "drafts": drafts, "last": last, "embeds": blank,
        "positions": np.zeros((batch, 3), np.int32),
    }  # fmt: skip
    after = kernels("embed_project", arrays, rows=batch, drafts_per_row=2, padding=77)
    expected = twin.embed_project(loaded(tables, weight), projection, codes, drafts, last, padding=77)
    np.testing.assert_array_equal(after["positions"], expected.positions)
    np.testing.assert_allclose(loaded(after["embeds"], inputs), expected.embeds, rtol=0, atol=tolerance)
    if not projected:
        np.testing.assert_array_equal(after["embeds"], stored(expected.embeds, inputs))

    ones = np.ones(batch, np.int32)
    arrays = {
        "talker_hidden": talker_hidden, "talker_table": talker_table, **shared, "codes": codes,
        "embeds": blank[:, :2].copy(), "positions": np.full((batch, 2), 9, np.int32),
        "last": ones, "states": ones, "rounds": ones, "errors": ones,
    }  # fmt: skip
    after = kernels("start_frame", arrays, rows=batch)
    expected = twin.start_frame(loaded(talker_hidden, inputs), loaded(talker_table, weight), projection, codes)
    np.testing.assert_array_equal(after["positions"], expected.positions)
    np.testing.assert_allclose(loaded(after["embeds"], inputs), expected.embeds, rtol=0, atol=tolerance)
    for name, value in (("last", 0), ("states", 0), ("rounds", 0), ("errors", NO_ERROR)):
        np.testing.assert_array_equal(after[name], value)


@pytest.mark.parametrize("weight", DTYPES)
def test_sum_embeddings_equals_its_twin_bit_by_bit(make: MakeKernels, weight: str) -> None:
    size, talker, batch, random = 40, 296, 3, np.random.default_rng(2)
    tables = stored(random.normal(0, 1, (GROUPS - 1, size, talker)), weight)
    talker_table = stored(random.normal(0, 1, (70, talker)), weight)
    codes = random.integers(0, size, (batch, GROUPS)).astype(np.int32)
    codes[:, 0] += 30
    arrays = {
        "talker_table": talker_table, "tables": tables, "codes": codes, "sums": np.zeros((batch, talker), np.float32),
    }  # fmt: skip
    sizes = sizes_of(size, talker_hidden_size=talker, weight_dtype=weight)
    sums = make(sizes)("sum_embeddings", arrays, rows=batch)["sums"]
    expected = twin.sum_embeddings(loaded(talker_table, weight), loaded(tables, weight), codes)
    np.testing.assert_array_equal(sums, expected)


# --------------------------------------------------------------------------------------------------- frames and graphs


def test_the_frame_number_in_device_memory_gives_fresh_draws(make: MakeKernels, on_device: bool) -> None:
    """One captured graph (on a device) draws other codes each time it is replayed, and those of the twin."""
    kernels, calls = make(sizes_of(1000)), KernelCalls(sizes_of(1000))
    batch = 8
    rows, last = requests([(0, 1.0, 1.0)] * batch), np.zeros(batch, np.int32)
    rows["frame"] = 2**32 - 2  # the counter wraps
    logits = logits_of("normal", batch, 1000)[:, None]
    arrays = {
        "logits": logits, "requests": rows, "last": last, "codes": np.zeros((batch, 1), np.int32),
        "laws": np.zeros((batch, 1, 1000), np.float32), "errors": np.full(batch, NO_ERROR, np.int32),
    }  # fmt: skip
    at = {name: kernels.backend.upload(array) for name, array in arrays.items()}
    sequence = [
        calls.select_sample(**at, rows=batch, width=1, use=Use.TARGET, deepest=GROUPS - 1),
        calls.advance_frame(requests=at["requests"], rows=batch),
    ]
    backend: Any = kernels.backend
    replay = backend.graph(sequence) if on_device else lambda: [backend.run(call) for call in sequence]
    drawn = []
    for frame in (2**32 - 2, 2**32 - 1, 0, 1):
        replay()
        drawn.append(backend.download(at["codes"], arrays["codes"])[:, 0].tolist())
        rows["frame"] = frame
        expected = twin.select_sample(logits, rows, last, use=Use.TARGET, deepest=GROUPS - 1).codes[:, 0]
        np.testing.assert_array_equal(drawn[-1], expected)
    assert len({tuple(codes) for codes in drawn}) == len(drawn)


def test_rounds_repeat_while_a_row_misses_codes(tmp_path: Path) -> None:
    """On the shim only: a device needs a conditional node around it."""
    kernels = host_kernels(tmp_path)(sizes_of())
    for last, repeats in (([GROUPS - 1] * 40, 0), ([GROUPS - 1] * 39 + [GROUPS - 2], 1), ([0], 1)):
        arrays = {"handle": np.full(1, 9, np.uint32), "last": np.array(last, np.int32)}
        after = kernels("repeat_round", arrays, rows=len(last))
        assert after["handle"] == repeats


def test_the_request_array_is_laid_out_as_the_kernels_read_it() -> None:
    assert REQUEST.itemsize == 32
    assert [REQUEST.fields[name][1] for name in REQUEST.names] == [0, 8, 16, 24, 28]  # type: ignore[index,union-attr]


@pytest.mark.parametrize(
    ("codebook", "threads"), [(2, 32), (128, 32), (129, 64), (1000, 256), (2048, 512), (2049, 512), (99_999, 512)]
)
def test_threads_of_a_codebook(codebook: int, threads: int) -> None:
    assert sizes_of(codebook).threads == threads


@pytest.mark.parametrize("changes", [{"hidden_size": 12}, {"talker_hidden_size": 0}, {"weight_dtype": "F8"}])
def test_sizes_that_kernels_cannot_take_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        sizes_of(**changes)
