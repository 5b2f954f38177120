"""Profiles as values: the contract table, what widening changes, and that they admit what the runtime binds."""

from __future__ import annotations

import pytest
from trt_cpspec.builder.profile import (
    CONTEXT,
    CONTRACTS,
    GENERATION,
    WIDENED,
    Contract,
    GraphInput,
    Kind,
    Limits,
    ShapeRange,
    check_profile,
    component_kind,
    format_table,
    profiles_for,
    profiles_from_json,
    recognise,
    verify_size_of,
    widened,
)

from trt_cpspec.errors import ConfigError, EngineError
from trt_cpspec.session import PREFILL_CHUNK, bucket_for

B, W, C = 3, 8, 256


def inputs(**shapes: tuple[int, ...]) -> list[GraphInput]:
    return [GraphInput(name, shape) for name, shape in shapes.items()]


PORTABLE = inputs(
    positions=(-1, -1), inputs_embeds=(-1, -1, 16), past_key_0=(-1, 2, -1, 16), past_value_0=(-1, 2, -1, 16)
)
PADDED = inputs(
    inputs_embeds=(-1, -1, 16), past_key_values_0=(2, -1, 128, 2, 16), rope_rotary_cos_sin=(-1, -1, 16),
    context_lengths=(-1,), kvcache_start_index=(-1,), kv_page_table=(-1, 2, -1), last_token_ids=(-1, 1),
    lm_heads=(15, 32, 16), lm_head_idx=(1,),
)  # fmt: skip
RAGGED = inputs(
    inputs_embeds=(-1, 16), positions=(-1,), rope_rotary_cos_sin=(-1, 16), past_key_values_0=(2, -1, 128, 2, 16),
    query_lengths=(-1,), past_lengths=(-1,), attention_sequence_lengths=(-1,), state_indices=(-1,),
    query_start_offsets=(-1,), context_sequence_count_carrier=(-1,), execution_phase_marker=(-1,),
    kv_page_table=(-1, 2, -1), logits_indices=(-1,), skip_softmax_scale=(-1,), lm_heads=(15, 32, 16), lm_head_idx=(1,),
)  # fmt: skip
CODEC = inputs(codes=(-1, 16, -1))
STREAMING_CODEC = inputs(
    codes=(-1, 16, -1), position=(1,), past_tail_0=(-1, 8, 2), past_key_0=(-1, 4, 71, 8), past_value_0=(-1, 4, 71, 8)
)
ALL = {
    Contract.PORTABLE: PORTABLE,
    Contract.EDGE_PADDED: PADDED,
    Contract.EDGE_RAGGED: RAGGED,
    Contract.CODEC: CODEC,
}


def limits(width: int, *, capacity: int = C, batch: int = B) -> Limits:
    return Limits(max_input_len=64, max_kv_cache_capacity=capacity, max_batch_size=batch, max_verify_size=width)


def shape_range(*shapes: tuple[int, ...]) -> ShapeRange:
    return ShapeRange(*shapes)


def same(*shape: int) -> ShapeRange:
    return ShapeRange(shape, shape, shape)


def row(low: int, best: int, high: int) -> ShapeRange:
    return ShapeRange((low,), (best,), (high,))


# ---- the contract table, number by number ---------------------------------------------------------------------------

SEQUENCES = ("query_lengths", "past_lengths", "attention_sequence_lengths", "state_indices", "logits_indices")
STATIC = {"lm_heads": same(15, 32, 16), "lm_head_idx": same(1)}
PAGES = shape_range((1, 2, 2), (B, 2, 2), (B, 2, 2))
GENERATION_BEFORE = {
    Contract.PORTABLE: {
        "positions": shape_range((1, 1), (1, 1), (B, 1)),
        "inputs_embeds": shape_range((1, 1, 16), (1, 1, 16), (B, 1, 16)),
        "past_key_0": shape_range((1, 2, 64, 16), (1, 2, C + 1, 16), (B, 2, C + 1, 16)),
        "past_value_0": shape_range((1, 2, 64, 16), (1, 2, C + 1, 16), (B, 2, C + 1, 16)),
    },
    Contract.EDGE_PADDED: {
        "inputs_embeds": shape_range((1, 1, 16), (B, 1, 16), (B, 1, 16)),
        "past_key_values_0": same(2, 6, 128, 2, 16),
        "rope_rotary_cos_sin": shape_range((1, C, 16), (B, C, 16), (B, C, 16)),
        "context_lengths": row(1, B, B),
        "kvcache_start_index": row(0, B, B),
        "kv_page_table": PAGES,
        "last_token_ids": shape_range((1, 1), (B, 1), (B, 1)),
        **STATIC,
    },
    Contract.EDGE_RAGGED: {
        "inputs_embeds": shape_range((1, 16), (B, 16), (B, 16)),
        "positions": row(1, B, B),
        "rope_rotary_cos_sin": shape_range((1, 16), (B, 16), (B, 16)),
        "past_key_values_0": same(2, 6, 128, 2, 16),
        **{name: row(1, B, B) for name in SEQUENCES},
        "query_start_offsets": row(2, B + 1, B + 1),
        "context_sequence_count_carrier": row(0, 0, 0),
        "execution_phase_marker": row(1, 3, 8),
        "kv_page_table": PAGES,
        "skip_softmax_scale": row(0, 0, C),
        **STATIC,
    },
}
CHANGES = {
    Contract.PORTABLE: {
        "positions": shape_range((1, 1), (1, 1), (B, W)),
        "inputs_embeds": shape_range((1, 1, 16), (1, 1, 16), (B, W, 16)),
    },
    Contract.EDGE_PADDED: {"inputs_embeds": shape_range((1, 1, 16), (B, 1, 16), (B, W, 16))},
    Contract.EDGE_RAGGED: {
        "inputs_embeds": shape_range((1, 16), (B, 16), (B * W, 16)),
        "positions": row(1, B, B * W),
        "rope_rotary_cos_sin": shape_range((1, 16), (B, 16), (B * W, 16)),
        "context_sequence_count_carrier": row(0, 0, B),
    },
}


@pytest.mark.parametrize("contract", GENERATION_BEFORE)
def test_generation_profile_before_and_after_widening(contract: Contract) -> None:
    narrow = profiles_for(Kind.CODE_PREDICTOR, ALL[contract], limits(1))
    wide = profiles_for(Kind.CODE_PREDICTOR, ALL[contract], limits(W))
    assert narrow.contract is wide.contract is contract
    assert narrow.profiles[GENERATION] == GENERATION_BEFORE[contract]
    assert wide.profiles[GENERATION] == GENERATION_BEFORE[contract] | CHANGES[contract]
    assert wide.profiles[CONTEXT] == narrow.profiles[CONTEXT]
    assert narrow.verify_size(B) == 1
    assert wide.verify_size(B) == W


@pytest.mark.parametrize("contract", ALL)
def test_no_other_engine_changes_by_one_number(contract: Contract) -> None:
    kind = Kind.CODEC if contract is Contract.CODEC else Kind.DECODER
    found = [profiles_for(kind, ALL[contract], limits(width)).as_json() for width in range(1, W + 1)]
    assert all(other == found[0] for other in found)


def test_context_profiles() -> None:
    ours = profiles_for(Kind.CODE_PREDICTOR, PORTABLE, limits(W, capacity=24)).profiles[CONTEXT]
    assert ours["inputs_embeds"] == shape_range((1, 1, 16), (1, 2, 16), (B, 64, 16))
    ragged = profiles_for(Kind.DECODER, RAGGED, limits(1)).profiles[CONTEXT]
    assert ragged["rope_rotary_cos_sin"] == shape_range((1, 16), (B * 32, 16), (B * 64, 16))
    assert ragged["context_sequence_count_carrier"] == row(1, B, B)
    assert ragged["execution_phase_marker"] == row(1, 1, 8)
    padded = profiles_for(Kind.DECODER, PADDED, limits(1)).profiles[CONTEXT]
    assert padded["inputs_embeds"] == shape_range((1, 1, 16), (B, 32, 16), (B, 64, 16))


def test_codec_has_one_profile() -> None:
    found = profiles_for(Kind.CODEC, CODEC, Limits())
    assert found.profiles == {"frames": {"codes": shape_range((1, 16, 1), (1, 16, 300), (1, 16, 2000))}}


def test_every_token_aligned_input_counts_for_the_window() -> None:
    wide = dict(profiles_for(Kind.CODE_PREDICTOR, RAGGED, limits(W)).profiles[GENERATION])
    for name in ("inputs_embeds", "positions", "rope_rotary_cos_sin"):
        forgotten = wide | {name: GENERATION_BEFORE[Contract.EDGE_RAGGED][name]}
        assert verify_size_of(Contract.EDGE_RAGGED, forgotten, B) == 1
    forgotten = wide | {"context_sequence_count_carrier": row(0, 0, 0)}
    assert verify_size_of(Contract.EDGE_RAGGED, forgotten, B) == 1


def test_widened_symbols_are_in_their_contract() -> None:
    for contract, symbols in WIDENED.items():
        assert set(symbols) <= {axis for rule in CONTRACTS[contract] for axis in rule.axes}


# ---- what the runtime binds -----------------------------------------------------------------------------------------


def admits(found: ShapeRange, shape: tuple[int, ...]) -> bool:
    return all(low <= size <= high for low, size, high in zip(found.min, shape, found.max, strict=True))


@pytest.mark.parametrize("capacity", [2, 40, 63, 64, 100, 4096])
def test_talker_profiles_admit_every_bucket_and_chunk(capacity: int) -> None:
    found = profiles_for(
        Kind.DECODER, PORTABLE, Limits(max_input_len=max(1, capacity - 1), max_kv_cache_capacity=capacity)
    ).profiles
    for slots in {bucket_for(needed, capacity + 1) for needed in range(1, capacity + 2)}:
        for batch in (1, 4):
            for profile in found.values():
                assert admits(profile["past_key_0"], (batch, 2, slots, 16))
    for length in (1, min(capacity - 1, PREFILL_CHUNK)):
        assert admits(found[CONTEXT]["inputs_embeds"], (4, length, 16))
    assert admits(found[GENERATION]["inputs_embeds"], (4, 1, 16))


@pytest.mark.parametrize("width", range(1, W + 1))
@pytest.mark.parametrize("room", [0, W])
@pytest.mark.parametrize("groups", [4, 16, 60])
def test_predictor_profiles_admit_prefill_and_every_pass(groups: int, width: int, room: int) -> None:
    capacity = groups + (room or width)
    found = profiles_for(
        Kind.CODE_PREDICTOR,
        PORTABLE,
        Limits(max_input_len=2, max_kv_cache_capacity=capacity, max_verify_size=width),
    ).profiles
    slots = bucket_for(groups + width + 1, capacity + 1)  # CodePredictor.prefill, DecoderSession.start
    for batch in (1, 4):
        assert admits(found[CONTEXT]["inputs_embeds"], (batch, 2, 16))
        assert admits(found[CONTEXT]["past_key_0"], (batch, 2, slots, 16))
        for rows in range(1, width + 1):
            assert admits(found[GENERATION]["positions"], (batch, rows))
            assert admits(found[GENERATION]["past_key_0"], (batch, 2, slots, 16))
    assert found[GENERATION]["inputs_embeds"].opt == (1, 1, 16)


# ---- recognition ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [f"{name}_code_predictor" for name in ("qwen3_tts", "qwen3_omni_moe_talker", "qwen3_omni_next", "a")],
)
def test_code_predictor_by_suffix(model: str) -> None:
    assert component_kind({"model": model}, "x") is Kind.CODE_PREDICTOR


@pytest.mark.parametrize("model", ["qwen3_tts_talker", "code_predictor", "qwen3_code_predictor_v2", "x_CODE_PREDICTOR"])
def test_other_models_are_no_code_predictor(model: str) -> None:
    assert component_kind({"model": model, "model_type": "a_code_predictor"}, "x") is Kind.DECODER


def test_model_type_alone_makes_no_code_predictor() -> None:
    with pytest.raises(EngineError, match="a_code_predictor"):
        component_kind({"model_type": "a_code_predictor"}, "x")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "neither model nor model_type"),
        ({"model": ""}, "neither model nor model_type"),
        ({"model_type": "qwen3_omni_audio_encoder"}, "no decoder and no codec"),
        ({"model": "qwen3", "engine_role": "draft"}, "engine_role 'draft'"),
        ({"model": "qwen3", "spec_decode_type": "eagle3"}, "spec_decode_type 'eagle3'"),
    ],
)
def test_components_that_are_refused(config: dict[str, str], words: str) -> None:
    with pytest.raises(EngineError, match=words):
        component_kind(config, "config.json")


@pytest.mark.parametrize("contract", ALL)
def test_contract_is_recognised(contract: Contract) -> None:
    assert recognise(ALL[contract]) is contract


@pytest.mark.parametrize(
    ("extra", "sign"),
    [
        ({"lm_head_weight": (32, 16)}, "lm_head_weight"),
        ({"past_key_values_0": (-1, 2, 2, -1, 16)}, "past_key_values_0 without pages"),
        ({"k_cache_0": (-1, 2, -1, 16)}, "k_cache_0"),
    ],
)
def test_dense_contract_is_refused_with_the_reason(extra: dict[str, tuple[int, ...]], sign: str) -> None:
    graph = inputs(inputs_embeds=(-1, -1, 16), context_lengths=(-1,), kvcache_start_index=(-1,), **extra)
    with pytest.raises(EngineError, match=f"dense contract of 0.6 .*{sign}.*cannot verify.*export it again"):
        recognise(graph)


def test_a_codec_that_carries_state_is_one_too() -> None:
    assert recognise(STREAMING_CODEC) is Contract.CODEC
    found = profiles_for(Kind.CODEC, STREAMING_CODEC, Limits()).profiles
    assert found == {
        "frames": {
            "codes": shape_range((1, 16, 1), (1, 16, 300), (1, 16, 2000)),
            "position": same(1),
            "past_tail_0": same(1, 8, 2),
            "past_key_0": same(1, 4, 71, 8),
            "past_value_0": same(1, 4, 71, 8),
        }
    }
    with pytest.raises(EngineError, match="no known contract"):
        recognise([item for item in STREAMING_CODEC if item.name != "position"])
    with pytest.raises(EngineError, match="future_0 is unknown to the contract codec"):
        profiles_for(Kind.CODEC, [*STREAMING_CODEC, GraphInput("future_0", (-1, 2))], Limits())


def test_unknown_contract_lists_the_inputs() -> None:
    with pytest.raises(EngineError, match=r"no known contract .*pixels \(rank 4\)"):
        recognise(inputs(pixels=(1, 3, 8, 8)))


# ---- checks before TensorRT sees a profile --------------------------------------------------------------------------


def changed(graph: list[GraphInput], name: str, shape: tuple[int, ...]) -> list[GraphInput]:
    return [GraphInput(item.name, shape if item.name == name else item.shape) for item in graph]


@pytest.mark.parametrize(
    ("graph", "words"),
    [
        (changed(PORTABLE, "inputs_embeds", (-1, 1, 16)), r"inputs_embeds: axis 1 \(length\) is fixed to 1"),
        (changed(PORTABLE, "inputs_embeds", (1, -1, 16)), r"inputs_embeds: axis 0 \(batch\) is fixed to 1"),
        (changed(PORTABLE, "past_key_0", (-1, -1, -1, 16)), "past_key_0: axis 1 is dynamic"),
        (changed(PORTABLE, "past_key_0", (-1, -1, 16)), "past_key_0 has rank 3"),
        ([*PORTABLE, GraphInput("mystery", (-1,))], "mystery is unknown to the contract portable"),
        (changed(RAGGED, "rope_rotary_cos_sin", (3, 16)), "rope_rotary_cos_sin: axis 0"),
    ],
)
def test_a_graph_that_does_not_fit_is_named(graph: list[GraphInput], words: str) -> None:
    with pytest.raises(EngineError, match=words):
        profiles_for(Kind.CODE_PREDICTOR, graph, limits(W))


def test_widening_a_fixed_axis_says_so() -> None:
    fixed = changed(PORTABLE, "positions", (-1, 1))
    with pytest.raises(EngineError, match=r"input positions: axis 1 is fixed to 1 .*window of 8 needs up to 8"):
        widened(Contract.PORTABLE, fixed, GENERATION_BEFORE[Contract.PORTABLE], limits(W))


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"x": shape_range((2, 4), (1, 4), (3, 4))}, "input x, axis 0: min 2, opt 1, max 3"),
        ({"x": shape_range((1, 4), (4, 4), (3, 4))}, "input x, axis 0: min 1, opt 4, max 3"),
        ({"x": shape_range((-1, 4), (1, 4), (3, 4))}, "input x, axis 0: min -1"),
        ({"x": shape_range((1, 4), (1, 4), (1, 5))}, "input x, axis 1: the graph fixes it to 4"),
        ({"x": shape_range((1,), (1, 4), (1, 4))}, "input x: min has rank 1"),
        ({}, "lacks input: x"),
        ({"x": same(1, 4), "y": same(1)}, "unknown input: y"),
    ],
)
def test_check_profile_names_tensor_and_axis(found: dict[str, ShapeRange], words: str) -> None:
    with pytest.raises(EngineError, match=words):
        check_profile([GraphInput("x", (-1, 4))], found, "generation")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_batch_size": 0}, "max_batch_size is 0"),
        ({"max_input_len": True}, "max_input_len is True"),
        ({"max_verify_size": 9}, "widest window is 8"),
        ({"opt_code_len": 3000}, "must not decrease"),
        ({"max_kv_pool_pages": 3}, "max_kv_pool_pages is 3.*need 128"),
    ],
)
def test_limits_are_checked(values: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Limits(**values)


def test_component_and_graph_must_agree() -> None:
    with pytest.raises(EngineError, match="calls the component a codec decoder, its graph's contract is portable"):
        profiles_for(Kind.CODEC, PORTABLE, Limits())


# ---- as text --------------------------------------------------------------------------------------------------------


def test_json_keeps_every_number() -> None:
    found = profiles_for(Kind.CODE_PREDICTOR, RAGGED, limits(W))
    assert profiles_from_json(found.as_json()) == found.profiles


def test_table_marks_what_changes_and_joins_layers() -> None:
    graph = [*PORTABLE, GraphInput("past_key_1", (-1, 2, -1, 16)), GraphInput("past_value_1", (-1, 2, -1, 16))]
    before, after = (profiles_for(Kind.CODE_PREDICTOR, graph, limits(width)).profiles for width in (1, W))
    lines = format_table(before, after).splitlines()
    assert [line.split()[2] for line in lines if line.startswith("*")] == ["positions", "inputs_embeds"]
    assert "1x1x16 | 1x1x16 | 3x8x16" in next(line for line in lines if line.startswith("*  generation  inputs"))
    assert sum("past_key_* (2)" in line for line in lines) == 2  # once a profile
    assert "unknown" in format_table({}, after)
