"""The fused executor: the whole CodePredictor, and a whole frame, in one persistent CUDA kernel.

It reads the folder that ``cpspec-build`` wrote (the weights of ``model.onnx.data``, the side files) and needs no plan
and no TensorRT. :class:`FusedSession` stands beside the other decoder sessions; :class:`FusedFrames` decodes a frame in
one launch. What the kernel does, and how its weights are packed, is in ``kernels/fused_frame.cu``.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .config import MAX_SPECULATIVE_CODEBOOK, MAX_VERIFY_SIZE, CodePredictorSpec, Mode, Section
from .cuda import Device, DeviceArray
from .device_frame import CapturedFrame, CapturedFrames, FrameIO
from .errors import CpSpecError, EngineError
from .nvrtc import Call, KernelLibrary
from .rotary import rotary_frequencies
from .tensorfile import GRAPH_DATA_FILE, WEIGHT_INDEX, TensorFile

THREADS = 256
MAX_BATCH = 8
MAX_GROUPS = 8
"""Groups of 8 rows of a matrix that a block takes at once, at most: registers hold their sums."""
MIN_COMPUTE_CAPABILITY = (8, 0)
UNIT = 32
"""Inner values of a weight unit."""
_UNIT_BYTES = 512
"""Of a unit of 8 rows."""
_PADDING = 4
_KEY_PADDING = 4
"""Floats of a kept key behind its values: its norm, and alignment."""
_RESERVED_BYTES = 4096
"""Shared memory of a block beside its ring and its sums: addresses, columns, the place of its weights."""
_SELECT_BYTES = 12288
CHUNK_BYTES = 4096
IN_FLIGHT, IN_FLIGHT_WIDE = 6, 4
"""Chunks of a block that are on their way at a time: enough for the bandwidth of memory, and no more, for what queues
there stands before the activations. Of these passes of more than 4 columns have many, and wait for them longest."""
HELPERS = 128
"""Threads of a block that add up and stream."""
MAX_COPIES = 8
"""Blocks that keep the same keys and values, at most, each its own copy."""

NO_TIME = np.uint64(2**64 - 1)
"""What is to stand where a frame notes a time (:meth:`FusedModel.stamped`)."""

Words = NDArray[np.uint16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """How a matrix ``[out, in]`` is dealt out to the blocks and warps of the grid (``Product`` of the kernel)."""

    inner: int
    outer: int
    blocks: int
    warps: int
    step: int = 8
    max_groups: int = MAX_GROUPS

    @property
    def groups(self) -> int:
        """Groups of 8 rows of a block in each slab."""
        pairs = self.step // 8
        return min(-(-(self.outer // self.step) // self.blocks), max(self.max_groups // pairs, 1)) * pairs

    @property
    def slabs(self) -> int:
        """Slabs of the matrix: as many rows of it as all blocks take at once."""
        return -(-self.outer // (self.blocks * self.groups * 8))

    @property
    def busy_blocks(self) -> int:
        """Blocks that have rows of the matrix, the first ones."""
        return min(-(-self.outer // (self.groups * 8)), self.blocks)

    @property
    def units(self) -> int:
        """Units of 32 inner values of a warp."""
        return -(-(self.inner // UNIT) // self.warps)

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit of a warp."""
        return self.groups * _UNIT_BYTES

    @property
    def nbytes(self) -> int:
        """Bytes of the packed matrix."""
        return self.slabs * self.blocks * self.part_bytes

    @property
    def part_bytes(self) -> int:
        """Bytes of a block's part of a slab."""
        return self.warps * self.units * self.unit_bytes

    def pack(self, matrix: Words) -> Words:
        """Return a matrix as the kernel streams it, padded with 0: ``[slab, block, warp, unit, group, row of 8, 32]``.

        Parameters
        ----------
        matrix : ndarray, shape [out, in], uint16
            The bits of FP16 or BF16 weights.

        Raises
        ------
        EngineError
            Another shape.
        """
        if matrix.shape != (self.outer, self.inner):
            raise EngineError(
                f"a matrix has shape {list(matrix.shape)}, config.json asks for {[self.outer, self.inner]}"
            )
        rows, columns = self.slabs * self.blocks * self.groups * 8, self.warps * self.units * UNIT
        whole = np.zeros((rows, columns), np.uint16)
        whole[: self.outer, : self.inner] = matrix
        parts = whole.reshape(self.slabs, self.blocks, self.groups, 8, self.warps, self.units, UNIT)
        return np.ascontiguousarray(parts.transpose(0, 1, 4, 5, 2, 3, 6))


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedPlan:
    """The kernel for one CodePredictor on one GPU: its sizes, and how weights are dealt out.

    Attributes
    ----------
    spec : CodePredictorSpec
    dtype : {"F16", "BF16"}
        Of the weights and side files.
    projected : bool
        Whether there is a ``small_to_mtp_projection``.
    blocks : int
        Of the grid: one a multiprocessor.
    shared_bytes : int
        Dynamic shared memory of a block.
    threads : int
        Of a block.
    stamped : bool
        Whether a frame notes when what it waits for was there, for measuring (``Stamp`` of the kernel).
    """

    spec: CodePredictorSpec
    dtype: str
    projected: bool
    blocks: int
    shared_bytes: int
    threads: int = THREADS
    stamped: bool = False

    @property
    def stamps_shape(self) -> tuple[int, int, int]:
        """Of the times that a frame notes: of each block and pass, as ``Stamp`` of the kernel names them."""
        return self.blocks, self.spec.num_code_groups, 3

    @property
    def max_batch(self) -> int:
        """Rows of a batch at most."""
        return min(MAX_BATCH, self.spec.limits.max_batch_size)

    @property
    def products(self) -> dict[str, Product]:
        """The matrices of the model, by name."""
        return self._products(self._deal()[0])

    def _products(self, max_groups: int) -> dict[str, Product]:
        d = self.spec.decoder
        deal = {"blocks": self.blocks, "warps": self.threads // 32, "max_groups": max_groups}
        heads = d.num_attention_heads * d.head_dim
        both = heads + 2 * d.num_key_value_heads * d.head_dim
        return {
            "projection": Product(inner=self.spec.talker_hidden_size, outer=d.hidden_size, **deal),
            "qkv": Product(inner=d.hidden_size, outer=both, **deal),
            "o": Product(inner=heads, outer=d.hidden_size, **deal),
            "gate_up": Product(inner=d.hidden_size, outer=2 * d.intermediate_size, step=16, **deal),
            "down": Product(inner=d.intermediate_size, outer=d.hidden_size, **deal),
            "heads": Product(inner=d.hidden_size, outer=d.vocab_size, **deal),
        }

    def _deal(self) -> tuple[int, int]:
        """Return how many groups of rows a block takes at once, and how many chunks the ring of a block then has.

        Raises
        ------
        EngineError
            Shared memory is too small, however few the rows.
        """
        needed = chunks = 0
        for max_groups in range(MAX_GROUPS, 0, -1):
            products = list(self._products(max_groups).values())
            chunks = (self.shared_bytes - self._fixed_bytes(max(p.groups for p in products) * 8)) // CHUNK_BYTES
            needed = max(-(-product.part_bytes // CHUNK_BYTES) for product in products)
            if needed <= chunks:
                return max_groups, chunks
        raise EngineError(
            f"the fused kernel needs more shared memory than the {self.shared_bytes} bytes of a block here: "
            f"{needed} chunks of {CHUNK_BYTES} for the widest rows, there is room for {max(chunks, 0)}"
        )

    def _fixed_bytes(self, rows: int) -> int:
        """Return the shared memory of a block beside its ring, for sums of so many rows."""
        d, warps = self.spec.decoder, self.threads // 32
        sums = 2 * 8 * (warps * (rows + _PADDING) + 1) * 4
        scores = 2 * (warps // 4) * 64 * 4
        constants = (d.num_hidden_layers * 2 + self.spec.num_code_groups) * d.head_dim * 4
        noise = self.codes_a_thread * self.threads * 4
        return _RESERVED_BYTES + constants + sums + scores + _SELECT_BYTES + noise

    @property
    def codes_a_thread(self) -> int:
        """Neighbouring codes of a thread that picks (``ITEMS`` of ``select_sample.cu``)."""
        return next(items for items in (4, 8, 16) if self.spec.decoder.vocab_size <= items * self.threads)

    def macros(self) -> dict[str, str]:
        """Return what ``fused_frame.cu`` is compiled with."""
        d, (max_groups, chunks) = self.spec.decoder, self._deal()
        return {
            "V": str(d.vocab_size), "G": str(self.spec.num_code_groups), "H": str(d.hidden_size),
            "HT": str(self.spec.talker_hidden_size), "THREADS": str(self.threads), "WEIGHT": self.dtype,
            "HIDDEN": "F32", "INPUT": "F32", "LAYERS": str(d.num_hidden_layers), "HEADS": str(d.num_attention_heads),
            "KV_HEADS": str(d.num_key_value_heads), "HEAD_DIM": str(d.head_dim), "INTER": str(d.intermediate_size),
            "CTAS": str(self.blocks), "CHUNKS": str(chunks), "CHUNK_BYTES": str(CHUNK_BYTES),
            "IN_FLIGHT": str(min(IN_FLIGHT, chunks)), "IN_FLIGHT_WIDE": str(min(IN_FLIGHT_WIDE, chunks)),
            "PARTICIPANTS": str(self.threads), "HELPERS": str(HELPERS), "MAX_GROUPS": str(max_groups),
            "MAX_BATCH": str(self.max_batch), "MAX_COPIES": str(MAX_COPIES),
            "HAS_PROJECTION": "true" if self.projected else "false", "RMS_EPS": f"{d.rms_norm_eps!r}f",
            "SHARED_BYTES": str(self.shared_bytes), "STAMPS": "true" if self.stamped else "false",
        }  # fmt: skip

    def call(self, kernel: str, arguments: tuple[Any, ...]) -> Call:
        """Return the launch of ``fused_frame`` or ``fused_pass``."""
        threads = self.threads + HELPERS
        return Call(kernel, (self.blocks, 1, 1), threads, arguments, self.shared_bytes, cooperative=True)

    def refusal(self) -> str | None:
        """Return why the kernel cannot run this model here, or None."""
        d = self.spec.decoder
        widths = {
            "hidden_size": d.hidden_size,
            "talker_hidden_size": self.spec.talker_hidden_size,
            "intermediate_size": d.intermediate_size,
            "num_attention_heads * head_dim": d.num_attention_heads * d.head_dim,
        }
        for name, width in widths.items():
            if width % UNIT:
                return f"{name} is {width}, it must be a multiple of {UNIT}"
        if d.head_dim not in (64, 96, 128):
            return f"head_dim is {d.head_dim}, it must be 64, 96 or 128"
        if self.spec.num_code_groups > 33:
            return f"num_code_groups is {self.spec.num_code_groups}, at most 33 are possible"
        if d.vocab_size > MAX_SPECULATIVE_CODEBOOK or d.vocab_size % 8:
            return f"the codebook has {d.vocab_size} codes, it must be a multiple of 8 up to {MAX_SPECULATIVE_CODEBOOK}"
        if self.dtype not in ("F16", "BF16"):
            return f"the weights are {self.dtype}, they must be FP16 or BF16 (cpspec-build --precision fp16)"
        try:
            products = self.products
        except EngineError as error:
            return str(error)
        # Who adds the last heads of a pass waits for norms that the next pass overwrites. The end of a round, or every
        # row's codes where there are no drafts, now keeps it from that for these shapes too; no test shows it yet.
        if self.max_batch > 1 and products["o"].busy_blocks > products["qkv"].busy_blocks:
            return (
                f"o_proj has rows for {products['o'].busy_blocks} blocks and q, k and v together for "
                f"{products['qkv'].busy_blocks}: with so few heads it decodes one row only "
                "(cpspec-build --maxBatchSize 1)"
            )
        return None

    def rotary(self) -> NDArray[np.float32]:
        """Return cosine and sine of each position's angles, ``[G, headDim / 2, 2]``, as the portable graph has them."""
        d = self.spec.decoder
        frequencies = rotary_frequencies(d.head_dim, d.rope_theta)
        angles = np.arange(self.spec.num_code_groups, dtype=np.float32)[:, None] * frequencies
        return np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)


MODEL_FIELDS = (
    "weights", "bias", "input_norm", "post_norm", "final_norm", "head_norm", "rotary", "talker_table", "tables",
    "exchange", "hidden", "keys", "values", "laws", "draft_laws", "counter",
    "requests", "talker_hidden", "codes", "history", "rounds", "errors", "embedded", "stamps",
)  # fmt: skip
"""The addresses that the kernel is given, in the order of ``Model`` in ``fused_frame.cu``, and its ``stamps``."""


def model_arrays(plan: FusedPlan, folder: Path, talker_dir: Path) -> dict[str, NDArray[Any]]:
    """Read and pack what the kernel needs of an engine folder; the keys are those of :data:`MODEL_FIELDS`.

    Parameters
    ----------
    plan : FusedPlan
    folder : Path
        The ``code_predictor`` folder.
    talker_dir : Path
        Where the Talker's ``embedding.safetensors`` lies.

    Raises
    ------
    EngineError, ConfigError
        A file is missing or does not fit the config.
    """
    weights, products = GraphWeights(folder), plan.products
    layers = range(plan.spec.decoder.num_hidden_layers)
    side = {name: TensorFile(folder / f"{name}.safetensors") for name in ("lm_heads", "codec_embeddings")}
    depths = range(plan.spec.num_code_groups - 1)

    def packed(name: str, parts: Iterable[Words]) -> list[Words]:
        return [products[name].pack(part).reshape(-1) for part in parts]

    def bits(file: TensorFile, name: str) -> Words:
        return file.stored(name, plan.dtype).view(np.uint16)

    def stacked(suffix: str) -> NDArray[np.float32]:
        return np.stack([weights.vector(f"layers.{layer}.{suffix}") for layer in layers])

    projection = TensorFile(folder / "small_to_mtp_projection.safetensors") if plan.projected else None
    parts = [
        *(packed("projection", [bits(projection, "weight")]) if projection else []),
        *packed("qkv", (weights.matrix(f"layers.{i}.self_attn.q_proj.weight+k_proj+v_proj") for i in layers)),
        *packed("o", (weights.matrix(f"layers.{i}.self_attn.o_proj.weight") for i in layers)),
        *packed("gate_up", (_paired(weights.matrix(f"layers.{i}.mlp.gate_proj.weight+up_proj")) for i in layers)),
        *packed("down", (weights.matrix(f"layers.{i}.mlp.down_proj.weight") for i in layers)),
        *packed("heads", (bits(side["lm_heads"], f"lm_head_{i}.weight") for i in depths)),
    ]
    arrays: dict[str, NDArray[Any]] = {
        "weights": np.concatenate(parts),
        "input_norm": stacked("input_layernorm.weight"),
        "post_norm": stacked("post_attention_layernorm.weight"),
        "final_norm": weights.vector("norm.weight"),
        # All query heads share a row, and all key heads.
        "head_norm": np.ascontiguousarray(stacked("self_attn.qk_norm")[:, [0, -1]]),
        "rotary": plan.rotary(),
        "talker_table": bits(TensorFile(talker_dir / "embedding.safetensors"), "embedding"),
        "tables": np.stack([bits(side["codec_embeddings"], f"embedding_{i}") for i in depths]),
    }
    if projection:
        arrays["bias"] = projection.read("bias")
    return arrays


def work_layout(plan: FusedPlan, batch: int, drafts: int) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return shape and dtype of the kernel's working memory for a batch and a number of drafts."""
    d, groups = plan.spec.decoder, plan.spec.num_code_groups
    columns, heads = batch * max(drafts + 1, MAX_VERIFY_SIZE), d.num_attention_heads * d.head_dim
    # Words of 4 bytes a value, then pairs of 8: see Exchange in the kernel.
    words = (plan.spec.talker_hidden_size if plan.projected else 0) + 2 * d.hidden_size + heads + d.intermediate_size
    attended = d.num_hidden_layers * (heads + 2 * d.num_key_value_heads * d.head_dim)
    logits = -(-d.vocab_size // plan.codes_a_thread) * plan.codes_a_thread
    pairs = d.hidden_size + d.hidden_size // 4 + attended + (drafts + 1) * logits * (2 if drafts else 1)
    pieces = columns * (words // 4 + pairs // 2) + 3 * plan.max_batch * MAX_VERIFY_SIZE
    cache = (d.num_hidden_layers, plan.max_batch, MAX_COPIES, d.num_key_value_heads, groups)
    return {
        "exchange": ((pieces, 4), np.uint32),
        "hidden": ((columns, d.hidden_size), np.float32),
        "keys": ((*cache, d.head_dim + _KEY_PADDING), np.float32),
        "values": ((*cache, d.head_dim), np.float32),
        "laws": ((columns, d.vocab_size), np.float32),
        "draft_laws": ((2 * batch * max(drafts, 1), d.vocab_size), np.float32),
        "counter": ((2,), np.uint32),
    }


class GraphWeights:
    """The weights of a portable decoder graph, read through the index that the builder wrote beside it.

    Raises
    ------
    EngineError
        There is no index, or a weight is missing.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / GRAPH_DATA_FILE
        index = folder / WEIGHT_INDEX
        if not index.is_file() or not self._path.is_file():
            missing = index if not index.is_file() else self._path
            raise EngineError(f"{missing} does not exist; build the folder again from the checkpoint")
        try:
            self._index: dict[str, Any] = dict(json.loads(index.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise EngineError(f"{index} is damaged ({error}); build the folder again from the checkpoint") from error
        marks = [name for name in self._index if name.endswith("layers.0.input_layernorm.weight")]
        if not marks:
            raise EngineError(f"{index} names no decoder layer; build the folder again from the checkpoint")
        self._prefix = marks[0].removesuffix("layers.0.input_layernorm.weight")

    @property
    def dtype(self) -> str:
        """Type of the matrices: ``F32``, ``F16`` or ``BF16``."""
        return str(self._entry("layers.0.self_attn.o_proj.weight")["dtype"])

    def matrix(self, name: str) -> Words:
        """Return the bits of a weight as ``[out, in]``; the graph stores ``[in, out]``."""
        stored = self._read(name)
        if stored.dtype != np.uint16 or stored.ndim != 2:
            raise EngineError(f"{self._path}: {name} is no matrix of 16-bit weights; build the folder again")
        return stored.T

    def vector(self, name: str) -> NDArray[np.float32]:
        """Return an FP32 weight without axes of length 1."""
        return np.squeeze(np.array(self._read(name), np.float32))

    def _read(self, name: str) -> NDArray[Any]:
        entry = self._entry(name)
        try:
            kind = np.dtype(np.float32 if entry["dtype"] == "F32" else np.uint16)
            shape = tuple(entry["shape"])
            if math.prod(shape) * kind.itemsize + entry["offset"] > self._path.stat().st_size:
                raise ValueError("it lies beyond the end of the file")
            return np.memmap(self._path, kind, "r", entry["offset"], shape)
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            raise EngineError(f"{self._path}: {name} cannot be read ({error}); build the folder again") from error

    def _entry(self, name: str) -> dict[str, Any]:
        if self._prefix + name not in self._index:
            raise EngineError(f"{self._path} has no weight {self._prefix}{name}; build the folder again")
        entry = self._index[self._prefix + name]
        if not isinstance(entry, dict) or entry.get("dtype") not in ("F32", "F16", "BF16"):
            raise EngineError(f"{self._path}: the index of {name} is damaged; build the folder again")
        return entry


def _paired(matrix: Words) -> Words:
    """Put 8 rows of the first half and 8 of the second in turn: a block then holds both sides of a product."""
    first, second = np.split(matrix, 2)
    width = matrix.shape[1]
    return np.stack([first.reshape(-1, 8, width), second.reshape(-1, 8, width)], axis=1).reshape(-1, width)


class FusedModel:
    """A CodePredictor in device memory, packed for the kernel, and the kernel itself.

    Parameters
    ----------
    device : Device
    plan : FusedPlan
    folder, talker_dir : Path
        See :func:`model_arrays`.

    Raises
    ------
    EngineError
        The kernel cannot run here: its reason, which is that of :meth:`FusedPlan.refusal`.
    """

    def __init__(self, device: Device, plan: FusedPlan, folder: Path, talker_dir: Path) -> None:
        reason = plan.refusal()
        if reason:
            raise EngineError(f"{folder}: {reason}")
        self.device, self.plan = device, plan
        self._library = KernelLibrary(plan.macros())
        self._constant: dict[str, DeviceArray] = {}
        arrays = model_arrays(plan, folder, talker_dir)
        device.require(sum(array.nbytes for array in arrays.values()), f"{folder}: the weights of the fused kernel")
        for name, array in arrays.items():
            self._constant[name] = device.empty(array.shape, array.dtype)
            device.upload(self._constant[name], np.ascontiguousarray(array))
            device.synchronize()  # the array goes away
        for kernel in ("fused_frame", "fused_pass"):
            self._library.load(kernel)

    def stamped(self) -> tuple[FusedModel, DeviceArray]:
        """Return a model of the same weights whose frames note times, and where: ``[blocks, G, 3]`` uint64.

        A time is in ns of the GPU's clock; a frame leaves the least of what stands there, :data:`NO_TIME` where nothing
        is to be left of the frame before, and what it notes.
        """
        model, plan = copy.copy(self), replace(self.plan, stamped=True)
        stamps = self.device.empty(plan.stamps_shape, np.uint64)
        model.plan, model._library = plan, KernelLibrary(plan.macros())
        model._library.load("fused_frame")
        model._constant = self._constant | {"stamps": stamps}
        return model, stamps

    def table(self, work: Mapping[str, DeviceArray], io: Mapping[str, int]) -> DeviceArray:
        """Upload the addresses that a launch works with."""
        addresses = {name: array.address for name, array in (self._constant | dict(work)).items()} | dict(io)
        values = np.array([addresses.get(name, 0) for name in MODEL_FIELDS], np.uint64)
        table = self.device.empty(values.shape, values.dtype)
        self.device.upload(table, values)
        self.device.synchronize()  # the array goes away
        return table

    def work(self, batch: int, drafts: int) -> dict[str, DeviceArray]:
        """Allocate the working memory of a batch; a frame's ``counter`` is that of its input."""
        layout = work_layout(self.plan, batch, drafts)
        needed = sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in layout.values())
        self.device.require(needed, f"the fused kernel's memory of {batch} row(s)")
        return {name: self.device.zeros(shape, dtype) for name, (shape, dtype) in layout.items()}

    def enqueue(self, kernel: str, arguments: tuple[Any, ...]) -> None:
        """Put one launch on the stream; its ``counter`` must be 0."""
        self._library.run_on(self.device.stream, self.plan.call(kernel, arguments))


class FusedSession:
    """The fused kernel pass by pass: the same methods as :class:`~trt_cpspec.session.DecoderSession`.

    Parameters
    ----------
    model : FusedModel

    Attributes
    ----------
    run_seconds : float
        Time spent in copies and passes so far, as the host sees it.
    """

    def __init__(self, model: FusedModel) -> None:
        self.model = model
        self._states: dict[int, _PassMemory] = {}
        self._now: _PassMemory | None = None
        self.run_seconds = 0.0

    @property
    def device(self) -> Device:
        """The device on which it runs."""
        return self.model.device

    def max_positions(self) -> int | None:
        """Return how many positions a pass takes for each row."""
        return MAX_VERIFY_SIZE

    def start(self, batch: int, positions: int) -> None:
        """Begin new sequences (see :class:`~trt_cpspec.session.DecoderSession`); the cache always holds a frame."""
        del positions
        self.device.make_current()
        if batch > self.model.plan.max_batch:
            raise EngineError(f"the fused kernel decodes at most {self.model.plan.max_batch} rows, not {batch}")
        if batch not in self._states:
            self._states[batch] = _PassMemory(self.model, batch)
        self._now = self._states[batch]

    def clear(self) -> None:
        """Zero the cache."""
        for name in ("keys", "values"):
            self._memory.work[name].zero()

    def keep_rows(self, rows: NDArray[np.intp]) -> None:
        """Keep the sequences of these rows and drop the others."""
        old = self._memory
        self.start(len(rows), 0)
        for name in ("keys", "values"):
            source, target = old.work[name], self._memory.work[name]
            held = np.empty(source.shape, source.dtype)
            self.device.download(held, source)
            self.device.synchronize()
            moved = np.zeros_like(held)
            moved[:, : len(rows)] = held[:, rows, :1]  # another batch has another number of copies
            self.device.upload(target, moved)
            self.device.synchronize()

    def forward(self, embeds: NDArray[np.float32], positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """Run rows ``[B, T, H]`` at positions ``[B, T]``, T up to 8; a negative position is padding."""
        started = time.perf_counter()
        width = positions.shape[1]
        if width > MAX_VERIFY_SIZE or positions.max() >= self.model.plan.spec.num_code_groups:
            raise EngineError(
                f"the fused kernel takes {MAX_VERIFY_SIZE} positions a pass and a frame of "
                f"{self.model.plan.spec.num_code_groups}, not {width} up to position {int(positions.max())}"
            )
        hidden = self._memory.run(embeds, positions)
        self.run_seconds += time.perf_counter() - started
        return hidden

    @property
    def _memory(self) -> _PassMemory:
        if self._now is None:
            raise EngineError("start() must be called before a pass")
        return self._now


class _PassMemory:
    """Memory of the passes of one batch size."""

    def __init__(self, model: FusedModel, batch: int) -> None:
        device, width = model.device, model.plan.spec.decoder.hidden_size
        self._model, self._batch = model, batch
        self.work = model.work(batch, 0)  # passes of any width pick nothing
        self._table = model.table(self.work, {})
        self._rows = device.empty((batch, MAX_VERIFY_SIZE, width), np.float32)
        self._positions = device.empty((batch, MAX_VERIFY_SIZE), np.int32)
        self._hidden = device.zeros((batch, MAX_VERIFY_SIZE, width), np.float32)

    def run(self, embeds: NDArray[np.float32], positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """Run one pass and wait for it."""
        device = self._model.device
        rows, places = np.ascontiguousarray(embeds, np.float32), np.ascontiguousarray(positions, np.int32)
        device.upload_at(self._rows.address, rows)
        device.upload_at(self._positions.address, places)
        self.enqueue(positions.shape[1])
        hidden = np.empty(rows.shape, np.float32)
        device.download(hidden, self._hidden)
        device.synchronize()
        return hidden

    def enqueue(self, width: int) -> None:
        """Put a pass of ``width`` positions a row on the stream, over what was uploaded last."""
        arguments = (self._table.address, self._rows.address, self._positions.address, self._hidden.address)
        self.work["counter"].zero()
        self._model.enqueue("fused_pass", (*arguments, np.int32(self._batch), np.int32(width)))


class FusedFrames(CapturedFrames):
    """Frames of the fused kernel, one launch each.

    Parameters
    ----------
    model : FusedModel
    """

    def __init__(self, model: FusedModel) -> None:
        super().__init__(model.device)
        self._model = model

    def _capture(self, batch: int, drafts: int, mode: Mode) -> CapturedFrame:
        if batch > self._model.plan.max_batch:
            raise EngineError(f"the fused kernel decodes at most {self._model.plan.max_batch} rows, not {batch}")
        return _FusedFrame(self._model, batch, drafts, mode)


class _FusedFrame:
    """The frame of one batch, number of drafts and mode: its memory and its graph."""

    def __init__(self, model: FusedModel, batch: int, drafts: int, mode: Mode) -> None:
        spec = model.plan.spec
        self.io = FrameIO(model.device, batch, spec.num_code_groups, spec.talker_hidden_size)
        self._work = model.work(batch, drafts)
        self._table = model.table(self._work, self.io.address)
        arguments = (self._table.address, np.int32(batch), np.int32(drafts), np.int32(mode == "coupled"))

        def frame() -> None:
            self.io.upload()
            model.enqueue("fused_frame", arguments)
            self.io.download()

        self.graph = model.device.capture(frame)


def open_fused(device: Device, spec: CodePredictorSpec, folder: Path, talker_dir: Path) -> FusedModel:
    """Load a CodePredictor folder into the fused kernel.

    Raises
    ------
    EngineError
        It cannot run this model on this device; the message is the reason.
    ConfigError
        A side file is missing or does not fit the config.
    """
    model = FusedModel(device, _plan_on(device, spec, folder), folder, talker_dir)
    # One dry pass: whether all blocks fit on the device at once is known now, not when somebody speaks.
    session = FusedSession(model)
    session.start(1, 1)
    session.forward(np.zeros((1, 1, spec.decoder.hidden_size), np.float32), np.zeros((1, 1), np.int64))
    return model


def fused_refusal(device: Device, folder: Path) -> str | None:
    """Return why the fused kernel cannot run a CodePredictor folder on a device, or None; no weight is read."""
    try:
        spec = CodePredictorSpec.from_section(Section.from_file(folder / "config.json"))
        return _plan_on(device, spec, folder).refusal()
    except CpSpecError as error:
        return str(error)


def _plan_on(device: Device, spec: CodePredictorSpec, folder: Path) -> FusedPlan:
    if device.compute_capability < MIN_COMPUTE_CAPABILITY:
        found = ".".join(map(str, device.compute_capability))
        raise EngineError(f"{device.name} has compute capability {found}, the fused kernel needs 8.0")
    if spec.limits.max_batch_size > MAX_BATCH:
        raise EngineError(
            f"{folder} was built for batches of {spec.limits.max_batch_size}, "
            f"the fused kernel takes at most {MAX_BATCH}"
        )
    return FusedPlan(
        spec=spec,
        dtype=GraphWeights(folder).dtype,
        projected=(folder / "small_to_mtp_projection.safetensors").is_file(),
        blocks=device.attribute("MULTIPROCESSOR_COUNT"),
        shared_bytes=device.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
    )
