"""The sampling law against the reference's vectors, its random numbers against Philox, the accept step by hand."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from trt_cpspec import sampling
from trt_cpspec.config import SamplingParams
from trt_cpspec.errors import ConfigError, NumericsError
from trt_cpspec.sampling import (
    Law,
    PhiloxNoise,
    Proposal,
    Use,
    accept_by_rejection,
    accept_coupled,
    accept_probability,
    law,
    penalised,
    philox,
    residual_law,
    uniforms,
)
from trt_cpspec.talker import processed_logits, talker_law

GOLDEN = Path(__file__).parent / "golden"
CASES: list[dict[str, Any]] = json.loads((GOLDEN / "sampler.json").read_text())["cases"]
KEEP_ALL_TIES = (10, 11, 12, 32, 33)
PLAIN = SamplingParams(temperature=1.0, top_k=0)
WORD = 0xFFFFFFFF


def one_hot(size: int, code: int) -> Law:
    return np.eye(size)[code]


def chi_square_p(observed: NDArray[np.integer], expected: NDArray[np.float64]) -> float:
    """Return the p-value against expected counts; an odd number of cells has a survival function in closed form."""
    degrees = observed.size - 1
    assert degrees % 2 == 0
    assert expected.min() >= 5
    half = float(((observed - expected) ** 2 / expected).sum()) / 2
    return sum(math.exp(i * math.log(half) - half - math.lgamma(i + 1)) for i in range(degrees // 2))


# Philox and the addresses of its numbers


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((WORD,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0_A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: tuple[int, ...], key: int, words: tuple[int, ...]) -> None:
    """The vectors of Random123 for philox4x32, 10 rounds; a counter's words do not depend on its neighbours'."""
    alone = philox(key, np.array([counter], np.uint64))
    assert tuple(alone[0]) == words
    assert tuple(philox(key, np.array([[1, 2, 3, 4], counter], np.uint64))[1]) == words


def reference_uniform(seed: int, frame: int, depth: int, use: int, index: int) -> float:
    """Philox at its address, in plain integers."""
    words, low, high = [frame, depth, use, index >> 2], seed & WORD, seed >> 32
    for _ in range(10):
        first, second = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [second >> 32 ^ words[1] ^ low, second & WORD, first >> 32 ^ words[3] ^ high, first & WORD]
        low, high = (low + 0x9E3779B9) & WORD, (high + 0xBB67AE85) & WORD
    return ((words[index & 3] >> 8) + 0.5) * 2.0**-24


@pytest.mark.parametrize("seed", [0, 1, 2**32, 0xDEADBEEF_12345678, 2**64 - 1])
@pytest.mark.parametrize("use", list(Use))
@pytest.mark.parametrize(("frame", "depth"), [(0, 0), (3, 15), (2**32 - 1, 31)])
def test_uniforms_are_the_formula_bit_by_bit(seed: int, use: Use, frame: int, depth: int) -> None:
    indices = np.array([0, 1, 2, 3, 4, 7, 1021, 2047, 4095])
    expected = [reference_uniform(seed, frame, depth, int(use), int(index)) for index in indices]
    assert uniforms(seed, frame, depth, use, indices).tolist() == expected


def test_addresses_share_no_numbers() -> None:
    """Every part of an address leads to numbers of its own; a number is read once in 2^24, so a few may be equal."""
    base = {"seed": 5, "frame": 6, "depth": 7, "use": Use.TARGET}
    changes = [
        *({"seed": seed} for seed in (4, 6, 5 + 2**32)),
        *({"frame": frame} for frame in (5, 7, 8)),
        *({"depth": depth} for depth in (6, 8, 5)),
        *({"use": use} for use in list(Use)[1:]),
        {"frame": 7, "depth": 6},  # frame and depth do not add up
        {"seed": 6, "frame": 5},
    ]
    streams = [uniforms(**{**base, **change}, indices=np.arange(2048)) for change in ({}, *changes)]
    for stream in streams:
        assert len(np.unique(stream)) >= 2046  # 4 lanes of 512 counters
    assert len(np.unique(np.concatenate(streams))) >= 2048 * len(streams) * 0.998
    for index, stream in enumerate(streams):
        assert all((stream != other).mean() > 0.999 for other in streams[:index])


@pytest.mark.parametrize(("word", "number"), [(0, 2.0**-25), (WORD, 1 - 2.0**-25)])
def test_extreme_words_stay_inside_the_open_interval(monkeypatch: Any, word: int, number: float) -> None:
    """No number is 0 or 1, so no Gumbel noise is infinite, certainty is accepted and the impossible is not."""
    monkeypatch.setattr(sampling, "philox", lambda key, counters: np.full((len(counters), 4), word, np.uint64))
    assert uniforms(0, 0, 0, Use.TARGET, np.arange(3)).tolist() == [number] * 3
    noise = PhiloxNoise(seed=0, frame=0)
    assert noise.accept(1.0, 1)
    assert not noise.accept(0.0, 1)
    assert noise.pick(np.array([0.0, 0.25, 0.5, 0.25]), 1, Use.TARGET) == 2


# The production draws


def test_pick_is_gumbel_max_over_the_codes_that_can_occur() -> None:
    """The noise belongs to the code, not to its rank among the survivors: two laws that share codes share noise."""
    probabilities = np.array([0.0, 0.3, 0.0, 0.0, 0.2, 0.1, 0.4, 0.0])
    for frame in range(200):
        scores = {
            code: math.log(probabilities[code]) - math.log(-math.log(reference_uniform(9, frame, 3, 1, code)))
            for code in (1, 4, 5, 6)
        }
        assert PhiloxNoise(seed=9, frame=frame).pick(probabilities, 3, Use.DRAFT) == max(scores, key=scores.__getitem__)


def test_pick_breaks_ties_to_the_lower_code(monkeypatch: Any) -> None:
    monkeypatch.setattr(sampling, "uniforms", lambda *address: np.full(len(address[-1]), 0.5))
    assert PhiloxNoise(seed=0, frame=0).pick(np.array([0.0, 0.5, 0.0, 0.5]), 1, Use.TARGET) == 1
    assert PhiloxNoise(seed=0, frame=0).pick(np.full(4, 0.25), 1, Use.TARGET) == 0


@pytest.mark.parametrize("code", [0, 5, 2047])
def test_pick_of_a_certain_code(code: int) -> None:
    assert PhiloxNoise(seed=1, frame=2).pick(one_hot(2048, code), 3, Use.TARGET) == code


# Logits of 12 codes, one of them impossible: eleven cells, one of 0.4 % and one of 36 %.
CHI_LOGITS = np.array([0.5, -1.0, 2.5, 0.0, -np.inf, 1.0, 1.0, -2.0, 0.7, 1.8, -0.3, 1.5])
CHI_LAW = np.exp(CHI_LOGITS) / np.exp(CHI_LOGITS).sum()
CHI_SEEDS, CHI_FRAMES = (0, 1, 20_26, 2**63 + 11), 25_000


def draw(seed: int, frame: int, depth: int) -> int:
    return PhiloxNoise(seed=seed, frame=frame).pick(law(CHI_LOGITS, PLAIN), depth, Use.TARGET)


@pytest.fixture(scope="module")
def draws() -> NDArray[np.int64]:
    """200,000 production draws, ``[4 seeds, 25,000 frames, depths 1 and 2]``.

    Philox runs once for all frames of a seed, for speed; every 500th draw is repeated without this.
    """
    probabilities = law(CHI_LOGITS, PLAIN)
    counters = np.zeros((CHI_FRAMES, 2, 3, 4), np.uint64)  # 3 counters hold the numbers of 12 codes
    counters[..., 0] = np.arange(CHI_FRAMES)[:, None, None]
    counters[..., 1] = np.array([1, 2])[:, None]
    counters[..., 3] = np.arange(3)
    picked = []
    for seed in CHI_SEEDS:
        words = philox(seed, counters.reshape(-1, 4)).reshape(CHI_FRAMES, 2, 12)
        numbers = ((words >> np.uint64(8)) + 0.5) * 2.0**-24
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                sampling, "uniforms", lambda _s, frame, depth, _u, codes, of=numbers: of[frame, depth - 1, codes]
            )
            noises = [PhiloxNoise(seed=seed, frame=frame) for frame in range(CHI_FRAMES)]
            picked.append([[noise.pick(probabilities, depth, Use.TARGET) for depth in (1, 2)] for noise in noises])
        for frame in range(0, CHI_FRAMES, 500):
            assert picked[-1][frame] == [draw(seed, frame, depth) for depth in (1, 2)]
    return np.array(picked)


def test_draws_follow_the_law(draws: NDArray[np.int64]) -> None:
    """The law of N = 0: the softmax of the logits, once, and never a code of probability 0."""
    counts = np.bincount(draws.ravel(), minlength=12)
    assert counts[4] == 0
    possible = CHI_LAW > 0
    assert chi_square_p(counts[possible], draws.size * CHI_LAW[possible]) > 1e-3
    for wrong in (CHI_LAW**0.97, CHI_LAW + 0.004 * possible):  # the test's power: a small distortion of the law
        expected = draws.size * wrong[possible] / wrong.sum()
        assert chi_square_p(counts[possible], expected) < 1e-6


@pytest.mark.parametrize("neighbour", ["depth", "frame", "seed"])
def test_neighbouring_draws_are_independent(draws: NDArray[np.int64], neighbour: str) -> None:
    first, second = {
        "depth": (draws[..., 0], draws[..., 1]),
        "frame": (draws[:, :-1], draws[:, 1:]),
        "seed": (draws[:-1], draws[1:]),
    }[neighbour]
    group = np.array([0, 0, 1, 0, 0, 2, 2, 0, 2, 2, 0, 1])  # 3 groups of codes: 9 cells
    share = np.bincount(group, weights=CHI_LAW)
    cells = np.bincount((group[first] * 3 + group[second]).ravel(), minlength=9)
    assert chi_square_p(cells, first.size * np.outer(share, share).ravel()) > 1e-3


def test_codes_and_uses_have_independent_numbers() -> None:
    """Pairs of one frame: two lanes of one counter, two counters, and one index under two uses."""
    frames = 3_000
    numbers = np.stack(
        [
            np.stack([uniforms(3, frame, 1, use, np.arange(6)) for use in (Use.TARGET, Use.DRAFT)])
            for frame in range(frames)
        ]
    )  # [frames, 2, 6]
    fifths = (numbers * 5).astype(np.int64)
    for one, other in [((0, 0), (0, 1)), ((0, 2), (0, 3)), ((0, 0), (0, 4)), ((0, 0), (1, 0)), ((1, 3), (0, 5))]:
        cells = np.bincount(fifths[(..., *one)] * 5 + fifths[(..., *other)], minlength=25)
        assert chi_square_p(cells, np.full(25, frames / 25)) > 1e-3


def test_accept_uses_a_uniform_number() -> None:
    numbers = np.array([uniforms(4, frame, 2, Use.ACCEPT, np.zeros(1, np.int64))[0] for frame in range(8_000)])
    cells = np.bincount((numbers * 101).astype(np.int64), minlength=101)
    assert chi_square_p(cells, np.full(101, len(numbers) / 101)) > 1e-3
    for probability in (0.0, 0.03, 0.5, 0.9, 1.0):
        events = [PhiloxNoise(seed=4, frame=frame).accept(probability, 2) for frame in range(500)]
        assert events == (numbers[:500] < probability).tolist()


# The law: the reference's vectors


@pytest.fixture(scope="module")
def golden() -> dict[str, NDArray[np.float32]]:
    with np.load(GOLDEN / "sampler.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def talker_spec() -> Any:
    config = json.loads((GOLDEN / "tts_a" / "checkpoint" / "config.json").read_text())
    ids = SimpleNamespace(codec_eos_token_id=config["talker_config"]["codec_eos_token_id"])
    return SimpleNamespace(ids=ids, min_frames=2)


def case_params(case: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{key: case[key] for key in ("temperature", "top_k", "top_p", "repetition_penalty")})


def case_logits(case: dict[str, Any], golden: dict[str, NDArray[np.float32]], spec: Any) -> NDArray[np.float64]:
    logits = golden[f"logits_{case['vocab']}"][case["row"]]
    if case["talker"]:
        return processed_logits(spec, logits, case["seen"], case["repetition_penalty"])
    return penalised(logits, case["seen"], case["repetition_penalty"])


def test_golden_cases_are_complete() -> None:
    assert len(CASES) == 46
    assert {case["kind"] for case in CASES} >= {"tie_at_k", "all_equal", "quantised", "greedy", "seen_lt1", "talker"}


@pytest.mark.parametrize("index", [i for i in range(len(CASES)) if i not in KEEP_ALL_TIES])
def test_law_is_the_references(index: int, golden: dict[str, NDArray[np.float32]], talker_spec: Any) -> None:
    case = CASES[index]
    logits = case_logits(case, golden, talker_spec)
    params = case_params(case) if case["do_sample"] else PLAIN  # the reference leaves the softmax when it is greedy
    ours, theirs = law(logits, params), golden[f"probs_{case['vocab']}"][case["row"]]
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(ours > 1e-30, theirs > 1e-30)
    assert ours.sum() == pytest.approx(1, abs=1e-12)
    greedy = law(logits, SamplingParams(temperature=0.0, top_k=case["top_k"], top_p=case["top_p"]))
    np.testing.assert_array_equal(greedy, one_hot(case["vocab"], case["argmax"]))
    if case["talker"]:
        raw = golden["logits_3072"][case["row"]]
        np.testing.assert_array_equal(talker_law(talker_spec, raw, case["seen"], params), ours)


@pytest.mark.parametrize("index", KEEP_ALL_TIES)
def test_ties_at_k_keep_the_lower_code(index: int, golden: dict[str, NDArray[np.float32]], talker_spec: Any) -> None:
    """Where the reference keeps every code that ties at k, we keep k: the lower ones, renormalised."""
    case = CASES[index]
    logits = case_logits(case, golden, talker_spec)
    theirs = golden[f"probs_{case['vocab']}"][case["row"]].astype(np.float64)
    survivors = sorted(sorted(range(len(logits)), key=lambda code: (-logits[code], code))[: case["top_k"]])
    dropped = [int(code) for code in np.flatnonzero(theirs) if code not in survivors]
    kth = logits[survivors].min()
    assert dropped
    assert all(logits[code] == kth and code > max(c for c in survivors if logits[c] == kth) for code in dropped)
    ours = law(logits, case_params(case))
    assert np.flatnonzero(ours).tolist() == survivors
    np.testing.assert_allclose(ours[survivors], theirs[survivors] / theirs[survivors].sum(), rtol=0, atol=1e-6)


# The law: edges


def logs(*probabilities: float) -> NDArray[np.float64]:
    with np.errstate(divide="ignore"):
        return np.log(probabilities)


@pytest.mark.parametrize(
    ("probabilities", "top_p", "kept"),
    [
        ((0.5, 0.5), 0.5, [0]),  # the code that reaches top_p exactly is the last one
        ((0.5, 0.5), 0.51, [0, 1]),
        ((0.5, 0.25, 0.25), 0.5, [0]),
        ((0.25, 0.5, 0.25), 0.75, [0, 1]),  # a tie at the boundary: the lower code stays
        ((0.25, 0.25, 0.25, 0.25), 0.5, [0, 1]),
        ((0.25, 0.25, 0.25, 0.25), 0.6, [0, 1, 2]),
        ((0.6, 0.3, 0.1), 0.61, [0, 1]),  # the code that crosses stays whole
        ((0.1, 0.3, 0.6), 1e-9, [2]),  # never empty
        ((0.25, 0.25, 0.25, 0.25), 1e-9, [0]),
        ((0.5, 0.0, 0.5), 0.9, [0, 2]),
    ],
)
def test_top_p_boundary(probabilities: tuple[float, ...], top_p: float, kept: list[int]) -> None:
    result = law(logs(*probabilities), SamplingParams(temperature=1.0, top_k=0, top_p=top_p))
    assert np.flatnonzero(result).tolist() == kept
    whole = np.array(probabilities)[kept]
    np.testing.assert_allclose(result[kept], whole / whole.sum(), rtol=1e-14)


def test_top_p_comes_after_top_k_and_temperature() -> None:
    """0.4, 0.3, 0.2, 0.1: without renormalising after top-k, or at temperature 1, the kept set would be another."""
    logits = logs(0.4, 0.3, 0.2, 0.1)
    after_top_k = law(logits, SamplingParams(temperature=1.0, top_k=2, top_p=0.55))
    np.testing.assert_allclose(after_top_k, [1, 0, 0, 0])  # 4/7 of the two that are left
    sharper = law(logits, SamplingParams(temperature=0.5, top_k=0, top_p=0.8))
    np.testing.assert_allclose(sharper, [16 / 25, 9 / 25, 0, 0])  # squares of 4, 3, 2, 1: 25 of 30 reach 0.8


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize(
    ("top_k", "kept"),
    [(0, [0, 1, 2, 3, 4]), (1, [4]), (2, [1, 4]), (3, [1, 2, 4]), (5, [0, 1, 2, 3, 4]), (6, [0, 1, 2, 3, 4])],
)
def test_top_k_edges(dtype: type[np.floating], top_k: int, kept: list[int]) -> None:
    result = law(np.array([1, 2, 2, 2, 3], dtype), SamplingParams(temperature=1.0, top_k=top_k))
    weights = np.exp([1.0, 2, 2, 2, 3])[kept]
    assert np.flatnonzero(result).tolist() == kept
    np.testing.assert_allclose(result[kept], weights / weights.sum(), rtol=1e-14)


@pytest.mark.parametrize("params", [PLAIN, SamplingParams(temperature=0.9, top_k=50), SamplingParams(top_p=0.8)])
def test_law_neither_changes_its_input_nor_its_dtype(params: SamplingParams) -> None:
    logits = np.linspace(-3, 3, 64).astype(np.float32)
    before = logits.copy()
    assert law(logits, params).dtype == np.float64
    np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize("top_p", [1.0, 0.5])
@pytest.mark.parametrize("top_k", [0, 1, 3])
def test_temperature_0_is_the_lowest_argmax(top_k: int, top_p: float) -> None:
    params = SamplingParams(temperature=0.0, top_k=top_k, top_p=top_p)
    assert law(np.array([1.0, 3.0, 3.0, -np.inf]), params).tolist() == [0, 1, 0, 0]
    assert law(np.zeros(4), params).tolist() == [1, 0, 0, 0]


def test_coldest_temperature_is_finite() -> None:
    params = SamplingParams(temperature=1e-5, top_k=0)
    assert law(np.array([1e4, -1e4, 1e4 - 1], np.float32), params).tolist() == [1, 0, 0]


@pytest.mark.parametrize("top_k", [0, 2, 3, 4])
@pytest.mark.parametrize("top_p", [1.0, 0.999])
def test_forbidden_codes_have_no_mass(top_k: int, top_p: float) -> None:
    """Fewer finite logits than top_k: the ties at minus infinity bring nothing in."""
    result = law(np.array([-np.inf, 1.0, -np.inf, 1.0]), SamplingParams(temperature=0.7, top_k=top_k, top_p=top_p))
    np.testing.assert_allclose(result, [0, 0.5, 0, 0.5])


@pytest.mark.parametrize("size", [4, 2048])
@pytest.mark.parametrize("params", [PLAIN, SamplingParams(temperature=0.0), SamplingParams(top_k=2, top_p=0.5)])
@pytest.mark.parametrize("kind", ["nan", "all nan", "inf", "all -inf"])
def test_logits_without_a_law_are_an_error(size: int, params: SamplingParams, kind: str) -> None:
    logits = np.linspace(-1, 1, size).astype(np.float32)
    logits[slice(None) if kind.startswith("all") else 1] = float(kind.split()[-1])
    with pytest.raises(NumericsError, match="describe no law"):
        law(logits, params)


def test_talker_names_nan_that_suppression_would_hide(talker_spec: Any) -> None:
    logits = np.zeros(3072, np.float32)
    logits[3000] = np.nan
    with pytest.raises(NumericsError, match="Talker"):
        talker_law(talker_spec, logits, [1, 2], PLAIN)


def test_talker_mask(talker_spec: Any) -> None:
    """Special codes never occur; the end may, from the third step on."""
    logits, end = np.zeros(3072, np.float32), talker_spec.ids.codec_eos_token_id
    for seen, allowed in (([], 2048), ([7], 2048), ([7, 7], 2049)):
        result = talker_law(talker_spec, logits, seen, PLAIN)
        assert np.count_nonzero(result) == allowed
        assert not result[2048:end].any()
        assert not result[end + 1 :].any()
        assert bool(result[end]) == (len(seen) >= 2)


@pytest.mark.parametrize(
    ("logits", "seen", "penalty", "expected"),
    [
        ([4, 3, 2, 1], [0, 1], 2.0, [2, 1.5, 2, 1]),
        ([4, 3, 2, 1], [0, 0, 1, 0], 2.0, [2, 1.5, 2, 1]),  # duplicates once
        ([4, -3, 0, 1], [0, 1, 2], 2.0, [2, -6, 0, 1]),  # a negative logit is multiplied
        ([4, -3, 2, 1], [0, 1], 0.5, [8, -1.5, 2, 1]),
        ([4, 3, 2, -np.inf], [3], 2.0, [4, 3, 2, -np.inf]),
        ([4, 3, 2, 1], [], 2.0, [4, 3, 2, 1]),
        ([4, 3, 2, 1], [0, 1], 1.0, [4, 3, 2, 1]),
    ],
)
def test_repetition_penalty(logits: list[float], seen: list[int], penalty: float, expected: list[float]) -> None:
    given = np.array(logits, np.float32)
    assert penalised(given, seen, penalty).tolist() == expected
    assert given.tolist() == logits


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (-1, -1e-9, 1e-9, math.nan, math.inf, "1", None, True)),
        *(("top_p", value) for value in (0, -1, 1.5, math.nan, math.inf, "1", None, True)),
        *(("top_k", value) for value in (-1, 1.0, 50.5, math.nan, "50", None, True)),
        *(("repetition_penalty", value) for value in (0, -1, math.nan, math.inf, "1", None, True)),
    ],
)
def test_bad_parameters_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name} "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "values", [{"temperature": 0}, {"temperature": 1e-5}, {"top_k": 2049}, {"top_p": 1e-9}, {"top_p": 1}]
)
def test_extreme_parameters_are_allowed(values: dict[str, Any]) -> None:
    assert law(np.linspace(0, 1, 2048), SamplingParams(**values)).sum() == pytest.approx(1)


# The accept step by hand


@dataclass
class Script:
    """Noise that answers as told, checks that a pick is possible, and records what it was asked."""

    accepts: Sequence[bool] = ()
    asked: list[tuple[str, int, Any]] = field(default_factory=list)

    def accept(self, probability: float, depth: int) -> bool:
        answers = sum(kind == "accept" for kind, _, _ in self.asked)
        self.asked.append(("accept", depth, probability))
        if probability in (0.0, 1.0):
            return probability == 1.0
        return self.accepts[answers]

    def pick(self, law: Law, depth: int, use: Use) -> int:
        assert law.sum() == pytest.approx(1)
        self.asked.append((use.name, depth, law.tolist()))
        return int(np.argmax(law))


def proposal(codes: list[int], laws: Sequence[Law], first_depth: int = 3) -> Proposal:
    return Proposal(first_depth=first_depth, codes=codes, laws=list(laws))


ROWS = [one_hot(4, code) for code in range(4)]
HALVES = np.array([0.5, 0.5, 0.0, 0.0])
OTHER_HALVES = np.array([0.0, 0.0, 0.5, 0.5])
EVEN = np.full(4, 0.25)


def test_bonus_comes_from_the_trailing_row() -> None:
    noise = Script()
    assert accept_by_rejection(ROWS, proposal([0, 1, 2], ROWS[:3]), noise) == [0, 1, 2, 3]
    assert noise.asked == [
        ("accept", 3, 1.0), ("accept", 4, 1.0), ("accept", 5, 1.0), ("TARGET", 6, ROWS[3].tolist()),
    ]  # fmt: skip


@pytest.mark.parametrize("offset", [0, 1, 2])
def test_residual_comes_from_the_rejecting_row(offset: int) -> None:
    """One-hot targets 0, 1, 2, 3: a wrong draft at an offset is replaced by that offset's code."""
    codes = [code if code != offset else 3 for code in range(3)]
    noise = Script()
    drafts = [one_hot(4, code) for code in codes]
    assert accept_by_rejection(ROWS, proposal(codes, drafts), noise) == list(range(offset + 1))
    assert noise.asked[-1] == ("RESIDUAL", 3 + offset, ROWS[offset].tolist())


def test_no_draft_commits_a_target_draw() -> None:
    for rule in (accept_by_rejection, accept_coupled):
        noise = Script()
        assert rule([ROWS[2]], proposal([], []), noise) == [2]
        assert noise.asked == [("TARGET", 3, ROWS[2].tolist())]


@pytest.mark.parametrize("accepted", [True, False])
def test_accept_probability_is_target_over_draft_at_most_1(accepted: bool) -> None:
    target, draft = np.array([0.1, 0.6, 0.3, 0.0]), np.array([0.3, 0.3, 0.3, 0.1])
    assert [accept_probability(target, draft, code) for code in range(4)] == pytest.approx([1 / 3, 1, 1, 0])
    noise = Script([accepted])
    assert accept_by_rejection([target, ROWS[3]], proposal([0], [draft]), noise) == ([0, 3] if accepted else [1])
    assert noise.asked[0] == ("accept", 3, pytest.approx(1 / 3))
    assert noise.asked[1][0] == ("TARGET" if accepted else "RESIDUAL")


@pytest.mark.parametrize("seed", range(20))
def test_equal_laws_always_accept(seed: int) -> None:
    noise = PhiloxNoise(seed=seed, frame=0)
    code = noise.pick(HALVES, 3, Use.DRAFT)
    assert accept_by_rejection([HALVES, ROWS[3]], proposal([code], [HALVES]), noise) == [code, 3]


@pytest.mark.parametrize("seed", range(20))
def test_disjoint_supports_never_accept(seed: int) -> None:
    noise = PhiloxNoise(seed=seed, frame=0)
    code = noise.pick(HALVES, 3, Use.DRAFT)
    committed = accept_by_rejection([OTHER_HALVES, ROWS[0]], proposal([code], [HALVES]), noise)
    assert len(committed) == 1
    assert committed[0] in (2, 3)


@pytest.mark.parametrize(
    ("target", "draft", "expected"),
    [
        ([0.5, 0.5, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0]),  # a greedy draft: all that is left is the other code
        ([0.1, 0.6, 0.3, 0], [0.3, 0.3, 0.4, 0], [0, 1, 0, 0]),
        ([0.4, 0.4, 0.1, 0.1], [0.1, 0.2, 0.3, 0.4], [0.6, 0.4, 0, 0]),
        ([0, 0, 0.5, 0.5], [0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]),
        ([0.25, 0.25, 0.25, 0.25], [0.25, 0.25, 0.25, 0.25], [0.25, 0.25, 0.25, 0.25]),  # no mass: the target
        ([0.2, 0.8, 0, 0], [0.5, 0.8, 0, 0], [0.2, 0.8, 0, 0]),  # draft covers target everywhere: the target
    ],
)
def test_residual_law(target: list[float], draft: list[float], expected: list[float]) -> None:
    result = residual_law(np.array(target, float), np.array(draft, float))
    np.testing.assert_allclose(result, expected, atol=1e-15)
    assert result.sum() == pytest.approx(1)


@pytest.mark.parametrize("kind", ["uniform", "peaked", "tied", "near zero", "one-hot"])
def test_draft_accept_residual_restore_the_target(kind: str) -> None:
    """One position, summed over every outcome: draft mass accepted plus rejected mass redistributed is the target."""
    rng = np.random.default_rng(1)
    for _ in range(20):
        target, draft = rng.dirichlet(np.ones(6), 2)
        if kind == "peaked":
            target, draft = target**8 / (target**8).sum(), draft**8 / (draft**8).sum()
        elif kind == "tied":
            target, draft = np.array([1, 1, 2, 0, 0, 0]) / 4, rng.permutation([1, 1, 2, 0, 0, 0]) / 4
        elif kind == "near zero":
            draft = law(np.array([0, -700.0, -30, -1, -36, -740]), PLAIN)
        elif kind == "one-hot":
            draft = one_hot(6, int(rng.integers(6)))
        accepted = np.array([draft[c] and draft[c] * accept_probability(target, draft, c) for c in range(6)])
        np.testing.assert_allclose(accepted, np.minimum(target, draft), rtol=0, atol=1e-15)
        restored = accepted + (1 - accepted.sum()) * residual_law(target, draft)
        np.testing.assert_allclose(restored, target, rtol=0, atol=1e-15)


def test_a_draft_law_is_never_optional() -> None:
    with pytest.raises(TypeError):
        Proposal(first_depth=3, codes=[0])  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="zip"):
        accept_by_rejection(ROWS[:2], proposal([0], []), Script())


@pytest.mark.parametrize("rule", [accept_by_rejection, accept_coupled])
def test_a_missing_bonus_row_is_an_error(rule: Any) -> None:
    with pytest.raises(ValueError, match=r"n \+ 1 target laws"):
        rule(ROWS[:1], proposal([0], ROWS[:1]), Script())


@pytest.mark.parametrize("rule", [accept_by_rejection, accept_coupled])
def test_nothing_is_asked_behind_a_rejection(rule: Any) -> None:
    """The laws there belong to a prefix that never was; they may well be none."""
    targets = iter(ROWS)
    assert rule(targets, proposal([0, 2, 2], [ROWS[0], ROWS[2], ROWS[2]]), Script()) == [0, 1]
    assert next(targets) is ROWS[2]


@dataclass(frozen=True)
class SharedStream(PhiloxNoise):
    """The fault of vllm#54282: the replacement of a rejected draft reuses the draft's numbers."""

    def pick(self, law: Law, depth: int, use: Use) -> int:
        return PhiloxNoise.pick(self, law, depth, Use.DRAFT if use is Use.RESIDUAL else use)


@pytest.mark.parametrize(("noise_type", "fair"), [(PhiloxNoise, True), (SharedStream, False)])
def test_streams_of_a_round_are_disjoint(noise_type: type[PhiloxNoise], fair: bool) -> None:
    target, draft = np.array([0.1, 0.3, 0.6]), np.array([0.5, 0.02, 0.48])
    counts = np.zeros(3, np.int64)
    for seed in range(3_000):
        noise = noise_type(seed=seed, frame=0)
        code = noise.pick(draft, 3, Use.DRAFT)
        counts[accept_by_rejection([target, one_hot(3, 0)], proposal([code], [draft]), noise)[0]] += 1
    p_value = chi_square_p(counts, counts.sum() * target)
    assert p_value > 1e-3 if fair else p_value < 1e-9


def test_coupled_commits_target_draws_only() -> None:
    """Codes are the target's draws, draft or no draft; the walk ends at the first that the draft did not foresee."""
    for codes, committed in (
        ([0, 1, 2], [0, 1, 2, 3]),
        ([0, 1, 3], [0, 1, 2]),
        ([0, 2, 2], [0, 1]),
        ([3, 1, 2], [0]),
        ([], [3]),
    ):
        targets = ROWS[: len(codes)] + ROWS[3:]
        noise = Script()
        assert accept_coupled(targets, proposal(codes, [EVEN] * len(codes)), noise) == committed
        assert noise.asked == [("TARGET", 3 + i, targets[i].tolist()) for i in range(len(committed))]
