"""The CodePredictor against the reference, its windows and fallbacks, and frames for a Talker of one's own."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trt_cpspec.config import SamplingParams
from trt_cpspec.errors import ConfigError, EngineError, NumericsError
from trt_cpspec.frame import Round
from trt_cpspec.pipeline import Qwen3TTS
from trt_cpspec.predictor import CodePredictor
from trt_cpspec.sampling import PhiloxNoise, Use, law

Close = Callable[..., None]
GREEDY = SamplingParams(temperature=0.0)
WIDTHS = (2, 3, 4, 8)
MODES = ("rejection", "coupled")


# -- parity with the reference ----------------------------------------------------------------------------------------


def teacher_forced(predictor: CodePredictor, talker_hidden: np.ndarray, codes: np.ndarray, width: int) -> np.ndarray:
    """Return the hidden states of whole frames, ``[F, G-1, C]``: state s chooses code s + 1. ``width`` codes a pass."""
    states = [predictor.prefill(talker_hidden, codes[:, 0])[:, None]]
    for depth in range(1, codes.shape[1] - 1, width):
        part = codes[:, depth : min(depth + width, codes.shape[1] - 1)]
        counts = np.full(len(codes), part.shape[1])
        states.append(predictor.forward(part, np.full(len(codes), depth), counts).copy())
    return np.concatenate(states, axis=1)


def logits_of(predictor: CodePredictor, hidden: np.ndarray) -> np.ndarray:
    return np.stack([predictor.target_logits(rows, 1) for rows in hidden])


@pytest.mark.parametrize("width", [1, 2, 3, 8])
def test_hidden_states_and_logits(case: Any, close: Close, width: int) -> None:
    predictor = case.tts.predictor
    hidden = teacher_forced(predictor, case["talker_hidden"], case["codes"], width)
    logits = logits_of(predictor, hidden)
    detail = case.prompt["n_detail"]
    close(hidden[:detail], case["cp_hidden"])
    close(logits[:detail], case["cp_logits"])
    np.testing.assert_array_equal(logits.argmax(axis=2), case["codes"][:, 1:])
    top = np.sort(logits, axis=2)
    close(top[:, :, -1] - top[:, :, -2], case["cp_margin"])


def test_next_inputs(case: Any, close: Close) -> None:
    close(case.tts.predictor.embed_frame(case["codes"]) + case.trailing, case["next_embeds"])


def test_draft_logits_apply_later_heads_to_one_state(case: Any, close: Close) -> None:
    predictor = case.tts.predictor
    hidden = case["cp_hidden"][0]
    close(predictor.draft_logits(hidden[3], 4, 1)[0], case["cp_logits"][0, 3])
    drafts = predictor.draft_logits(hidden[3], 5, 7)
    assert drafts.shape == (7, 2048)
    for offset, row in enumerate(drafts):
        close(row, predictor.target_logits(hidden[3:4], 5 + offset)[0])


def test_rows_of_a_pass_are_independent(variants: dict[str, Any], close: Close) -> None:
    """Rows at different depths, with different counts, one of them with nothing to do."""
    predictor, arrays = variants["tts_b"].tts.predictor, variants["tts_b"].arrays
    codes, hidden = arrays["p0.codes"][:3].astype(np.int32), arrays["p0.talker_hidden"][:3]
    expected = teacher_forced(predictor, hidden, codes, 1)
    predictor.prefill(hidden, codes[:, 0])
    predictor.forward(codes[:, 1:5], np.ones(3, np.int64), np.array([4, 2, 1]))
    depths, counts = np.array([5, 3, 2]), np.array([1, 4, 0])
    inputs = np.zeros((3, 4), np.int32)
    inputs[0, :1], inputs[1, :4] = codes[0, 5:6], codes[1, 3:7]
    passed = predictor.forward(inputs, depths, counts).copy()
    close(passed[0, 0], expected[0, 5])
    close(passed[1], expected[1, 3:7])
    # Rejected drafts of row 1 are overwritten, and row 2, which padded, goes on where it stood.
    inputs[:, :2] = [codes[0, 6:8], codes[1, 4:6], codes[2, 2:4]]
    again = predictor.forward(inputs[:, :2], np.array([6, 4, 2]), np.array([2, 2, 2]))
    close(again, np.stack([expected[0, 6:8], expected[1, 4:6], expected[2, 2:4]]))


# -- frames -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("verify_size", [0, *WIDTHS])
def test_greedy_frames_are_the_references(case: Any, verify_size: int, mode: str) -> None:
    hidden, codes = case["talker_hidden"], case["codes"]
    result = case.tts.predictor.decode_frame(
        hidden[:4], codes[:4, 0], params=GREEDY, verify_size=verify_size, mode=mode
    )
    np.testing.assert_array_equal(result.codes, codes[:4])
    assert result.codes.dtype == np.int32
    for rounds in result.rounds:
        assert_rounds_cover_a_frame(rounds, groups=16, verify_size=verify_size)


def assert_rounds_cover_a_frame(rounds: Sequence[Round], groups: int, verify_size: int) -> None:
    depth = 2
    for first_depth, proposed, accepted in rounds:
        assert first_depth == depth
        assert proposed == min(max(verify_size - 1, 0), groups - depth - 1)
        assert 0 <= accepted <= proposed
        depth += accepted + 1
    assert depth == groups


def frame_inputs(predictor: CodePredictor, batch: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal((batch, predictor.spec.talker_hidden_size)).astype(np.float32)
    return hidden, rng.integers(predictor.codebook_size, size=batch)


def test_every_commit_length_occurs_and_coupling_changes_no_code(lively: Any) -> None:
    predictor = lively.predictor
    seen: set[int] = set()
    for frame in range(0, 48, 4):
        hidden, code0 = frame_inputs(predictor, 4, seed=frame)
        options = {"seeds": [7, 8, 9, 2**64 - 1], "frames": frame}
        expected = predictor.decode_frame(hidden, code0, **options).codes
        result = predictor.decode_frame(hidden, code0, **options, verify_size=8, mode="coupled")
        np.testing.assert_array_equal(result.codes, expected)
        for rounds in result.rounds:
            assert_rounds_cover_a_frame(rounds, groups=16, verify_size=8)
            seen.update(accepted + 1 for _, _, accepted in rounds)
        rejection = predictor.decode_frame(hidden, code0, **options, verify_size=8, mode="rejection")
        seen.update(10 + accepted + 1 for rounds in rejection.rounds for _, _, accepted in rounds)
    assert seen == {*range(1, 9), *range(11, 19)}


@pytest.mark.parametrize("verify_size", [2, 5, 8])
def test_drafts_come_from_the_state_of_the_last_committed_code(lively: Any, verify_size: int) -> None:
    """A draft from another state would change no code, only how many are accepted: so count them independently."""
    predictor, params = lively.predictor, SamplingParams()
    for frame in range(6):
        talker_hidden, code0 = frame_inputs(predictor, 1, seed=frame)
        options = {"seeds": 5, "frames": frame, "params": params}
        codes = predictor.decode_frame(talker_hidden, code0, **options).codes
        states = teacher_forced(predictor, talker_hidden, codes, 1)[0]
        noise, expected, depth = PhiloxNoise(5, frame), [], 2
        while depth < 16:
            count = min(verify_size - 1, 15 - depth)
            logits = predictor.draft_logits(states[depth - 2], depth, count) if count else []
            drafts = [noise.pick(law(row, params), depth + i, Use.TARGET) for i, row in enumerate(logits)]
            agree = [draft == code for draft, code in zip(drafts, codes[0, depth:], strict=False)]
            accepted = [*agree, False].index(False)
            expected.append(Round(depth, len(drafts), accepted))
            depth += accepted + 1
        result = predictor.decode_frame(talker_hidden, code0, **options, verify_size=verify_size, mode="coupled")
        assert result.rounds == [expected]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("verify_size", [0, 2, 8])
def test_a_row_does_not_depend_on_its_neighbours(lively: Any, verify_size: int, mode: str) -> None:
    predictor = lively.predictor
    hidden, code0 = frame_inputs(predictor, 4)
    params = [
        SamplingParams(),
        SamplingParams(temperature=1.3, top_k=5),
        GREEDY,
        SamplingParams(temperature=0.7, top_k=0, top_p=0.8),
    ]
    seeds, frames = [3, 3, 4, 5], [0, 1, 0, 9]

    def decode(rows: Sequence[int]) -> tuple[np.ndarray, list[list[Round]]]:
        result = predictor.decode_frame(
            hidden[list(rows)],
            code0[list(rows)],
            params=[params[row] for row in rows],
            seeds=[seeds[row] for row in rows],
            frames=[frames[row] for row in rows],
            verify_size=verify_size,
            mode=mode,
        )
        return result.codes, result.rounds

    alone = [decode([row]) for row in range(4)]
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 0], [1, 1, 3]):
        codes, rounds = decode(order)
        for place, row in enumerate(order):
            np.testing.assert_array_equal(codes[place], alone[row][0][0])
            assert rounds[place] == alone[row][1][0]


def test_random_numbers_depend_on_seed_and_frame(lively: Any) -> None:
    hidden, code0 = frame_inputs(lively.predictor, 1)
    codes = {
        (seed, frame): tuple(lively.predictor.decode_frame(hidden, code0, seeds=seed, frames=frame).codes[0])
        for seed in (1, 2, 2**32 + 1)
        for frame in (0, 1)
    }
    assert len(set(codes.values())) == 6
    again = lively.predictor.decode_frame(hidden, code0, seeds=np.array([2]), frames=np.array([1])).codes[0]
    assert tuple(again) == codes[2, 1]


def test_a_single_row_needs_no_batch_axis(lively: Any) -> None:
    hidden, code0 = frame_inputs(lively.predictor, 1)
    result = lively.predictor.decode_frame(hidden[0].astype(np.float64), int(code0[0]))
    np.testing.assert_array_equal(result.codes, lively.predictor.decode_frame(hidden, code0).codes)
    assert result.codes.shape == (1, 16)


# -- fallbacks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "options", "verify_size", "reason"),
    [
        ({"codebook_size": 4100, "num_code_groups": 4}, {}, 3, "the codebook of 4100 exceeds the largest supported"),
        ({"codebook_size": 64}, {"max_verify_size": 1}, 3, r"at most 1 position\(s\) a pass and 3 were asked"),
        (
            {"codebook_size": 64},
            {"max_verify_size": 2},
            3,
            "--onlyCodePredictor --maxVerifySize 3, or where there is none build again",
        ),
        ({"codebook_size": 64, "num_code_groups": 2}, {}, 2, r"1 residual depth\(s\) leave no draft slot"),
    ],
)
def test_a_fallback_speaks_on_and_says_why_once(
    synthetic: Callable[..., Path],
    build: Callable[..., Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    fields: dict[str, Any],
    options: dict[str, Any],
    verify_size: int,
    reason: str,
) -> None:
    engine = build(synthetic(**fields), tmp_path / "engine", **options)
    tts = Qwen3TTS.from_engine_dir(engine, threads=1)
    expected = tts.synthesize("Hello world", seed=3, max_audio_length=3)
    assert not caplog.records
    for mode in ("coupled", "rejection"):
        with caplog.at_level(logging.WARNING):
            speech = tts.synthesize("Hello world", seed=3, max_audio_length=3, verify_size=verify_size, mode=mode)
        np.testing.assert_array_equal(speech.codes, expected.codes)
        np.testing.assert_array_equal(speech.waveform, expected.waveform)
        stats = speech.stats.as_dict()
        assert (stats["requested_verify_size"], stats["verify_size"], stats["proposed"]) == (verify_size, 0, 0)
        assert re.search(reason, stats["fallback_reason"])
    assert len(caplog.records) == 1
    assert stats["fallback_reason"] in caplog.text


def test_a_narrow_engine_still_serves_what_it_can(
    synthetic: Callable[..., Path], build: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = build(synthetic(codebook_size=64), tmp_path / "engine", max_verify_size=2)
    predictor = CodePredictor.from_engine_dir(engine / "code_predictor")
    assert predictor.window(2).verify_size == 2
    hidden, code0 = frame_inputs(predictor, 2)
    expected = predictor.decode_frame(hidden, code0).codes
    result = predictor.decode_frame(hidden, code0, verify_size=2, mode="coupled")
    np.testing.assert_array_equal(result.codes, expected)
    assert result.window.reason is None
    assert not caplog.records


@pytest.mark.parametrize("verify_size", [1, -1, 9, True, 2.0, "3", None])
def test_an_impossible_window_is_refused(lively: Any, verify_size: Any) -> None:
    with pytest.raises(ConfigError, match="give 0 to switch speculation off, or 2 to 8"):
        lively.predictor.window(verify_size)


# -- inputs that cannot be used ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hidden", "code0", "options", "words"),
    [
        (np.zeros((1, 47)), [0], {}, r"talker_hidden has shape \[1, 47\], \[B, 48\] is needed"),
        (np.zeros((1, 1, 48)), [0], {}, r"talker_hidden has shape \[1, 1, 48\]"),
        (np.zeros((2, 48)), [0], {}, r"code0 must be 2 integer\(s\)"),
        (np.zeros((1, 48)), [[0]], {}, r"shape \[1, 1\]"),
        (np.zeros((1, 48)), [1.0], {}, "float64"),
        (np.zeros((1, 48)), 5.5, {}, "float64"),
        (np.zeros((1, 48)), [True], {}, "bool"),
        (np.zeros((1, 48)), [-1], {}, r"code0 must lie in \[0, 1280\), it is \[-1\]"),
        (np.zeros((1, 48)), [1280], {}, "code0 must lie in"),
        (np.zeros((5, 48)), [0] * 5, {}, "a batch of 5 exceeds the engine's max_batch_size 4"),
        (np.zeros((2, 48)), [0, 1], {"seeds": [1]}, "seeds has 1 entries for a batch of 2"),
        (np.zeros((2, 48)), [0, 1], {"frames": [1, 2, 3]}, "frames has 3 entries"),
        (np.zeros((2, 48)), [0, 1], {"params": [GREEDY]}, "params has 1 entries"),
        (np.zeros((1, 48)), [0], {"mode": "couple"}, "did you mean 'coupled'"),
        (np.zeros((1, 48)), [0], {"verify_size": 1}, "verify size of 1"),
    ],
)
def test_bad_frame_inputs_are_named(
    lively: Any, hidden: np.ndarray, code0: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        lively.predictor.decode_frame(hidden, code0, **options)


def test_an_empty_batch_is_refused(lively: Any) -> None:
    with pytest.raises(ConfigError):
        lively.predictor.decode_frame(np.zeros((0, 48)), np.zeros(0, np.int64))


def test_a_state_that_is_not_finite_names_its_row(lively: Any) -> None:
    hidden, code0 = frame_inputs(lively.predictor, 3)
    hidden[2, 5] = np.inf
    with pytest.raises(NumericsError, match="talker_hidden is not finite") as caught:
        lively.predictor.decode_frame(hidden, code0)
    assert caught.value.row == 2


@pytest.mark.parametrize("verify_size", [0, 8])
@pytest.mark.parametrize("depth", [0, 1, 9, 14])
def test_a_nan_names_row_and_depth_and_leaves_no_trace(
    lively: Any, monkeypatch: pytest.MonkeyPatch, depth: int, verify_size: int
) -> None:
    """The embedding of one code is broken: the frame that holds it fails, the next one does not."""
    predictor = lively.predictor
    hidden, code0 = frame_inputs(predictor, 3)
    code0[:] = [10, 20, 30]
    options = {"seeds": [4, 5, 6], "verify_size": verify_size, "mode": "coupled"}
    expected = predictor.decode_frame(hidden, code0, **options).codes
    with monkeypatch.context() as patch:
        plant_nan(patch, predictor, depth, int(expected[1, depth]))
        with pytest.raises(NumericsError, match=r"CodePredictor, depth \d+: .* nan") as caught:
            predictor.decode_frame(hidden, code0, **options)
        assert caught.value.row == 1
        named = int(re.findall(r"\d+", str(caught.value))[0])
        # A broken draft spoils the whole pass that it stands in: its attention scores are NaN, masked or not.
        assert named == depth + 1 or (verify_size and depth + 1 - verify_size < named <= depth + 1)
    np.testing.assert_array_equal(predictor.decode_frame(hidden, code0, **options).codes, expected)


def plant_nan(patch: pytest.MonkeyPatch, predictor: CodePredictor, depth: int, code: int) -> None:
    """Break the embedding row of one code of one depth."""
    tables = [predictor._code0_embedding, *predictor._tables.embeddings]
    broken = np.array(tables[depth])
    broken[code] = np.nan
    if depth == 0:
        patch.setattr(predictor, "_code0_embedding", broken)
    else:
        tables[depth] = broken
        patch.setattr(predictor._tables, "embeddings", tables[1:])


# -- engine folders that cannot be used -------------------------------------------------------------------------------


def test_own_talker_folder(variants: dict[str, Any], engine_copy: Callable[..., Path]) -> None:
    engine = engine_copy()
    (engine / "talker").rename(engine / "elsewhere")
    predictor = CodePredictor.from_engine_dir(str(engine / "code_predictor"), talker_dir=str(engine / "elsewhere"))
    arrays = variants["tts_a"].arrays
    codes = predictor.decode_frame(arrays["p0.talker_hidden"][0], arrays["p0.codes"][0, 0], params=GREEDY).codes
    np.testing.assert_array_equal(codes, arrays["p0.codes"][:1])
    with pytest.raises(ConfigError, match=r"talker/embedding.safetensors"):
        CodePredictor.from_engine_dir(engine / "code_predictor")


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
@pytest.mark.parametrize(
    ("file", "tensor"),
    [("lm_heads.safetensors", "lm_head_7.weight"), ("small_to_mtp_projection.safetensors", "weight")],
)
def test_a_dead_weight_is_refused(
    engine_copy: Callable[..., Path], overwrite: Callable[..., None], file: str, tensor: str, value: float
) -> None:
    folder = engine_copy("tts_b") / "code_predictor"
    overwrite(folder / file, tensor, value)
    with pytest.raises(ConfigError, match=f"{file}: tensor {tensor} is all zero or not finite"):
        CodePredictor.from_engine_dir(folder)


def test_a_missing_projection_is_named(engine_copy: Callable[..., Path]) -> None:
    folder = engine_copy("tts_b") / "code_predictor"
    (folder / "small_to_mtp_projection.safetensors").unlink()
    with pytest.raises(EngineError, match=r"small_to_mtp_projection.* is required: the talker_hidden_size 24"):
        CodePredictor.from_engine_dir(folder)


@pytest.mark.parametrize("file", ["codec_embeddings", "lm_heads"])
def test_another_number_of_tables_is_refused(
    engine_copy: Callable[..., Path], synthetic: Callable[..., Path], build: Callable[..., Path], file: str
) -> None:
    folder = engine_copy() / "code_predictor"
    other = build(synthetic(codebook_size=64, num_code_groups=2), folder.parent / "other") / "code_predictor"
    (folder / f"{file}.safetensors").write_bytes((other / f"{file}.safetensors").read_bytes())
    with pytest.raises(EngineError, match=f"{file}.safetensors has 1 entries, num_code_groups asks for 15"):
        CodePredictor.from_engine_dir(folder)


def test_tables_of_another_shape_are_refused(engine_copy: Callable[..., Path]) -> None:
    folder, other = engine_copy() / "code_predictor", engine_copy("tts_b", to="other") / "code_predictor"
    (folder / "codec_embeddings.safetensors").write_bytes((other / "codec_embeddings.safetensors").read_bytes())
    with pytest.raises(ConfigError, match=r"tensor embedding_0 has shape \[2048, 24\].* asks for \[2048, 16\]"):
        CodePredictor.from_engine_dir(folder)


def test_the_talker_of_another_checkpoint_is_refused(variants: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match=r"embedding has shape .*, the CodePredictor needs rows of .* 16"):
        CodePredictor.from_engine_dir(
            variants["tts_a"].engine / "code_predictor", talker_dir=variants["tts_b"].engine / "talker"
        )


def test_a_talker_is_no_code_predictor(variants: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="name the code_predictor folder"):
        CodePredictor.from_engine_dir(variants["tts_a"].engine / "talker")
