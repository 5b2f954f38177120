"""``cpspec verify``: a correct engine passes, and every known error of a sampler is found and named."""

from __future__ import annotations

import json
import re
import warnings
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from trt_cpspec.builder.cli import main

from trt_cpspec import frame, sampling
from trt_cpspec import verify as verify_module
from trt_cpspec.config import SamplingParams
from trt_cpspec.contexts import random_contexts
from trt_cpspec.errors import ConfigError, EngineError
from trt_cpspec.oracle import Decision, Draws, Sampler, cells
from trt_cpspec.pipeline import Qwen3TTS
from trt_cpspec.predictor import CodePredictor
from trt_cpspec.sampling import PhiloxNoise, Use
from trt_cpspec.uniformity import MIN_SAMPLE, chi_square_tail, detectable_variation, uniformity
from trt_cpspec.verify import VerifyOptions, compare_with_graph, format_report, verify

Patch = pytest.MonkeyPatch
FEW = VerifyOptions(frames=12)


@pytest.fixture(scope="module")
def predictor(lively: Qwen3TTS) -> CodePredictor:
    return lively.predictor


def run(predictor: CodePredictor, options: VerifyOptions = FEW) -> dict[str, Any]:
    return verify(predictor, random_contexts(predictor), options)


# ---- a correct engine -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2])
def test_a_correct_engine_passes(seed: int, predictor: CodePredictor) -> None:
    report = run(predictor, VerifyOptions(frames=24, seed=seed))
    assert (report["verdict"], report["errors"]) == ("pass", [])
    assert report["replay"]["decisions"] == 2 * 24 * 15
    assert report["coupled"] == {"codes": 24 * 15, "rounding": 0, "wrong": 0}
    assert report["rows"] == {"compared": 4 * 8, "rounding": 0, "wrong": 0}
    assert report["edges"]["probability 0, smallest number"] >= 5
    assert report["edges"]["probability 1, largest number"] >= 5
    assert report["windows"] == [2, 3, 8]
    assert json.loads(json.dumps(report)) == report


def test_the_law_check_alone_passes_a_correct_engine_and_judges_every_depth(predictor: CodePredictor) -> None:
    report = run(predictor, VerifyOptions(frames=MIN_SAMPLE, windows=(3,)))
    depths = [test for name, test in report["law"].items() if name.startswith("depth ")]
    assert len(depths) == 15
    assert all(test["judged"] for test in depths)
    assert min(test["p_value"] for test in report["law"].values()) > 1e-4
    assert report["law"]["all depths"]["sample"] == 15 * MIN_SAMPLE


# ---- planted errors -------------------------------------------------------------------------------------------------


def whole_softmax_stated(patch: Patch) -> None:
    real = frame._draft

    def draft(model: Any, hidden: Any, row: Any, *rest: Any) -> Any:
        proposal = real(model, hidden, row, *rest)
        if not proposal.codes:
            return proposal
        logits = model.draft_logits(hidden, proposal.first_depth, len(proposal.codes))
        whole = replace(row.params, top_k=0, top_p=1.0)
        return replace(proposal, laws=[sampling.law(values, whole) for values in logits])

    patch.setattr(frame, "_draft", draft)


def top_p_of_drafts_only(patch: Patch) -> None:
    real = frame._target_law

    def target_law(model: Any, hidden: Any, row: Any, *rest: Any) -> Any:
        return real(model, hidden, row._replace(params=replace(row.params, top_p=1.0)), *rest)

    patch.setattr(frame, "_target_law", target_law)


def top_p_of_targets_only(patch: Patch) -> None:
    real = frame._draft

    def draft(model: Any, hidden: Any, row: Any, *rest: Any) -> Any:
        return real(model, hidden, row._replace(params=replace(row.params, top_p=1.0)), *rest)

    patch.setattr(frame, "_draft", draft)


def residual_not_normalised(patch: Patch) -> None:
    def residual_law(target: Any, draft: Any) -> Any:
        excess = np.maximum(target - draft, 0.0)
        excess[-1] += 1 - excess.sum()  # where an inverse of the running sum ends up
        return excess

    patch.setattr(sampling, "residual_law", residual_law)


def residual_is_the_target(patch: Patch) -> None:
    patch.setattr(sampling, "residual_law", lambda target, draft: target)


def bonus_of_the_row_before(patch: Patch) -> None:
    real = frame.accept_by_rejection

    def accept(targets: Any, proposal: Any, noise: Any) -> list[int]:
        laws = list(targets)
        return real(laws if len(laws) == 1 else [*laws[:-1], laws[-2]], proposal, noise)

    patch.setattr(frame, "accept_by_rejection", accept)


def noise_of_the_draft_for_the_residual(patch: Patch) -> None:
    real = PhiloxNoise.pick

    def pick(self: PhiloxNoise, law: Any, depth: int, use: Use) -> int:
        return real(self, law, depth, Use.DRAFT if use == Use.RESIDUAL else use)

    patch.setattr(PhiloxNoise, "pick", pick)


def zero_accepts_probability_zero(patch: Patch) -> None:
    def accept(self: PhiloxNoise, probability: float, depth: int) -> bool:
        number = sampling.uniforms(self.seed, self.frame, depth, Use.ACCEPT, np.zeros(1, np.int64))[0]
        return bool(number - 2.0**-25 <= probability)

    patch.setattr(PhiloxNoise, "accept", accept)


def one_rejects_probability_one(patch: Patch) -> None:
    def accept(self: PhiloxNoise, probability: float, depth: int) -> bool:
        number = sampling.uniforms(self.seed, self.frame, depth, Use.ACCEPT, np.zeros(1, np.int64))[0]
        return bool(np.float32(number) < probability)

    patch.setattr(PhiloxNoise, "accept", accept)


def seeds_by_the_slot(patch: Patch) -> None:
    real = CodePredictor.decode_frame

    def decode_frame(self: CodePredictor, *args: Any, seeds: list[int], **kwargs: Any) -> Any:
        return real(self, *args, seeds=[seeds[0] + slot for slot in range(len(seeds))], **kwargs)

    patch.setattr(CodePredictor, "decode_frame", decode_frame)


def every_draft_accepted(patch: Patch) -> None:
    patch.setattr(PhiloxNoise, "accept", lambda self, probability, depth: True)


def greedy_drafts_of_a_soft_law(patch: Patch) -> None:
    real = PhiloxNoise.pick

    def pick(self: PhiloxNoise, law: Any, depth: int, use: Use) -> int:
        return int(np.argmax(law)) if use == Use.DRAFT else real(self, law, depth, use)

    patch.setattr(PhiloxNoise, "pick", pick)


def drafts_accepted_by_agreement(patch: Patch) -> None:
    def accept(targets: Any, proposal: Any, noise: Any) -> list[int]:
        return sampling.accept_coupled(targets, proposal, noise)

    patch.setattr(frame, "accept_by_rejection", accept)


def coupled_codes_of_another_stream(patch: Patch) -> None:
    real = frame.accept_coupled

    def accept(targets: Any, proposal: Any, noise: PhiloxNoise) -> list[int]:
        return real(targets, proposal, replace(noise, frame=noise.frame + 1))

    patch.setattr(frame, "accept_coupled", accept)


PLANTED: dict[Callable[[Patch], None], str] = {
    whole_softmax_stated: "replay: .*: the draft law in the accept step is the whole softmax",
    top_p_of_drafts_only: "replay: .*: top-p on the draft side only",
    top_p_of_targets_only: "replay: .*: top-p on the target side only",
    residual_not_normalised: "replay: .*: the residual law is not normalised",
    residual_is_the_target: "replay: .*: a rejected draft is replaced by a draw from the target law",
    bonus_of_the_row_before: "replay: .*: the bonus is drawn from the wrong row",
    noise_of_the_draft_for_the_residual: "replay: .*: the residual draw shares its noise with the draft",
    zero_accepts_probability_zero: "edges: a draft of probability 0, smallest number is decided wrongly",
    one_rejects_probability_one: "edges: a draft of probability 1, largest number is decided wrongly",
    seeds_by_the_slot: "rows: .*: seeds or states go by the batch slot",
    every_draft_accepted: "replay: .*: every draft is accepted",
    greedy_drafts_of_a_soft_law: "replay: .*: drafts are the most likely codes",
    drafts_accepted_by_agreement: "replay: .*: a draft is accepted only where it equals a draw of the target",
    coupled_codes_of_another_stream: "coupled: .* have other codes than N = 0 gives",
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_error_is_found_and_named(
    plant: Callable[[Patch], None], predictor: CodePredictor, monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    report = run(predictor)
    assert report["verdict"] == "fail"
    assert any(re.search(PLANTED[plant], error) for error in report["errors"]), report["errors"]
    assert not any(" or: " in error for error in report["errors"])  # one name, not several


@pytest.mark.parametrize("frames", [1, 2])
@pytest.mark.parametrize("plant", [residual_is_the_target, every_draft_accepted], ids=lambda plant: plant.__name__)
def test_a_frame_or_two_are_enough_for_a_gross_error(
    plant: Callable[[Patch], None], frames: int, predictor: CodePredictor, monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    assert run(predictor, VerifyOptions(frames=frames, windows=(8,)))["verdict"] == "fail"


LAW_BREAKERS: dict[Callable[[Patch], None], str] = {
    top_p_of_drafts_only: "have probability 0",
    every_draft_accepted: "whether a draft is accepted",
    greedy_drafts_of_a_soft_law: "an accepted draft",
}


@pytest.mark.parametrize("plant", LAW_BREAKERS, ids=lambda plant: plant.__name__)
def test_the_law_check_finds_it_without_knowing_the_random_numbers(
    plant: Callable[[Patch], None], predictor: CodePredictor, monkeypatch: Patch
) -> None:
    """The replay is switched off: what is left assumes nothing on the stream of random numbers."""
    plant(monkeypatch)
    monkeypatch.setattr(verify_module._Run, "_make_again", lambda *_: None)
    report = run(predictor, VerifyOptions(frames=160, windows=(3,)))
    errors = [error for error in report["errors"] if error.startswith("law: ")]
    assert any(LAW_BREAKERS[plant] in error for error in errors), report["law"]


# ---- rounding -------------------------------------------------------------------------------------------------------


def noisy_passes(patch: Patch, size: float, *, relative: bool = False) -> None:
    """An engine that rounds: each hidden state is off by what its own bits and the shape of the pass decide."""
    real = CodePredictor.forward

    def forward(self: CodePredictor, codes: Any, depths: Any, counts: Any) -> Any:
        hidden = real(self, codes, depths, counts)
        error = np.random.default_rng([zlib.crc32(hidden.tobytes()), *codes.shape]).standard_normal(hidden.shape)
        scale = np.abs(hidden) if relative else 1.0
        return hidden + (size * scale * error).astype(np.float32)

    patch.setattr(CodePredictor, "forward", forward)


def peaked_heads(patch: Patch, predictor: CodePredictor, spread: float) -> None:
    """Heads of the same direction, whose logits have about this standard deviation."""
    real = CodePredictor._apply_heads
    measured = verify_module.measure_rounding(predictor, random_contexts(predictor), (2,))["logit_spread"]

    def apply_heads(self: CodePredictor, heads: Any, hidden: Any) -> Any:
        return real(self, heads, hidden) * np.float32(spread / measured)

    patch.setattr(CodePredictor, "_apply_heads", apply_heads)


def test_rounding_is_measured_and_reported_and_no_failure(predictor: CodePredictor, monkeypatch: Patch) -> None:
    noisy_passes(monkeypatch, 0.005)
    report = run(predictor, VerifyOptions(frames=60, windows=(3, 8)))
    assert (report["verdict"], report["errors"]) == ("pass", [])
    assert report["rounding"]["largest_error"] > 0.01
    assert report["logit_error"] == report["rounding"]["largest_error"]
    assert report["replay"]["within_rounding"] + report["coupled"]["rounding"] > 0


def test_passes_that_differ_by_more_than_rounding_are_a_failure(predictor: CodePredictor, monkeypatch: Patch) -> None:
    noisy_passes(monkeypatch, 1.0)
    report = run(predictor)
    assert report["errors"][0].startswith(
        "rounding: passes of 1 x 2, 1 x 3, 1 x 8, 4 x 1, 4 x 2, 4 x 3, 4 x 8 rows x positions"
    )
    assert report["logit_error"] == verify_module.LOGIT_FLOOR


def test_peaked_heads_are_judged_by_their_own_scale(predictor: CodePredictor, monkeypatch: Patch) -> None:
    """A BF16 keeps 8 bits of a hidden state: more than a logit, where logits are spread over hundreds."""
    peaked_heads(monkeypatch, predictor, 40.0)
    noisy_passes(monkeypatch, 2.0**-8, relative=True)
    report = run(predictor, VerifyOptions(frames=60))
    assert (report["verdict"], report["errors"]) == ("pass", [])
    assert report["not_judged"] == []
    assert report["rounding"]["logit_spread"] == pytest.approx(40, rel=0.1)
    assert report["logit_error"] == report["rounding"]["largest_error"] > 0.5
    excused = f"decisions within {2 * report['logit_error']:.2g} logits were excused as rounding"
    assert format_report(report).splitlines()[-1] == f"PASS: speculation changes nothing on this engine; {excused}"


@pytest.mark.parametrize("plant", [bonus_of_the_row_before, every_draft_accepted], ids=lambda plant: plant.__name__)
def test_an_error_is_found_through_the_rounding_of_peaked_heads(
    plant: Callable[[Patch], None], predictor: CodePredictor, monkeypatch: Patch
) -> None:
    peaked_heads(monkeypatch, predictor, 40.0)
    noisy_passes(monkeypatch, 2.0**-8, relative=True)
    plant(monkeypatch)
    report = run(predictor)
    assert any(error.startswith("replay: ") for error in report["errors"]), report["errors"]


def test_more_than_rounding_is_blamed_on_no_sampler(predictor: CodePredictor, monkeypatch: Patch) -> None:
    noisy_passes(monkeypatch, 1.0)
    report = run(predictor, VerifyOptions(frames=30))
    (error,) = report["errors"]
    assert error.startswith("rounding: ")
    assert error.endswith("which is no rounding above 0.2: replay, law, coupled, rows, edges are not judged")
    assert report["not_judged"] == ["replay", "law", "coupled", "rows", "edges"]
    assert report["replay"]["wrong"]  # told, and judged by nobody
    assert not any(test["judged"] for test in report["law"].values())
    *lines, verdict = format_report(report).splitlines()
    assert "unjudged" in "".join(lines)
    assert verdict.startswith("FAIL: this engine's passes differ by more than rounding")


def test_a_wide_pass_that_forgets_the_past_is_a_failure(predictor: CodePredictor, monkeypatch: Patch) -> None:
    real = CodePredictor.forward

    def forward(self: CodePredictor, codes: Any, depths: Any, counts: Any) -> Any:
        return real(self, codes, depths + (codes.shape[1] > 1) * (depths > 1), counts)

    monkeypatch.setattr(CodePredictor, "forward", forward)
    assert run(predictor)["verdict"] == "fail"


@pytest.mark.parametrize("plant", [bonus_of_the_row_before, residual_not_normalised], ids=lambda plant: plant.__name__)
def test_an_error_is_found_through_the_rounding(
    plant: Callable[[Patch], None], predictor: CodePredictor, monkeypatch: Patch
) -> None:
    noisy_passes(monkeypatch, 0.003)
    plant(monkeypatch)
    report = run(predictor)
    assert any(re.search(PLANTED[plant], error) for error in report["errors"]), report["errors"]


def test_a_code_that_differs_beyond_the_margin_is_a_failure(predictor: CodePredictor, monkeypatch: Patch) -> None:
    real = CodePredictor.decode_frame

    def decode_frame(self: CodePredictor, *args: Any, **kwargs: Any) -> Any:
        result = real(self, *args, **kwargs)
        if kwargs.get("mode") == "coupled" and kwargs["verify_size"] == 8:
            result.codes[0, 9] = (result.codes[0, 9] + 1) % 256
        return result

    monkeypatch.setattr(CodePredictor, "decode_frame", decode_frame)
    report = run(predictor)
    assert report["coupled"]["wrong"] == 1  # of three batches, one at N = 8
    assert [error.split(":")[0] for error in report["errors"]] == ["coupled"]


def test_a_plan_is_compared_with_its_graph(lively: Qwen3TTS, monkeypatch: Patch) -> None:
    contexts = random_contexts(lively.predictor)
    report = verify(lively.predictor, contexts, VerifyOptions(frames=2), reference=lively.predictor)
    assert report["graph"] == {"relative_error": 0.0, "largest_logit_error": 0.0}
    assert "graph     hidden states differ from the graph's on the CPU by 0.0e+00" in format_report(report)


@pytest.mark.parametrize("factor", [1.1, np.nan])
def test_a_plan_that_computes_something_else_is_a_failure(factor: float, predictor: CodePredictor) -> None:
    """Everything about it agrees with itself; only the graph can tell."""
    other = CodePredictor(predictor.spec, predictor._session, predictor._tables, predictor._code0_embedding)
    other.forward = lambda *args: factor * predictor.forward(*args)  # type: ignore[method-assign]
    graph = compare_with_graph(other, predictor, random_contexts(predictor))
    (error,) = verify_module._graph_errors(graph)
    assert "the plan computes something else" in error


@pytest.mark.parametrize("spread", [1.0, 400.0])
def test_a_law_of_any_sharpness_is_placed_without_a_warning(spread: float) -> None:
    """A draft's share can be 1e308 times the target's and more."""
    random = np.random.default_rng(0)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(200):
            target, draft = (spread * random.standard_normal((2, 16))).astype(np.float32)
            draws = Draws(SamplingParams(temperature=1.0, top_k=0, top_p=1.0), seed, 0)
            wanted = Decision(kind="draft", depth=2, offset=0, draws=draws, target=target, draft=draft, code=0)
            accepted, code = Sampler().outcome(wanted)
            found.append(cells(replace(wanted, accepted=accepted, code=code), random).code)
    assert None not in found
    assert np.mean(found) == pytest.approx(0.5, abs=0.08)


# ---- what it needs --------------------------------------------------------------------------------------------------


def test_an_engine_that_cannot_verify_says_why(predictor: CodePredictor, monkeypatch: Patch) -> None:
    monkeypatch.setattr(CodePredictor, "max_verify_size", 2)
    narrow = CodePredictor(predictor.spec, predictor._session, predictor._tables, predictor._code0_embedding)
    with pytest.raises(EngineError, match=r"no speculation to verify: .*at most 2 position"):
        verify(narrow, random_contexts(narrow), VerifyOptions(windows=(5,)))


def test_an_engine_of_one_row_has_no_rows_to_compare(predictor: CodePredictor) -> None:
    spec = replace(predictor.spec, limits=replace(predictor.spec.limits, max_batch_size=1))
    single = CodePredictor(spec, predictor._session, predictor._tables, predictor._code0_embedding)
    report = verify(single, random_contexts(single), VerifyOptions(frames=3))
    assert (report["verdict"], report["rows"]["compared"]) == ("pass", 0)
    assert "rows      not compared: the engine takes one row" in format_report(report)


@pytest.mark.parametrize("options", [{"frames": 0}, {"seed": -1}])
def test_impossible_options_are_named(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        VerifyOptions(**options)


# ---- chi-square -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "tail"), [(16.0, 0.452961), (26.296228, 0.05), (39.252355, 0.001), (0.0, 1.0)])
def test_the_tail_of_chi_square_with_16_degrees(value: float, tail: float) -> None:
    assert chi_square_tail(value) == pytest.approx(tail, abs=1e-6)


def test_the_noncentral_tail_is_that_of_shifted_normals() -> None:
    random = np.random.default_rng(0)
    draws = random.standard_normal((200_000, 16))
    draws[:, 0] += np.sqrt(30.0)
    assert chi_square_tail(50.0, 30.0) == pytest.approx(((draws**2).sum(axis=1) > 50.0).mean(), abs=0.004)


def test_the_stated_power_is_met() -> None:
    """A shift of exactly the detectable size is found, in the worst shape: equal over all cells."""
    random, count, threshold = np.random.default_rng(0), 4000, 1e-6
    size = detectable_variation(count, threshold)
    found = 0
    for _ in range(300):
        shares = 1 + 2 * size * np.array([1.0, -1.0] * 8 + [0.0]) * 17 / 16
        cell = random.choice(17, count, p=shares / 17)
        found += uniformity((cell + random.random(count)) / 17)["p_value"] < threshold
    assert found >= 297


def test_uniform_numbers_are_not_found() -> None:
    random = np.random.default_rng(0)
    tests = [uniformity(random.random(400)) for _ in range(500)]
    assert np.mean([test["p_value"] < 0.01 for test in tests]) < 0.03
    assert np.mean([test["total_variation"] for test in tests]) == pytest.approx(tests[0]["noise"], rel=0.05)


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_demo_engine_passes(demo_engines: Path) -> None:
    result = CliRunner().invoke(main, ["verify", str(demo_engines), "--frames", "8"])
    assert (result.exit_code, result.stderr) == (0, "")
    assert "from 64 frames of a spoken text" in result.stdout
    assert result.stdout.splitlines()[-1] == (
        "PASS: speculation changes nothing on this engine; too few frames for the law by itself, every decision was "
        "checked"
    )


def test_json_and_random_states(demo_engines: Path) -> None:
    args = ["verify", str(demo_engines), "--frames", "4", "--randomStates", "--json", "--cpSpecVerifySize", "3"]
    result = CliRunner().invoke(main, args)
    report = json.loads(result.stdout)
    assert (result.exit_code, report["verdict"], report["windows"]) == (0, "pass", [3])
    assert report["contexts"] == "64 random hidden states"
    assert {"device", "processor", "numpy", "onnxruntime", "trt_cpspec"} <= set(report["machine"])


def test_a_code_predictor_by_itself_is_enough(demo_engines: Path) -> None:
    result = CliRunner().invoke(main, ["verify", str(demo_engines / "code_predictor"), "--frames", "2"])
    assert (result.exit_code, "random hidden states" in result.stdout) == (0, True)


def test_a_failure_has_its_own_exit_code_and_a_name(demo_engines: Path, monkeypatch: Patch) -> None:
    bonus_of_the_row_before(monkeypatch)
    result = CliRunner().invoke(main, ["verify", str(demo_engines), "--frames", "8", "--randomStates"])
    assert result.exit_code == 1
    assert re.search("^error +replay: .*wrong row", result.stdout, re.MULTILINE)
    assert result.stdout.splitlines()[-1] == "FAIL: speculation changes the speech on this engine"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere"], "nowhere.* does not exist"),
        (["ENG", "--frames", "0"], "frames is 0"),
        (["ENG", "--cpSpecVerifySize", "1"], "a verify size of 1 is not possible"),
        (["ENG", "--cpSpecVerifySize", "0"], "no speculation to verify: a verify size of 0"),
        (["ENG", "--text", " "], "holds nothing visible"),
    ],
)
def test_what_verify_refuses(args: list[str], message: str, demo_engines: Path) -> None:
    result = CliRunner().invoke(main, ["verify", *[str(demo_engines) if arg == "ENG" else arg for arg in args]])
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.search(message, result.stderr.replace("\n", " "))
