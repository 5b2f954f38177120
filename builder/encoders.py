"""The encoders of Qwen3-Omni as portable graphs: audio (mel features to rows) and vision (patches to rows).

Both give rows of the Thinker's width, which take the place of the placeholder tokens of a prompt.

Audio: ``mel [W, chunks, bins, frames]`` float32, ``extents [2]`` int32 and ``lengths [W]`` int32 to
``embeds [W, rows, H]`` float32. A window is what attention sees at once: 8 s in the release, 8 chunks of a second. Only
the first ``lengths[w]`` rows of a window mean something. Chunks shorter than ``frames`` are filled up with zeros; where
all chunks of a conversation are, the reference cuts the filling off, and ``extents`` says how many frames are then left
behind the first and the second convolution.

Vision: ``patches [P, values]`` float32, ``places [P, 2]`` int32 (row and column), ``corners [P, 4]`` int32 and
``shares [P, 4]`` float32 to ``embeds [P / 4, H]`` and ``deepstack [P / 4, D * H]`` float32, for one image. ``corners``
are rows of the table of learned positions, mixed by ``shares``; the four patches of one output row stand together.

Source of the arithmetic: ``transformers`` 4.57, ``Qwen3OmniMoeAudioEncoder`` and ``Qwen3OmniMoeVisionEncoder``. 4.57
lets audio attend across windows unless it runs flash attention; here windows are kept, as in training and in later
versions. Types are those of :mod:`.decoder`: products narrow where that is asked for, all else FP32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from trt_cpspec.audio_input import AudioFront
from trt_cpspec.config import Section
from trt_cpspec.encoders import AUDIO_TYPE, VISION_TYPE
from trt_cpspec.errors import ConfigError
from trt_cpspec.image_input import MAX_PATCHES, ImageFront
from trt_cpspec.rotary import rotary_frequencies

from .checkpoint import Weights
from .decoder import MASKED
from .graph import GraphWriter, transposed
from .linear import Products, gelu, rotated, standardised

PREPROCESSOR_FILE = "preprocessor_config.json"
AUDIO_PREFIX, VISION_PREFIX = "thinker.audio_tower", "thinker.visual"
MAX_WINDOWS = 8
"""Windows of one call of the audio graph; a longer clip takes several calls."""

_AUDIO_EPS, _VISION_EPS = 1e-5, 1e-6
_WAVE_PERIOD = 10000.0
_ROPE_THETA = 10000.0
_HALVINGS = 3
"""Convolutions of stride 2 before the audio transformer."""

Progress = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioEncoderSpec:
    """Shape of the audio encoder; the field names are the keys of the official ``audio_config``.

    Attributes
    ----------
    num_mel_bins : int
    d_model, encoder_layers, encoder_attention_heads, encoder_ffn_dim : int
        The transformer.
    downsample_hidden_size : int
        Channels of the convolutions.
    output_dim : int
        H, the Thinker's width.
    n_window : int
        Half the mel frames of a chunk.
    n_window_infer : int
        Mel frames of a window, a multiple of a chunk's.
    max_source_positions : int
        Rows of a chunk at most.
    """

    num_mel_bins: int
    d_model: int
    encoder_layers: int
    encoder_attention_heads: int
    encoder_ffn_dim: int
    downsample_hidden_size: int
    output_dim: int
    n_window: int
    n_window_infer: int
    max_source_positions: int

    def __post_init__(self) -> None:
        if self.d_model % self.encoder_attention_heads or self.d_model % 2 or self.d_model < 4:
            raise ConfigError(
                f"d_model {self.d_model} must be even and a multiple of encoder_attention_heads "
                f"{self.encoder_attention_heads}"
            )
        if self.n_window_infer % self.chunk_frames:
            raise ConfigError(f"n_window_infer {self.n_window_infer} is no multiple of twice n_window {self.n_window}")
        if self.chunk_rows > self.max_source_positions:
            raise ConfigError(f"max_source_positions {self.max_source_positions} is below the {self.chunk_rows} needed")

    @classmethod
    def from_section(cls, section: Section) -> AudioEncoderSpec:
        """Read an ``audio_config``; a key that is missing or not supported is a ConfigError that names it."""
        section.require("activation_function", "gelu")
        section.require("scale_embedding", False)
        sizes = {item.name: section.integer(item.name, minimum=1) for item in fields(cls)}
        try:
            return cls(**sizes)
        except ConfigError as error:
            raise ConfigError(f"{section.where}: {error}") from error

    @property
    def chunk_frames(self) -> int:
        """Mel frames of a chunk."""
        return 2 * self.n_window

    @property
    def window_chunks(self) -> int:
        """Chunks of a window."""
        return self.n_window_infer // self.chunk_frames

    @property
    def chunk_rows(self) -> int:
        """Rows that a whole chunk becomes."""
        return _halved(self.chunk_frames, _HALVINGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionEncoderSpec:
    """Shape of the vision encoder; the field names are the keys of the official ``vision_config``.

    Attributes
    ----------
    depth, hidden_size, num_heads, intermediate_size : int
        The transformer.
    in_channels, patch_size, temporal_patch_size : int
        Of a patch.
    spatial_merge_size : int
        Patches along each side of the square that becomes one row.
    num_position_embeddings : int
        Rows of the table of learned positions, a square number.
    out_hidden_size : int
        H, the Thinker's width.
    deepstack_visual_indexes : tuple of int
        The layers behind which the features of the Thinker's first layers are taken.
    """

    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    num_position_embeddings: int
    out_hidden_size: int
    deepstack_visual_indexes: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 4:
            raise ConfigError(
                f"hidden_size {self.hidden_size} must be num_heads {self.num_heads} times a multiple of 4: two axes "
                f"of rotary pairs"
            )
        if math.isqrt(self.num_position_embeddings) ** 2 != self.num_position_embeddings:
            raise ConfigError(f"num_position_embeddings {self.num_position_embeddings} is no square number")
        layers = self.deepstack_visual_indexes
        if list(layers) != sorted(set(layers)) or any(not 0 <= layer < self.depth for layer in layers):
            raise ConfigError(f"deepstack_visual_indexes {list(layers)} must rise and lie below depth {self.depth}")

    @classmethod
    def from_section(cls, section: Section) -> VisionEncoderSpec:
        """Read a ``vision_config``; a key that is missing or not supported is a ConfigError that names it."""
        section.require("hidden_act", "gelu_pytorch_tanh")
        if section.has("apply_vit_abs_pos_embed"):
            section.require("apply_vit_abs_pos_embed", True)
        layers = section.integers("deepstack_visual_indexes")
        names = [item.name for item in fields(cls) if item.name != "deepstack_visual_indexes"]
        sizes = {name: section.integer(name, minimum=1) for name in names}
        try:
            return cls(deepstack_visual_indexes=layers, **sizes)
        except ConfigError as error:
            raise ConfigError(f"{section.where}: {error}") from error

    @property
    def patch_values(self) -> int:
        """Values of a patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def merged_patches(self) -> int:
        """Patches that become one row."""
        return self.spatial_merge_size**2


@dataclass(frozen=True, slots=True, kw_only=True)
class OmniEncoders:
    """The encoders of a checkpoint that can be built; None is one that it has not.

    Attributes
    ----------
    audio : AudioEncoderSpec or None
    vision : VisionEncoderSpec or None
    audio_front, image_front : AudioFront, ImageFront, or None
        What stands before them.
    """

    audio: AudioEncoderSpec | None = None
    vision: VisionEncoderSpec | None = None
    audio_front: AudioFront | None = None
    image_front: ImageFront | None = None


def read_encoders(thinker: Section, weights: Weights, width: int) -> OmniEncoders:
    """Read the encoders of a checkpoint.

    Parameters
    ----------
    thinker : Section
        ``thinker_config``.
    weights : Weights
        An encoder without weights there is none.
    width : int
        Of the Thinker.

    Raises
    ------
    ConfigError
        A key that is missing, not supported, or contradicts another one.
    """
    found: dict[str, Any] = {}
    path = weights.folder / PREPROCESSOR_FILE
    if thinker.has("audio_config") and f"{AUDIO_PREFIX}.conv_out.weight" in weights:
        section = thinker.section("audio_config")
        section.require("output_dim", width)
        found["audio"] = spec = AudioEncoderSpec.from_section(section)
        found["audio_front"] = front = AudioFront.from_section(Section.from_file(path))
        if front.feature_size != spec.num_mel_bins:
            raise ConfigError(f"{path}: feature_size is {front.feature_size}, num_mel_bins is {spec.num_mel_bins}")
    if thinker.has("vision_config") and f"{VISION_PREFIX}.pos_embed.weight" in weights:
        section = thinker.section("vision_config")
        section.require("out_hidden_size", width)
        found["vision"] = sight = VisionEncoderSpec.from_section(section)
        found["image_front"] = pixels = ImageFront.from_section(Section.from_file(path))
        given = pixels.patch_size, pixels.temporal_patch_size, pixels.merge_size, 3
        if given != (sight.patch_size, sight.temporal_patch_size, sight.spatial_merge_size, sight.in_channels):
            raise ConfigError(f"{path}: patch_size, temporal_patch_size and merge_size contradict vision_config")
    return OmniEncoders(**found)


def write_audio_encoder(
    weights: Weights,
    spec: AudioEncoderSpec,
    front: AudioFront,
    folder: Path,
    *,
    dtype: str,
    narrow: bool,
    progress: Progress = lambda: None,
) -> dict[str, Any]:
    """Write the audio encoder's graph into an existing folder and return its engine config.

    Parameters
    ----------
    weights : Weights
    spec : AudioEncoderSpec
    front : AudioFront
    folder : Path
    dtype, narrow
        As of :func:`~.decoder.write_decoder`.
    progress : callable
        Called after the convolutions and after each layer.
    """
    with GraphWriter(folder, AUDIO_TYPE) as graph:
        _AudioWriter(Products(graph, weights, dtype, narrow=narrow), AUDIO_PREFIX, _AUDIO_EPS).write(spec, progress)
        graph.save()
    return {
        "model_type": AUDIO_TYPE,
        "hidden_size": spec.output_dim,
        "audio_config": asdict(spec),
        "preprocessor": asdict(front),
        "window_chunks": spec.window_chunks,
        "chunk_frames": spec.chunk_frames,
        "chunk_rows": spec.chunk_rows,
        "builder_config": {"max_windows": MAX_WINDOWS},
    }


def write_vision_encoder(
    weights: Weights,
    spec: VisionEncoderSpec,
    front: ImageFront,
    folder: Path,
    *,
    dtype: str,
    narrow: bool,
    max_rows: int,
    progress: Progress = lambda: None,
) -> dict[str, Any]:
    """Write the vision encoder's graph into an existing folder and return its engine config.

    Parameters are those of :func:`write_audio_encoder`; ``max_rows`` is how many rows an image may have, up to what
    :data:`~trt_cpspec.image_input.MAX_PATCHES` become.
    """
    with GraphWriter(folder, VISION_TYPE) as graph:
        writer = _VisionWriter(Products(graph, weights, dtype, narrow=narrow), VISION_PREFIX, _VISION_EPS)
        writer.write(spec, progress)
        graph.save()
    config = asdict(spec) | {"deepstack_visual_indexes": list(spec.deepstack_visual_indexes)}
    return {
        "model_type": VISION_TYPE,
        "hidden_size": spec.out_hidden_size,
        "num_deepstack_features": len(spec.deepstack_visual_indexes),
        "positions_per_side": math.isqrt(spec.num_position_embeddings),
        "vision_config": config,
        "preprocessor": asdict(front),
        "builder_config": {"max_patches": min(max_rows * spec.merged_patches, MAX_PATCHES)},
    }


class _EncoderWriter:
    """What both encoders share. Values are ``[B, T, C]``; names of weights lack their :attr:`prefix`."""

    def __init__(self, products: Products, prefix: str, eps: float) -> None:
        self.products, self.graph, self.weights = products, products.graph, products.weights
        self.prefix, self.eps = prefix, eps

    def linear(self, names: list[str], value: str, widths: list[int], inner: int) -> str:
        """Apply linear layers with biases side by side."""
        full = [f"{self.prefix}.{name}" for name in names]
        product = self.products.linear(value, [f"{name}.weight" for name in full], widths, inner)
        biases = [self.weights.read(f"{name}.bias", (w,)) for name, w in zip(full, widths, strict=True)]
        return self.graph.op("Add", product, self.graph.weight(f"{full[0]}.bias", [sum(widths)], biases))

    def layer_norm(self, name: str, value: str, width: int) -> str:
        """Apply a LayerNorm over the last axis."""
        normed = standardised(self.graph, value, self.eps)
        scaled = self.graph.op("Mul", normed, self.stored(f"{name}.weight", (width,)))
        return self.graph.op("Add", scaled, self.stored(f"{name}.bias", (width,)))

    def stored(self, name: str, shape: tuple[int, ...]) -> str:
        """Stream a tensor into the graph in FP32."""
        full = f"{self.prefix}.{name}"
        return self.graph.weight(full, shape, self.weights.chunks(full, shape))

    def attention(self, product: str, heads: int, width: int, *, mask: str | None, turn: Callable[[str], str]) -> str:
        """Attend within each row of the batch, given queries, keys and values side by side.

        ``turn`` is applied to queries and keys, ``[B, 2 * heads, T, headDim]``.
        """
        graph, size = self.graph, width // heads
        split = graph.op("Reshape", product, graph.constant([0, 0, 3 * heads, size], np.int64))
        by_head = graph.op("Transpose", split, perm=[0, 2, 1, 3])
        both, values = graph.op_n("Split", [by_head, graph.constant([2 * heads, heads], np.int64)], 2, axis=1)
        queries, keys = graph.op_n("Split", [turn(both)], 2, axis=1)
        queries = graph.op("Mul", queries, graph.constant(size**-0.5, np.float32))
        scores = graph.op("MatMul", queries, graph.op("Transpose", keys, perm=[0, 1, 3, 2]))
        shares = graph.op("Softmax", graph.op("Add", scores, mask) if mask is not None else scores, axis=-1)
        rows = graph.op("Transpose", graph.op("MatMul", shares, values), perm=[0, 2, 1, 3])
        return graph.op("Reshape", rows, graph.constant([0, 0, width], np.int64))

    def range_of(self, length: int) -> str:
        """Return ``0 ... length - 1`` as ``[1, 1, 1, length]`` int32."""
        return self.graph.constant(np.arange(length, dtype=np.int32).reshape(1, 1, 1, length))


class _AudioWriter(_EncoderWriter):
    """Writes the audio encoder."""

    def write(self, spec: AudioEncoderSpec, progress: Progress) -> None:
        graph, width = self.graph, spec.d_model
        shape: list[int | str] = ["windows", spec.window_chunks, spec.num_mel_bins, spec.chunk_frames]
        mel = graph.input("mel", TensorProto.FLOAT, shape)
        extents = graph.input("extents", TensorProto.INT32, [_HALVINGS - 1])
        lengths = graph.input("lengths", TensorProto.INT32, ["windows"])
        rows = spec.window_chunks * spec.chunk_rows
        hidden = self._convolved(spec, mel, extents)
        hidden = graph.op("Reshape", hidden, graph.constant([-1, rows, width], np.int64))
        own = graph.op("Unsqueeze", lengths, graph.constant([1, 2, 3], np.int64))
        heard = graph.op("Less", self.range_of(rows), own)
        mask = graph.op("Where", heard, graph.constant(0, np.float32), graph.constant(MASKED))
        progress()
        for index in range(spec.encoder_layers):
            hidden = self._layer(spec, f"layers.{index}", hidden, mask)
            progress()
        hidden = self.layer_norm("ln_post", hidden, width)
        hidden = gelu(graph, self.linear(["proj1"], hidden, [width], width))
        hidden = self.linear(["proj2"], hidden, [spec.output_dim], width)
        graph.output(hidden, "embeds", TensorProto.FLOAT, ["windows", rows, spec.output_dim])

    def _convolved(self, spec: AudioEncoderSpec, mel: str, extents: str) -> str:
        """Halve time and bins three times and add the positions of a chunk: ``[W * chunks, rows, d_model]``."""
        graph, channels = self.graph, spec.downsample_hidden_size
        bins, frames, before = spec.num_mel_bins, spec.chunk_frames, 1
        value = graph.op("Reshape", mel, graph.constant([-1, 1, bins, frames], np.int64))
        for stage in range(_HALVINGS):
            name = f"conv2d{stage + 1}"
            kernel = self.stored(f"{name}.weight", (channels, before, 3, 3))
            bias = self.stored(f"{name}.bias", (channels,))
            value = graph.op("Conv", value, kernel, bias, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
            value, before = gelu(graph, value), channels
            bins, frames = _halved(bins, 1), _halved(frames, 1)
            if stage < _HALVINGS - 1:
                extent = graph.op("Gather", extents, graph.constant(stage, np.int32), axis=0)
                there = graph.op("Less", self.range_of(frames), extent)
                value = graph.op("Mul", value, graph.op("Cast", there, to=TensorProto.FLOAT))
        value = graph.op("Transpose", value, perm=[0, 3, 1, 2])
        value = graph.op("Reshape", value, graph.constant([0, frames, channels * bins], np.int64))
        name = f"{self.prefix}.conv_out.weight"
        value = self.products.linear(value, [name], [spec.d_model], channels * bins)
        return graph.op("Add", value, graph.constant(_waves(frames, spec.d_model)))

    def _layer(self, spec: AudioEncoderSpec, name: str, hidden: str, mask: str) -> str:
        width, inner = spec.d_model, spec.encoder_ffn_dim
        normed = self.layer_norm(f"{name}.self_attn_layer_norm", hidden, width)
        names = [f"{name}.self_attn.{part}_proj" for part in "qkv"]
        product = self.linear(names, normed, [width] * 3, width)
        mixed = self.attention(product, spec.encoder_attention_heads, width, mask=mask, turn=lambda both: both)
        hidden = self.graph.op("Add", hidden, self.linear([f"{name}.self_attn.out_proj"], mixed, [width], width))
        normed = self.layer_norm(f"{name}.final_layer_norm", hidden, width)
        opened = gelu(self.graph, self.linear([f"{name}.fc1"], normed, [inner], width))
        return self.graph.op("Add", hidden, self.linear([f"{name}.fc2"], opened, [width], inner))


class _VisionWriter(_EncoderWriter):
    """Writes the vision encoder. An image is a batch of one."""

    def write(self, spec: VisionEncoderSpec, progress: Progress) -> None:
        graph, width = self.graph, spec.hidden_size
        patches = graph.input("patches", TensorProto.FLOAT, ["patches", spec.patch_values])
        places = graph.input("places", TensorProto.INT32, ["patches", 2])
        hidden = graph.op("Add", self._embedded(spec, patches), self._positions(spec))
        hidden = graph.op("Unsqueeze", hidden, graph.constant([0], np.int64))
        cos, sin = self._angles(places, width // spec.num_heads)
        progress()
        taken: list[str] = []
        for index in range(spec.depth):
            hidden = self._layer(spec, f"blocks.{index}", hidden, cos, sin)
            if index in spec.deepstack_visual_indexes:
                taken.append(self._merged(spec, f"merger_list.{len(taken)}", hidden, late=True))
            progress()
        rows = self._merged(spec, "merger", hidden, late=False)
        graph.output(rows, "embeds", TensorProto.FLOAT, ["rows", spec.out_hidden_size])
        if taken:
            stack = graph.op("Concat", *taken, axis=-1) if len(taken) > 1 else taken[0]
            graph.output(stack, "deepstack", TensorProto.FLOAT, ["rows", len(taken) * spec.out_hidden_size])

    def _embedded(self, spec: VisionEncoderSpec, patches: str) -> str:
        """Embed patches: a convolution as wide as its stride is a product."""
        name, width, values = f"{self.prefix}.patch_embed.proj", spec.hidden_size, spec.patch_values
        kernel = (width, spec.in_channels, spec.temporal_patch_size, spec.patch_size, spec.patch_size)

        def read() -> NDArray[np.float32]:
            return self.weights.read(f"{name}.weight", kernel).reshape(width, values)

        products = self.products
        stored = self.graph.weight(f"{name}.weight", [values, width], transposed(read), products.dtype)
        product = products.product(patches, products.typed(stored, products.element))
        return self.graph.op("Add", product, self.stored("patch_embed.proj.bias", (width,)))

    def _positions(self, spec: VisionEncoderSpec) -> str:
        """Mix learned positions, ``[P, C]``: four neighbours in the table, by their shares."""
        graph = self.graph
        corners = graph.input("corners", TensorProto.INT32, ["patches", 4])
        shares = graph.input("shares", TensorProto.FLOAT, ["patches", 4])
        table = self.stored("pos_embed.weight", (spec.num_position_embeddings, spec.hidden_size))
        near = graph.op("Gather", table, corners, axis=0)
        weighted = graph.op("Mul", near, graph.op("Unsqueeze", shares, graph.constant([2], np.int64)))
        return graph.op("ReduceSum", weighted, graph.constant([1], np.int64), keepdims=0)

    def _angles(self, places: str, head_dim: int) -> tuple[str, str]:
        """Return cosine and sine ``[1, 1, P, headDim / 2]``: half of the pairs turn by row, half by column."""
        graph, half = self.graph, head_dim // 2
        frequencies = rotary_frequencies(half, _ROPE_THETA)
        column = graph.op("Cast", graph.op("Unsqueeze", places, graph.constant([2], np.int64)), to=TensorProto.FLOAT)
        angles = graph.op("Mul", column, graph.constant(frequencies.reshape(1, 1, -1)))  # [P, 2, headDim / 4]
        angles = graph.op("Reshape", angles, graph.constant([1, 1, -1, half], np.int64))
        return graph.op("Cos", angles), graph.op("Sin", angles)

    def _layer(self, spec: VisionEncoderSpec, name: str, hidden: str, cos: str, sin: str) -> str:
        graph, width, inner = self.graph, spec.hidden_size, spec.intermediate_size
        normed = self.layer_norm(f"{name}.norm1", hidden, width)
        product = self.linear([f"{name}.attn.qkv"], normed, [3 * width], width)
        turn = partial(rotated, graph, cos=cos, sin=sin)
        mixed = self.attention(product, spec.num_heads, width, mask=None, turn=turn)
        hidden = graph.op("Add", hidden, self.linear([f"{name}.attn.proj"], mixed, [width], width))
        normed = self.layer_norm(f"{name}.norm2", hidden, width)
        opened = self._tanh_gelu(self.linear([f"{name}.mlp.linear_fc1"], normed, [inner], width))
        return graph.op("Add", hidden, self.linear([f"{name}.mlp.linear_fc2"], opened, [width], inner))

    def _merged(self, spec: VisionEncoderSpec, name: str, hidden: str, *, late: bool) -> str:
        """Make one row of a square of patches, ``[1, P, C]`` to ``[P / 4, H]``; ``late`` norms the square as one."""
        graph, wide = self.graph, spec.hidden_size * spec.merged_patches
        square = graph.constant([-1, wide], np.int64)
        if late:
            hidden = self.layer_norm(f"{name}.ln_q", graph.op("Reshape", hidden, square), wide)
        else:
            hidden = graph.op("Reshape", self.layer_norm(f"{name}.ln_q", hidden, spec.hidden_size), square)
        hidden = gelu(graph, self.linear([f"{name}.mlp.0"], hidden, [wide], wide))
        return self.linear([f"{name}.mlp.2"], hidden, [spec.out_hidden_size], wide)

    def _tanh_gelu(self, value: str) -> str:
        """Apply the tanh form of the GELU."""
        graph = self.graph
        cube = graph.op("Mul", graph.op("Mul", value, value), value)
        inner = graph.op("Add", value, graph.op("Mul", cube, graph.constant(0.044715, np.float32)))
        inner = graph.op("Tanh", graph.op("Mul", inner, graph.constant(math.sqrt(2 / math.pi), np.float32)))
        half = graph.op("Mul", value, graph.constant(0.5, np.float32))
        return graph.op("Mul", half, graph.op("Add", inner, graph.constant(1.0, np.float32)))


def _halved(length: int, times: int) -> int:
    """Return what convolutions of stride 2, kernel 3 and padding 1 leave of a length."""
    for _ in range(times):
        length = (length + 1) // 2
    return length


def _waves(rows: int, width: int) -> NDArray[np.float32]:
    """Return the sinusoidal positions of a chunk, ``[1, rows, width]``: sines, then cosines."""
    step = np.log(_WAVE_PERIOD) / (width // 2 - 1)
    rates = np.exp(-np.float32(step) * np.arange(width // 2, dtype=np.float32))
    angles = np.arange(rows, dtype=np.float32)[:, None] * rates
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)[None].astype(np.float32)
