"""Requests to speech on real engines: parity, exact speculation, batches, errors that stay where they belong."""

from __future__ import annotations

import ast
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trt_cpspec import pipeline
from trt_cpspec.config import Mode, SamplingParams
from trt_cpspec.errors import ConfigError, CpSpecError, EngineError, NumericsError
from trt_cpspec.pipeline import PreparedRequest, Qwen3TTS, Speech
from trt_cpspec.requests import Request
from trt_cpspec.sampling import PhiloxNoise, Use
from trt_cpspec.talker import talker_law

Close = Callable[..., None]
MODES: tuple[Mode, ...] = ("rejection", "coupled")

COVERED_BY = {
    "input_ids": "test_talker.py::test_token_ids",
    "instruct_ids": "test_talker.py::test_token_ids",
    "row_text_id": "test_talker.py::test_prompt_rows",
    "row_codec_id": "test_talker.py::test_prompt_rows",
    "trailing_text_id": "test_talker.py::test_prompt_rows",
    "prefill_embeds": "test_talker.py::test_prompt_embeddings",
    "trailing_embeds": "test_talker.py::test_prompt_embeddings",
    "tts_pad_embed": "test_talker.py::test_prompt_embeddings",
    "talker_hidden": "test_talker.py::test_hidden_states",
    "talker_logits_raw": "test_talker.py::test_logits",
    "talker_logits_proc": "test_talker.py::test_logits",
    "talker_margin": "test_talker.py::test_logits",
    "cp_hidden": "test_predictor.py::test_hidden_states_and_logits",
    "cp_logits": "test_predictor.py::test_hidden_states_and_logits",
    "cp_margin": "test_predictor.py::test_hidden_states_and_logits",
    "next_embeds": "test_predictor.py::test_next_inputs",
    "codes": "test_pipeline.py::test_free_running",
    "code0_sampled": "test_pipeline.py::test_free_running",
    "wav": "test_pipeline.py::test_free_running",
}
"""Which test holds each golden array against ours; those of the codec are in test_codec.py."""


# -- parity with the reference ----------------------------------------------------------------------------------------


def test_every_golden_array_is_covered(variants: dict[str, Any]) -> None:
    names = [name for variant in variants.values() for name in variant.arrays if not name.startswith("codec.")]
    assert {name.split(".", 1)[1] for name in names} == set(COVERED_BY)
    for variant in variants.values():  # the ``case`` fixture meets every prompt that has arrays
        prompts = {name.split(".")[0] for name in variant.arrays} - {"codec"}
        assert prompts == {f"p{index}" for index in range({"tts_a": 4, "tts_b": 3}[variant.name])}
    for name, place in COVERED_BY.items():
        file, test = place.split("::")
        module = ast.parse((Path(__file__).parent / file).read_text(encoding="utf-8"))
        functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
        assert "case" in [argument.arg for argument in functions[test].args.args]
        assert f"case['{name}']" in ast.unparse(functions[test])


class Recorder:
    """What passes between the stages of one run."""

    def __init__(self, tts: Qwen3TTS, patch: pytest.MonkeyPatch) -> None:
        self.talker_hidden: list[np.ndarray] = []
        self.next_embeds: list[np.ndarray] = []
        self.raw_logits: list[np.ndarray] = []
        self.sampled: Sequence[int] = []
        decode_frame, step, law = tts.predictor.decode_frame, tts.talker.step, pipeline.talker_law

        def spied_frame(hidden: np.ndarray, *args: Any, **options: Any) -> Any:
            self.talker_hidden.append(hidden[0].copy())
            return decode_frame(hidden, *args, **options)

        def spied_step(embeds: np.ndarray) -> Any:
            self.next_embeds.append(embeds[0].copy())
            return step(embeds)

        def spied_law(spec: Any, logits: np.ndarray, seen: Sequence[int], params: SamplingParams) -> Any:
            self.raw_logits.append(logits)
            self.sampled = seen  # the pipeline's own list: it gets the choice that follows, too
            return law(spec, logits, seen, params)

        patch.setattr(tts.predictor, "decode_frame", spied_frame)
        patch.setattr(tts.talker, "step", spied_step)
        patch.setattr(pipeline, "talker_law", spied_law)


def test_free_running(case: Any, close: Close, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Recorder(case.tts, monkeypatch)
    speech = case.speak()
    np.testing.assert_array_equal(speech.codes, case["codes"])
    assert list(record.sampled) == case["code0_sampled"].tolist()
    assert speech.finish_reason == {"eos": "eos", "max": "length"}[case.prompt["finish_reason"]]
    close(np.stack(record.talker_hidden), case["talker_hidden"])
    close(np.stack(record.next_embeds), case["next_embeds"])
    close(np.stack(record.raw_logits[:3]), case["talker_logits_raw"])
    close(speech.waveform, case["wav"])
    assert (speech.waveform.dtype, speech.sample_rate) == (np.float32, 24000)
    assert speech.duration_ms == 80 * len(speech.codes)
    stats = speech.stats.as_dict()
    assert (stats["frames"], stats["passes"], stats["verify_size"]) == (len(speech.codes), 15 * len(speech.codes), 0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("verify_size", [2, 3, 4, 8])
def test_greedy_speculation_gives_the_references_codes(case: Any, verify_size: int, mode: Mode) -> None:
    speech = case.speak(verify_size=verify_size, mode=mode)
    np.testing.assert_array_equal(speech.codes, case["codes"])
    stats = speech.stats.as_dict()
    assert (stats["verify_size"], stats["mode"], stats["fallback_reason"]) == (verify_size, mode, None)
    assert stats["rounds"] + stats["accepted"] == 14 * len(speech.codes)
    assert stats["proposed"] > 0


# -- exact speculation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tts_a", "tts_b"])
@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_coupled_speech_is_autoregressive_speech(variants: dict[str, Any], name: str, seed: int) -> None:
    tts = variants[name].tts
    expected = tts.synthesize("Hello there", seed=seed, max_audio_length=4)
    for verify_size in (2, 3, 4, 8):
        speech = tts.synthesize("Hello there", seed=seed, max_audio_length=4, verify_size=verify_size, mode="coupled")
        np.testing.assert_array_equal(speech.codes, expected.codes)
        np.testing.assert_array_equal(speech.waveform, expected.waveform)
        assert speech.finish_reason == expected.finish_reason


def test_wide_windows_pay_off_and_change_nothing(lively: Qwen3TTS) -> None:
    commits = np.zeros(8, int)
    for seed in range(4):
        expected = lively.synthesize("Hello world", seed=seed, max_audio_length=12)
        speech = lively.synthesize("Hello world", seed=seed, max_audio_length=12, verify_size=8, mode="coupled")
        np.testing.assert_array_equal(speech.codes, expected.codes)
        assert speech.stats.passes < expected.stats.passes
        commits += speech.stats.as_dict()["commit_histogram"]
    assert (commits > 0).all(), commits


def test_rejection_follows_another_stream_at_the_same_law(lively: Qwen3TTS) -> None:
    """Sampled, the two modes differ in their codes; greedy, in nothing."""
    options = {"seed": 1, "max_audio_length": 6, "verify_size": 4}
    coupled = lively.synthesize("Hello world", mode="coupled", **options)
    rejection = lively.synthesize("Hello world", mode="rejection", **options)
    assert not np.array_equal(coupled.codes, rejection.codes)
    np.testing.assert_array_equal(rejection.codes, lively.synthesize("Hello world", mode="rejection", **options).codes)


def test_speech_is_the_loop_of_the_parts(lively: Qwen3TTS) -> None:
    """Written out for one request: which random numbers, hidden states and inputs belong to which frame."""
    talker, predictor, request = lively.talker, lively.predictor, Request(text="Good day", seed=11, max_audio_length=5)
    speech = lively.synthesize(request.text, seed=11, max_audio_length=5)
    assert len(speech.codes) > 2
    prepared = lively.prepare(request)
    sampling, seen = prepared.sampling, []
    hidden = talker.prefill([talker.embed_prompt(prepared.prompt)])
    for frame, codes in enumerate(speech.codes):
        target = talker_law(talker.spec, talker.logits(hidden[0]), seen, sampling.talker)
        seen.append(PhiloxNoise(11, frame).pick(target, 0, Use.TARGET))
        result = predictor.decode_frame(hidden, seen[-1:], params=sampling.subtalker, seeds=11, frames=frame)
        np.testing.assert_array_equal(result.codes[0], codes)
        pad = talker.embed_text(np.array([talker.spec.ids.tts_pad_token_id]))
        hidden = talker.step(predictor.embed_frame(result.codes) + pad)


# -- batches ----------------------------------------------------------------------------------------------------------

REQUESTS = (
    Request(text="Hello world", seed=1, max_audio_length=9),
    Request(
        text="This is a short test of it.", seed=2, max_audio_length=3, speaker="eric", language="english",
        talker_temperature=1.2, subtalker_top_k=5,
    ),
    Request(text="Good day", seed=1, max_audio_length=6, non_streaming_mode=False, subtalker_temperature=0.0),
    Request(
        text="Speak, one word and one more word.", seed=2**40, max_audio_length=8, talker_temperature=0.0,
        subtalker_top_p=0.7, subtalker_top_k=0, repetition_penalty=1.3,
    ),
)  # fmt: skip


def run(tts: Qwen3TTS, requests: Sequence[Request], verify_size: int = 0, mode: Mode = "rejection") -> list[Any]:
    return run_prepared(tts, [tts.prepare(request) for request in requests], verify_size, mode)


def run_prepared(
    tts: Qwen3TTS, prepared: Sequence[PreparedRequest], verify_size: int = 0, mode: Mode = "rejection"
) -> list[Any]:
    return list(tts.run_batch(prepared, window=tts.predictor.window(verify_size), mode=mode))


def assert_same(actual: Speech, expected: Speech) -> None:
    np.testing.assert_array_equal(actual.codes, expected.codes)
    np.testing.assert_array_equal(actual.waveform, expected.waveform)
    assert actual.finish_reason == expected.finish_reason
    assert actual.sampling == expected.sampling
    assert actual.stats.as_dict() == expected.stats.as_dict()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("verify_size", [0, 2, 8])
def test_each_request_of_a_batch_equals_itself_alone(lively: Qwen3TTS, verify_size: int, mode: Mode) -> None:
    alone = [run(lively, [request], verify_size, mode)[0] for request in REQUESTS]
    lengths = [len(speech.codes) for speech in alone]
    assert len(set(lengths)) >= 3, lengths  # rows that end at different times are the point
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [1, 2], [2, 3, 1]):
        speeches = run(lively, [REQUESTS[index] for index in order], verify_size, mode)
        for speech, index in zip(speeches, order, strict=True):
            assert_same(speech, alone[index])


def test_golden_prompts_in_one_batch(variants: dict[str, Any]) -> None:
    for variant, count in (("tts_a", 4), ("tts_b", 3)):
        tts, arrays = variants[variant].tts, variants[variant].arrays
        prompts = [golden_request(variants[variant], index) for index in range(count)]
        for speech, index in zip(run(tts, prompts, 3), range(count), strict=True):
            np.testing.assert_array_equal(speech.codes, arrays[f"p{index}.codes"])


def golden_request(variant: Any, index: int) -> Request:
    request = variant.prompts[index]["request"]
    given = {name: request[name] or None for name in ("text", "language", "instruct")}
    return Request(
        **given,
        speaker=request.get("speaker"),
        non_streaming_mode=request["non_streaming_mode"],
        max_audio_length=request["max_new_tokens"] - 1,
        repetition_penalty=request["repetition_penalty"],
        talker_temperature=0.0,
        subtalker_temperature=0.0,
        seed=index,
    )


def test_more_texts_than_a_batch_holds(lively: Qwen3TTS) -> None:
    texts = ["Hello", "world", "a test", "one word", "Good day", "short"]
    assert len(texts) > lively.max_batch_size == 4
    options = {"seed": 5, "max_audio_length": 3, "verify_size": 3}
    speeches = lively.synthesize(texts, **options)
    assert len(speeches) == len(texts)
    for text, speech in zip(texts, speeches, strict=True):
        assert_same(speech, lively.synthesize(text, **options))
    assert lively.synthesize([]) == []


def test_a_batch_beyond_the_limit_is_refused(lively: Qwen3TTS) -> None:
    with pytest.raises(ConfigError, match="a batch of 5 exceeds the engine's max_batch_size 4"):
        run(lively, [REQUESTS[0]] * 5)


def test_seeds(lively: Qwen3TTS, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [Request(text="Hello world", seed=seed, max_audio_length=4) for seed in (1, None, 1)]
    first, drawn, last = run(lively, requests)
    assert_same(first, last)
    assert not np.array_equal(first.codes, drawn.codes)
    # What was drawn is reported, and gives the same speech again.
    assert 0 <= drawn.sampling.seed < 2**32
    assert_same(drawn, lively.synthesize("Hello world", seed=drawn.sampling.seed, max_audio_length=4))
    shared = [lively.prepare(request, default_seed=7).sampling.seed for request in requests]
    assert shared == [1, 7, 1]
    drawn_again = {lively.prepare(requests[1]).sampling.seed for _ in range(4)}
    assert len(drawn_again) > 1


def test_progress_counts_frames(lively: Qwen3TTS) -> None:
    ticks: list[int] = []
    prepared = [lively.prepare(request) for request in REQUESTS]
    speeches = lively.run_batch(prepared, window=lively.predictor.window(0), mode="coupled", progress=ticks.append)
    assert sum(ticks) == sum(len(speech.codes) for speech in speeches if isinstance(speech, Speech))
    assert ticks[0] == 4
    stages = {stage["stage_id"]: stage for stage in lively.times.as_profile()["stages"]}
    assert set(stages) == {"talker_prefill", "talker_generation", "codepredictor_generation", "code2wav"}
    assert all(0 < stage["min_ms"] <= stage["average_time_per_run_ms"] <= stage["max_ms"] for stage in stages.values())


def test_sampling_is_resolved_and_reported(variants: dict[str, Any]) -> None:
    tts = variants["tts_a"].tts
    defaults = tts.prepare(Request(text="Hi", seed=3)).sampling.as_dict()
    assert defaults == {
        "talker_temperature": 0.9, "talker_top_k": 50, "talker_top_p": 1.0, "repetition_penalty": 1.05,
        "subtalker_temperature": 0.9, "subtalker_top_k": 50, "subtalker_top_p": 1.0, "seed": 3,
    }  # fmt: skip
    changes = {"talker_temperature": 0.0, "subtalker_top_k": 0, "subtalker_top_p": 0.5, "repetition_penalty": 1.0}
    assert tts.prepare(Request(text="Hi", seed=3, **changes)).sampling.as_dict() == defaults | changes


# -- limits of an engine ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def narrow(variants: dict[str, Any], build: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Qwen3TTS:
    """Just large enough for the first golden prompt: 25 rows of prefill and 12 frames."""
    engine = build(
        variants["tts_a"].checkpoint, tmp_path_factory.mktemp("narrow") / "engine",
        max_input_len=25, max_kv_cache_capacity=37, max_batch_size=1,
    )  # fmt: skip
    return Qwen3TTS.from_engine_dir(engine, threads=1)


@pytest.mark.parametrize(
    ("asked", "frames", "warned"), [(None, 12, False), (12, 12, False), (13, 12, True), (5, 5, False)]
)
def test_frames_end_with_the_capacity(
    narrow: Qwen3TTS, variants: dict[str, Any], asked: int | None, frames: int, warned: bool
) -> None:
    request = golden_request(variants["tts_a"], 0)
    options = {name: getattr(request, name) for name in ("speaker", "language", "repetition_penalty")}
    speech = narrow.synthesize(
        request.text, **options, max_audio_length=asked, talker_temperature=0.0, subtalker_temperature=0.0
    )
    np.testing.assert_array_equal(speech.codes, variants["tts_a"].arrays["p0.codes"][:frames])
    assert speech.finish_reason == "length"
    expected = f"max_audio_length {asked} is limited to 12 frames by the engine's max_kv_cache_capacity 37"
    cut = "the speech is cut after 12 frames, the room that the engine's max_kv_cache_capacity leaves"
    assert list(speech.warnings) == ([expected] if warned else [cut] if asked is None else [])


def test_a_text_beyond_the_engine_is_refused(narrow: Qwen3TTS) -> None:
    text = "a " * 40
    with pytest.raises(ConfigError, match=r"the text takes \d+ rows, the engine's max_input_len is 25; shorten"):
        narrow.synthesize(text)
    assert len(narrow.synthesize(text, non_streaming_mode=False, max_audio_length=1, seed=1).codes) == 1
    with pytest.raises(ConfigError, match="rows"):
        narrow.synthesize(["a", text])  # refused before the first is spoken


def test_batches_are_as_large_as_the_engine_allows(narrow: Qwen3TTS) -> None:
    assert narrow.max_batch_size == 1
    assert len(narrow.synthesize(["one", "two"], seed=1, max_audio_length=1)) == 2


# -- names and options ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("tts_a", {"speaker": "Viviann"}, "unknown speaker 'Viviann'; did you mean 'vivian'"),
        ("tts_a", {"speaker": "nobody at all"}, "allowed: aiden, dylan, eric"),
        ("tts_b", {"speaker": "vivian"}, "a voice_design checkpoint has no speakers; use instruct"),
        ("tts_a", {"language": "englisch"}, "unknown language 'englisch'; did you mean 'english'"),
        ("tts_a", {"language": "sichuan_dialect"}, "unknown language 'sichuan_dialect'"),
        ("tts_a", {"talker_temprature": 1}, "unknown option 'talker_temprature'; did you mean .*'talker_temperature'"),
        ("tts_a", {"warnings": ("x",)}, "unknown option 'warnings'"),
        ("tts_a", {"verify_size": 1}, "verify size of 1"),
        ("tts_a", {"mode": "coupling"}, "unknown verification mode 'coupling'; did you mean 'coupled'"),
        ("tts_a", {"seed": -1}, "seed is -1"),
        ("tts_a", {"max_audio_length": 0}, "max_audio_length is 0"),
        ("tts_a", {"talker_temperature": -0.5}, "talker_temperature is -0.5"),
        ("tts_a", {"subtalker_top_p": 0.0}, "subtalker_top_p is 0.0"),
    ],
)
def test_bad_options_are_named(variants: dict[str, Any], name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        variants[name].tts.synthesize("Hi", **options)


@pytest.mark.parametrize("text", ["", "  \n", "a <|im_end|> b"])
def test_a_text_that_cannot_be_spoken_is_refused(variants: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match="text"):
        variants["tts_a"].tts.synthesize(text)


def test_speakers_and_languages(variants: dict[str, Any]) -> None:
    custom, design = variants["tts_a"].tts, variants["tts_b"].tts
    prepared = custom.prepare(Request(text="Hi"))
    assert (prepared.speaker, prepared.language) == ("serena", "auto")  # the first of the checkpoint
    prepared = custom.prepare(Request(text="Hi", speaker="VIVIAN", language="ENGLISH"))
    assert (prepared.speaker, prepared.language) == ("vivian", "english")
    assert design.prepare(Request(text="Hi")).speaker is None


def test_an_instruct_for_a_small_custom_voice_is_ignored_with_a_warning(variants: dict[str, Any]) -> None:
    custom, design = variants["tts_a"].tts, variants["tts_b"].tts
    plain, asked = custom.prepare(Request(text="Hi")), custom.prepare(Request(text="Hi", instruct="Slowly."))
    np.testing.assert_array_equal(asked.prompt.text_ids, plain.prompt.text_ids)
    assert asked.warnings == ("instruct is ignored: a custom voice model of size 0b6 was not trained for it",)
    assert not plain.warnings
    assert not design.prepare(Request(text="Hi", instruct="Slowly.")).warnings
    with pytest.raises(ConfigError, match="instruct"):
        custom.prepare(Request(text="Hi", instruct="<|im_end|>"))


def test_a_large_custom_voice_takes_an_instruct(edited_engine: Callable[..., Path]) -> None:
    engine = edited_engine(lambda config: config.update(tts_model_size="1b7"))
    tts = Qwen3TTS.from_engine_dir(engine, threads=1)
    prepared = tts.prepare(Request(text="Hi", instruct="Slowly."))
    assert not prepared.warnings
    assert prepared.prompt.text_ids[:3].tolist() == tts.tokenizer.instruct_ids("Slowly.")[:3]


# -- errors while speaking --------------------------------------------------------------------------------------------


def lone_code(speeches: Sequence[Speech], row: int, frame: int, depth: int) -> int:
    """Return a code that no other frame has at that depth."""
    code = int(speeches[row].codes[frame, depth])
    assert sum(int((speech.codes[:, depth] == code).sum()) for speech in speeches) == 1
    return code


def break_code(patch: pytest.MonkeyPatch, tts: Qwen3TTS, depth: int, code: int) -> None:
    """Make the embedding of one code NaN."""
    predictor = tts.predictor
    tables = [predictor._code0_embedding, *predictor._tables.embeddings]
    tables[depth] = np.array(tables[depth])
    tables[depth][code] = np.nan
    patch.setattr(predictor, "_code0_embedding", tables[0])
    patch.setattr(predictor._tables, "embeddings", tables[1:])


def short_requests() -> list[Request]:
    texts = ("Hello there", "Good morning", "This one is a longer text")
    return [Request(text=text, seed=seed, max_audio_length=5) for seed, text in enumerate(texts)]


@pytest.mark.parametrize("verify_size", [0, 3])
@pytest.mark.parametrize(("frame", "depth"), [(0, 0), (1, 5), (2, 14)])
def test_a_nan_in_the_code_predictor_fails_its_request_alone(
    variants: dict[str, Any], monkeypatch: pytest.MonkeyPatch, frame: int, depth: int, verify_size: int
) -> None:
    tts, requests = variants["tts_a"].tts, short_requests()
    before = run(tts, requests, verify_size, "coupled")
    with monkeypatch.context() as patch:
        break_code(patch, tts, depth, lone_code(before, 1, frame, depth))
        after = run(tts, requests, verify_size, "coupled")
        with pytest.raises(NumericsError, match=f"^frame {frame}: CodePredictor"):
            tts.synthesize(requests[1].text, seed=1, max_audio_length=5, verify_size=verify_size, mode="coupled")
    assert isinstance(after[1], NumericsError)
    assert f"frame {frame}: CodePredictor, depth" in str(after[1])
    if verify_size == 0:
        assert f"depth {depth + 1}:" in str(after[1])
    for row in (0, 2):
        assert_same(after[row], before[row])
    for healthy, expected in zip(run(tts, requests, verify_size, "coupled"), before, strict=True):
        assert_same(healthy, expected)


def test_a_nan_in_the_talker_fails_its_request_alone(variants: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    tts, requests = variants["tts_a"].tts, short_requests()
    before, step, calls = run(tts, requests), tts.talker.step, []

    def broken(embeds: np.ndarray) -> np.ndarray:
        calls.append(len(embeds))
        if len(calls) == 2:
            embeds = embeds.copy()
            embeds[0] = np.nan
        return step(embeds)

    with monkeypatch.context() as patch:
        patch.setattr(tts.talker, "step", broken)
        after = run(tts, requests)
    assert isinstance(after[0], NumericsError)
    assert str(after[0]).startswith("frame 2, depth 0: Talker: the logits hold nan")
    for row in (1, 2):
        assert_same(after[row], before[row])
    for healthy, expected in zip(run(tts, requests), before, strict=True):
        assert_same(healthy, expected)


@pytest.mark.parametrize("where", ["prompt", "frame"])
def test_a_request_that_failed_alone_spoils_no_later_one(
    variants: dict[str, Any], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The NaN stands in the Talker's cache, behind the rows of the next, shorter prompt."""
    tts = variants["tts_a"].tts
    options = {"seed": 1, "max_audio_length": 5}
    expected = tts.synthesize("Hi", **options)
    long = tts.synthesize("This one is a longer text", **options)
    with monkeypatch.context() as patch:
        if where == "prompt":
            embed = tts.talker.embed_prompt
            patch.setattr(tts.talker, "embed_prompt", lambda prompt: embed(prompt) * np.float32(np.nan))
        else:
            break_code(patch, tts, 15, int(long.codes[0, 15]))
        with pytest.raises(NumericsError, match="depth 0: Talker"):
            tts.synthesize("This one is a longer text", **options)
    assert_same(tts.synthesize("Hi", **options), expected)


def test_every_request_of_a_batch_may_fail(variants: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    tts = variants["tts_a"].tts
    with monkeypatch.context() as patch:
        patch.setattr(tts.predictor._tables, "heads", np.full_like(tts.predictor._tables.heads, np.nan))
        failed = run(tts, short_requests())
    assert [str(error).split(":")[0] for error in failed] == ["frame 0"] * 3
    assert all(isinstance(error, NumericsError) for error in failed)
    assert len(run(tts, short_requests())[0].codes) >= 2


def test_a_codec_that_fails_fails_its_request_alone(variants: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    tts, decode = variants["tts_a"].tts, variants["tts_a"].tts.codec.decode
    calls: list[int] = []

    def broken(codes: np.ndarray) -> np.ndarray:
        calls.append(1)
        if len(calls) == 2:
            raise EngineError("the codec is tired")
        return decode(codes)

    monkeypatch.setattr(tts.codec, "decode", broken)
    results = run(tts, short_requests())
    assert [isinstance(result, CpSpecError) for result in results] == [False, True, False]


# -- engine folders ---------------------------------------------------------------------------------------------------


@pytest.fixture
def edited_engine(engine_copy: Callable[..., Path]) -> Callable[..., Path]:
    """``edited_engine(edit, component="talker")`` copies an engine and changes a config in it."""

    def copy(edit: Callable[[dict[str, Any]], None], component: str = "talker") -> Path:
        engine = engine_copy()
        path = engine / component / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        edit(config)
        path.write_text(json.dumps(config), encoding="utf-8")
        return engine

    return copy


def test_the_talker_folder_names_the_others(variants: dict[str, Any]) -> None:
    engine = variants["tts_a"].engine
    tts = Qwen3TTS.from_engine_dir(
        talker_dir=str(engine / "talker"), code2wav_dir=str(engine / "code2wav"), tokenizer_dir=engine / "talker"
    )
    expected = variants["tts_a"].tts.synthesize("Hi", seed=1, max_audio_length=2)
    assert_same(tts.synthesize("Hi", seed=1, max_audio_length=2), expected)


@pytest.mark.parametrize("folders", [{}, {"engine_dir": "a", "talker_dir": "b"}])
def test_one_of_the_two_folders_is_needed(folders: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="give either the engine folder or the talker folder"):
        Qwen3TTS.from_engine_dir(**folders)


@pytest.mark.parametrize("component", ["talker", "code_predictor", "code2wav"])
@pytest.mark.parametrize("file", ["config.json", "model.onnx"])
def test_a_missing_file_is_named(engine_copy: Callable[..., Path], component: str, file: str) -> None:
    engine = engine_copy()
    (engine / component / file).unlink()
    with pytest.raises((ConfigError, EngineError), match=f"{component}/{file}"):
        Qwen3TTS.from_engine_dir(engine)


@pytest.mark.parametrize("component", ["talker", "code_predictor"])
def test_folders_of_checkpoints_of_other_widths_are_refused(engine_copy: Callable[..., Path], component: str) -> None:
    engine, other = engine_copy("tts_a"), engine_copy("tts_b", to="other")
    (engine / component).rename(engine / "former")
    (other / component).rename(engine / component)
    with pytest.raises(EngineError, match="the CodePredictor needs rows of talker_hidden_size"):
        Qwen3TTS.from_engine_dir(engine)


@pytest.mark.parametrize(
    ("component", "fields"),
    [
        ("talker", {"num_code_groups": 4}),
        ("code_predictor", {"num_code_groups": 4}),
        ("code2wav", {"num_code_groups": 4}),
        ("talker", {"codebook_size": 128}),
        ("code_predictor", {"codebook_size": 128}),
        ("code2wav", {"codebook_size": 32}),
    ],
)
def test_folders_of_checkpoints_of_other_codes_are_refused(
    synthetic: Callable[..., Path], build: Callable[..., Path], tmp_path: Path, component: str, fields: dict[str, int]
) -> None:
    base = {"codebook_size": 64, "num_code_groups": 16}
    engine = build(synthetic(**base), tmp_path / "engine")
    other = build(synthetic(**base | fields), tmp_path / "other")
    (engine / component).rename(engine / "former")
    (other / component).rename(engine / component)
    with pytest.raises((ConfigError, EngineError), match="different checkpoints"):
        Qwen3TTS.from_engine_dir(engine)


def test_loading_and_speaking_say_nothing_when_all_is_well(
    variants: dict[str, Any], caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO):
        Qwen3TTS.from_engine_dir(variants["tts_a"].engine).synthesize("Hi", max_audio_length=1, verify_size=3)
    assert not caplog.records
    assert capsys.readouterr() == ("", "")
