"""The codec decoder, from residual codes to a waveform, as one portable graph.

It is Qwen3-TTS's ``speech_tokenizer`` or Qwen3-Omni's ``code2wav``.
The graph is FP32 whatever the precision of the decoders (design: the codec is small and its output is heard), and it
is causal: frame ``t`` of the waveform depends on frames ``<= t`` of the codes. One graph serves a whole utterance and
a stream: what a layer must remember of the frames before is an input ``past_*``, and what it must remember of these an
output ``present_*``. Zeros and position 0 begin anew. Source of the arithmetic: the
``qwen_tts`` 0.1.1 package, ``Qwen3TTSTokenizerV2Decoder``, and ``transformers`` 4.57, ``Qwen3OmniMoeCode2Wav``. The two
differ in three things: how codes are embedded, what stands around the transformer, and where a transposed convolution
is cut. Qwen3-Omni cuts it on both sides, so the first ``samples_trimmed`` samples behind a beginning are none of its
waveform: the graph gives them, keeps them out of every convolution behind, and the runtime drops them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from trt_cpspec.config import Section
from trt_cpspec.durable import write_file
from trt_cpspec.errors import ConfigError
from trt_cpspec.rotary import rotary_frequencies

from .checkpoint import Weights
from .graph import GraphWriter
from .linear import gelu, standardised

TOKENIZER_FOLDER = "speech_tokenizer"
MODEL_TYPE = "qwen3_tts_code2wav"
OMNI_MODEL_TYPE = "qwen3_omni_code2wav"
OMNI_SAMPLE_RATE = 24000
"""Hertz; no key of a Qwen3-Omni checkpoint says it (reference: its model card's ``soundfile.write``)."""

MIN_CODE_LEN = 1
OPT_CODE_LEN = 300
MAX_CODE_LEN = 2000
"""Most frames of one call: the rotary tables in the graph end here."""

_TUPLES = ("upsample_rates", "upsampling_ratios")
_FLOATS = ("rope_theta", "rms_norm_eps")
_USAGE_FLOOR = 1e-5
_SNAKE_FLOOR = 1e-9
_LAYER_NORM_EPS = 1e-6
_END = 2**63 - 1
# Finite: a mask of -inf turns into NaN where a backend computes softmax as exp(x - max) in pieces.
_MASKED = -1e30

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpec:
    """Shape of the codec decoder; the field names are the keys of the official config.

    Attributes
    ----------
    num_quantizers : int
        Codes of one frame, ``G``. The first is the semantic one, with a projection of its own.
    codebook_size, codebook_dim : int
        Rows of a codebook, and twice their width.
    latent_dim, hidden_size, intermediate_size : int
        Channels around the transformer, in it, and in its MLP.
    num_hidden_layers, num_attention_heads, head_dim : int
        ``num_attention_heads * head_dim`` differs from ``hidden_size``, in the releases too.
    sliding_window : int
        Positions a row attends to, itself counted.
    rope_theta, rms_norm_eps : float
    decoder_dim : int
        Channels before the first decoder block; each block halves them.
    upsample_rates, upsampling_ratios : tuple of int
        Factors of the decoder blocks, and of the stages between transformer and decoder.
    output_sample_rate : int
        Hertz.
    """

    num_quantizers: int
    codebook_size: int
    codebook_dim: int
    latent_dim: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    sliding_window: int
    rope_theta: float
    rms_norm_eps: float
    decoder_dim: int
    upsample_rates: tuple[int, ...]
    upsampling_ratios: tuple[int, ...]
    output_sample_rate: int

    def __post_init__(self) -> None:
        for name in _TUPLES:
            factors = getattr(self, name)
            if not factors or min(factors) < 1:
                raise ConfigError(f"{name} is {list(factors)}, it must hold positive factors")
        halvings = 2 ** len(self.upsample_rates)
        if self.decoder_dim % halvings:
            raise ConfigError(f"decoder_dim {self.decoder_dim} cannot be halved {len(self.upsample_rates)} times")
        for name in ("codebook_dim", "head_dim"):
            if getattr(self, name) % 2:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be even")
        if self.rope_theta <= 0 or self.rms_norm_eps <= 0:
            raise ConfigError(f"rope_theta {self.rope_theta} and rms_norm_eps {self.rms_norm_eps} must be positive")

    @property
    def samples_per_frame(self) -> int:
        """Waveform samples of one frame of codes."""
        return math.prod(self.upsample_rates) * math.prod(self.upsampling_ratios)

    @property
    def samples_trimmed(self) -> int:
        """Samples that an utterance loses where transposed convolutions are cut on both sides (Qwen3-Omni)."""
        lost = 0
        for rate in self.upsample_rates:  # a stage gives (length - 1) * rate
            lost = (lost + 1) * rate
        return lost

    @property
    def progress_steps(self) -> int:
        """How often :func:`write_code2wav` calls ``progress``."""
        return 2 + self.num_hidden_layers + len(self.upsampling_ratios) + len(self.upsample_rates)


def read_codec_spec(checkpoint_dir: Path) -> CodecSpec:
    """Read and check ``checkpoint_dir/speech_tokenizer/config.json``.

    Parameters
    ----------
    checkpoint_dir : Path
        An official release.

    Raises
    ------
    ConfigError
        A key that is missing, of another type, contradictory, or of a value this graph does not implement.
    """
    top = Section.from_file(checkpoint_dir / TOKENIZER_FOLDER / "config.json")
    top.require("model_type", "qwen3_tts_tokenizer_12hz")
    section = top.section("decoder_config")
    spec = _spec_of(section, output_sample_rate=top.integer("output_sample_rate", minimum=1))
    announced = top.integer("decode_upsample_rate", minimum=1)
    if announced != spec.samples_per_frame:
        raise ConfigError(
            f"{top.where}: decode_upsample_rate is {announced}, but upsample_rates {list(spec.upsample_rates)} times "
            f"upsampling_ratios {list(spec.upsampling_ratios)} is {spec.samples_per_frame}"
        )
    return spec


def read_omni_codec_spec(section: Section) -> CodecSpec:
    """Read and check a Qwen3-Omni checkpoint's ``code2wav_config``; errors as of :func:`read_codec_spec`."""
    hidden, heads = section.integer("hidden_size", minimum=1), section.integer("num_attention_heads", minimum=1)
    given = {} if section.has("head_dim") else {"head_dim": hidden // heads}
    spec = _spec_of(section, output_sample_rate=OMNI_SAMPLE_RATE, latent_dim=hidden, **given)
    if math.prod(spec.upsampling_ratios) == 1:
        raise ConfigError(
            f"{section.where}: upsampling_ratios is {list(spec.upsampling_ratios)}, one must be 2 or more: else the "
            f"decoder cuts off a frame and more"
        )
    return spec


def _spec_of(section: Section, **given: int) -> CodecSpec:
    """Read a codec's config, but for the fields that are given."""
    _check_supported(section)
    values: dict[str, Any] = dict(given)
    values |= {name: section.integers(name) for name in _TUPLES}
    values |= {name: section.number(name) for name in _FLOATS}
    for field in fields(CodecSpec):
        if field.name not in values:
            minimum = 2 if field.name == "num_quantizers" else 1
            values[field.name] = section.integer(field.name, minimum=minimum)
    section.require("num_key_value_heads", values["num_attention_heads"])
    try:
        return CodecSpec(**values)
    except ConfigError as error:
        raise ConfigError(f"{section.where}: {error}") from error


def _check_supported(section: Section) -> None:
    section.require("hidden_act", "silu")
    section.require("attention_bias", False)
    # The reference knows one semantic quantizer and never reads this key: it may be absent, not different.
    if section.has("num_semantic_quantizers"):
        section.require("num_semantic_quantizers", 1)
    for key in ("rope_scaling", "rope_parameters"):
        if section.has(key):
            raise ConfigError(
                f"{section.where}: {key} is {section.values[key]!r:.80}, only plain rope_theta is supported"
            )


def write_code2wav(checkpoint_dir: Path, out_dir: Path, progress: Callable[[], None] = lambda: None) -> None:
    """Write the codec decoder of a checkpoint as ``model.onnx``, ``model.onnx.data`` and ``config.json``.

    The graph maps ``codes [B, G, T] int32`` to ``waveform [B, 1, T * samples_per_frame] float32``, for any ``B`` and
    ``1 <= T``, ``position + T <= MAX_CODE_LEN``. ``position [1] int32`` counts the frames since the beginning, and
    every ``past_*`` is the ``present_*`` of the call before, or zeros at position 0. It does not clip to [-1, 1],
    because TensorRT-RTX fails on a final Clip, and it does not check the codes: one that is out of range reads a row of
    another codebook.

    Parameters
    ----------
    checkpoint_dir : Path
        An official release; its ``speech_tokenizer`` folder is read.
    out_dir : Path
        Created when it does not exist.
    progress : callable
        Called after each part of the graph, ``CodecSpec.progress_steps`` times in all.

    Raises
    ------
    ConfigError
        The codec's config or weights are missing, damaged or contradict each other.
    """
    spec = read_codec_spec(checkpoint_dir)
    _write(
        _Decoder, Weights(checkpoint_dir / TOKENIZER_FOLDER), spec, out_dir, _engine_config(MODEL_TYPE, spec), progress
    )


def write_omni_code2wav(
    weights: Weights, spec: CodecSpec, out_dir: Path, progress: Callable[[], None] = lambda: None
) -> None:
    """Write the codec decoder of a Qwen3-Omni checkpoint, with the files, limits and errors of :func:`write_code2wav`.

    The first ``samples_trimmed`` samples behind a beginning are to be dropped.

    Parameters
    ----------
    weights : Weights
        Of the checkpoint.
    spec : CodecSpec
    out_dir : Path
    progress : callable
    """
    config = _engine_config(OMNI_MODEL_TYPE, spec) | {"samples_trimmed": spec.samples_trimmed}
    _write(_OmniDecoder, weights, spec, out_dir, config, progress)


def _write(
    writer: type[_Decoder],
    weights: Weights,
    spec: CodecSpec,
    out_dir: Path,
    config: dict[str, Any],
    progress: Callable[[], None],
) -> None:
    out_dir.mkdir(parents=True, exist_ok=True)
    with GraphWriter(out_dir, config["model_type"]) as graph:
        decoder = writer(graph, weights, spec, progress)
        decoder.build()
        graph.save()
    config = config | {"state_values": decoder.state_values}
    write_file(out_dir / "config.json", (json.dumps(config, indent=2) + "\n").encode())


def _engine_config(model_type: str, spec: CodecSpec) -> dict[str, Any]:
    config = asdict(spec)
    sample_rate = config.pop("output_sample_rate")
    return {
        "model_type": model_type,
        "precision": "fp32",
        "sample_rate": sample_rate,
        "samples_per_frame": spec.samples_per_frame,
        "carries_state": True,
        "code2wav_config": config,
        "builder_config": {
            "min_code_len": MIN_CODE_LEN,
            "opt_code_len": OPT_CODE_LEN,
            "max_code_len": MAX_CODE_LEN,
        },
    }


class _Decoder:
    """Writes the nodes, front to back. Values are ``[B, C, T]`` between convolutions, ``[B, T, C]`` between MatMuls.

    Methods take and return names of values. ``name`` is a tensor's official name without its leading :attr:`prefix`.
    """

    prefix = "decoder."
    cut_left = False
    """Whether transposed convolutions lose their head: the output before the second of their inputs."""

    def __init__(self, graph: GraphWriter, weights: Weights, spec: CodecSpec, progress: Callable[[], None]) -> None:
        self.graph = graph
        self.weights = weights
        self.spec = spec
        self.progress = progress
        self.position = ""
        self.tails = 0
        self.state_values = 0  # that a call leaves for the next
        self.samples_lost = 0  # behind a beginning, at the rate of the value at hand

    def build(self) -> None:
        """Write the graph from ``codes`` to ``waveform``."""
        spec = self.spec
        codes = self.graph.input("codes", TensorProto.INT32, ["batch", spec.num_quantizers, "frames"])
        self.position = self.graph.input("position", TensorProto.INT32, [1])
        value = self.embedded(codes)
        self.progress()
        places = self.places(codes)
        value = self.swapped(self.transformer(value, places))
        for stage, factor in enumerate(spec.upsampling_ratios):
            value = self.upsampled(f"upsample.{stage}", value, factor)
            self.progress()
        value = self.causal_conv("decoder.0.conv", value, (spec.decoder_dim, spec.latent_dim, 7))
        channels, factor = spec.decoder_dim, math.prod(spec.upsampling_ratios)
        heard = None
        for block, rate in enumerate(spec.upsample_rates, start=1):
            factor *= rate
            if self.cut_left:
                self.samples_lost = (self.samples_lost + 1) * rate
                heard = self.heard(places, factor)
            value = self.decoder_block(f"decoder.{block}.block", value, channels, rate, heard)
            channels //= 2
            self.progress()
        last = len(spec.upsample_rates) + 1
        value = self.silenced(self.snake(f"decoder.{last}", value, channels), heard)
        self.causal_conv(f"decoder.{last + 1}.conv", value, (1, channels, 7), output="waveform")
        self.graph.rename_output("waveform", TensorProto.FLOAT, ["batch", 1, "samples"])
        self.progress()

    # -- codebooks --------------------------------------------------------------------------------------------------

    def embedded(self, codes: str) -> str:
        """Return what the transformer gets of each frame: ``[B, G, T] int32 -> [B, T, latent_dim]``."""
        value = self.swapped(self.quantized(codes))
        value = self.causal_conv("pre_conv.conv", value, (self.spec.latent_dim, self.spec.codebook_dim, 3))
        return self.swapped(value)

    def quantized(self, codes: str) -> str:
        """Sum the codebook rows of each frame: ``[B, G, T] int32 -> [B, T, codebook_dim]``."""
        graph, spec = self.graph, self.spec
        width = spec.codebook_dim // 2
        books = self._codebook_names()
        shape = (spec.num_quantizers * spec.codebook_size, width)
        table = graph.weight("codebooks", shape, (self._codebook(book, width) for book in books))
        vectors = self.looked_up(table, codes)
        first = graph.op("Gather", vectors, graph.constant(0, np.int32), axis=1)
        rest = graph.op("ReduceSum", self.sliced(vectors, 1, 1, spec.num_quantizers), self.axes(1), keepdims=0)
        parts = []
        for group, value in (("rvq_first", first), ("rvq_rest", rest)):
            name = f"quantizer.{group}.output_proj"
            kernel = self.read(f"{name}.weight", (spec.codebook_dim, width, 1))
            parts.append(self.matmul(name, value, kernel[:, :, 0]))
        return graph.op("Add", *parts)

    def looked_up(self, table: str, codes: str) -> str:
        """Look each code up in its codebook: ``[B, G, T] int32 -> [B, G, T, width]``."""
        # All codebooks are one table, so that one Gather serves a frame: code g looks into rows g * codebook_size + ...
        offsets = np.arange(self.spec.num_quantizers, dtype=np.int32) * self.spec.codebook_size
        rows = self.graph.op("Add", codes, self.graph.constant(offsets.reshape(1, -1, 1)))
        return self.graph.op("Gather", table, rows, axis=0)

    def _codebook_names(self) -> list[str]:
        rest = (f"quantizer.rvq_rest.vq.layers.{i}._codebook" for i in range(self.spec.num_quantizers - 1))
        return ["quantizer.rvq_first.vq.layers.0._codebook", *rest]

    def _codebook(self, name: str, width: int) -> Array:
        """Return the rows of one codebook; a row that training never used has usage 0, which the floor keeps finite."""
        usage = self.read(f"{name}.cluster_usage", (self.spec.codebook_size,))
        rows = self.read(f"{name}.embedding_sum", (self.spec.codebook_size, width))
        rows /= np.maximum(usage, np.float32(_USAGE_FLOOR))[:, None]
        return rows

    # -- transformer ------------------------------------------------------------------------------------------------

    def places(self, codes: str) -> str:
        """Return the position of each frame, ``[T] int32``."""
        graph = self.graph
        frames = graph.op("Gather", graph.op("Shape", codes), self.axes(2), axis=0)  # [1] int64
        offsets = self.sliced(graph.constant(np.arange(MAX_CODE_LEN), np.int32), 0, 0, frames)
        return graph.op("Add", offsets, self.position)

    def transformer(self, value: str, places: str) -> str:
        """Apply the pre-transformer: ``[B, T, latent_dim] -> [B, T, latent_dim]``."""
        spec, name = self.spec, "pre_transformer"
        value = self.linear(f"{name}.input_proj", value, (spec.hidden_size, spec.latent_dim), bias=True)
        value = self.transformer_layers(value, places)
        return self.linear(f"{name}.output_proj", value, (spec.latent_dim, spec.hidden_size), bias=True)

    def transformer_layers(self, value: str, places: str) -> str:
        """Apply the layers of the pre-transformer and its norm: ``[B, T, hidden_size] -> [B, T, hidden_size]``."""
        rotary, mask = self.positional(places)
        for layer in range(self.spec.num_hidden_layers):
            value = self.transformer_layer(layer, value, rotary, mask)
            self.progress()
        return self.rms_norm("pre_transformer.norm", value)

    def positional(self, places: str) -> tuple[tuple[str, str], str]:
        """Return the rotary ``(cos, sin)``, each ``[T, head_dim / 2]``, and the additive mask ``[T, P + T]``.

        ``P``, one less than the window, is the number of keys that come from the call before. Cosine and sine are
        tables, not nodes: a GPU's fast trigonometry is poor at angles of thousands of radians.
        """
        graph, kept = self.graph, self.spec.sliding_window - 1
        tables = rotary_tables(self.spec)
        cos, sin = (
            graph.op("Gather", graph.weight(f"rotary_{kind}", table.shape, [table]), places, axis=0)
            for kind, table in zip(("cos", "sin"), tables, strict=True)
        )
        before = graph.constant(np.arange(-kept, 0), np.int32)
        keys = graph.op("Concat", graph.op("Add", before, self.position), places, axis=0) if kept else places
        distance = graph.op("Sub", graph.op("Unsqueeze", places, self.axes(1)), keys)  # [T, P + T] query minus key
        future = graph.op("Less", distance, graph.constant(0, np.int32))
        too_old = graph.op("Greater", distance, graph.constant(kept, np.int32))
        not_there = graph.op("Less", keys, graph.constant(0, np.int32))
        hidden = graph.op("Or", graph.op("Or", future, too_old), not_there)
        return (cos, sin), graph.op("Where", hidden, self.number(_MASKED), self.number(0.0))

    def transformer_layer(self, layer: int, value: str, rotary: tuple[str, str], mask: str) -> str:
        """Apply one layer: ``[B, T, hidden_size] -> [B, T, hidden_size]``."""
        spec, graph, name = self.spec, self.graph, f"pre_transformer.layers.{layer}"
        normed = self.rms_norm(f"{name}.input_layernorm", value)
        value = graph.op("Add", value, self.attention(layer, normed, rotary, mask))
        normed = self.rms_norm(f"{name}.post_attention_layernorm", value)
        wide, narrow = (spec.intermediate_size, spec.hidden_size), (spec.hidden_size, spec.intermediate_size)
        gate = self.linear(f"{name}.mlp.gate_proj", normed, wide)
        up = self.linear(f"{name}.mlp.up_proj", normed, wide)
        gated = graph.op("Mul", graph.op("Mul", gate, graph.op("Sigmoid", gate)), up)
        scale = self.read(f"{name}.mlp_layer_scale.scale", (spec.hidden_size,))
        return graph.op("Add", value, self.linear(f"{name}.mlp.down_proj", gated, narrow, scale=scale))

    def attention(self, layer: int, value: str, rotary: tuple[str, str], mask: str) -> str:
        """Attend over the sliding window, layer scale included: ``[B, T, hidden_size] -> [B, T, hidden_size]``."""
        spec, graph, name = self.spec, self.graph, f"pre_transformer.layers.{layer}"
        width = spec.num_attention_heads * spec.head_dim
        # The softmax scale goes into the query weights, the layer scale into the output weights: two passes saved.
        scaling = np.full(width, spec.head_dim**-0.5, np.float32)
        inward = (width, spec.hidden_size)
        query = self.heads(self.linear(f"{name}.self_attn.q_proj", value, inward, scale=scaling))
        key = self.heads(self.linear(f"{name}.self_attn.k_proj", value, inward))
        attended = self.heads(self.linear(f"{name}.self_attn.v_proj", value, inward))
        query, key = self.rotated(query, rotary), self.rotated(key, rotary)
        kept, inner = spec.sliding_window - 1, (spec.num_attention_heads, spec.head_dim)
        key = self.carried(f"key_{layer}", key, kept, 2, (inner[0], kept, inner[1]))
        attended = self.carried(f"value_{layer}", attended, kept, 2, (inner[0], kept, inner[1]))
        scores = graph.op("MatMul", query, graph.op("Transpose", key, perm=[0, 1, 3, 2]))
        scores = graph.op("Softmax", graph.op("Add", scores, mask), axis=-1)
        merged = graph.op("Transpose", graph.op("MatMul", scores, attended), perm=[0, 2, 1, 3])
        merged = graph.op("Reshape", merged, graph.constant([0, -1, width], np.int64))
        scale = self.read(f"{name}.self_attn_layer_scale.scale", (spec.hidden_size,))
        return self.linear(f"{name}.self_attn.o_proj", merged, (spec.hidden_size, width), scale=scale)

    def heads(self, value: str) -> str:
        """``[B, T, heads * head_dim] -> [B, heads, T, head_dim]``."""
        shape = self.graph.constant([0, -1, self.spec.num_attention_heads, self.spec.head_dim], np.int64)
        return self.graph.op("Transpose", self.graph.op("Reshape", value, shape), perm=[0, 2, 1, 3])

    def rotated(self, value: str, rotary: tuple[str, str]) -> str:
        """Rotate ``[B, heads, T, head_dim]`` by position; pairs are the two halves of a head."""
        op, half = self.graph.op, self.spec.head_dim // 2
        cos, sin = rotary
        left, right = self.sliced(value, 3, 0, half), self.sliced(value, 3, half, 2 * half)
        turned_left = op("Sub", op("Mul", left, cos), op("Mul", right, sin))
        turned_right = op("Add", op("Mul", right, cos), op("Mul", left, sin))
        return op("Concat", turned_left, turned_right, axis=-1)

    def rms_norm(self, name: str, value: str) -> str:
        """Normalise the last axis by its root mean square."""
        op = self.graph.op
        mean = op("ReduceMean", op("Mul", value, value), axes=[-1], keepdims=1)
        root = op("Sqrt", op("Add", mean, self.number(self.spec.rms_norm_eps)))
        return op("Mul", op("Div", value, root), self.stored(f"{name}.weight", (self.spec.hidden_size,)))

    # -- upsampling and waveform ------------------------------------------------------------------------------------

    def upsampled(self, name: str, value: str, factor: int) -> str:
        """Stretch time and apply a ConvNeXt block: ``[B, latent_dim, T] -> [B, latent_dim, T * factor]``."""
        channels, op = self.spec.latent_dim, self.graph.op
        value = self.causal_transposed(f"{name}.0.conv", value, (channels, channels, factor), factor)
        name = f"{name}.1"
        inner = self.causal_conv(f"{name}.dwconv.conv", value, (channels, 1, 7), groups=channels)
        inner = self.layer_norm(f"{name}.norm", self.swapped(inner))
        inner = self.linear(f"{name}.pwconv1", inner, (4 * channels, channels), bias=True)
        gamma = self.read(f"{name}.gamma", (channels,))
        inner = self.linear(
            f"{name}.pwconv2", gelu(self.graph, inner), (channels, 4 * channels), bias=True, scale=gamma
        )
        return op("Add", value, self.swapped(inner))

    def layer_norm(self, name: str, value: str) -> str:
        """Normalise the last axis, ``latent_dim`` wide, by mean and variance."""
        op, shape = self.graph.op, (self.spec.latent_dim,)
        normed = standardised(self.graph, value, _LAYER_NORM_EPS)
        scaled = op("Mul", normed, self.stored(f"{name}.weight", shape))
        return op("Add", scaled, self.stored(f"{name}.bias", shape))

    def heard(self, places: str, factor: int) -> str:
        """Return 0 for the samples that a cut on the left takes away, else 1: ``[1, 1, T * factor]``."""
        graph = self.graph
        first = graph.op("Unsqueeze", graph.op("Less", places, graph.constant(1, np.int32)), self.axes(1))  # [T, 1]
        samples = graph.constant(np.arange(factor)[None], np.int32)
        head = graph.op("Less", samples, graph.constant(self.samples_lost, np.int32))  # [1, factor]
        lost = graph.op("And", first, head)  # [T, factor]: less than a frame is lost, of the first one
        kept = graph.op("Where", lost, self.number(0.0), self.number(1.0))
        return graph.op("Reshape", kept, graph.constant([1, 1, -1], np.int64))

    def silenced(self, value: str, heard: str | None) -> str:
        """Zero what is not heard, so that the next convolution finds there what it finds before a beginning."""
        return value if heard is None else self.graph.op("Mul", value, heard)

    def decoder_block(self, name: str, value: str, channels: int, rate: int, heard: str | None) -> str:
        """Stretch time by ``rate`` and halve the channels: ``[B, C, T] -> [B, C / 2, T * rate]``."""
        narrow = channels // 2
        value = self.snake(f"{name}.0", value, channels)
        value = self.causal_transposed(f"{name}.1.conv", value, (channels, narrow, 2 * rate), rate)
        for unit, dilation in enumerate((1, 3, 9), start=2):
            inner = self.silenced(self.snake(f"{name}.{unit}.act1", value, narrow), heard)
            inner = self.causal_conv(f"{name}.{unit}.conv1.conv", inner, (narrow, narrow, 7), dilation=dilation)
            inner = self.snake(f"{name}.{unit}.act2", inner, narrow)
            inner = self.causal_conv(f"{name}.{unit}.conv2.conv", inner, (narrow, narrow, 1))
            value = self.graph.op("Add", inner, value)
        return value

    def snake(self, name: str, value: str, channels: int) -> str:
        """``x + sin(x * exp(alpha))^2 / (exp(beta) + 1e-9)`` per channel; the checkpoint stores logarithms."""
        graph, shape = self.graph, (1, channels, 1)
        alpha = np.exp(self.read(f"{name}.alpha", (channels,))).reshape(shape)
        beta = np.exp(self.read(f"{name}.beta", (channels,))).reshape(shape)
        gain = graph.weight(f"{name}.beta", shape, [np.float32(1) / (beta + np.float32(_SNAKE_FLOOR))])
        wave = graph.op("Sin", graph.op("Mul", value, graph.weight(f"{name}.alpha", shape, [alpha])))
        return graph.op("Add", value, graph.op("Mul", graph.op("Mul", wave, wave), gain))

    # -- layers -----------------------------------------------------------------------------------------------------

    def causal_conv(
        self, name: str, value: str, shape: tuple[int, int, int], *, dilation: int = 1, groups: int = 1, **kwargs: str
    ) -> str:
        """Convolve with what came before on the left, so that T stays and no frame sees its future."""
        kernel, bias = self.stored(f"{name}.weight", shape), self.stored(f"{name}.bias", shape[:1])
        attributes: dict[str, Any] = {"kernel_shape": [shape[2]], "dilations": [dilation], "group": groups}
        joined = self.behind_tail(value, (shape[2] - 1) * dilation, shape[1] * groups)
        return self.graph.op("Conv", joined, kernel, bias, **attributes, **kwargs)

    def causal_transposed(self, name: str, value: str, shape: tuple[int, int, int], rate: int) -> str:
        """Stretch time by ``rate``, exactly: what hangs over on the right belongs to the frames that follow."""
        kernel, bias = self.stored(f"{name}.weight", shape), self.stored(f"{name}.bias", (shape[1],))
        tail = -(-shape[2] // rate) - 1
        joined = self.behind_tail(value, tail, shape[0])
        value = self.graph.op("ConvTranspose", joined, kernel, bias, kernel_shape=[shape[2]], strides=[rate])
        return self.sliced(value, 2, tail * rate, rate - shape[2]) if tail else value

    def behind_tail(self, value: str, length: int, channels: int) -> str:
        """Put the last ``length`` samples of the call before in front: ``[B, C, T] -> [B, C, length + T]``."""
        if not length:
            return value
        self.tails += 1
        return self.carried(f"tail_{self.tails - 1}", value, length, 2, (channels, length))

    def carried(self, name: str, value: str, length: int, axis: int, shape: tuple[int, ...]) -> str:
        """Put ``past_<name>`` in front of a value, and leave its last ``length`` as ``present_<name>``.

        ``shape`` is theirs, but for the batch.
        """
        if not length:
            return value
        extents: list[int | str] = ["batch", *shape]
        self.state_values += math.prod(shape)
        past = self.graph.input(f"past_{name}", TensorProto.FLOAT, extents)
        joined = self.graph.op("Concat", past, value, axis=axis)
        ends = self.axes(-length), self.axes(_END), self.axes(axis)
        present = self.graph.op("Slice", joined, *ends, output=f"present_{name}")
        self.graph.rename_output(present, TensorProto.FLOAT, extents)
        return joined

    def linear(
        self, name: str, value: str, shape: tuple[int, int], *, bias: bool = False, scale: Array | None = None
    ) -> str:
        """Apply a ``[out, in]`` linear layer, its outputs multiplied by ``scale [out]``."""
        factor = np.ones(shape[0], np.float32) if scale is None else scale
        value = self.matmul(name, value, self.read(f"{name}.weight", shape) * factor[:, None])
        if not bias:
            return value
        offset = self.read(f"{name}.bias", shape[:1]) * factor
        return self.graph.op("Add", value, self.graph.weight(f"{name}.bias", shape[:1], [offset]))

    def matmul(self, name: str, value: str, matrix: Array) -> str:
        """Multiply by an ``[out, in]`` matrix, stored transposed as MatMul wants it."""
        weight = self.graph.weight(f"{name}.weight", matrix.shape[::-1], [np.ascontiguousarray(matrix.T)])
        return self.graph.op("MatMul", value, weight)

    # -- small helpers ----------------------------------------------------------------------------------------------

    def read(self, name: str, shape: tuple[int, ...]) -> Array:
        """Read a tensor of the codec decoder."""
        return self.weights.read(f"{self.prefix}{name}", shape)

    def stored(self, name: str, shape: tuple[int, ...]) -> str:
        """Stream a tensor into the graph as it is."""
        return self.graph.weight(name, shape, self.weights.chunks(f"{self.prefix}{name}", shape))

    def swapped(self, value: str) -> str:
        """Swap the last two axes of three."""
        return self.graph.op("Transpose", value, perm=[0, 2, 1])

    def sliced(self, value: str, axis: int, start: int, stop: int | str) -> str:
        """Slice one axis; ``stop`` is a number, or the name of a ``[1] int64`` value."""
        end = self.axes(stop) if isinstance(stop, int) else stop
        return self.graph.op("Slice", value, self.axes(start), end, self.axes(axis))

    def axes(self, number: int) -> str:
        """Return a ``[1] int64`` constant."""
        return self.graph.constant([number], np.int64)

    def number(self, value: float) -> str:
        """Return a scalar float32 constant."""
        return self.graph.constant(value, np.float32)


class _OmniDecoder(_Decoder):
    """The decoder of Qwen3-Omni: codes are embedded, not dequantised, and the transformer has their width."""

    prefix = "code2wav."
    cut_left = True

    def embedded(self, codes: str) -> str:
        """Average the embeddings of a frame's codes: ``[B, G, T] int32 -> [B, T, hidden_size]``."""
        spec = self.spec
        table = self.stored("code_embedding.weight", (spec.num_quantizers * spec.codebook_size, spec.hidden_size))
        return self.graph.op("ReduceMean", self.looked_up(table, codes), axes=[1], keepdims=0)

    def transformer(self, value: str, places: str) -> str:
        """Apply the pre-transformer: ``[B, T, hidden_size] -> [B, T, hidden_size]``."""
        return self.transformer_layers(value, places)


def rotary_tables(spec: CodecSpec) -> tuple[Array, Array]:
    """Return cosine and sine of every angle, each ``[MAX_CODE_LEN, head_dim / 2] f32``.

    The angles are products of float32 numbers, as in the reference: at position 2000 a rounding differs by 1e-4.
    """
    frequencies = rotary_frequencies(spec.head_dim, spec.rope_theta)
    angles = np.arange(MAX_CODE_LEN, dtype=np.float32)[:, None] * frequencies
    return np.cos(angles), np.sin(angles)
