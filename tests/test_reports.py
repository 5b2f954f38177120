"""Kinds of errors that users of such software have met elsewhere, and where each is guarded against here.

``REPORTS`` names the tests; that they exist is checked. Those whose small input was nowhere else are in this file.
"""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trt_cpspec.config import SamplingParams
from trt_cpspec.errors import ConfigError
from trt_cpspec.pipeline import Qwen3TTS
from trt_cpspec.predictor import CodePredictor
from trt_cpspec.requests import Request
from trt_cpspec.sampling import PhiloxNoise, Proposal, Use, accept_by_rejection, law, penalised

TESTS = Path(__file__).parent

REPORTS: dict[int, tuple[str, tuple[str, ...]]] = {
    1: (
        "draft and residual draws share their noise",
        (
            "test_reports.test_a_round_restores_the_target",
            "test_sampling.test_streams_of_a_round_are_disjoint",
            "test_verify.test_a_planted_error_is_found_and_named",
        ),
    ),
    2: (
        "the accept step's draft law is not the one sampled from",
        (
            "test_reports.test_a_truncated_draft_law_restores_the_target",
            "test_verify.test_a_planted_error_is_found_and_named",
        ),
    ),
    4: ("a missing draft law changes the rule in silence", ("test_sampling.test_a_draft_law_is_never_optional",)),
    5: (
        "a greedy draft is verified with a soft law",
        (
            "test_reports.test_a_greedy_draft_has_a_one_hot_law",
            "test_verify.test_a_planted_error_is_found_and_named",
        ),
    ),
    6: (
        "acceptance only where two samples agree",
        ("test_sampling.test_equal_laws_always_accept", "test_verify.test_a_planted_error_is_found_and_named"),
    ),
    8: (
        "a constant accept number",
        (
            "test_sampling.test_disjoint_supports_never_accept",
            "test_frame.test_acceptance_is_the_sum_of_min",
            "test_verify.test_a_planted_error_is_found_and_named",
        ),
    ),
    10: (
        "NaN logits become an id outside the codebook",
        ("test_sampling.test_logits_without_a_law_are_an_error", "test_frame.test_bad_logits_name_row_and_depth"),
    ),
    11: (
        "NaN logits commit nothing, for ever",
        (
            "test_frame.test_bad_logits_name_row_and_depth",
            "test_pipeline.test_a_nan_in_the_code_predictor_fails_its_request_alone",
        ),
    ),
    12: (
        "bonus or residual of the wrong row",
        (
            "test_sampling.test_bonus_comes_from_the_trailing_row",
            "test_sampling.test_residual_comes_from_the_rejecting_row",
        ),
    ),
    14: (
        "seeds addressed by position",
        ("test_frame.test_a_seed_belongs_to_its_row", "test_predictor.test_a_row_does_not_depend_on_its_neighbours"),
    ),
    15: (
        "a request's seed is ignored, or lost in a mixed batch",
        ("test_reports.test_a_request_without_a_seed_disturbs_none", "test_pipeline.test_seeds"),
    ),
    17: (
        "no distribution test is shipped",
        ("test_verify.test_the_demo_engine_passes", "test_verify.test_the_stated_power_is_met"),
    ),
    19: (
        "uniform numbers are used twice",
        ("test_frame.test_a_number_decides_once", "test_sampling.test_addresses_share_no_numbers"),
    ),
    20: ("a deterministic search passes for a sample", ("test_reports.test_a_greedy_draft_has_a_one_hot_law",)),
    21: (
        "ties at the k-th logit are kept by one path only",
        (
            "test_reports.test_ties_at_k_keep_exactly_k",
            "test_sampling.test_ties_at_k_keep_the_lower_code",
        ),
    ),
    23: (
        "a repetition penalty without effect",
        ("test_reports.test_the_penalty_takes_effect", "test_sampling.test_repetition_penalty"),
    ),
    24: (
        "temperature 0, and parameters out of range",
        (
            "test_reports.test_parameters_out_of_range_are_named",
            "test_sampling.test_temperature_0_is_the_lowest_argmax",
            "test_sampling.test_coldest_temperature_is_finite",
        ),
    ),
    25: ("probabilities where logits belong", ("test_sampling.test_draws_follow_the_law",)),
    27: (
        "the CodePredictor's parameters do not arrive",
        ("test_reports.test_the_subtalker_temperature_changes_the_entropy", "test_cli.test_an_option_takes_effect"),
    ),
    28: ("the boundary of top-p", ("test_sampling.test_top_p_boundary",)),
    30: (
        "the end of speech never comes",
        ("test_guards.test_without_an_end_the_cap_is_scaled_to_the_text",),
    ),
    31: (
        "an exhausted budget passes for success",
        ("test_guards.test_speech_without_an_end_is_a_failure_where_that_is_asked_for",),
    ),
    32: ("a short text becomes long gibberish", ("test_reports.test_a_short_text_is_short",)),
    33: (
        "greedy decoding repeats itself",
        ("test_guards.test_codes_that_repeat_are_warned_of", "test_guards.test_silence_is_warned_of"),
    ),
    34: (
        "the end of speech comes too early",
        (
            "test_talker.test_the_end_is_forbidden_for_two_steps",
            "test_pipeline.test_coupled_speech_is_autoregressive_speech",
        ),
    ),
    35: (
        "gibberish late in a long text",
        ("test_guards.test_codes_that_repeat_are_warned_of",),
    ),
    37: (
        "FP16 overflows in the decoder",
        (
            "test_reports.test_an_fp16_engine_keeps_up_with_large_hidden_states",
            "test_decoder_graph.test_fp16_stores_matrices_and_computes_in_fp32",
        ),
    ),
    38: ("the MLP's product in FP16", ("test_decoder_graph.test_fp16_stores_matrices_and_computes_in_fp32",)),
    39: (
        "a cast to FP16 saturates",
        ("test_checkpoint.test_an_fp16_overflow_names_the_tensor_and_changes_nothing",),
    ),
    40: (
        "passes of one position and of several round differently",
        (
            "test_verify.test_rounding_is_measured_and_reported_and_no_failure",
            "test_verify.test_passes_that_differ_by_more_than_rounding_are_a_failure",
        ),
    ),
    41: (
        "a waveform of NaN is written",
        (
            "test_codec.test_a_waveform_that_is_not_finite_is_an_error",
            "test_guards.test_a_waveform_without_speech_is_never_written",
            "test_reports.test_codes_of_zero_make_a_finite_waveform",
        ),
    ),
    42: (
        "a seed gives other codes in a batch",
        ("test_pipeline.test_each_request_of_a_batch_equals_itself_alone",),
    ),
    43: (
        "a profile that is too narrow is met while decoding",
        ("test_runtime.test_a_narrow_plan_switches_speculation_off_and_says_how_to_widen_it",),
    ),
    45: ("a tensor is missing", ("test_runtime.test_every_missing_and_every_unknown_tensor_is_named",)),
    46: (
        "a plan of another version or device",
        (
            "test_runtime.test_a_plan_that_cannot_be_trusted_is_refused",
            "test_runtime.test_tensorrts_own_words_are_repeated",
        ),
    ),
    48: (
        "what cannot run fails after the Talker has run",
        ("test_reports.test_an_engine_that_cannot_be_used_fails_before_any_audio",),
    ),
    49: (
        "a plan that runs and computes something else",
        ("test_verify.test_a_plan_that_computes_something_else_is_a_failure",),
    ),
    50: ("the projection is optional for equal widths", ("test_predictor.test_a_missing_projection_is_named",)),
    51: (
        "a missing key becomes a default",
        ("test_checkpoint.test_a_missing_key_is_named", "test_checkpoint.test_a_wrong_type_is_named"),
    ),
    52: (
        "a side file of zeros",
        ("test_predictor.test_a_dead_weight_is_refused", "test_talker.test_a_dead_weight_is_refused"),
    ),
    54: ("capture before a warm run", ("test_gpu.test_a_frame_is_one_launch",)),
    58: ("two requests at the same time", ("test_reports.test_threads_are_served_one_after_the_other",)),
    59: (
        "more requests than room, or no memory",
        (
            "test_pipeline.test_more_texts_than_a_batch_holds",
            "test_pipeline.test_a_batch_beyond_the_limit_is_refused",
            "test_cli.test_an_engine_that_fails_fails_its_request_only",
        ),
    ),
    60: (
        "a cache far larger than a frame needs",
        (
            "test_reports.test_a_frame_needs_few_slots",
            "test_session.test_the_cache_is_as_large_as_the_positions_in_use",
        ),
    ),
    63: (
        "blank texts",
        (
            "test_text.test_blank_texts_are_refused_at_every_door",
            "test_cli.test_what_cannot_be_used_is_refused_before_any_work",
        ),
    ),
    65: (
        "the codec's left context",
        ("test_codec.test_long_decode_in_chunks", "test_codec.test_chunks_cover_every_frame_once"),
    ),
    68: (
        "a seed that covers a part, and is not echoed",
        ("test_cli.test_the_seed_decides_every_byte", "test_cli.test_a_request_goes_before_the_command_line"),
    ),
    70: (
        "an optional package is needed at import",
        ("test_packaging.test_importing_the_package_needs_numpy_alone_and_changes_nothing",),
    ),
    71: ("another format is asked for, wav is written", ("test_guards.test_what_the_short_form_refuses",)),
}  # fmt: skip

NOT_HERE = {
    55: "capture beside another thread's work: captures are thread-local, and there is no server",
    56: "capture in the first request: there is no server whose first request could wait",
    62: "a persistent kernel's barrier: there is none",
    67: "stateful resampling: speech is written at the codec's rate only",
}
"""Kinds that nothing here could have."""


def test_every_named_test_exists() -> None:
    known = {
        f"{path.stem}.{node.name}"
        for path in TESTS.glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    named = {name for _, names in REPORTS.values() for name in names}
    assert named - known == set()
    assert not REPORTS.keys() & NOT_HERE.keys()
    mine = {f"test_reports.{name}" for name in globals() if name.startswith("test_")}
    assert mine - named == {"test_reports.test_every_named_test_exists"}


# ---- exactness ------------------------------------------------------------------------------------------------------


def committed(target: np.ndarray, draft: np.ndarray, seeds: int) -> np.ndarray:
    """Return the shares of each code that a round of one draft commits first."""
    counts = np.zeros(len(target))
    for seed in range(seeds):
        noise = PhiloxNoise(seed, 0)
        proposal = Proposal(first_depth=3, codes=[noise.pick(draft, 3, Use.DRAFT)], laws=[draft])
        counts[accept_by_rejection([target, target], proposal, noise)[0]] += 1
    return counts / seeds


@pytest.mark.parametrize(
    ("target", "draft"), [([0.1, 0.6, 0.3], [0.3, 0.3, 0.4]), ([0.1, 0.5, 0.4], [0.6, 0.35, 0.05])]
)
def test_a_round_restores_the_target(target: list[float], draft: list[float]) -> None:
    """With noise that draft and residual share, the second would be 0.07 away; the first has one code to replace."""
    shares = committed(np.array(target), np.array(draft), 8192)
    assert np.abs(shares - target).sum() / 2 < 0.015


def test_a_truncated_draft_law_restores_the_target() -> None:
    logits = np.array([1.0, 0.5, 0.0, -0.5], np.float32)
    truncated = law(logits, SamplingParams(temperature=1.0, top_k=2))
    assert np.abs(committed(truncated, truncated, 8192) - truncated).sum() / 2 < 0.015
    whole = law(logits, SamplingParams(temperature=1.0, top_k=0))
    assert np.abs(committed(truncated, whole, 8192) - truncated).sum() / 2 < 0.015


def test_a_greedy_draft_has_a_one_hot_law() -> None:
    draft = law(np.array([2.0, 1.0, 0.0, 0.0], np.float32), SamplingParams(temperature=0.0))
    np.testing.assert_array_equal(draft, [1, 0, 0, 0])
    target = np.array([0.5, 0.5, 0.0, 0.0])
    assert np.abs(committed(target, draft, 8192) - target).max() < 0.02


def test_a_request_without_a_seed_disturbs_none(lively: Qwen3TTS) -> None:
    requests = [lively.prepare(Request(text="Hi.", seed=seed, max_audio_length=3)) for seed in (1, None, 1)]
    window = lively.predictor.window(3)
    first, _, last = lively.run_batch(requests, window=window, mode="rejection")
    (alone,) = lively.run_batch(requests[:1], window=window, mode="rejection")
    np.testing.assert_array_equal(first.codes, last.codes)  # type: ignore[union-attr]
    np.testing.assert_array_equal(first.codes, alone.codes)  # type: ignore[union-attr]


# ---- the sampler ----------------------------------------------------------------------------------------------------


def test_ties_at_k_keep_exactly_k() -> None:
    np.testing.assert_array_equal(
        np.flatnonzero(law(np.array([1, 2, 2, 2, 3], np.float32), SamplingParams(top_k=2))), [1, 4]
    )


def test_the_penalty_takes_effect() -> None:
    np.testing.assert_array_equal(penalised(np.array([4, 3, 2, 1], np.float32), [0, 1], 2.0), [2, 1.5, 2, 1])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0), ("temperature", float("nan")), ("temperature", 1e-9), ("top_p", 0.0), ("top_p", -1.0),
        ("top_p", 1.5), ("top_k", -1),
    ],
)  # fmt: skip
def test_parameters_out_of_range_are_named(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    everything = [law(np.arange(8, dtype=np.float32), SamplingParams(top_k=k)) for k in (0, 8, 2049)]
    np.testing.assert_array_equal(everything[0], everything[1])
    np.testing.assert_array_equal(everything[0], everything[2])


def test_the_subtalker_temperature_changes_the_entropy(lively: Qwen3TTS) -> None:
    state = np.random.default_rng(0).standard_normal(lively.predictor.spec.talker_hidden_size).astype(np.float32)

    def codes(temperature: float) -> int:
        """Return how many codes depth 5 takes in 40 draws."""
        params = SamplingParams(temperature=temperature)
        return len({lively.predictor.decode_frame(state, 1, params=params, seeds=s).codes[0, 5] for s in range(40)})

    assert codes(0.1) < 0.5 * codes(1.5)


# ---- speech ---------------------------------------------------------------------------------------------------------


def test_a_short_text_is_short(lively: Qwen3TTS) -> None:
    assert lively.prepare(Request(text="1次", seed=7)).max_frames * 0.08 < 16


def test_codes_of_zero_make_a_finite_waveform(variants: dict[str, Any]) -> None:
    codec = variants["tts_a"].tts.codec
    assert np.isfinite(codec.decode(np.zeros((4, 16), np.int32))).all()


# ---- engines --------------------------------------------------------------------------------------------------------


def test_an_fp16_engine_keeps_up_with_large_hidden_states(
    variants: dict[str, Any], build: Callable[..., Path], tmp_path: Path
) -> None:
    half = build(variants["tts_a"].checkpoint, tmp_path / "half", precision="fp16")
    predictors = [CodePredictor.from_engine_dir(path / "code_predictor") for path in (variants["tts_a"].engine, half)]
    width = predictors[0].spec.talker_hidden_size
    state = 64 * np.random.default_rng(0).standard_normal((1, width)).astype(np.float32)
    whole, halved = (predictor.prefill(state, np.array([1], np.int32)) for predictor in predictors)
    assert np.isfinite(halved).all()
    assert np.abs(halved - whole).max() < 0.01 * np.abs(whole).max()


def test_an_engine_that_cannot_be_used_fails_before_any_audio(
    engine_copy: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last component to be opened is damaged: nothing has been spoken by then."""
    engine = engine_copy()
    (engine / "code2wav" / "model.onnx").write_bytes(b"not a graph")
    monkeypatch.setattr(Qwen3TTS, "run_batch", lambda *_, **__: pytest.fail("it speaks"))
    with pytest.raises(Exception, match="code2wav"):
        Qwen3TTS.from_engine_dir(engine)


def test_a_frame_needs_few_slots(variants: dict[str, Any]) -> None:
    spec = variants["tts_a"].tts.predictor.spec
    assert spec.limits.max_kv_cache_capacity == spec.num_code_groups + spec.max_verify_size


def test_threads_are_served_one_after_the_other(lively: Qwen3TTS) -> None:
    alone = [lively.synthesize("Hi.", seed=seed, max_audio_length=4).codes for seed in range(4)]
    spoken: dict[int, np.ndarray] = {}

    def speak(seed: int) -> None:
        spoken[seed] = lively.synthesize("Hi.", seed=seed, max_audio_length=4).codes

    threads = [threading.Thread(target=speak, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(4):
        np.testing.assert_array_equal(spoken[seed], alone[seed])
