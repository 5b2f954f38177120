"""The fused kernel: on every CPU through the host shim, and on a device where there is one.

The portable graph on ONNX Runtime, with the same 16-bit weights, is what its passes are measured against; the host's
frame loop is what its frames must equal, code for code.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fused_model import FusedModel, released_plan
from kernel_shim import LATE, HostKernels
from numpy.typing import NDArray
from trt_cpspec.builder.synthetic import DecoderSize, SyntheticSpec, write_checkpoint
from trt_cpspec.builder.tts import BuildOptions, TtsBuild

from trt_cpspec import fused, runtime
from trt_cpspec.config import CodePredictorSpec, SamplingParams, Section
from trt_cpspec.cuda import Device
from trt_cpspec.errors import ConfigError, EngineError, NumericsError
from trt_cpspec.fused import NO_TIME, FusedPlan, GraphWeights, Product, open_fused
from trt_cpspec.predictor import CodePredictor
from trt_cpspec.runtime import open_runtime

Array = NDArray[Any]

SIZE = DecoderSize(hidden=128, layers=2, heads=4, kv_heads=2, head_dim=64, intermediate=192)
GROUPS, CODEBOOK = 6, 512
PARAMS = [SamplingParams(), SamplingParams(top_k=20, top_p=0.8, temperature=1.1), SamplingParams(temperature=0)]
WINDOWS = [(0, "rejection"), (2, "rejection"), (3, "rejection"), (4, "coupled"), (8, "rejection"), (8, "coupled")]


def build(folder: Path, precision: str, talker_width: int, *, size: DecoderSize = SIZE, groups: int = GROUPS) -> Path:
    """Build a small CodePredictor; a Talker of another width has a projection."""
    tiny = SyntheticSpec.tiny()
    spec = replace(
        tiny,
        code_predictor=size,
        talker=replace(tiny.talker, hidden=talker_width, layers=1),
        num_code_groups=groups,
        codebook_size=CODEBOOK,
    )
    write_checkpoint(folder / "checkpoint", spec)
    options = BuildOptions(precision=precision)
    with TtsBuild(folder / "checkpoint", folder / "engine", options) as made:
        for name, _, write in made.components:
            if name in ("talker", "code_predictor"):
                write()
        made.commit()
    return folder / "engine"


class Case:
    """A folder, its host predictor, and the fused kernel on what runs kernels."""

    def __init__(
        self,
        engine: Path,
        make_kernels: Callable[[FusedPlan], Any],
        blocks: int,
        shared_bytes: int,
        threads: int = 128,
        stamped: bool = False,
    ) -> None:
        folder = self.folder = engine / "code_predictor"
        self.host = CodePredictor.from_engine_dir(folder, device="cpu", threads=1)
        self.plan = FusedPlan(
            spec=self.host.spec,
            dtype=GraphWeights(folder).dtype,
            projected=(folder / "small_to_mtp_projection.safetensors").is_file(),
            blocks=blocks,
            shared_bytes=shared_bytes,
            threads=threads,
            stamped=stamped,
        )
        assert self.plan.refusal() is None
        self.model = FusedModel(make_kernels(self.plan), self.plan, folder, engine / "talker")

    def states(self, rows: int, seed: int = 0) -> tuple[Array, list[int]]:
        random = np.random.default_rng(seed)
        hidden = random.standard_normal((rows, self.host.spec.talker_hidden_size)).astype(np.float32)
        return hidden, random.integers(0, CODEBOOK, rows).tolist()


@pytest.fixture(scope="session", params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def make_kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    if request.param == "cpu":
        folder = tmp_path_factory.mktemp("fused")
        return lambda plan: HostKernels(plan.macros(), folder)
    require_device()
    device_kernels = importlib.import_module("kernel_device").DeviceKernels
    return lambda plan: device_kernels(plan.macros())


def require_device() -> Device:
    """Skip where there is no device, and fail instead where one is required."""
    try:
        return Device()
    except EngineError as error:
        if os.environ.get("CPSPEC_REQUIRE_GPU") == "1":
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session", params=["bf16", "bf16-projected", "fp16"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    precision, *projected = request.param.split("-")
    return build(tmp_path_factory.mktemp(request.param), precision, 160 if projected else SIZE.hidden)


@pytest.fixture(scope="session")
def case(engine: Path, make_kernels: Any) -> Case:
    # Not a divisor of anything: the last blocks have fewer rows, or none.
    return Case(engine, make_kernels, blocks=7, shared_bytes=100_000)


@pytest.fixture(scope="session")
def case_of_host(engine_of_bf16: Path, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """With blocks enough that the last two, 13 and 14, have no rows of any matrix."""
    folder = tmp_path_factory.mktemp("late")
    return Case(engine_of_bf16, lambda plan: HostKernels(plan.macros(), folder), blocks=15, shared_bytes=100_000)


@pytest.fixture(scope="session")
def engine_of_bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("plain"), "bf16", SIZE.hidden)


def passes(batch: int, width: int) -> Iterator[Array]:
    """Yield the positions of a frame's passes: two of prefill, then ``width`` at a time."""
    yield np.tile(np.arange(2), (batch, 1))
    for first in range(2, GROUPS, width):
        yield np.tile(np.arange(first, min(first + width, GROUPS)), (batch, 1))


@pytest.mark.parametrize(("batch", "width"), [(1, 1), (1, 3), (2, 2), (4, 4)])
def test_a_pass_equals_the_portable_graph(case: Case, batch: int, width: int) -> None:
    random = np.random.default_rng(batch)
    steps = [
        (random.standard_normal((*positions.shape, SIZE.hidden)).astype(np.float32), positions)
        for positions in passes(batch, width)
    ]
    session = case.host._session
    session.start(batch, GROUPS + 8)
    expected = [session.forward(*step).copy() for step in steps]
    for found, wanted in zip(case.model.passes(steps), expected, strict=True):
        assert np.linalg.norm(found - wanted) < 2e-5 * np.linalg.norm(wanted)


def test_a_padding_position_changes_nothing(case: Case) -> None:
    rows = np.random.default_rng(1).standard_normal((2, 3, SIZE.hidden)).astype(np.float32)
    whole = case.model.passes([(rows, np.array([[0, 1, 2], [0, 1, 2]]))])[0]
    padded = case.model.passes([(rows, np.array([[0, 1, 2], [0, 1, -1]]))])[0]
    np.testing.assert_array_equal(padded[0], whole[0])
    np.testing.assert_array_equal(padded[1, :2], whole[1, :2])
    assert np.isnan(padded[1, 2]).all()  # nothing was written


def test_a_position_that_is_not_finite_spoils_none_before_it(case: Case) -> None:
    rows = np.random.default_rng(2).standard_normal((1, 6, SIZE.hidden)).astype(np.float32)
    for width in (3, 6):
        whole, spoilt = rows[:, :width], rows[:, :width].copy()
        spoilt[:, -1] = np.nan
        found, wanted = (case.model.passes([(values, np.arange(width)[None])])[0] for values in (spoilt, whole))
        np.testing.assert_array_equal(found[:, :-1], wanted[:, :-1])


@pytest.mark.parametrize(("verify_size", "mode"), WINDOWS)
def test_frames_equal_the_host_s(case: Case, verify_size: int, mode: Any) -> None:
    for number in range(3):
        hidden, code0 = case.states(3, seed=number)
        draws = [(params, 11 + row, number) for row, params in enumerate(PARAMS)]
        options = {"drafts": max(verify_size - 1, 0), "coupled": mode == "coupled"}
        found = case.model.frame(hidden, code0, draws, order=number, **options)
        wanted = case.host.decode_frame(
            hidden, code0, params=PARAMS, seeds=[11, 12, 13], frames=number, verify_size=verify_size, mode=mode
        )
        np.testing.assert_array_equal(found.codes, wanted.codes)
        assert found.rounds == wanted.rounds
        np.testing.assert_array_equal(found.embedded, case.host.embed_frame(found.codes))


def test_a_block_that_keeps_keys_may_be_late_for_any_number_of_layers(tmp_path: Path) -> None:
    """With three layers the first use of a column that the prefill had not has the tag of use 0."""
    engine = build(tmp_path, "bf16", SIZE.hidden, size=replace(SIZE, layers=3))
    case = Case(engine, lambda plan: HostKernels(plan.macros(), tmp_path), blocks=15, shared_bytes=100_000)
    hidden, code0 = case.states(1, seed=8)
    wanted = case.host.decode_frame(hidden, code0, params=PARAMS[1], seeds=[5], frames=2, verify_size=3)
    found = case.model.frame(hidden, code0, [(PARAMS[1], 5, 2)], drafts=2, order=LATE + 9)
    np.testing.assert_array_equal(found.codes, wanted.codes)


def test_a_block_without_rows_of_the_mlp_takes_no_cleared_words(tmp_path: Path) -> None:
    """Of 5 blocks the last has rows of q, k and v alone: it may look for a use of the hidden state too early by one.

    Another block is late to store that: what clearing left there must have the tag of neither.
    """
    engine = build(tmp_path, "bf16", SIZE.hidden, size=replace(SIZE, layers=3, intermediate=32))
    case = Case(engine, lambda plan: HostKernels(plan.macros(), tmp_path), blocks=5, shared_bytes=100_000)
    busy = {name: product.busy_blocks for name, product in case.plan.products.items()}
    assert (busy["qkv"], busy["o"], busy["gate_up"]) == (5, 4, 4)
    for seed, params in enumerate((PARAMS[1], PARAMS[0], PARAMS[1])):
        hidden, code0 = case.states(1, seed=seed)
        wanted = case.host.decode_frame(hidden, code0, params=params, seeds=[5], frames=seed)
        found = case.model.frame(hidden, code0, [(params, 5, seed)], order=LATE + 1)
        np.testing.assert_array_equal(found.codes, wanted.codes)


def test_a_flat_law_picks_what_the_host_picks(case: Case) -> None:
    """The best score of all is seldom among the first few: its entry is left out, again and again."""
    params = [SamplingParams(temperature=80, top_k=top_k) for top_k in (1, 2, 500)]
    hidden, code0 = case.states(3, seed=20)
    found = case.model.frame(hidden, code0, [(params[row], 70 + row, 4) for row in range(3)])
    wanted = case.host.decode_frame(hidden, code0, params=params, seeds=[70, 71, 72], frames=4, verify_size=0)
    np.testing.assert_array_equal(found.codes, wanted.codes)


def test_a_stamped_frame_tells_when_its_passes_begin_and_end(engine: Path, make_kernels: Any) -> None:
    """Of each pass, by the first block that has come so far: rows, then logits of targets, then a pick."""
    case = Case(engine, make_kernels, blocks=7, shared_bytes=100_000, stamped=True)
    hidden, code0 = case.states(1, seed=3)
    wanted = case.host.decode_frame(hidden, code0, params=PARAMS[1], seeds=[5], frames=2, verify_size=3)
    found = case.model.frame(hidden, code0, [(PARAMS[1], 5, 2)], drafts=2)
    np.testing.assert_array_equal(found.codes, wanted.codes)
    assert case.model.stamps is not None
    first = case.model.stamps.min(0)
    passes = 1 + len(found.rounds[0])
    in_order = first[1 : passes + 1].ravel().tolist()
    assert (first[passes + 1 :] == NO_TIME).all()
    assert in_order == sorted(set(in_order))
    begun, ended = first[0, :2].tolist()
    assert begun < in_order[0]
    assert in_order[-1] < ended < NO_TIME


@pytest.mark.parametrize(("verify_size", "block"), [(0, 14), (3, 13), (3, 14)])
def test_a_block_without_rows_may_be_late(case_of_host: Case, verify_size: int, block: int) -> None:
    """Where it has one turn for 64 of the others, who picks still finds the logits that it is to read."""
    case = case_of_host
    hidden, code0 = case.states(1, seed=8)
    wanted = case.host.decode_frame(hidden, code0, params=PARAMS[1], seeds=[5], frames=2, verify_size=verify_size)
    drafts = max(verify_size - 1, 0)
    found = case.model.frame(hidden, code0, [(PARAMS[1], 5, 2)], drafts=drafts, order=LATE + block)
    np.testing.assert_array_equal(found.codes, wanted.codes)
    assert found.rounds == wanted.rounds


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "groups", "threads"),
    [(3, 3, 96, 33, 128), (2, 1, 64, 32, 256), (4, 1, 128, 21, 256), (2, 2, 64, 3, 256), (2, 1, 64, 2, 256)],
    ids=["a query a key, 33 depths", "32 depths", "four queries a key, two teams", "two depths", "one depth"],
)
def test_other_shapes(
    tmp_path: Path, make_kernels: Any, heads: int, kv_heads: int, head_dim: int, groups: int, threads: int
) -> None:
    """Hidden states are the graph's, and codes those of plain decoding, whichever passes they come in."""
    size = DecoderSize(hidden=96, layers=1, heads=heads, kv_heads=kv_heads, head_dim=head_dim, intermediate=64)
    engine = build(tmp_path, "bf16", size.hidden, size=size, groups=groups)
    case = Case(engine, make_kernels, blocks=10, shared_bytes=120_000, threads=threads)
    starts = sorted({0, 1, *range(2, groups, 5), groups - 2, groups - 1})  # one position with few keys, and with many
    places = [np.arange(start, end)[None] for start, end in zip(starts, [*starts[1:], groups], strict=True)]
    random = np.random.default_rng(4)
    steps = [(random.standard_normal((1, at.size, size.hidden)).astype(np.float32), at) for at in places]
    session = case.host._session
    session.start(1, groups + 8)
    for found, step in zip(case.model.passes(steps), steps, strict=True):
        wanted = session.forward(*step)
        assert np.linalg.norm(found - wanted) < 2e-5 * np.linalg.norm(wanted)
    hidden, code0 = case.states(2, seed=6)
    draws = [(PARAMS[row], 21 + row, 3) for row in range(2)]
    plain = case.model.frame(hidden, code0, draws)
    wanted = case.host.decode_frame(hidden, code0, params=PARAMS[:2], seeds=[21, 22], frames=3, verify_size=0)
    np.testing.assert_array_equal(plain.codes, wanted.codes)
    for drafts in (2, 7) if groups > 2 else ():
        found = case.model.frame(hidden, code0, draws, drafts=drafts, coupled=True)
        np.testing.assert_array_equal(found.codes, plain.codes)
        found = case.model.frame(hidden, code0, draws, drafts=drafts)
        wanted = case.host.decode_frame(
            hidden, code0, params=PARAMS[:2], seeds=[21, 22], frames=3, verify_size=drafts + 1
        )
        np.testing.assert_array_equal(found.codes, wanted.codes)
        assert found.rounds == wanted.rounds


def test_few_blocks_take_a_matrix_in_slabs(engine: Path, make_kernels: Any) -> None:
    case = Case(engine, make_kernels, blocks=4, shared_bytes=44_000)
    slabs = {name: product.slabs for name, product in case.plan.products.items()}
    assert slabs["qkv"] > 1
    assert slabs["gate_up"] > 1
    assert slabs["heads"] > 2
    hidden, code0 = case.states(2)
    for verify_size in (0, 3):
        found = case.model.frame(hidden, code0, [(PARAMS[0], 1, 4), (PARAMS[1], 2, 4)], drafts=max(verify_size - 1, 0))
        wanted = case.host.decode_frame(
            hidden, code0, params=PARAMS[:2], seeds=[1, 2], frames=4, verify_size=verify_size
        )
        np.testing.assert_array_equal(found.codes, wanted.codes)
        assert found.rounds == wanted.rounds


def test_coupled_codes_are_those_of_plain_decoding_for_every_window(case: Case) -> None:
    hidden, code0 = case.states(2, seed=5)
    draws = [(PARAMS[row], 3 + row, 9) for row in range(2)]
    plain = case.model.frame(hidden, code0, draws).codes
    for drafts in range(1, 8):
        np.testing.assert_array_equal(case.model.frame(hidden, code0, draws, drafts=drafts, coupled=True).codes, plain)


def test_a_row_does_not_depend_on_its_neighbours(case: Case) -> None:
    """Bit by bit: the sums of embeddings of equal codes, and the hidden states of a pass."""
    hidden, code0 = case.states(4, seed=2)
    draws = [(PARAMS[row % 3], 40 + row, row) for row in range(4)]
    alone = [case.model.frame(hidden[[r]], [code0[r]], [draws[r]], drafts=2).codes[0] for r in range(4)]
    order = [2, 0, 3, 1]
    together = case.model.frame(hidden[order], [code0[r] for r in order], [draws[r] for r in order], drafts=2)
    for place, row in enumerate(order):
        np.testing.assert_array_equal(together.codes[place], alone[row])
    rows = np.random.default_rng(3).standard_normal((4, 8, SIZE.hidden)).astype(np.float32)
    positions = np.tile(np.arange(8) % GROUPS, (4, 1))
    positions[:, GROUPS:] = -1
    wide = case.model.passes([(rows, positions)])[0]
    for row in range(4):
        narrow = case.model.passes([(rows[[row], :2], positions[[row], :2])])[0]
        np.testing.assert_array_equal(wide[row, :2], narrow[0])


def test_a_law_of_nan_names_its_row_and_depth(case: Case) -> None:
    hidden, code0 = case.states(2)
    hidden[1] = np.nan
    with pytest.raises(AssertionError, match=r"\[2139062143 +1\]"):  # NO_ERROR for row 0, depth 1 for row 1
        case.model.frame(hidden, code0, [(PARAMS[0], 1, 1)] * 2, drafts=2)


# ---------------------------------------------------------------------------------------------------------- the layout


def test_packing_deals_every_weight_out_once() -> None:
    product = Product(inner=96, outer=40, blocks=3, warps=2)
    matrix = np.arange(1, 40 * 96 + 1, dtype=np.uint16).reshape(40, 96)
    packed = product.pack(matrix)
    assert packed.nbytes == product.nbytes == 3 * product.part_bytes
    assert product.slabs == 1
    assert product.groups == 2
    assert product.units == 2
    np.testing.assert_array_equal(np.sort(packed[packed > 0]), matrix.reshape(-1))
    # Block 1, warp 0, unit 1, group 1, row 3: row 16 + 8 + 3 of the matrix, inner values 32 to 63.
    np.testing.assert_array_equal(packed[0, 1, 0, 1, 1, 3], matrix[27, 32:64])
    slabs = replace(product, max_groups=1)
    assert slabs.slabs == 2
    # Slab 1, block 0, warp 1, unit 0, group 0, row 3: row 24 + 3, inner values 64 to 95.
    np.testing.assert_array_equal(slabs.pack(matrix)[1, 0, 1, 0, 0, 3], matrix[27, 64:96])


def test_both_sides_of_a_gated_product_go_to_one_block() -> None:
    matrix = np.arange(64, dtype=np.uint16).reshape(32, 2)  # 16 rows of gate, 16 of up
    paired = fused._paired(matrix)
    np.testing.assert_array_equal(paired[:8], matrix[:8])
    np.testing.assert_array_equal(paired[8:16], matrix[16:24])
    np.testing.assert_array_equal(paired[16:24], matrix[8:16])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "F32"}, r"weights are F32, they must be FP16 or BF16 .*--precision fp16"),
        ({"head_dim": 48}, "head_dim is 48, it must be 64, 96 or 128"),
        ({"hidden_size": 1000}, "hidden_size is 1000, it must be a multiple of 32"),
        ({"vocab_size": 8192}, "the codebook has 8192 codes"),
        ({"num_code_groups": 40}, "num_code_groups is 40, at most 33 are possible"),
        (
            {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64},
            "o_proj has rows for 128 blocks and q, k and v together for 32: .*--maxBatchSize 1",
        ),
        ({"shared_bytes": 49_152}, "needs more shared memory than the 49152 bytes of a block here: 12 chunks of 4096"),
    ],
)
def test_what_the_kernel_cannot_run_is_said(changes: dict[str, Any], reason: str) -> None:
    assert released_plan().refusal() is None
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(released_plan(**changes).refusal())


@pytest.mark.parametrize(("blocks", "shared_bytes"), [(132, 232_448), (128, 101_376), (84, 101_376), (16, 166_912)])
def test_the_released_size_fits_many_gpus(blocks: int, shared_bytes: int) -> None:
    """Of compute capability 9.0, 8.9, 8.6 and 8.7: multiprocessors, and shared memory of a block."""
    assert released_plan(blocks=blocks, shared_bytes=shared_bytes).refusal() is None


def test_the_executor_needs_a_device(engine_of_bf16: Path) -> None:
    folder = engine_of_bf16 / "code_predictor"
    with pytest.raises(EngineError, match="the fused executor needs a CUDA device: give --device cuda"):
        CodePredictor.from_engine_dir(folder, device="cpu", executor="fused")
    with pytest.raises(ConfigError, match="unknown executor 'fuse'; did you mean 'fused'"):
        CodePredictor.from_engine_dir(folder, device="cpu", executor="fuse")


def test_a_folder_without_its_index_says_what_to_do(engine_of_bf16: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"model\.weights\.json does not exist; build the folder again"):
        GraphWeights(tmp_path)
    for name in ("model.onnx.data", "model.weights.json"):
        (tmp_path / name).write_bytes((engine_of_bf16 / "code_predictor" / name).read_bytes())
    index = json.loads((tmp_path / "model.weights.json").read_text(encoding="utf-8"))
    name = next(name for name in index if name.endswith("layers.1.mlp.down_proj.weight"))
    del index[name]
    (tmp_path / "model.weights.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(EngineError, match=r"has no weight .*layers\.1\.mlp\.down_proj\.weight; build the folder again"):
        GraphWeights(tmp_path).matrix("layers.1.mlp.down_proj.weight")


# ---------------------------------------------------------------------------------------------------------- on a device


@pytest.fixture(scope="session")
def on_device(engine: Path) -> tuple[CodePredictor, CodePredictor]:
    """The predictor as users open it: fused on the device, and its host twin."""
    require_device()
    folder = engine / "code_predictor"
    return (
        CodePredictor.from_engine_dir(folder, device="cuda", executor="fused"),
        CodePredictor.from_engine_dir(folder, device="cpu"),
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("verify_size", "mode"), WINDOWS)
def test_the_device_decodes_what_the_host_does(
    on_device: tuple[CodePredictor, CodePredictor], verify_size: int, mode: Any
) -> None:
    there, here = on_device
    assert there.frame_on_device
    random = np.random.default_rng(verify_size)
    for number in range(40):
        hidden = random.standard_normal((3, here.spec.talker_hidden_size)).astype(np.float32)
        code0 = random.integers(0, CODEBOOK, 3)
        options = {"params": PARAMS, "seeds": [1, 2, 3], "frames": number, "verify_size": verify_size, "mode": mode}
        found, wanted = there.decode_frame(hidden, code0, **options), here.decode_frame(hidden, code0, **options)
        np.testing.assert_array_equal(found.codes, wanted.codes)
        assert found.rounds == wanted.rounds


@pytest.mark.gpu
def test_a_thousand_replays_are_one(on_device: tuple[CodePredictor, CodePredictor]) -> None:
    predictor = on_device[0]
    hidden = np.random.default_rng(1).standard_normal(predictor.spec.talker_hidden_size).astype(np.float32)
    first = predictor.decode_frame(hidden, 5, seeds=2, frames=3, verify_size=3)
    for _ in range(1000):
        again = predictor.decode_frame(hidden, 5, seeds=2, frames=3, verify_size=3)
        assert np.array_equal(first.codes, again.codes)
        assert first.rounds == again.rounds
        assert np.array_equal(first.embedded, again.embedded)


@pytest.mark.gpu
def test_an_error_on_the_device_goes_away(on_device: tuple[CodePredictor, CodePredictor]) -> None:
    predictor = on_device[0]
    hidden = np.random.default_rng(1).standard_normal((2, predictor.spec.talker_hidden_size)).astype(np.float32)
    before = predictor.decode_frame(hidden, [5, 6], seeds=2)
    huge = hidden.copy()
    huge[1] = 3e38  # its square is beyond FP32
    with pytest.raises(NumericsError, match="depth 1") as caught:
        predictor.decode_frame(huge, [5, 6], seeds=2)
    assert caught.value.row == 1
    np.testing.assert_array_equal(predictor.decode_frame(hidden, [5, 6], seeds=2).codes, before.codes)


@pytest.mark.gpu
def test_a_batch_that_is_too_large_is_refused(engine_of_bf16: Path) -> None:
    device, folder = require_device(), engine_of_bf16 / "code_predictor"
    spec = CodePredictorSpec.from_section(Section.from_file(folder / "config.json"))
    large = replace(spec, limits=replace(spec.limits, max_batch_size=9))
    with pytest.raises(EngineError, match="built for batches of 9, the fused kernel takes at most 8"):
        open_fused(device, large, folder, engine_of_bf16 / "talker")


# ------------------------------------------------------------------------------------------------ where it is chosen


class StandIn:
    """A device that only says what it is."""

    def __init__(self, capability: tuple[int, int], shared_bytes: int) -> None:
        self.name, self.compute_capability, self._shared = "Stand-in", capability, shared_bytes

    def require(self, nbytes: int, what: str) -> None:
        pass

    def attribute(self, name: str) -> int:
        return {"MULTIPROCESSOR_COUNT": 132, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": self._shared}[name]


HOPPER, TURING, SMALL = ((9, 0), 232_448), ((7, 5), 65_536), ((8, 6), 20_000)


def test_auto_takes_a_device_for_a_folder_without_a_plan_where_the_kernel_can_run_it(
    engine_of_bf16: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = engine_of_bf16 / "code_predictor"
    choice = {"code_predictor": folder, "executor": "auto"}
    monkeypatch.setattr(runtime, "Device", lambda: StandIn(*HOPPER))
    assert open_runtime("auto", [folder], **choice).cuda is not None
    assert open_runtime("auto", [folder], code_predictor=folder, executor="engine").cuda is None
    assert caplog.messages == []
    # The other components have no plan either: nothing was promised, nothing is said.
    assert open_runtime("auto", [engine_of_bf16 / "talker", folder], **choice).cuda is None
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("device", "reason"),
    [(TURING, "compute capability 7.5, the fused kernel needs 8.0"), (SMALL, "needs more shared memory")],
)
def test_auto_decodes_on_the_cpu_where_there_is_no_plan_and_the_kernel_cannot_run(
    device: Any, reason: str, engine_of_bf16: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = engine_of_bf16 / "code_predictor"
    monkeypatch.setattr(runtime, "Device", lambda: StandIn(*device))
    predictor = CodePredictor.from_engine_dir(folder)
    assert len(caplog.messages) == 1
    assert reason in caplog.messages[0]
    assert caplog.messages[0].endswith("running on the CPU")
    assert predictor.decode_frame(np.ones(SIZE.hidden), 5).codes.shape == (1, GROUPS)
    # Asked for by name, both are told: why not the kernel, and that there is no plan.
    both = rf"the fused kernel cannot run it \(.*{reason}.*\), and there is no llm\.engine"
    with pytest.raises(EngineError, match=both):
        CodePredictor.from_engine_dir(folder, device="cuda")


def test_without_a_device_a_folder_without_a_plan_is_silently_the_cpu_s(
    engine_of_bf16: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none() -> Any:
        raise EngineError("no CUDA device can be used")

    folder = engine_of_bf16 / "code_predictor"
    monkeypatch.setattr(runtime, "Device", none)
    assert open_runtime("auto", [folder], code_predictor=folder, executor="auto").cuda is None
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("model.weights.json", lambda data: data[: len(data) // 2], "is damaged"),
        ("model.onnx.data", lambda data: data[:1000], "cannot be read"),
    ],
)
def test_damaged_weights_are_an_engine_error(
    name: str, damage: Callable[[bytes], bytes], message: str, engine_of_bf16: Path, tmp_path: Path
) -> None:
    for kept in ("model.onnx.data", "model.weights.json"):
        (tmp_path / kept).write_bytes((engine_of_bf16 / "code_predictor" / kept).read_bytes())
    (tmp_path / name).write_bytes(damage((tmp_path / name).read_bytes()))
    with pytest.raises(EngineError, match=f"{message}.*build the folder again"):
        GraphWeights(tmp_path).matrix("layers.1.mlp.down_proj.weight")


def test_weights_of_another_shape_are_refused() -> None:
    with pytest.raises(EngineError, match=r"a matrix has shape \[32, 96\], config\.json asks for \[40, 96\]"):
        Product(inner=96, outer=40, blocks=3, warps=2).pack(np.zeros((32, 96), np.uint16))
