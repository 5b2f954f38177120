"""The Talker against the reference: ids, rows, hidden states and logits; then its rules one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trt_cpspec.config import SamplingParams, Section, TalkerSpec
from trt_cpspec.errors import ConfigError, EngineError, NumericsError
from trt_cpspec.requests import Request
from trt_cpspec.talker import NO_CODE, Talker, assemble_prompt, processed_logits, talker_law

Close = Callable[..., None]

# -- parity with the reference ----------------------------------------------------------------------------------------


def test_token_ids(case: Any) -> None:
    tokenizer = case.tts.tokenizer
    assert tokenizer.assistant_ids(case.text) == case["input_ids"].tolist()
    if "instruct_ids" in case:
        assert tokenizer.instruct_ids(case.options["instruct"]) == case["instruct_ids"].tolist()


def test_prompt_rows(case: Any) -> None:
    prompt = case.prepare().prompt
    np.testing.assert_array_equal(prompt.text_ids, case["row_text_id"])
    np.testing.assert_array_equal(prompt.codec_ids, case["row_codec_id"])
    np.testing.assert_array_equal(prompt.trailing_text_ids, case["trailing_text_id"])
    assert len(prompt.text_ids) == len(case.prompt["row_labels"])


def test_prompt_embeddings(case: Any, close: Close) -> None:
    talker, prompt = case.tts.talker, case.prepare().prompt
    close(talker.embed_prompt(prompt), case["prefill_embeds"])
    close(talker.embed_text(prompt.trailing_text_ids), case["trailing_embeds"])
    close(talker.embed_text(np.array([talker.spec.ids.tts_pad_token_id]))[0], case["tts_pad_embed"])


def teacher_forced(case: Any) -> np.ndarray:
    """Return the hidden state of every sampling step, ``[F + 1, H]``, from the reference's inputs."""
    talker = case.tts.talker
    states = [talker.prefill([case["prefill_embeds"]])[0]]
    states += [talker.step(embeds[None])[0] for embeds in case["next_embeds"]]
    return np.stack(states)


def test_hidden_states(case: Any, close: Close) -> None:
    close(teacher_forced(case)[:-1], case["talker_hidden"])


def test_logits(case: Any, close: Close) -> None:
    talker, sampled = case.tts.talker, case["code0_sampled"]
    raw = np.stack([talker.logits(hidden) for hidden in teacher_forced(case)])
    processed = np.stack(
        [processed_logits(talker.spec, row, sampled[:step].tolist(), case.penalty) for step, row in enumerate(raw)]
    )
    steps = len(case["talker_logits_raw"])
    close(raw[:steps], case["talker_logits_raw"])
    close(processed[:steps], case["talker_logits_proc"])
    np.testing.assert_array_equal(np.isneginf(processed[:steps]), np.isneginf(case["talker_logits_proc"]))
    np.testing.assert_array_equal(processed.argmax(axis=1), sampled)
    top = np.sort(processed, axis=1)
    close(top[:, -1] - top[:, -2], case["talker_margin"])


def test_each_processor_matters_where_the_reference_says(case: Any) -> None:
    """The golden prompts prove nothing of a processor that never changes the choice; these steps are where it does."""
    talker, sampled = case.tts.talker, case["code0_sampled"]
    spec, changed = talker.spec, case.prompt["argmax_changed_by"]
    raw = [talker.logits(hidden) for hidden in teacher_forced(case)]
    for step in changed["repetition"]:
        without = processed_logits(spec, raw[step], sampled[:step].tolist(), 1.0)
        assert int(without.argmax()) != sampled[step]
    for step in changed["suppress"] + changed["min_new_tokens"]:
        assert int(raw[step].argmax()) != sampled[step]


# -- rows of a prefill ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("speaker", "language", "expected"),
    [
        ("eric", None, "sichuan_dialect"),
        ("Eric", "auto", "sichuan_dialect"),
        ("ERIC", "Chinese", "sichuan_dialect"),
        ("dylan", "chinese", "beijing_dialect"),
        ("eric", "english", "english"),
        ("vivian", "chinese", "chinese"),
        ("vivian", "AUTO", None),
    ],
)
def test_a_speaker_of_a_dialect_replaces_chinese(
    variants: dict[str, Any], speaker: str, language: str | None, expected: str | None
) -> None:
    tts = variants["tts_a"].tts
    spec, ids = tts.talker.spec, tts.talker.spec.ids
    prompt = tts.prepare(Request(text="Hi", speaker=speaker, language=language)).prompt
    think = [ids.codec_nothink_id, ids.codec_think_bos_id, ids.codec_think_eos_id]
    if expected is not None:
        think = [ids.codec_think_id, ids.codec_think_bos_id, spec.languages[expected], ids.codec_think_eos_id]
    block = [*think, spec.speakers[speaker.lower()], ids.codec_pad_id]
    np.testing.assert_array_equal(prompt.codec_ids[3 : 3 + len(block)], block)
    np.testing.assert_array_equal(prompt.codec_ids[:3], NO_CODE)


def test_layouts_hold_the_same_text(variants: dict[str, Any]) -> None:
    spec = variants["tts_a"].tts.talker.spec
    ids = [1, 2, 3, 10, 11, 12, 91, 92, 93, 94, 95]
    options = {"speaker": "ryan", "language": "auto"}
    whole = assemble_prompt(spec, ids, **options, non_streaming_mode=True)
    stream = assemble_prompt(spec, ids, **options, non_streaming_mode=False)
    end, pad = spec.ids.tts_eos_token_id, spec.ids.tts_pad_token_id
    assert whole.text_ids[-5:].tolist() == [10, 11, 12, end, pad]
    assert whole.trailing_text_ids.tolist() == [pad]
    assert stream.text_ids[-1] == 10
    assert stream.trailing_text_ids.tolist() == [11, 12, end]
    assert whole.codec_ids[-1] == stream.codec_ids[-1] == spec.ids.codec_bos_id


def test_an_instruct_stands_first_and_has_no_codec_side(variants: dict[str, Any]) -> None:
    tts = variants["tts_b"].tts
    plain = tts.prepare(Request(text="Hi")).prompt
    prompt = tts.prepare(Request(text="Hi", instruct="Calm.")).prompt
    extra = tts.tokenizer.instruct_ids("Calm.")
    assert prompt.text_ids.tolist() == [*extra, *plain.text_ids]
    assert prompt.codec_ids.tolist() == [NO_CODE] * len(extra) + plain.codec_ids.tolist()


# -- the law of a first code ------------------------------------------------------------------------------------------


@pytest.fixture
def spec(variants: dict[str, Any]) -> TalkerSpec:
    return variants["tts_a"].tts.talker.spec


@pytest.mark.parametrize("step", [0, 1, 2, 3])
def test_the_end_is_forbidden_for_two_steps(spec: TalkerSpec, step: int) -> None:
    logits = np.zeros(3072, np.float32)
    logits[spec.ids.codec_eos_token_id] = 9
    out = processed_logits(spec, logits, list(range(step)), 1.0)
    allowed = np.flatnonzero(np.isfinite(out))
    expected = np.arange(2048) if step < 2 else np.append(np.arange(2048), spec.ids.codec_eos_token_id)
    np.testing.assert_array_equal(allowed, expected)
    law = talker_law(spec, logits, list(range(step)), SamplingParams(temperature=0.0))
    assert int(law.argmax()) == (0 if step < 2 else spec.ids.codec_eos_token_id)


def test_a_repeated_code_is_penalised_once(spec: TalkerSpec) -> None:
    logits = np.full(3072, -1, np.float32)
    logits[5] = 3
    out = processed_logits(spec, logits, [5, 5, 7, 5], 1.5)
    assert out[[5, 7, 8]].tolist() == [2.0, -1.5, -1.0]


@pytest.mark.parametrize("place", [3, 2500])
def test_a_nan_is_no_law(spec: TalkerSpec, place: int) -> None:
    logits = np.zeros(3072, np.float32)
    logits[place] = np.nan
    with pytest.raises(NumericsError, match="nan"):
        talker_law(spec, logits, [], SamplingParams())


# -- batches ----------------------------------------------------------------------------------------------------------


def test_rows_of_a_batch_are_those_of_single_runs(variants: dict[str, Any], close: Close) -> None:
    talker, arrays = variants["tts_a"].tts.talker, variants["tts_a"].arrays
    prompts = [arrays[f"p{i}.prefill_embeds"] for i in range(4)]
    steps = [arrays[f"p{i}.next_embeds"] for i in range(4)]
    hidden = [talker.prefill(prompts)]
    hidden += [talker.step(np.stack([rows[k] for rows in steps])) for k in range(3)]
    for row in range(4):
        close(np.stack([states[row] for states in hidden]), arrays[f"p{row}.talker_hidden"][:4])


def test_kept_rows_go_on_undisturbed(variants: dict[str, Any], close: Close) -> None:
    talker, arrays = variants["tts_a"].tts.talker, variants["tts_a"].arrays
    steps = [arrays[f"p{i}.next_embeds"] for i in range(4)]
    talker.prefill([arrays[f"p{i}.prefill_embeds"] for i in range(4)])
    rows = [0, 1, 2, 3]
    for k, kept in enumerate(([0, 1, 2, 3], [0, 2, 3], [2, 0], [0])):
        if len(kept) < len(talker):
            talker.keep_rows(np.array([rows.index(row) for row in kept]))
            rows = kept
        assert len(talker) == len(kept)
        hidden = talker.step(np.stack([steps[row][k] for row in kept]))
        for place, row in enumerate(kept):
            close(hidden[place], arrays[f"p{row}.talker_hidden"][k + 1])


# -- engine folders that cannot be used -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "tensor"),
    [("codec_head.safetensors", "codec_head.weight"), ("text_projection.safetensors", "linear_fc2.weight")],
)
@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_a_dead_weight_is_refused(
    engine_copy: Callable[..., Path], overwrite: Callable[..., None], file: str, tensor: str, value: float
) -> None:
    folder = engine_copy() / "talker"
    overwrite(folder / file, tensor, value)
    with pytest.raises(ConfigError, match=rf"{file}: tensor {tensor} is all zero or not finite"):
        Talker.from_engine_dir(folder)


@pytest.mark.parametrize("file", ["embedding", "codec_head", "text_projection"])
def test_a_side_file_of_another_checkpoint_is_refused(
    engine_copy: Callable[..., Path], file: str, variants: dict[str, Any]
) -> None:
    folder = engine_copy() / "talker"
    (folder / f"{file}.safetensors").write_bytes(
        (variants["tts_b"].engine / "talker" / f"{file}.safetensors").read_bytes()
    )
    with pytest.raises(ConfigError, match=f"{file}.safetensors: tensor .* has shape"):
        Talker.from_engine_dir(folder)


@pytest.mark.parametrize("file", ["embedding", "text_embedding", "codec_head", "text_projection"])
def test_a_missing_side_file_is_named(engine_copy: Callable[..., Path], file: str) -> None:
    folder = engine_copy() / "talker"
    (folder / f"{file}.safetensors").unlink()
    with pytest.raises(ConfigError, match=f"{file}.safetensors"):
        Talker.from_engine_dir(folder)


def test_a_code_predictor_is_no_talker(variants: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="name the talker folder"):
        Talker.from_engine_dir(variants["tts_a"].engine / "code_predictor")


def test_config_of_an_engine_is_the_checkpoints(variants: dict[str, Any]) -> None:
    spec = TalkerSpec.from_section(Section.from_file(variants["tts_a"].engine / "talker" / "config.json"))
    assert (spec.decoder.hidden_size, spec.decoder.num_hidden_layers, spec.text_vocab_size) == (16, 3, 464)
    assert spec.speakers["vivian"] == 3065
    assert spec.dialects == {"eric": "sichuan_dialect", "dylan": "beijing_dialect"}
    assert spec.defaults.talker == SamplingParams(temperature=0.9, top_k=50, top_p=1.0, repetition_penalty=1.05)
