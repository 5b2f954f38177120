"""Conversations to spoken answers on real engines: parity, exact speculation, batches, the reference's edges."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trt_cpspec.builder.synthetic import OmniSpec, write_checkpoint

from trt_cpspec.config import RoleIds, SamplingParams, Section, TalkerSpec, ThinkerSpec
from trt_cpspec.errors import ConfigError, EngineError, NumericsError, SpeechError
from trt_cpspec.omni import Qwen3Omni, Reply
from trt_cpspec.pipeline import Qwen3TTS
from trt_cpspec.requests import ChatRequest
from trt_cpspec.sampling import PhiloxNoise, Use, law
from trt_cpspec.session import open_graph
from trt_cpspec.talker import assemble_answer_prompt, processed_logits, talker_law

MODES = ("rejection", "coupled")
GREEDY = dict.fromkeys(("temperature", "talker_temperature", "subtalker_temperature"), 0.0)
ABSOLUTE = 2e-5
LOGITS = 5e-5


def edit_config(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    edit(config)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def near(actual: Any, expected: np.ndarray, atol: float = ABSOLUTE) -> None:
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=0, atol=atol)


# -- parity with the reference ----------------------------------------------------------------------------------------

HERE = {
    "prompt_ids", "thinker_ids", "thinker_logits", "thinker_embeds", "thinker_hidden", "thinker_position_ids",
    "talker_prefill_embeds", "talker_prefill_ids", "talker_position_ids", "trailing_text", "tts_pad_embed",
    "talker_tokens", "talker_logits", "talker_scores", "talker_law", "talker_hidden", "codes", "next_embeds",
    "next_position_ids", "cp_inputs", "cp_hidden", "cp_logits", "cp_law", "waveform", "c2w_codes", "c2w_wave",
    "c2w_wave_chunked",
}  # fmt: skip
OF_THE_GRAPHS = {
    f"{part}_router_{call}_{what}"
    for part in ("thinker", "talker")
    for call in ("prefill", "decode")
    for what in ("logits", "ids", "weights")
} | {"c2w_long_codes", "c2w_long_embeds", "c2w_long_hidden"}


def test_every_golden_array_is_held_against_ours(omni: Any) -> None:
    names = {name.split("_", 1)[1] if name[0] == "p" else name for name in omni.arrays}
    assert names == HERE | OF_THE_GRAPHS
    source = Path(__file__).read_text(encoding="utf-8")
    assert not [name for name in HERE if f'["{name}"]' not in source]


def test_prompt(omni_case: Any) -> None:
    rendered = omni_case.model.tokenizer.render(omni_case.prompt["messages"])
    assert rendered == omni_case.prompt["rendered"]
    assert omni_case.model.tokenizer.encode(rendered) == omni_case["prompt_ids"].tolist()


def test_thinker(omni_case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    thinker = omni_case.model.thinker
    logits: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    apply, forward = thinker.logits, thinker._session.forward

    def spied_logits(hidden: np.ndarray) -> np.ndarray:
        logits.append(apply(hidden))
        return logits[-1]

    def spied_forward(embeds: np.ndarray, at: np.ndarray) -> Any:
        positions.append(at)
        return forward(embeds, at)

    monkeypatch.setattr(thinker, "logits", spied_logits)
    monkeypatch.setattr(thinker._session, "forward", spied_forward)
    reply = omni_case.respond()
    assert list(reply.token_ids) == omni_case["thinker_ids"].tolist()
    assert (reply.text, reply.finish_reason) == (omni_case.prompt["text"], omni_case.prompt["thinker_finish"])
    near(logits[:3], omni_case["thinker_logits"], LOGITS)
    fed = [*omni_case["prompt_ids"].tolist(), *reply.token_ids[:-1]]
    np.testing.assert_array_equal(thinker.embed(fed), omni_case["thinker_embeds"])
    # Of text alone the three axes agree, and are the slots of the cache.
    np.testing.assert_array_equal(omni_case["thinker_position_ids"], np.stack([positions[0][0]] * 3))
    assert [int(at[0, 0]) for at in positions[1:]] == list(range(len(omni_case["prompt_ids"]), len(fed)))


def test_hidden_states_for_the_talker(omni_case: Any) -> None:
    """The graph's second output; no text row of the Talker reads it."""
    folder, spec = omni_case.variant.engine / "thinker", omni_case.model.thinker.spec.decoder
    embeds = omni_case["thinker_embeds"][None]
    cache = np.zeros((1, spec.num_key_value_heads, embeds.shape[1] + 1, spec.head_dim), np.float32)
    feeds = {f"past_{kind}_{i}": cache for i in range(spec.num_hidden_layers) for kind in ("key", "value")}
    places = np.arange(embeds.shape[1], dtype=np.int32)[None]
    feeds |= {"inputs_embeds": embeds, "positions": places, "rotary_positions": places[..., None].repeat(3, axis=2)}
    feeds["deepstack_embeds"] = np.zeros_like(embeds)
    (hidden,) = open_graph(folder / "model.onnx", threads=1).run(["accept_hidden_states"], feeds)
    near(hidden[0], omni_case["thinker_hidden"])


def test_talker_prompt(omni_case: Any) -> None:
    model, talker = omni_case.model, omni_case.model.voice.talker
    spoken = omni_case["thinker_ids"].tolist()[:-1]
    prompt = assemble_answer_prompt(
        talker.spec, model.thinker.spec.roles, omni_case["prompt_ids"].tolist(), spoken, "ethan"
    )
    assert prompt is not None
    near(talker.embed_prompt(prompt), omni_case["talker_prefill_embeds"])
    near(talker.embed_text(prompt.trailing_text_ids), omni_case["trailing_text"])
    near(talker.embed_text(np.array([talker.spec.ids.tts_pad_token_id]))[0], omni_case["tts_pad_embed"])
    heard = len(prompt.text_ids) - 9
    np.testing.assert_array_equal(prompt.text_ids[:heard], omni_case["talker_prefill_ids"][:heard])


class Recorder:
    """What passes between the stages of one run."""

    def __init__(self, model: Qwen3Omni, patch: pytest.MonkeyPatch) -> None:
        self.hidden: list[np.ndarray] = []
        self.logits: list[np.ndarray] = []
        self.next_embeds: list[np.ndarray] = []
        self.positions: list[np.ndarray] = []
        assert model.voice is not None
        talker = model.voice.talker
        logits, step, forward = talker.logits, talker.step, talker._session.forward

        def spied_logits(hidden: np.ndarray) -> np.ndarray:
            self.hidden.append(hidden.copy())
            self.logits.append(logits(hidden))
            return self.logits[-1]

        def spied_step(embeds: np.ndarray) -> Any:
            self.next_embeds.append(embeds[0].copy())
            return step(embeds)

        def spied_forward(embeds: np.ndarray, positions: np.ndarray) -> Any:
            self.positions.append(positions[0])
            return forward(embeds, positions)

        patch.setattr(talker, "logits", spied_logits)
        patch.setattr(talker, "step", spied_step)
        patch.setattr(talker._session, "forward", spied_forward)


def test_free_running(omni_case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Recorder(omni_case.model, monkeypatch)
    speech = omni_case.respond().speech
    np.testing.assert_array_equal(speech.codes, omni_case["codes"])
    assert speech.finish_reason == omni_case.prompt["talker_finish"]
    near(record.hidden, omni_case["talker_hidden"])
    near(record.logits, omni_case["talker_logits"], LOGITS)
    near(record.next_embeds, omni_case["next_embeds"])
    np.testing.assert_array_equal(omni_case["talker_position_ids"], np.stack([record.positions[0]] * 3))
    np.testing.assert_array_equal(omni_case["next_position_ids"], np.stack(record.positions[1:]).repeat(3, axis=1))
    near(speech.waveform, omni_case["waveform"])
    assert (speech.waveform.dtype, speech.sample_rate) == (np.float32, 24000)
    assert len(speech.waveform) == 1920 * len(speech.codes) - 555
    assert speech.stats.passes == 15 * len(speech.codes)


def test_talker_scores_and_law(omni_case: Any) -> None:
    spec, tokens = omni_case.model.voice.talker.spec, omni_case["talker_tokens"].tolist()
    for step in range(3):
        logits, seen = omni_case["talker_logits"][step], tokens[:step]
        scores = processed_logits(spec, logits, seen, spec.defaults.talker.repetition_penalty)
        np.testing.assert_allclose(scores, omni_case["talker_scores"][step], rtol=1e-6)
        near(talker_law(spec, logits, seen, spec.defaults.talker), omni_case["talker_law"][step], 1e-6)
        assert int(scores.argmax()) == tokens[step]


@pytest.mark.parametrize("width", [1, 3, 8])
def test_code_predictor(omni_case: Any, width: int) -> None:
    predictor, codes, count = omni_case.model.voice.predictor, omni_case["codes"], len(omni_case["cp_hidden"])
    inputs, defaults = omni_case["cp_inputs"], omni_case.model.voice.talker.spec.defaults.subtalker
    near(omni_case["talker_hidden"][:count], inputs[:, 0], 0)
    near(predictor._code0_embedding[codes[:count, 0]], inputs[:, 1], 0)
    for frame in range(count):
        states = [predictor.prefill(inputs[frame, :1], codes[frame, :1])[0]]
        for depth in range(1, 15, width):
            part = codes[frame : frame + 1, depth : min(depth + width, 15)]
            states += list(predictor.forward(part, np.array([depth]), np.array([part.shape[1]]))[0].copy())
        near(states, omni_case["cp_hidden"][frame])
        logits = predictor.target_logits(np.stack(states), 1)
        near(logits, omni_case["cp_logits"][frame], LOGITS)
        near([law(row, defaults) for row in logits], omni_case["cp_law"][frame], 5e-6)


def test_codec(omni: Any) -> None:
    codec, codes = omni.model.voice.codec, omni.arrays["c2w_codes"].T
    near(codec.decode(codes), omni.arrays["c2w_wave"])
    near(codec.decode(codes, chunk=5, left_context=2), omni.arrays["c2w_wave_chunked"])
    for how in ({}, {"chunk": 5, "left_context": 2}):
        for size in (1, 2, 7):
            stream = codec.stream(**how)
            found = [stream.push(codes[start : start + size]) for start in range(0, len(codes), size)]
            assert len(found[0]) == 1920 * size - 555 * (1 if size < 6 or not how else 2)
            assert np.abs(np.concatenate(found) - codec.decode(codes, **how)).max() < 1 / 32768
    assert len(codec.decode(codes[:1])) == 1920 - 555
    assert len(codec.decode(codes[:0])) == 0


def test_sampling_defaults(omni: Any) -> None:
    defaults, spec = omni.golden["sampling_defaults"], omni.model.voice.talker.spec
    talker, predictor = defaults["talker"], defaults["code_predictor"]
    assert spec.defaults.talker == SamplingParams(
        **{name: talker[name] for name in ("temperature", "top_k", "top_p", "repetition_penalty")}
    )
    assert spec.defaults.subtalker == SamplingParams(
        **{name: predictor[name] for name in ("temperature", "top_k", "top_p")}
    )
    assert omni.model.prepare(chat("Hi", seed=3)).sampling == {
        "temperature": 1.0, "top_k": 50, "top_p": 0.8, "talker_temperature": 0.9, "talker_top_k": 50,
        "talker_top_p": 1.0, "repetition_penalty": 1.05, "subtalker_temperature": 1.0, "subtalker_top_k": 50,
        "subtalker_top_p": 0.8, "seed": 3,
    }  # fmt: skip


# -- exact speculation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("verify_size", [2, 3, 8])
def test_greedy_speculation_gives_the_references_codes(omni_case: Any, verify_size: int, mode: str) -> None:
    speech = omni_case.respond(verify_size=verify_size, mode=mode).speech
    np.testing.assert_array_equal(speech.codes, omni_case["codes"])
    stats = speech.stats.as_dict()
    assert (stats["verify_size"], stats["mode"], stats["fallback_reason"]) == (verify_size, mode, None)
    assert stats["rounds"] + stats["accepted"] == 14 * len(speech.codes)
    assert stats["proposed"] > 0


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_coupled_speech_is_autoregressive_speech(omni: Any, seed: int) -> None:
    options = {"seed": seed, "max_audio_length": 5, "max_generate_length": 8}
    expected = omni.model.respond("Hello there", **options)
    for verify_size in (2, 3, 8):
        reply = omni.model.respond("Hello there", verify_size=verify_size, mode="coupled", **options)
        assert_same(reply, expected, stats=False)


@pytest.fixture(scope="module", params=["mixture", "dense"])
def lively(
    request: pytest.FixtureRequest, build_omni: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Qwen3Omni:
    """A generated checkpoint whose drafts are right about half of the time."""
    folder = tmp_path_factory.mktemp(request.param)
    experts = {} if request.param == "mixture" else {"thinker_experts": None, "talker_experts": None}
    write_checkpoint(folder / "checkpoint", OmniSpec.tiny(agreement=0.8, codebook_size=256, **experts))
    return Qwen3Omni.from_engine_dir(build_omni(folder / "checkpoint", folder / "engine"), threads=1)


def test_wide_windows_pay_off_and_change_nothing(lively: Qwen3Omni) -> None:
    commits = np.zeros(8, int)
    for seed in range(4):
        options = {"seed": seed, "max_audio_length": 12, "max_generate_length": 10}
        expected = lively.respond("Hello world", **options)
        for verify_size in (3, 8):
            reply = lively.respond("Hello world", verify_size=verify_size, mode="coupled", **options)
            assert_same(reply, expected, stats=False)
            assert reply.speech is not None
            assert expected.speech is not None
            assert reply.speech.stats.passes < expected.speech.stats.passes
        commits += reply.speech.stats.as_dict()["commit_histogram"]
    assert (commits > 0).sum() >= 6, commits


@pytest.mark.parametrize(("width", "asked"), [(1, 3), (3, 4)])
def test_a_narrow_engine_falls_back(
    width: int, asked: int, omni: Any, omni_copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit_config(omni_copy / "code_predictor", lambda config: config["builder_config"].update(max_verify_size=width))
    model = Qwen3Omni.from_engine_dir(omni_copy, threads=1)
    options = {"seed": 5, "max_audio_length": 4}
    reply = model.respond("Hi", verify_size=asked, **options)
    window = reply.speech.stats.window
    assert (window.requested, window.verify_size) == (asked, 0)
    assert f"--maxVerifySize {asked}" in window.reason
    assert caplog.messages == [f"CodePredictor speculation is off: {window.reason}; decoding autoregressively"]
    np.testing.assert_array_equal(reply.speech.codes, omni.model.respond("Hi", **options).speech.codes)


def test_the_thinkers_random_numbers_are_its_own(omni: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    thinker, apply = omni.model.thinker, omni.model.thinker.logits
    logits: list[np.ndarray] = []

    def spied(hidden: np.ndarray) -> np.ndarray:
        logits.append(apply(hidden))
        return logits[-1]

    monkeypatch.setattr(thinker, "logits", spied)
    params = SamplingParams(temperature=1.3, top_k=40, top_p=0.9)
    reply = omni.model.respond(
        "Hi", seed=9, temperature=1.3, top_k=40, top_p=0.9, max_generate_length=12, max_audio_length=1
    )
    drawn = [PhiloxNoise(9, step).pick(law(row, params), 0, Use.TEXT) for step, row in enumerate(logits)]
    assert list(reply.token_ids) == drawn
    others = [PhiloxNoise(9, step).pick(law(row, params), 0, Use.TARGET) for step, row in enumerate(logits)]
    assert drawn != others


# -- batches ----------------------------------------------------------------------------------------------------------


def chat(messages: Any, **options: Any) -> ChatRequest:
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return ChatRequest(messages=messages, **options)


REQUESTS = (
    chat("Hello there", seed=1, max_generate_length=9, max_audio_length=6),
    chat(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me of the river, please."}],
        seed=2, temperature=1.5, top_k=0, top_p=1.0, max_generate_length=3, max_audio_length=9, speaker="aiden",
    ),
    chat("Hi", seed=1, temperature=0.0, max_generate_length=5, max_audio_length=3, subtalker_temperature=0.0),
    chat("Count to five", seed=2**40, max_generate_length=1, max_audio_length=4),
)  # fmt: skip


def run(model: Qwen3Omni, requests: Sequence[ChatRequest], verify_size: int = 0, mode: Any = "rejection") -> list[Any]:
    prepared = [model.prepare(request) for request in requests]
    return list(model.run_batch(prepared, window=model.window(verify_size), mode=mode))


def assert_same(actual: Reply, expected: Reply, *, stats: bool = True) -> None:
    assert (actual.text, actual.token_ids, actual.finish_reason) == (
        expected.text,
        expected.token_ids,
        expected.finish_reason,
    )
    assert actual.speech is not None
    assert expected.speech is not None
    np.testing.assert_array_equal(actual.speech.codes, expected.speech.codes)
    np.testing.assert_array_equal(actual.speech.waveform, expected.speech.waveform)
    assert actual.speech.finish_reason == expected.speech.finish_reason
    assert actual.speech.sampling == expected.speech.sampling
    if stats:
        assert actual.speech.stats.as_dict() == expected.speech.stats.as_dict()


@pytest.mark.parametrize("verify_size", [0, 3])
def test_each_request_of_a_batch_equals_itself_alone(omni: Any, verify_size: int) -> None:
    alone = [run(omni.model, [request], verify_size)[0] for request in REQUESTS]
    assert len({len(reply.token_ids) for reply in alone}) >= 3  # rows that end at different times are the point
    assert len({len(reply.speech.codes) for reply in alone}) >= 3
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [1, 2], [2, 3, 1]):
        replies = run(omni.model, [REQUESTS[index] for index in order], verify_size)
        for reply, index in zip(replies, order, strict=True):
            assert_same(reply, alone[index])


def test_more_conversations_than_a_batch_holds(omni: Any) -> None:
    texts = ["Hello", "Hi", "a river", "five", "please", "story"]
    assert len(texts) > omni.model.max_batch_size == 4
    options = {"seed": 5, "max_audio_length": 2, "max_generate_length": 3}
    for text, reply in zip(texts, omni.model.respond_all(texts, **options), strict=True):
        assert_same(reply, omni.model.respond(text, **options))
    assert omni.model.respond_all([]) == []
    with pytest.raises(ConfigError, match="give a list of conversations"):
        omni.model.respond_all("Hello")
    with pytest.raises(ConfigError, match="a batch of 5 exceeds the engine's max_batch_size 4"):
        run(omni.model, [REQUESTS[0]] * 5)


def test_seeds(omni: Any) -> None:
    options = {"max_audio_length": 3, "max_generate_length": 6}
    first = omni.model.respond("Hi", seed=1, **options)
    assert_same(omni.model.respond("Hi", seed=1, **options), first)
    assert omni.model.respond("Hi", seed=2, **options).token_ids != first.token_ids
    drawn = omni.model.prepare(chat("Hi"))
    assert drawn.seed == drawn.voice.sampling.seed != omni.model.prepare(chat("Hi")).seed
    assert omni.model.prepare(chat("Hi"), default_seed=7).seed == 7
    assert omni.model.prepare(chat("Hi", seed=8), default_seed=7).seed == 8


# -- the reference's edges --------------------------------------------------------------------------------------------


def test_an_end_at_the_first_step_is_silence(omni: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference checks the prefill's sample, and fails where it has no frame."""
    talker = omni.model.voice.talker
    end = np.eye(1, talker.spec.decoder.vocab_size, talker.spec.ids.codec_eos_token_id, np.float32)[0]
    monkeypatch.setattr(talker, "logits", lambda hidden: end)
    speech = omni.model.respond("Hi", seed=1, max_generate_length=4, **GREEDY).speech
    assert (speech.finish_reason, speech.codes.shape, speech.waveform.shape) == ("eos", (0, 16), (0,))
    assert speech.stats.frames == speech.stats.passes == 0


@pytest.mark.parametrize("ends", [True, False])
def test_an_answer_without_a_word_is_silence(ends: bool, omni: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends at once, or its only token is the one at the limit, which is not spoken."""
    thinker = omni.model.thinker
    token = next(iter(thinker.spec.eos_token_ids)) if ends else 300
    only = np.eye(1, thinker.spec.decoder.vocab_size, token, np.float32)[0]
    monkeypatch.setattr(thinker, "logits", lambda hidden: only)
    reply = omni.model.respond("Hi", seed=1, max_generate_length=5 if ends else 1, verify_size=3, **GREEDY)
    assert (reply.token_ids, reply.finish_reason) == ((token,), "eos" if ends else "length")
    assert bool(reply.text) != ends
    assert (reply.speech.finish_reason, len(reply.speech.waveform), len(reply.speech.codes)) == ("eos", 0, 0)
    assert reply.speech.warnings == ("the answer holds nothing to speak",)
    assert reply.speech.stats.window.verify_size == 3


def test_the_last_code_at_the_limit_makes_no_frame(omni: Any) -> None:
    speech = omni.case(0).respond(max_audio_length=3).speech
    np.testing.assert_array_equal(speech.codes, omni.arrays["p0_codes"][:3])
    assert (speech.finish_reason, len(speech.waveform)) == ("length", 3 * 1920 - 555)


def test_the_last_token_at_the_limit_is_not_spoken(omni: Any) -> None:
    case = omni.case(0)
    prepared = case.model.prepare(chat(case.prompt["messages"], **case.options | {"max_generate_length": 4}))
    (reply,) = case.model.run_batch([prepared], window=case.model.window(0), mode="coupled")
    assert reply.finish_reason == "length"
    assert list(reply.token_ids) == omni.arrays["p0_thinker_ids"][:4].tolist()
    model = case.model
    three = model._prompt(model.voice, prepared.prompt_ids, reply.token_ids[:3], "ethan")
    expected = model.voice.run_batch([replace(prepared.voice, prompt=three)], window=model.window(0), mode="coupled")[0]
    np.testing.assert_array_equal(reply.speech.codes, expected.codes)


# -- the Talker's prefill, by ids -------------------------------------------------------------------------------------

ROLES = RoleIds(im_start_token_id=1, system_token_id=10, user_token_id=11, assistant_token_id=12)
SYSTEM, USER, ASSISTANT, OPEN = [1, 10, 5, 50, 2, 5], [1, 11, 5, 51, 2, 5], [1, 12, 5, 52, 2, 5], [1, 12, 5]


def rows_of(omni: Any, prompt_ids: list[int], answer_ids: list[int]) -> Any:
    return assemble_answer_prompt(omni.model.voice.talker.spec, ROLES, prompt_ids, answer_ids, "aiden")


def test_only_the_users_segments_are_heard(omni: Any) -> None:
    ids = omni.model.voice.talker.spec.ids
    pad, bos, eos = ids.tts_pad_token_id, ids.tts_bos_token_id, ids.tts_eos_token_id
    prompt = rows_of(omni, [*SYSTEM, *USER, *ASSISTANT, *USER, *OPEN], [60, 61, 62])
    assert prompt.text_ids.tolist() == [*USER, *USER, *OPEN, pad, pad, pad, pad, bos, 60]
    assert prompt.codec_ids.tolist() == [-1] * 15 + [2155, 2156, 2157, 2303, 2148, 2149]
    assert prompt.trailing_text_ids.tolist() == [61, 62, eos]
    assert rows_of(omni, [*SYSTEM, *OPEN], [60]).trailing_text_ids.tolist() == [eos]
    assert rows_of(omni, [*USER, *OPEN], []) is None
    # A start token in the answer starts no segment, and what the template puts behind the header is spoken.
    assert rows_of(omni, [*USER, *OPEN, 70], [1, 60]).text_ids.tolist()[-1] == 70
    assert rows_of(omni, [*USER, *OPEN, 70], [1, 60]).trailing_text_ids.tolist() == [1, 60, eos]


@pytest.mark.parametrize(
    ("prompt_ids", "message"),
    [
        ([*USER, 1, 13, 5, *OPEN], "neither system, user nor assistant"),
        ([*USER, *OPEN, 1], "neither system, user nor assistant"),
        ([5, 5], "neither system, user nor assistant"),
        ([*OPEN, *USER], "does not end in the header of an assistant's answer"),
    ],
)
def test_a_prompt_that_the_talker_cannot_hear(omni: Any, prompt_ids: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rows_of(omni, prompt_ids, [60])


# -- limits, and what is refused --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(omni: Any, tmp_path_factory: pytest.TempPathFactory) -> Qwen3Omni:
    """An engine for the first golden prompt: 34 tokens of the Thinker, 26 rows of the Talker, little room behind."""
    folder = shutil.copytree(omni.engine, tmp_path_factory.mktemp("small") / "engine")
    for name, rows in (("thinker", 34), ("talker", 26)):
        limits = {"max_input_len": rows, "max_kv_cache_capacity": rows + 4, "max_batch_size": 2}
        edit_config(folder / name, lambda config, limits=limits: config["builder_config"].update(limits))
    return Qwen3Omni.from_engine_dir(folder, threads=1)


def test_an_answer_ends_with_the_capacity_and_it_is_said(small: Qwen3Omni, omni: Any) -> None:
    case = omni.case(0)
    prepared = small.prepare(chat(case.prompt["messages"], **case.options))
    assert (prepared.max_tokens, prepared.voice.max_frames) == (5, 4)
    assert prepared.warnings == (
        "max_generate_length 12 is limited to 5 tokens by the Thinker's max_kv_cache_capacity 38",
        "max_audio_length 11 is limited to 4 frames by the engine's max_kv_cache_capacity 30",
    )
    reply = small.respond(case.prompt["messages"], **case.options)
    assert list(reply.token_ids) == case["thinker_ids"][:5].tolist()
    assert len(reply.speech.codes) <= 4
    silent = small.prepare(chat(case.prompt["messages"], seed=1))
    assert (silent.max_tokens, silent.voice.max_frames, silent.warnings) == (5, 4, ())


def test_a_conversation_beyond_the_engine_is_refused(small: Qwen3Omni) -> None:
    with pytest.raises(
        ConfigError, match=r"the conversation takes \d+ tokens, the Thinker's max_input_len is 34; short"
    ):
        small.respond("river " * 40)
    with pytest.raises(ConfigError, match=r"the text takes \d+ rows, .*max_input_len is 26; shorten what was said, or"):
        small.respond("a " * 16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speaker": "ethann"}, "unknown speaker 'ethann'; did you mean 'ethan'"),
        ({"temprature": 1.0}, "unknown option 'temprature'; did you mean"),
        ({"language": "english"}, "unknown option 'language'"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"max_generate_length": 0}, "max_generate_length is 0, it must be at least 1"),
        ({"verify_size": 9}, "0 to switch speculation off, or 2 to 8"),
        ({"mode": "greedy"}, "unknown verification mode"),
    ],
)
def test_what_cannot_be_used_is_refused(omni: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        omni.model.respond("Hi", **options)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        ([{"role": "tool", "content": "x"}], r"messages\[0\].role is 'tool'; allowed: assistant, system, user"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content must be a string or a list of text parts"),
        ([{"role": "user", "content": [{"video": "a.mp4"}]}], "type is 'video'; video input is not supported"),
        ([{"role": "user", "content": "a<|im_end|>b"}], r"messages\[0\].content contains '<\|im_end\|>'"),
        ([{"role": "user", "content": "<|audio_pad|>"}], r"contains '<\|audio_pad\|>', a special token"),
    ],
)
def test_messages_that_are_none(omni: Any, messages: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        omni.model.respond(messages)


def test_a_speaker_is_found_by_its_name(omni: Any) -> None:
    voices = {
        name: omni.model.prepare(chat("Hi", seed=1, speaker=name)).voice for name in (None, "", "Chelsie", "AIDEN")
    }
    assert [voice.speaker for voice in voices.values()] == ["chelsie", "chelsie", "chelsie", "aiden"]
    assert [voice.prompt.codec_ids[-3] for voice in voices.values()] == [2301, 2301, 2301, 2303]


# -- failures ---------------------------------------------------------------------------------------------------------


def test_an_answer_that_fails_leaves_the_others_alone(omni: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [chat(text, seed=1, max_generate_length=6, max_audio_length=3) for text in ("Hello", "Hi", "a river")]
    expected = run(omni.model, requests)
    thinker, apply, calls = omni.model.thinker, omni.model.thinker.logits, iter(range(1000))

    def spoiled(hidden: np.ndarray) -> np.ndarray:
        return apply(hidden) * (np.nan if next(calls) == 4 else 1)  # the second row's second token

    monkeypatch.setattr(thinker, "logits", spoiled)
    first, second, third = run(omni.model, requests)
    assert isinstance(second, NumericsError)
    assert str(second).startswith("Thinker, token 1: the logits hold nan")
    assert_same(first, expected[0])
    assert_same(third, expected[2])
    monkeypatch.setattr(thinker, "logits", lambda hidden: apply(hidden) * np.nan)
    with pytest.raises(NumericsError):
        omni.model.respond("Hi")


def test_an_engine_that_fails_ends_the_answers_that_go_on(omni: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [chat("Hello", seed=1, max_generate_length=n, max_audio_length=2) for n in (2, 9)]
    expected = run(omni.model, requests[:1])[0]
    step, calls = omni.model.thinker.step, iter(range(1000))

    def failing(embeds: np.ndarray) -> Any:
        if next(calls) == 2:
            raise EngineError("out of memory")
        return step(embeds)

    monkeypatch.setattr(omni.model.thinker, "step", failing)
    done, failed = run(omni.model, requests)
    assert_same(done, expected)
    assert str(failed) == "out of memory"


def test_a_head_that_fails_spares_the_answer_that_has_just_ended(omni: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [chat("Hello", seed=1, max_generate_length=n, max_audio_length=2) for n in (2, 9)]
    expected = run(omni.model, requests[:1])[0]
    apply, calls = omni.model.thinker.logits, iter(range(1000))

    def failing(hidden: np.ndarray) -> Any:
        if next(calls) == 3:  # the second row's second token
            raise EngineError("out of memory")
        return apply(hidden)

    monkeypatch.setattr(omni.model.thinker, "logits", failing)
    done, failed = run(omni.model, requests)
    assert_same(done, expected)
    assert str(failed) == "out of memory"


def test_speech_that_fails_fails_its_request(omni: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = omni.model.voice.codec
    monkeypatch.setattr(codec, "decode", lambda codes: (_ for _ in ()).throw(EngineError("no memory")))
    (result,) = run(omni.model, [chat("Hi", seed=1, max_audio_length=2)])
    assert isinstance(result, SpeechError)
    with pytest.raises(EngineError, match="no memory") as raised:
        omni.model.respond("Hi", seed=1, max_audio_length=2)
    assert (raised.value.text, raised.value.token_ids) == (result.text, result.token_ids)
    assert omni.model.tokenizer.decode(result.token_ids) == result.text


# -- folders ----------------------------------------------------------------------------------------------------------


def test_text_needs_the_thinker_alone(omni: Any, tmp_path: Path) -> None:
    shutil.copytree(omni.engine / "thinker", tmp_path / "thinker")
    model = Qwen3Omni.from_engine_dir(tmp_path, audio=False, threads=1)
    case = omni.case(0)
    reply = model.respond(case.prompt["messages"], temperature=0.0)
    assert (reply.text, reply.speech) == (case.prompt["text"], None)
    assert model.prepare(chat("Hi", seed=4)).sampling == {"temperature": 1.0, "top_k": 50, "top_p": 0.8, "seed": 4}
    assert model.window(0).verify_size == 0
    with pytest.raises(ConfigError, match="2 to 8"):
        model.respond("Hi", verify_size=9)
    with pytest.raises((ConfigError, EngineError), match="talker"):
        Qwen3Omni.from_engine_dir(tmp_path)


def test_folders_by_name(omni: Any) -> None:
    root = omni.engine
    model = Qwen3Omni.from_engine_dir(
        thinker_dir=root / "thinker",
        talker_dir=root / "talker",
        code2wav_dir=root / "multimodal" / "code2wav",
        tokenizer_dir=omni.checkpoint,
        threads=1,
    )
    options = {"seed": 3, "max_audio_length": 2, "max_generate_length": 3}
    assert_same(model.respond("Hi", **options), omni.model.respond("Hi", **options))
    for given in ({}, {"engine_dir": root, "thinker_dir": root / "thinker"}):
        with pytest.raises(ConfigError, match="give either the engine folder or the thinker folder"):
            Qwen3Omni.from_engine_dir(**given)


WRONG: dict[str, tuple[dict[str, str], str]] = {
    "root for thinker": ({"thinker_dir": "."}, r"is no thinker folder; did you mean .*/thinker\?"),
    "talker for thinker": ({"thinker_dir": "talker"}, r"is the folder of a talker; did you mean .*/thinker\?"),
    "root for talker": ({"talker_dir": "."}, r"is no talker folder; did you mean .*/talker\?"),
    "thinker for talker": ({"talker_dir": "thinker"}, r"is the folder of a thinker; did you mean .*/talker\?"),
    "root for code2wav": ({"code2wav_dir": "."}, r"did you mean .*/multimodal/code2wav\?"),
    "multimodal for code2wav": ({"code2wav_dir": "multimodal"}, r"did you mean .*/multimodal/code2wav\?"),
    "talker for code2wav": (
        {"code2wav_dir": "talker"},
        r"the folder of a talker; did you mean .*/multimodal/code2wav\?",
    ),
    "nowhere": ({"thinker_dir": "nowhere"}, r"nowhere is no thinker folder; did you mean .*/thinker\?"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_folder_says_which_may_be_meant(case: str, omni: Any) -> None:
    given, message = WRONG[case]
    paths = {"thinker_dir": omni.engine / "thinker"} | {name: omni.engine / place for name, place in given.items()}
    with pytest.raises(ConfigError, match=message):
        Qwen3Omni.from_engine_dir(**paths)


def test_a_checkpoint_is_no_engine_folder(omni: Any) -> None:
    message = r"is a checkpoint, no engine folder: build it with cpspec-build --checkpointDir .* and name ENG/{}"
    with pytest.raises(ConfigError, match=message.format("thinker")):
        Qwen3Omni.from_engine_dir(thinker_dir=omni.checkpoint)
    with pytest.raises(ConfigError, match=message.format("talker")):
        Qwen3TTS.from_engine_dir(talker_dir=omni.checkpoint)
    message = r"checkpoint is a checkpoint, no engine folder: build it with cpspec-build .* and name ENG$"
    for kind in (Qwen3Omni, Qwen3TTS):
        with pytest.raises(ConfigError, match=message):
            kind.from_engine_dir(omni.checkpoint)


def test_the_two_models_are_told_apart(omni: Any, variants: dict[str, Any]) -> None:
    speech = variants["tts_a"].engine
    with pytest.raises(ConfigError, match="holds the Talker of a Qwen3-Omni: speak with llm_inference"):
        Qwen3TTS.from_engine_dir(omni.engine)
    with pytest.raises(ConfigError, match="holds the Talker of a Qwen3-TTS: speak with qwen3_tts_inference"):
        Qwen3Omni.from_engine_dir(thinker_dir=omni.engine / "thinker", talker_dir=speech / "talker",
                                  code2wav_dir=speech / "code2wav")  # fmt: skip
    with pytest.raises(ConfigError, match="talker and code2wav come from different checkpoints: one of them is of a"):
        Qwen3Omni.from_engine_dir(omni.engine, code2wav_dir=speech / "code2wav")
    with pytest.raises(ConfigError, match=r"is no talker folder; did you mean .*/talker\?"):
        Qwen3TTS.from_engine_dir(talker_dir=speech)


def test_a_thinker_of_another_width_is_refused(omni: Any, omni_copy: Path) -> None:
    edit_config(omni_copy / "talker", lambda config: config.update(thinker_hidden_size=32))
    with pytest.raises((ConfigError, EngineError), match=r"thinker_hidden_size 32|its config asks for"):
        Qwen3Omni.from_engine_dir(omni_copy)


def test_a_thinker_without_the_talkers_tokens_is_refused(omni_copy: Path) -> None:
    edit_config(omni_copy / "talker", lambda config: config.update(tts_eos_token_id=512))
    with pytest.raises(EngineError, match=r"embedding has 512 tokens, the Talker in .* needs the token 512"):
        Qwen3Omni.from_engine_dir(omni_copy)


def test_a_template_that_makes_nothing_is_refused(omni_copy: Path) -> None:
    (omni_copy / "thinker" / "chat_template.jinja").write_text("")
    with pytest.raises(ConfigError, match="the chat template makes nothing of the messages"):
        Qwen3Omni.from_engine_dir(omni_copy).respond("Hi")


def test_a_tokenizer_of_another_checkpoint_is_refused(omni: Any, omni_copy: Path) -> None:
    model = Qwen3Omni.from_engine_dir(omni_copy, threads=1)
    model.thinker.spec = replace(model.thinker.spec, decoder=replace(model.thinker.spec.decoder, vocab_size=400))
    with pytest.raises(ConfigError, match=r"gives the token 4\d\d, the Thinker knows 400: they are of different"):
        model.respond("Hi")


def test_a_thinkers_config(omni: Any) -> None:
    values = json.loads((omni.engine / "thinker" / "config.json").read_text(encoding="utf-8"))
    spec = ThinkerSpec.from_section(Section(values, "c"))
    assert spec.eos_token_ids == {450}
    assert spec.roles == RoleIds(im_start_token_id=449, system_token_id=272, user_token_id=270, assistant_token_id=266)
    several = ThinkerSpec.from_section(Section(values | {"eos_token_id": [450, 448]}, "c"))
    assert several.eos_token_ids == {448, 450}
    with pytest.raises(EngineError, match="model is 'qwen3_omni_moe_talker', no Thinker; name the thinker folder"):
        ThinkerSpec.from_section(Section(values | {"model": "qwen3_omni_moe_talker"}, "c"))
    for key in ("eos_token_id", "user_token_id", "hidden_size"):
        with pytest.raises(ConfigError, match=f"the key {key} is missing"):
            ThinkerSpec.from_section(Section({k: v for k, v in values.items() if k != key}, "c"))


def test_a_talkers_config(omni: Any) -> None:
    values = json.loads((omni.engine / "talker" / "config.json").read_text(encoding="utf-8"))
    spec = TalkerSpec.from_section(Section(values | {"intermediate_size": 80, "thinker_hidden_size": 96}, "c"))
    assert (spec.is_omni, spec.projection_size, spec.text_hidden_size, spec.min_frames) == (True, 80, 96, 0)
    assert spec.ids.codec_think_id == -1
    generation = {"talker_do_sample": False, "talker_top_k": 7, "subtalker_top_p": 0.5, "top_k": 9}
    changed = TalkerSpec.from_section(Section(values | {"generation_config": generation}, "c")).defaults
    assert (changed.talker.temperature, changed.talker.top_k, changed.subtalker.top_p) == (0.0, 7, 0.5)


def test_a_talker_without_speakers_is_refused(omni_copy: Path) -> None:
    edit_config(omni_copy / "talker", lambda config: config.update(speaker_id={}))
    with pytest.raises(ConfigError, match="speaker_id is empty"):
        Qwen3Omni.from_engine_dir(omni_copy)


def test_progress_and_times(omni_copy: Path) -> None:
    model = Qwen3Omni.from_engine_dir(omni_copy, threads=1)
    ticks: list[int] = []
    replies = model.respond_all(["Hi", "Hello"], seed=1, max_audio_length=3, progress=ticks.append)
    assert sum(ticks) == sum(len(reply.speech.codes) for reply in replies)
    stages = {stage["stage_id"]: stage["total_runs"] for stage in model.times.as_profile()["stages"]}
    assert set(stages) == {
        "thinker_prefill", "thinker_generation", "talker_prefill", "talker_generation", "codepredictor_generation",
        "code2wav",
    }  # fmt: skip
    assert stages["thinker_prefill"] == 1
