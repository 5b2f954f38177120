"""The decoder session: cache extents, growth, padding, chunks, and a cache that no pass copies."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trt_cpspec import session as session_module
from trt_cpspec.config import DecoderSpec, Section
from trt_cpspec.errors import EngineError
from trt_cpspec.session import MIN_BUCKET, SCRATCH_SLOTS, DecoderSession, GraphSession, bucket_for

Close = Callable[..., None]
CAPACITY = 600


@pytest.fixture(scope="session")
def talker_dir(variants: dict[str, Any]) -> Path:
    return variants["tts_a"].engine / "talker"


@pytest.fixture
def open_session(talker_dir: Path) -> Callable[..., DecoderSession]:
    spec = DecoderSpec.from_section(Section.from_file(talker_dir / "config.json"))

    def make(capacity: int = CAPACITY) -> DecoderSession:
        return DecoderSession(talker_dir / "model.onnx", spec, capacity=capacity, threads=1)

    return make


def inputs(batch: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((batch, length, 16)).astype(np.float32)


def at(*rows: Any) -> np.ndarray:
    return np.array(rows, np.int64)


def one_pass(session: DecoderSession, embeds: np.ndarray, slots: int = 0) -> np.ndarray:
    """Run whole sequences in one pass of a fresh cache."""
    batch, length = embeds.shape[:2]
    session.start(batch, slots or length)
    return session.forward(embeds, np.tile(np.arange(length), (batch, 1))).copy()


# -- extents ----------------------------------------------------------------------------------------------------------


def test_buckets_are_monotone_geometric_and_capped() -> None:
    sizes = [bucket_for(slots, 10**9) for slots in range(1, 5000)]
    assert sizes == sorted(sizes)
    assert all(size >= slots for slots, size in enumerate(sizes, start=1))
    distinct = sorted(set(sizes))
    assert distinct[:6] == [MIN_BUCKET, 96, 128, 192, 256, 384]
    assert all(1.3 < larger / smaller <= 1.5 for smaller, larger in itertools.pairwise(distinct))
    assert [bucket_for(slots, 100) for slots in (1, 64, 65, 97, 100)] == [64, 64, 96, 100, 100]
    assert bucket_for(5, 20) == 20


def test_the_cache_is_as_large_as_the_positions_in_use(open_session: Callable[..., DecoderSession]) -> None:
    session = open_session()
    session.start(1, 10)
    assert session.slots == MIN_BUCKET
    session.forward(inputs(1, 1), at([MIN_BUCKET - SCRATCH_SLOTS - 1]))
    assert session.slots == MIN_BUCKET
    session.forward(inputs(1, 1), at([MIN_BUCKET - SCRATCH_SLOTS]))
    assert session.slots == 96


def test_growth_keeps_the_results(open_session: Callable[..., DecoderSession], close: Close) -> None:
    embeds = inputs(2, 200)
    expected = one_pass(open_session(), embeds, slots=CAPACITY)
    growing, extents, states = open_session(), set(), []
    growing.start(2, 1)
    for position in range(embeds.shape[1]):
        states.append(growing.forward(embeds[:, position : position + 1], at([position], [position]))[:, 0].copy())
        extents.add(growing.slots)
    assert extents == {64, 96, 128, 192, 256}
    close(np.stack(states, axis=1), expected)


def test_one_step_over_several_extents_keeps_the_results(
    open_session: Callable[..., DecoderSession], close: Close
) -> None:
    embeds = inputs(1, 300)
    expected = one_pass(open_session(), embeds)
    session = open_session()
    session.start(1, 1)
    session.forward(embeds[:, :40], np.arange(40)[None])
    assert session.slots == 64
    close(session.forward(embeds[:, 40:], np.arange(40, 300)[None]), expected[:, 40:])
    assert session.slots == 384


def test_a_position_beyond_the_capacity_is_refused(open_session: Callable[..., DecoderSession]) -> None:
    session = open_session(capacity=70)
    session.start(1, 1)
    session.forward(inputs(1, 1), at([69]))
    assert session.slots == 70 + SCRATCH_SLOTS
    with pytest.raises(EngineError, match="position 70 is beyond the KV capacity of 70"):
        session.forward(inputs(1, 1), at([70]))


# -- passes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2, 3, 8])
def test_the_width_of_a_pass_changes_nothing(
    open_session: Callable[..., DecoderSession], close: Close, width: int
) -> None:
    embeds = inputs(3, 24)
    expected = one_pass(open_session(), embeds)
    session = open_session()
    session.start(3, 24)
    parts = [
        session.forward(embeds[:, k : k + width], np.tile(np.arange(k, k + width), (3, 1))).copy()
        for k in range(0, 24, width)
    ]
    close(np.concatenate(parts, axis=1), expected)


def test_a_rewind_is_nothing_but_smaller_positions(open_session: Callable[..., DecoderSession], close: Close) -> None:
    embeds, session = inputs(1, 6), open_session()
    expected = one_pass(session, embeds)
    session.start(1, 6)
    session.forward(embeds[:, :3], at([0, 1, 2]))
    session.forward(inputs(1, 3, seed=9), at([3, 4, 5]))  # drafts that were not accepted
    close(session.forward(embeds[:, 3:], at([3, 4, 5])), expected[:, 3:])


def test_an_older_sequence_leaves_no_trace(open_session: Callable[..., DecoderSession]) -> None:
    session, embeds = open_session(), inputs(1, 5)
    expected = one_pass(session, embeds)
    one_pass(session, 50 * inputs(1, 60, seed=3))
    np.testing.assert_array_equal(one_pass(session, embeds), expected)


def test_padding_disturbs_nobody(open_session: Callable[..., DecoderSession], close: Close) -> None:
    embeds = inputs(3, 12)
    alone = [one_pass(open_session(), embeds[row : row + 1, :length])[0] for row, length in enumerate((12, 5, 9))]
    session = open_session()
    session.start(3, 12)
    real = np.arange(12) < at(12, 5, 9)[:, None]
    positions = np.where(real, np.arange(12), -1)
    padded = np.where(real[:, :, None], embeds, 1e6).astype(np.float32)
    hidden = session.forward(padded, positions).copy()
    for row, expected in enumerate(alone):
        close(hidden[row, : len(expected)], expected)
    # A row that pads its whole pass stands still; the next pass of the others reads no padding either.
    following = inputs(3, 1, seed=4)
    session.forward(following, at([12], [-1], [9]))
    longer = one_pass(open_session(), np.concatenate([embeds[1:2, :5], following[1:2]], axis=1))
    close(session.forward(following, at([13], [5], [10]))[1, 0], longer[0, -1])


def test_padding_writes_the_scratch_slot_alone(open_session: Callable[..., DecoderSession]) -> None:
    session = open_session()
    session.start(1, 4)
    session.forward(inputs(1, 3), at([0, -1, -1]))
    for array in session._cache.values():
        written = np.flatnonzero(np.abs(array).sum(axis=(0, 1, 3)))
        assert written.tolist() == [0, session.slots - 1]


@pytest.mark.parametrize("chunk", [1, 4, 5])
def test_a_prefill_in_chunks(
    open_session: Callable[..., DecoderSession], close: Close, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    embeds = inputs(3, 11)
    positions = np.where(np.arange(11) < at(11, 3, 8)[:, None], np.arange(11), -1)

    def prefill() -> tuple[list[np.ndarray], np.ndarray]:
        session = open_session()
        session.start(3, 12)
        hidden = session.forward(embeds, positions)
        rows = [hidden[row, :length].copy() for row, length in enumerate((11, 3, 8))]
        return rows, session.forward(inputs(3, 1, seed=2), at([11], [3], [8])).copy()

    whole = prefill()
    monkeypatch.setattr(session_module, "PREFILL_CHUNK", chunk)
    parts = prefill()
    for actual, expected in zip([*parts[0], parts[1]], [*whole[0], whole[1]], strict=True):
        close(actual, expected)


def test_a_prefill_longer_than_the_released_chunk(open_session: Callable[..., DecoderSession], close: Close) -> None:
    length = session_module.PREFILL_CHUNK + 20
    embeds = inputs(1, length)
    whole, halves = open_session(), open_session()
    halves.start(1, length)
    halves.forward(embeds[:, :300], np.arange(300)[None])
    tail = halves.forward(embeds[:, 300:], np.arange(300, length)[None])
    close(one_pass(whole, embeds)[:, 300:], tail)


# -- the cache is bound in place --------------------------------------------------------------------------------------


def test_a_pass_writes_the_cache_it_reads(open_session: Callable[..., DecoderSession]) -> None:
    session = open_session()
    session.start(2, 10)
    before = dict(session._cache)
    addresses = {name: array.ctypes.data for name, array in before.items()}
    assert len(before) == 6  # keys and values of three layers
    for position in range(3):
        session.forward(inputs(2, 1, seed=position), at([position], [position]))
        for name, array in session._cache.items():
            assert array is before[name]
            assert array.ctypes.data == addresses[name]
            filled = np.abs(array).sum(axis=(1, 3)) > 0  # [B, S]
            np.testing.assert_array_equal(filled, np.tile(np.arange(session.slots) <= position, (2, 1)))


def test_the_keys_of_earlier_positions_are_read_from_that_memory(open_session: Callable[..., DecoderSession]) -> None:
    """Were the cache copied somewhere, changing it here would change nothing."""
    session, embeds = open_session(), inputs(1, 3)
    session.start(1, 3)
    session.forward(embeds[:, :2], at([0, 1]))
    expected = session.forward(embeds[:, 2:], at([2])).copy()
    session._cache["value_0"][:, :, 0] += 1
    assert np.abs(session.forward(embeds[:, 2:], at([2])) - expected).max() > 1e-3


def test_clear_zeroes_the_cache(open_session: Callable[..., DecoderSession]) -> None:
    session, embeds = open_session(), inputs(1, 4)
    expected = one_pass(session, embeds)
    session.forward(np.full((1, 1, 16), np.nan, np.float32), at([9]))
    assert np.isnan(session._cache["key_0"]).any()
    session.clear()
    assert not any(array.any() for array in session._cache.values())
    np.testing.assert_array_equal(one_pass(session, embeds), expected)


def test_kept_rows_keep_their_past(open_session: Callable[..., DecoderSession], close: Close) -> None:
    embeds = inputs(3, 4)
    expected = one_pass(open_session(), embeds)
    session = open_session()
    session.start(3, 4)
    session.forward(embeds[:, :3], np.tile(np.arange(3), (3, 1)))
    session.keep_rows(np.array([2, 0]))
    assert session.batch == 2
    close(session.forward(embeds[[2, 0], 3:], at([3], [3])), expected[[2, 0], 3:])


def test_time_inside_the_engine_is_counted(open_session: Callable[..., DecoderSession]) -> None:
    session = open_session()
    session.start(1, 1)
    session.forward(inputs(1, 1), at([0]))
    first = session.run_seconds
    session.forward(inputs(1, 1), at([1]))
    assert 0 < first < session.run_seconds < 10


# -- files that cannot be used ----------------------------------------------------------------------------------------


def test_a_missing_graph_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"model.onnx is missing"):
        GraphSession(tmp_path / "model.onnx")


@pytest.mark.parametrize("file", ["model.onnx", "model.onnx.data"])
@pytest.mark.parametrize("share", [0, 0.5])
def test_a_truncated_graph_is_named(engine_copy: Callable[..., Path], file: str, share: float) -> None:
    path = engine_copy() / "talker" / file
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(EngineError, match=r"talker/model.onnx cannot be loaded by ONNX Runtime"):
        GraphSession(path.parent / "model.onnx")
