"""The fused executor: the whole CodePredictor, and a whole frame, in one persistent CUDA kernel.

It reads the folder that ``cpspec-build`` wrote (the weights of ``model.onnx.data``, the side files) and needs no plan
and no TensorRT. :class:`FusedSession` stands beside the other decoder sessions; :class:`FusedFrames` decodes a frame in
one launch. What the kernel does, and how its weights are packed, is in ``kernels/fused_frame.cu``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .config import MAX_SPECULATIVE_CODEBOOK, MAX_VERIFY_SIZE, CodePredictorSpec
from .errors import EngineError
from .runtime import GRAPH_DATA_FILE, WEIGHT_INDEX
from .tensorfile import TensorFile

THREADS = 512
WARPS = THREADS // 32
MAX_BATCH = 8
UNIT = 32
"""Inner values of a weight unit."""
_UNIT_BYTES = 512
"""Of a unit of 8 rows."""
_PADDING = 8
_RESERVED_BYTES = 4096
"""Shared memory of a block beside its ring and its sums: addresses, columns, the place of its weights."""
_SELECT_BYTES = 12288
_MAX_SLOTS = 4

Words = NDArray[np.uint16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """How a matrix ``[out, in]`` is dealt out to the blocks and warps of the grid (``Product`` of the kernel)."""

    inner: int
    outer: int
    blocks: int
    warps: int
    step: int = 8

    @property
    def groups(self) -> int:
        """Groups of 8 rows of a block."""
        return -(-(self.outer // self.step) // self.blocks) * (self.step // 8)

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
        return self.blocks * self.warps * self.units * self.unit_bytes

    def pieces(self, slot_bytes: int) -> int:
        """Return into how many slots of the ring a warp's part goes; 0 where a unit is too large."""
        units = min(slot_bytes // self.unit_bytes, self.units)
        return -(-self.units // units) if units else 0

    def pack(self, matrix: Words) -> Words:
        """Return a matrix as the kernel streams it: ``[block, warp, unit, group, row of 8, 32 values]``, padded with 0.

        Parameters
        ----------
        matrix : ndarray, shape [out, in], uint16
            The bits of FP16 or BF16 weights.
        """
        rows, columns = self.blocks * self.groups * 8, self.warps * self.units * UNIT
        whole = np.zeros((rows, columns), np.uint16)
        whole[: self.outer, : self.inner] = matrix
        parts = whole.reshape(self.blocks, self.groups, 8, self.warps, self.units, UNIT)
        return np.ascontiguousarray(parts.transpose(0, 3, 4, 1, 2, 5))


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
    """

    spec: CodePredictorSpec
    dtype: str
    projected: bool
    blocks: int
    shared_bytes: int
    threads: int = THREADS

    @property
    def max_batch(self) -> int:
        """Rows of a batch at most."""
        return min(MAX_BATCH, self.spec.limits.max_batch_size)

    @property
    def products(self) -> dict[str, Product]:
        """The matrices of the model, by name."""
        d, deal = self.spec.decoder, {"blocks": self.blocks, "warps": self.threads // 32}
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

    def ring(self) -> tuple[int, int]:
        """Return slots and bytes of a slot of a warp's ring: as much as fits, the largest part in all slots at most.

        Raises
        ------
        EngineError
            Shared memory is too small for the widest matrix on this grid.
        """
        products, warps = list(self.products.values()), self.threads // 32
        rows = max(product.groups for product in products) * 8
        sums = warps * 8 * (rows + _PADDING + 1) * 4
        free = self.shared_bytes - _RESERVED_BYTES - max(sums, _SELECT_BYTES)
        for slots in range(_MAX_SLOTS, 1, -1):
            slot_bytes = free // (warps * slots) // _UNIT_BYTES * _UNIT_BYTES
            pieces = [product.pieces(slot_bytes) for product in products]
            if all(0 < count <= slots for count in pieces):
                return slots, slot_bytes
        raise EngineError(
            f"the fused kernel needs more shared memory than the {self.shared_bytes} bytes of a block here, for "
            f"{rows} rows of the widest matrix on {self.blocks} multiprocessors"
        )

    def macros(self) -> dict[str, str]:
        """Return what ``fused_frame.cu`` is compiled with."""
        d, (slots, slot_bytes) = self.spec.decoder, self.ring()
        return {
            "V": str(d.vocab_size), "G": str(self.spec.num_code_groups), "H": str(d.hidden_size),
            "HT": str(self.spec.talker_hidden_size), "THREADS": str(self.threads), "WEIGHT": self.dtype,
            "HIDDEN": "F32", "INPUT": "F32", "LAYERS": str(d.num_hidden_layers), "HEADS": str(d.num_attention_heads),
            "KV_HEADS": str(d.num_key_value_heads), "HEAD_DIM": str(d.head_dim), "INTER": str(d.intermediate_size),
            "CTAS": str(self.blocks), "SLOTS": str(slots), "SLOT_BYTES": str(slot_bytes),
            "MAX_BATCH": str(self.max_batch),
            "HAS_PROJECTION": "true" if self.projected else "false", "RMS_EPS": f"{d.rms_norm_eps!r}f",
            "SHARED_BYTES": str(self.shared_bytes),
        }  # fmt: skip

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
            self.ring()
        except EngineError as error:
            return str(error)
        return None

    def rotary(self) -> NDArray[np.float32]:
        """Return cosine and sine of each position's angles, ``[G, headDim / 2, 2]``, as the portable graph has them."""
        d = self.spec.decoder
        exponent = np.arange(0, d.head_dim, 2, dtype=np.float32) / np.float32(d.head_dim)
        frequencies = (1.0 / np.power(np.float32(d.rope_theta), exponent)).astype(np.float32)
        angles = np.arange(self.spec.num_code_groups, dtype=np.float32)[:, None] * frequencies
        return np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)


MODEL_FIELDS = (
    "projection", "qkv", "o", "gate_up", "down", "heads", "bias", "input_norm", "post_norm", "final_norm", "head_norm",
    "rotary", "talker_table", "tables", "embeds", "inputs", "hidden", "queries", "keys", "values", "mixed", "activated",
    "logits", "laws", "draft_logits", "draft_laws", "picks", "drafts", "last", "states", "counter", "requests",
    "talker_hidden", "codes", "history", "rounds", "errors", "embedded",
)  # fmt: skip
"""The addresses that the kernel is given, in the order of ``Model`` in ``fused_frame.cu``."""


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

    def packed(name: str, parts: Iterable[Words]) -> Words:
        product = products[name]
        return np.stack([product.pack(part) for part in parts])

    def stacked(suffix: str) -> NDArray[np.float32]:
        return np.stack([weights.vector(f"layers.{layer}.{suffix}") for layer in layers])

    arrays: dict[str, NDArray[Any]] = {
        "qkv": packed("qkv", (weights.matrix(f"layers.{i}.self_attn.q_proj.weight+k_proj+v_proj") for i in layers)),
        "o": packed("o", (weights.matrix(f"layers.{i}.self_attn.o_proj.weight") for i in layers)),
        "gate_up": packed(
            "gate_up", (_paired(weights.matrix(f"layers.{i}.mlp.gate_proj.weight+up_proj")) for i in layers)
        ),
        "down": packed("down", (weights.matrix(f"layers.{i}.mlp.down_proj.weight") for i in layers)),
        "heads": packed("heads", (_bits(side["lm_heads"].rows(f"lm_head_{i}.weight").stored) for i in depths)),
        "input_norm": stacked("input_layernorm.weight"),
        "post_norm": stacked("post_attention_layernorm.weight"),
        "final_norm": weights.vector("norm.weight"),
        "head_norm": stacked("self_attn.qk_norm"),
        "rotary": plan.rotary(),
        "talker_table": _bits(TensorFile(talker_dir / "embedding.safetensors").rows("embedding").stored),
        "tables": np.stack([_bits(side["codec_embeddings"].rows(f"embedding_{i}").stored) for i in depths]),
    }
    if plan.projected:
        file = TensorFile(folder / "small_to_mtp_projection.safetensors")
        arrays["projection"] = packed("projection", [_bits(file.rows("weight").stored)])
        arrays["bias"] = file.read("bias")
    return arrays


def work_layout(plan: FusedPlan, batch: int, drafts: int) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return shape and dtype of the kernel's working memory for a batch and a number of drafts."""
    d, groups = plan.spec.decoder, plan.spec.num_code_groups
    columns = batch * max(drafts + 1, MAX_VERIFY_SIZE)
    cache = (d.num_hidden_layers, plan.max_batch, groups, d.num_key_value_heads * d.head_dim)
    heads = d.num_attention_heads * d.head_dim
    return {
        "embeds": ((columns, plan.spec.talker_hidden_size), np.float32),
        "inputs": ((columns, d.hidden_size), np.float32),
        "hidden": ((columns, d.hidden_size), np.float32),
        "queries": ((columns, heads), np.float32),
        "keys": (cache, np.float32),
        "values": (cache, np.float32),
        "mixed": ((columns, heads), np.float32),
        "activated": ((columns, d.intermediate_size), np.float32),
        "logits": ((columns, d.vocab_size), np.float32),
        "laws": ((columns, d.vocab_size), np.float32),
        "draft_logits": ((columns, d.vocab_size), np.float32),
        "draft_laws": ((columns, d.vocab_size), np.float32),
        "picks": ((columns,), np.int32),
        "drafts": ((columns,), np.int32),
        "last": ((batch,), np.int32),
        "states": ((batch,), np.int32),
        "counter": ((1,), np.uint32),
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
        self._index = json.loads(index.read_text(encoding="utf-8"))
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
        return _bits(self._read(name)).T

    def vector(self, name: str) -> NDArray[np.float32]:
        """Return an FP32 weight without axes of length 1."""
        return np.squeeze(np.array(self._read(name), np.float32))

    def _read(self, name: str) -> NDArray[Any]:
        entry = self._entry(name)
        kind = np.dtype(np.float32 if entry["dtype"] == "F32" else np.uint16)
        return np.memmap(self._path, kind, "r", entry["offset"], tuple(entry["shape"]))

    def _entry(self, name: str) -> dict[str, Any]:
        if self._prefix + name not in self._index:
            raise EngineError(f"{self._path} has no weight {self._prefix}{name}; build the folder again")
        entry: dict[str, Any] = self._index[self._prefix + name]
        return entry


def _bits(stored: NDArray[Any]) -> Words:
    return stored if stored.dtype == np.uint16 else stored.view(np.uint16)


def _paired(matrix: Words) -> Words:
    """Put 8 rows of the first half and 8 of the second in turn: a block then holds both sides of a product."""
    first, second = np.split(matrix, 2)
    width = matrix.shape[1]
    return np.stack([first.reshape(-1, 8, width), second.reshape(-1, 8, width)], axis=1).reshape(-1, width)
