"""The model in torch: Talker, CodePredictor and codec with the names and shapes of the checkpoint's tensors.

``Talker(...).state_dict()`` has the keys of ``model.safetensors`` without their leading ``talker.``, and
``Decoder`` of the codec those of ``speech_tokenizer/model.safetensors`` without ``decoder.``. The arithmetic is that of
the graphs of ``trt_cpspec.builder`` (``decoder.py``, ``code2wav.py``); ``export.py`` compares the two.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  the name that torch's own documentation uses
from torch import Tensor, nn


def read_config(work: Path) -> dict[str, Any]:
    """Return the config of the checkpoint."""
    config: dict[str, Any] = json.loads((work / "skeleton" / "config.json").read_text(encoding="utf-8"))
    return config


def read_codec_config(work: Path) -> dict[str, Any]:
    """Return the config of the codec's decoder."""
    path = work / "skeleton" / "speech_tokenizer" / "config.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["decoder_config"]
    return config


# ---- the transformer of Talker and CodePredictor --------------------------------------------------------------------


class Norm(nn.Module):
    """RMSNorm, computed in FP32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, value: Tensor) -> Tensor:
        return F.rms_norm(value.float(), self.weight.shape, self.weight, self.eps)


def rotary(length: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of each position, ``[length, head_dim / 2]``."""
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * (1.0 / theta**exponents)
    return angles.cos(), angles.sin()


def rotated(heads: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate ``[B, heads, T, head_dim]``; pairs are the two halves of a head."""
    left, right = heads.float().chunk(2, -1)
    cos, sin = turn
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class Attention(nn.Module):
    """Causal grouped-query attention with a norm of each query and key head."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, size = config["hidden_size"], config["head_dim"]
        self.heads, self.kv_heads, self.size = config["num_attention_heads"], config["num_key_value_heads"], size
        self.q_proj = nn.Linear(hidden, self.heads * size, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * size, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * size, bias=False)
        self.o_proj = nn.Linear(self.heads * size, hidden, bias=False)
        self.q_norm, self.k_norm = Norm(size, config["rms_norm_eps"]), Norm(size, config["rms_norm_eps"])

    def forward(self, hidden: Tensor, turn: tuple[Tensor, Tensor], watched: int) -> tuple[Tensor, Tensor | None]:
        """Return the output, and the log-shares ``[B, watched, T, T]`` of the first heads."""
        batch, length, _ = hidden.shape
        query, key, value = (
            project(hidden).view(batch, length, -1, self.size).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotated(self.q_norm(query), turn), rotated(self.k_norm(key), turn)
        key, value = (part.repeat_interleave(self.heads // self.kv_heads, 1) for part in (key, value))
        query, key = query.to(value.dtype), key.to(value.dtype)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        shares = None
        if watched:
            scores = (query[:, :watched] @ key[:, :watched].transpose(-1, -2)).float() / math.sqrt(self.size)
            future = torch.ones(length, length, dtype=torch.bool, device=hidden.device).triu(1)
            shares = scores.masked_fill(future, -math.inf).log_softmax(-1)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1)), shares


class GatedMlp(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Layer(nn.Module):
    """One layer; ``dropout`` acts on what it adds to the residual stream."""

    def __init__(self, config: dict[str, Any], dropout: float) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm, self.post_attention_layernorm = Norm(hidden, eps), Norm(hidden, eps)
        self.self_attn, self.mlp = Attention(config), GatedMlp(hidden, config["intermediate_size"])
        self.dropout = dropout

    def forward(self, hidden: Tensor, turn: tuple[Tensor, Tensor], watched: int) -> tuple[Tensor, Tensor | None]:
        added, shares = self.self_attn(self.input_layernorm(hidden), turn, watched)
        hidden = hidden + F.dropout(added.float(), self.dropout, self.training)
        added = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + F.dropout(added.float(), self.dropout, self.training), shares


class Stack(nn.Module):
    """The layers and the final norm; what is embedded around them are attributes that the owner adds."""

    def __init__(self, config: dict[str, Any], dropout: float) -> None:
        super().__init__()
        self.head_dim, self.theta = config["head_dim"], float(config["rope_theta"])
        self.layers = nn.ModuleList(Layer(config, dropout) for _ in range(config["num_hidden_layers"]))
        self.norm = Norm(config["hidden_size"], config["rms_norm_eps"])

    def run(self, rows: Tensor, watched_layer: int = -1, watched: int = 0) -> tuple[Tensor, Tensor | None]:
        """Return the normed hidden states ``[B, T, H]`` of input rows, and the log-shares of one layer's heads."""
        turn = rotary(rows.shape[1], self.head_dim, self.theta, rows.device)
        seen = None
        hidden = rows.float()
        for index, layer in enumerate(self.layers):
            hidden, shares = layer(hidden, turn, watched if index == watched_layer else 0)
            seen = shares if shares is not None else seen
        return self.norm(hidden), seen


class CodePredictor(nn.Module):
    """The inner loop's model, trained on whole frames: each depth's head on its own position."""

    def __init__(self, talker: dict[str, Any], dropout: float) -> None:
        super().__init__()
        config = talker["code_predictor_config"]
        depths, vocab, width = talker["num_code_groups"] - 1, config["vocab_size"], talker["hidden_size"]
        self.model = Stack(config, dropout)
        self.model.codec_embedding = nn.ModuleList(nn.Embedding(vocab, width) for _ in range(depths))
        self.lm_head = nn.ModuleList(nn.Linear(config["hidden_size"], vocab, bias=False) for _ in range(depths))
        if config["hidden_size"] != width:
            self.small_to_mtp_projection = nn.Linear(width, config["hidden_size"])

    def hidden_states(self, rows: Tensor) -> Tensor:
        """Return ``[n, G - 1, C]``, what each head reads, of the rows ``[n, G, Ht]`` (see :meth:`rows`)."""
        if hasattr(self, "small_to_mtp_projection"):
            rows = self.small_to_mtp_projection(rows)
        return self.model.run(rows)[0][:, 1:]

    def rows(self, talker_hidden: Tensor, first: Tensor, codes: Tensor) -> Tensor:
        """Return the inputs ``[n, G, Ht]`` of frames: Talker state, embedded code 0 ``first``, codes 1 to G - 2."""
        embedded = [table(codes[:, depth + 1]) for depth, table in enumerate(list(self.model.codec_embedding)[:-1])]
        return torch.stack([talker_hidden, first, *embedded], 1)

    def heads(self) -> Tensor:
        """Return the heads, ``[G - 1, V, C]``."""
        return torch.stack([head.weight for head in self.lm_head])

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply each head to its own position: ``[n, G - 1, C]`` to ``[G - 1, n, V]``."""
        return torch.bmm(hidden.transpose(0, 1), self.heads().to(hidden.dtype).transpose(1, 2)).float()


class _TextProjection(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = nn.Linear(width, width), nn.Linear(width, hidden)

    def forward(self, value: Tensor) -> Tensor:
        return self.linear_fc2(F.silu(self.linear_fc1(value)))


class Talker(nn.Module):
    """The outer loop's model, with its CodePredictor."""

    def __init__(self, config: dict[str, Any], dropout: float = 0.0) -> None:
        super().__init__()
        talker = config["talker_config"]
        hidden, vocab, text = talker["hidden_size"], talker["vocab_size"], talker["text_hidden_size"]
        self.groups: int = talker["num_code_groups"]
        self.model = Stack(talker, dropout)
        self.model.codec_embedding = nn.Embedding(vocab, hidden)
        self.model.text_embedding = nn.Embedding(talker["text_vocab_size"], text)
        self.text_projection = _TextProjection(text, hidden)
        self.codec_head = nn.Linear(hidden, vocab, bias=False)
        self.code_predictor = CodePredictor(talker, dropout)
        self.apply(_initialise)

    def embed_text(self, ids: Tensor) -> Tensor:
        """Return projected text tokens."""
        return self.text_projection(self.model.text_embedding(ids))

    def embed_frames(self, codes: Tensor) -> Tensor:
        """Return the sum of the embedded codes of frames, ``[..., G]`` to ``[..., H]``."""
        tables = [self.model.codec_embedding, *self.code_predictor.model.codec_embedding]
        total = tables[0](codes[..., 0])
        for depth in range(1, self.groups):
            total = total + tables[depth](codes[..., depth])
        return total


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        std = 0.1 if isinstance(module, nn.Embedding) else 1 / math.sqrt(module.weight.shape[1])
        nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


# ---- the codec ------------------------------------------------------------------------------------------------------


class CausalConv(nn.Module):
    """A convolution with zeros on the left only."""

    def __init__(self, inward: int, outward: int, kernel: int, *, dilation: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inward, outward, kernel, dilation=dilation, groups=groups)
        self.left = (kernel - 1) * dilation

    def forward(self, value: Tensor) -> Tensor:
        return self.conv(F.pad(value, (self.left, 0)))


class CausalTransposed(nn.Module):
    """A transposed convolution whose overhang is cut on the right."""

    def __init__(self, inward: int, outward: int, kernel: int, rate: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(inward, outward, kernel, rate)
        self.tail = kernel - rate

    def forward(self, value: Tensor) -> Tensor:
        value = self.conv(value)
        return value[..., : -self.tail] if self.tail else value


def snake(value: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """Return ``x + sin(x exp(alpha))^2 / exp(beta)`` of ``[B, C, T]``."""
    wave = torch.sin(value * alpha.exp()[:, None])
    return value + wave * wave / (beta.exp()[:, None] + 1e-9)


class Snake(nn.Module):
    """:func:`snake` with an alpha and a beta for each channel."""

    kernel = staticmethod(snake)
    """Training may put a compiled one here: without, it moves the widest tensors of all some 40 times a step."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha, self.beta = nn.Parameter(torch.zeros(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, value: Tensor) -> Tensor:
        return Snake.kernel(value, self.alpha, self.beta)


class _Scale(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((channels,), 0.3))


class _CodecAttention(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, width = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden, width, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(width, hidden, bias=False)
        self.size = config["head_dim"]

    def forward(self, hidden: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        query, key, value = (
            project(hidden).view(batch, length, -1, self.size).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(rotated(query, turn), rotated(key, turn), value, mask)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class _CodecLayer(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm, self.post_attention_layernorm = Norm(hidden, eps), Norm(hidden, eps)
        self.self_attn, self.mlp = _CodecAttention(config), GatedMlp(hidden, config["intermediate_size"])
        self.self_attn_layer_scale, self.mlp_layer_scale = _Scale(hidden), _Scale(hidden)

    def forward(self, hidden: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        added = self.self_attn(self.input_layernorm(hidden), turn, mask)
        hidden = hidden + added * self.self_attn_layer_scale.scale
        return hidden + self.mlp(self.post_attention_layernorm(hidden)) * self.mlp_layer_scale.scale


class _CodecTransformer(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, latent = config["hidden_size"], config["latent_dim"]
        self.input_proj, self.output_proj = nn.Linear(latent, hidden), nn.Linear(hidden, latent)
        self.layers = nn.ModuleList(_CodecLayer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = Norm(hidden, config["rms_norm_eps"])
        self.size, self.theta = config["head_dim"], float(config["rope_theta"])
        self.window: int = config["sliding_window"]

    def forward(self, value: Tensor) -> Tensor:
        hidden, length = self.input_proj(value), value.shape[1]
        turn = rotary(length, self.size, self.theta, value.device)
        places = torch.arange(length, device=value.device)
        distance = places[:, None] - places
        mask = (distance >= 0) & (distance < self.window)
        for layer in self.layers:
            hidden = layer(hidden, turn, mask)
        return self.output_proj(self.norm(hidden))


class ConvNext(nn.Module):
    """A ConvNeXt block; causal in the decoder."""

    def __init__(self, channels: int, kernel: int = 7, *, causal: bool = True) -> None:
        super().__init__()
        self.dwconv = CausalConv(channels, channels, kernel, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.pwconv1, self.pwconv2 = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.gamma = nn.Parameter(torch.full((channels,), 0.3))
        self.causal = causal

    def forward(self, value: Tensor) -> Tensor:
        inner = self.dwconv(value) if self.causal else self.dwconv.conv(F.pad(value, (self.dwconv.left // 2,) * 2))
        inner = self.pwconv2(F.gelu(self.pwconv1(self.norm(inner.transpose(1, 2)))))
        return value + (inner * self.gamma).transpose(1, 2)


class _ResidualUnit(nn.Module):
    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.act1, self.conv1 = Snake(channels), CausalConv(channels, channels, 7, dilation=dilation)
        self.act2, self.conv2 = Snake(channels), CausalConv(channels, channels, 1)

    def forward(self, value: Tensor) -> Tensor:
        return value + self.conv2(self.act2(self.conv1(self.act1(value))))


class _DecoderBlock(nn.Module):
    def __init__(self, channels: int, rate: int) -> None:
        super().__init__()
        narrow = channels // 2
        self.block = nn.Sequential(
            Snake(channels), CausalTransposed(channels, narrow, 2 * rate, rate),
            *(_ResidualUnit(narrow, dilation) for dilation in (1, 3, 9)),
        )  # fmt: skip

    def forward(self, value: Tensor) -> Tensor:
        return self.block(value)


class Quantized(NamedTuple):
    """What the quantizer made of latents ``[n, codebook_dim]``.

    Attributes
    ----------
    codes : Tensor, [n, G]
    latents : Tensor, [n, codebook_dim]
        Of the codes that are kept.
    first : Tensor, [n, codebook_dim]
        The part that the first code tells.
    loss : Tensor
        The commitment of the latents to their codes.
    """

    codes: Tensor
    latents: Tensor
    first: Tensor
    loss: Tensor


class _Codebook(nn.Module):
    """A codebook as the checkpoint has it: a sum of vectors and how often each was used, both moving averages."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.register_buffer("cluster_usage", torch.ones(size))
        self.register_buffer("embedding_sum", torch.randn(size, width))


class _CodebookLayer(nn.Module):
    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self._codebook = _Codebook(size, width)


class _Layers(nn.Module):
    def __init__(self, count: int, size: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_CodebookLayer(size, width) for _ in range(count))


class _Residual(nn.Module):
    """Residual vector quantization of ``[n, codebook_dim]`` by codebooks of half that width."""

    def __init__(self, count: int, size: int, width: int) -> None:
        super().__init__()
        self.input_proj = nn.Conv1d(width, width // 2, 1, bias=False)
        self.output_proj = nn.Conv1d(width // 2, width, 1, bias=False)
        self.vq = _Layers(count, size, width // 2)

    def books(self) -> list[_Codebook]:
        return [layer._codebook for layer in self.vq.layers]

    def inward(self, latents: Tensor) -> Tensor:
        return latents @ self.input_proj.weight[:, :, 0].T

    def outward(self, vectors: Tensor) -> Tensor:
        return vectors @ self.output_proj.weight[:, :, 0].T


DECAY, DEAD_USAGE = 0.98, 0.3
DEEPER = 0.75
"""Weight of a depth's commitment, of that of the one before it: the first ones are to leave little."""


class Quantizer(nn.Module):
    """The first codebook, and the residual ones of what it leaves."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        size, width = config["codebook_size"], config["codebook_dim"]
        self.rvq_first = _Residual(1, size, width)
        self.rvq_rest = _Residual(config["num_quantizers"] - 1, size, width)

    def quantize(self, latents: Tensor, kept: Tensor | None = None) -> Quantized:
        """Quantize ``[n, codebook_dim]``; in training the codebooks learn, and row i keeps ``kept[i]`` of G codes."""
        inward = self.rvq_first.inward(latents)
        codes, vectors, first_loss = self._search(inward, self.rvq_first.books(), None)
        first = self.rvq_first.outward(inward + (vectors - inward).detach())
        inward = self.rvq_rest.inward(latents - first.detach())
        more, vectors, rest_loss = self._search(inward, self.rvq_rest.books(), None if kept is None else kept - 1)
        rest = self.rvq_rest.outward(inward + (vectors - inward).detach())
        if kept is not None:
            rest = rest * (kept > 1)[:, None]
        return Quantized(torch.cat([codes, more], 1), first + rest, first, first_loss + rest_loss)

    def _search(self, inward: Tensor, books: list[_Codebook], kept: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        rest = inward.float()
        total, loss = torch.zeros_like(rest), rest.new_zeros(())
        weights = [DEEPER**index for index in range(len(books))]
        found = []
        for index, book in enumerate(books):
            table = book.embedding_sum / book.cluster_usage.clamp(min=1e-5)[:, None]
            with torch.no_grad():
                scores = rest @ table.T - 0.5 * table.square().sum(1)
                codes = scores.argmax(1)
                vectors = table[codes]
                if self.training:
                    _learn(book, rest, codes)
            loss = loss + F.mse_loss(rest, vectors) * (weights[index] / sum(weights))
            found.append(codes)
            used = vectors if kept is None else vectors * (index < kept)[:, None]
            total = total + used
            rest = rest - vectors
        return torch.stack(found, 1), total, loss

    def dequantize(self, codes: Tensor) -> Tensor:
        """Return the latents ``[B, T, codebook_dim]`` of codes ``[B, G, T]``."""
        tables = [
            book.embedding_sum / book.cluster_usage.clamp(min=1e-5)[:, None]
            for book in (*self.rvq_first.books(), *self.rvq_rest.books())
        ]
        vectors = [table[codes[:, depth]] for depth, table in enumerate(tables)]
        return self.rvq_first.outward(vectors[0]) + self.rvq_rest.outward(torch.stack(vectors[1:]).sum(0))


@torch.no_grad()
def _learn(book: _Codebook, vectors: Tensor, codes: Tensor) -> None:
    """Move a codebook's averages; a code that is hardly used starts anew at a vector of the batch."""
    size = len(book.cluster_usage)
    counts = vectors.new_zeros(size).index_add_(0, codes, torch.ones_like(vectors[:, 0]))
    sums = torch.zeros_like(book.embedding_sum).index_add_(0, codes, vectors)
    book.cluster_usage.mul_(DECAY).add_(counts, alpha=1 - DECAY)
    book.embedding_sum.mul_(DECAY).add_(sums, alpha=1 - DECAY)
    dead = (book.cluster_usage < DEAD_USAGE)[:, None]
    others = vectors[torch.randint(len(vectors), (size,), device=vectors.device)]
    book.embedding_sum.copy_(torch.where(dead, others, book.embedding_sum))
    book.cluster_usage.copy_(torch.where(dead[:, 0], torch.ones_like(book.cluster_usage), book.cluster_usage))


class Decoder(nn.Module):
    """The codec's decoder, Code2Wav."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        latent, dim = config["latent_dim"], config["decoder_dim"]
        self.quantizer = Quantizer(config)
        self.pre_conv = CausalConv(config["codebook_dim"], latent, 3)
        self.pre_transformer = _CodecTransformer(config)
        self.upsample = nn.ModuleList(
            nn.ModuleList([CausalTransposed(latent, latent, factor, factor), ConvNext(latent)])
            for factor in config["upsampling_ratios"]
        )
        rates = config["upsample_rates"]
        blocks = [_DecoderBlock(dim >> stage, rate) for stage, rate in enumerate(rates)]
        last = dim >> len(rates)
        self.decoder = nn.Sequential(CausalConv(latent, dim, 7), *blocks, Snake(last), CausalConv(last, 1, 7))

    def forward(self, latents: Tensor, begins: Tensor | None = None, frames: int = 0) -> Tensor:
        """Return waveforms ``[B, T * 1920]`` of latents ``[B, T, codebook_dim]``.

        With ``begins`` ``[B]``, only ``frames`` frames of each from there on, with silence before them for the last
        convolutions.
        """
        length = latents.shape[1]
        value = self.pre_transformer(self.pre_conv(latents.transpose(1, 2)).transpose(1, 2)).transpose(1, 2)
        for stretch, block in self.upsample:
            value = block(stretch(value))
        if begins is not None:
            rate = value.shape[2] // length
            places = begins[:, None] * rate + torch.arange(frames * rate, device=value.device)
            value = value.gather(2, places[:, None].expand(-1, value.shape[1], -1))
        return self.decoder(value)[:, 0]


class Listener(nn.Module):
    """Tells the phonemes of a frame's parts from what the first code says of it. Not exported."""

    def __init__(self, codebook_dim: int, phones: int, parts: int = 4, width: int = 256) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(codebook_dim, width), nn.Linear(width, parts * phones)
        self.parts = parts

    def forward(self, first: Tensor) -> Tensor:
        """Return logits ``[n, parts, phones]`` of ``[n, codebook_dim]``."""
        return self.leave(F.gelu(self.enter(first))).unflatten(-1, (self.parts, -1))


class Encoder(nn.Module):
    """Waveform to latents, of log-mel bands: it hears no phase, so the codes need not tell one. Not exported."""

    def __init__(self, codebook_dim: int, width: int = 192) -> None:
        super().__init__()
        self.mel = Mel(1024, 240, 80)
        self.enter = nn.Conv1d(80, width, 5, padding=2)
        stages: list[nn.Module] = []
        for kernel in (7, 5, 3):  # a code is to tell of its own frame
            stages += [ConvNext(width, kernel, causal=False), nn.Conv1d(width, width, 4, 2, 1)]
        self.stages = nn.Sequential(*stages, *(ConvNext(width, 3, causal=False) for _ in range(2)))
        self.leave = nn.Linear(width, codebook_dim)

    def forward(self, wave: Tensor) -> Tensor:
        """Return latents ``[B, T, codebook_dim]`` of waveforms ``[B, T * 1920]``."""
        value = self.enter((self.mel(wave) + 2) / 2)
        return self.leave(self.stages(value).transpose(1, 2))


QUIET = 0.01
"""Added to a magnitude before its logarithm: about that of noise 66 dB below full scale. Below it nothing is learnt."""


class Mel(nn.Module):
    """Log-mel bands ``[B, bands, n / hop]`` up to a frequency, of waveforms ``[B, n]``."""

    def __init__(self, size: int, hop: int, bands: int, highest: float = 12000, rate: int = 24000) -> None:
        super().__init__()
        self.size, self.hop = size, hop
        self.register_buffer("window", torch.hann_window(size), persistent=False)
        top = 2595 * math.log10(1 + highest / 700)
        edges = 700 * (10 ** (torch.linspace(0, top, bands + 2) / 2595) - 1) / (rate / 2) * (size // 2)
        places = torch.arange(size // 2 + 1)[:, None]
        rising = (places - edges[:-2]) / (edges[1:-1] - edges[:-2])
        falling = (edges[2:] - places) / (edges[2:] - edges[1:-1])
        weights = torch.minimum(rising, falling).clamp(min=0)
        self.register_buffer("weights", weights / weights.sum(0).clamp(min=1e-3), persistent=False)

    def forward(self, wave: Tensor) -> Tensor:
        side = (self.size - self.hop) // 2
        spectrum = magnitudes(F.pad(wave, (side, self.size - self.hop - side)), self.size, self.hop, self.window)
        return (spectrum.transpose(1, 2) @ self.weights + QUIET).log().transpose(1, 2)


def magnitudes(wave: Tensor, size: int, hop: int, window: Tensor) -> Tensor:
    """Return the magnitudes ``[B, size / 2 + 1, frames]`` of a short-time spectrum that is not padded."""
    spectrum = torch.stft(wave.float(), size, hop, size, window, center=False, return_complex=True)
    return (spectrum.real.square() + spectrum.imag.square() + 1e-9).sqrt()
