"""Write Qwen3-TTS and Qwen3-Omni checkpoints with random weights in the official Hugging Face format, with numpy alone.

The sound is noise, but everything else is real: names, shapes, config keys, tokenizer, shards. Two things are shaped
on purpose, through one reserved residual channel (number 0, the *flag*; no layer writes to it):

Agreement of drafts and targets
    A draft reads the hidden state of an earlier row than the target does, so the two agree as far as the hidden
    states of a frame's rows do. ``agreement`` makes them alike: the code predictor sees less of each code's own
    embedding (its norms, or its input projection, shut the upper half of the channels, and the tables' lower half
    shrinks), and its attention turns to row 0, the Talker's hidden state, which every row shares. The tables keep
    their upper half at full size, so the Talker still hears every code and frames still differ.

    Measured chance of acceptance, sum of min(target, draft), at temperature 0.9 and top-k 50. It is the same for a
    draft one step ahead and for one seven steps ahead, within 0.02, for rows differ by their own code, not by distance:

    ========= ===== ===== ===== ===== ===== =====
    agreement 0     0.25  0.5   0.75  0.9   1
    ========= ===== ===== ===== ===== ===== =====
    tiny      0.04  0.36  0.51  0.79  0.95  1.00
    demo      0.03  0.25  0.36  0.68  0.91  1.00
    0.6B                  0.42  0.76  0.93  1.00
    1.7B                  0.63  0.86  0.96  1.00
    ========= ===== ===== ===== ===== ===== =====

    (The released sizes with a Talker of one layer and random hidden states.) At 0.75, the default, a window of 8
    commits every length from 1 to 8, each in 2 % of the rounds or more (tiny).

End of an utterance
    Every codec embedding carries the same positive flag, so the Talker's residual stream holds the sum of a frame's
    flags once it decodes. Its final norm hands that (negated) to ``codec_head``, where only the row of the
    end-of-speech code reads it: a bias that gives this code about one chance in ``MEAN_FRAMES`` a frame.

A Qwen3-Omni checkpoint has the same Talker and code predictor, a Thinker whose text never ends by itself (it goes to
the length limit), and an audio and a vision encoder only where their sizes are given.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import NormalDist
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from trt_cpspec.errors import ConfigError, did_you_mean
from trt_cpspec.tensorfile import StreamedTensor, write_tensors

F32 = NDArray[np.float32]
Progress = Callable[[str, int, int], None]
"""Called after each tensor with its name, the bytes of its file written so far, and the bytes of that file."""

MODEL_TYPES = ("custom_voice", "voice_design", "base")
DTYPES = ("F32", "F16", "BF16")
MEAN_FRAMES = 40
"""Frames after which an utterance ends on average, at the released sampling parameters; approximate."""

_SPECIAL_CODES = 1024
"""The Talker's codes above the codebook: control codes, languages, speakers."""
_RELEASED_CODEBOOK = 2048
_BLOCK_VALUES = 1 << 20
"""Values made at a time: 4 MiB."""

_FLAG = 0.3
"""Channel 0 of every codec embedding; the others have this standard deviation too."""
_FLAG_ATTENTION = 8.0
_LOGIT_STD = 3.0
"""Spread of the logits: with top-k 50 of 2048 at temperature 0.9 a law of about 3 bits."""
_TEMPERATURE, _TOP_K = 0.9, 50

_LANGUAGES = {
    "chinese": 2055, "english": 2050, "german": 2053, "italian": 2070, "portuguese": 2071, "spanish": 2054,
    "japanese": 2058, "korean": 2064, "french": 2061, "russian": 2069,
}  # fmt: skip
_DIALECTS = {"beijing_dialect": 2074, "sichuan_dialect": 2062}
_SPEAKERS = {
    "serena": 3066, "vivian": 3065, "uncle_fu": 3010, "ryan": 3061, "aiden": 2861, "ono_anna": 2873, "sohee": 2864,
    "eric": 2875, "dylan": 2878,
}  # fmt: skip
_SPEAKER_DIALECT = {"eric": "sichuan_dialect", "dylan": "beijing_dialect"}
_CONTROL = {
    "codec_bos_id": 2149, "codec_eos_token_id": 2150, "codec_think_id": 2154, "codec_nothink_id": 2155,
    "codec_pad_id": 2148, "codec_think_bos_id": 2156, "codec_think_eos_id": 2157,
}  # fmt: skip

# "assistant" and "user" come first: the templates need them to be one token each.
_WORDS = (
    "assistant", "user", "Ġthe", "Ġa", "Ġand", "Ġis", "Ġto", "Ġof", "Ġin", "Ġthis", "Ġit", "Ġthat", "Ġwas", "Ġfor",
    "Ġyou", "Ġare", "Ġwith", "Ġone", "Ġon", "Ġtest", "Ġshort", "Ġtext", "Ġvoice", "Ġspeak", "Ġword", "Ġhello",
    "Ġworld", "Ġgood", "Ġday", "Hello", "The", "This", "It", "Speak", "hello", "world", "ing", "er", "ed", "ly",
)  # fmt: skip
_OMNI_WORDS = ("system",)
_SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>",
    "<tts_text_eod>", "<tts_text_bos_single>", "<|audio_pad|>",
)  # fmt: skip
_OMNI_SPECIAL_TOKENS = (
    "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
_TOKEN_KEYS = {
    "im_end_token_id": "<|im_end|>", "im_start_token_id": "<|im_start|>", "tts_bos_token_id": "<tts_text_bos>",
    "tts_eos_token_id": "<tts_text_eod>", "tts_pad_token_id": "<tts_pad>",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSize:
    """Sizes of one transformer decoder (the Talker, or the code predictor)."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        _check_positive(self)
        if self.hidden % 2 or self.head_dim % 4:
            raise ConfigError(f"hidden {self.hidden} must be even and head_dim {self.head_dim} a multiple of 4")
        if self.heads % self.kv_heads:
            raise ConfigError(f"heads {self.heads} is no multiple of kv_heads {self.kv_heads}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSize:
    """Sizes of the speech tokenizer: of its decoder (codes to waveform), and of the encoder that only clones use.

    Attributes
    ----------
    decoder_dim : int
        Channels of the first vocoder stage, halved four times: a multiple of 16.
    latent_dim, codebook_dim : int
        Width between the stages; width of the quantizer, of whose half a codebook entry has.
    hidden, intermediate, layers, heads, head_dim : int
        The transformer.
    sliding_window : int
        Positions that the transformer looks back, itself included.
    encoder_hidden, encoder_filters, encoder_layers, encoder_codebook, encoder_codebook_dim : int
        The encoder.
    """

    decoder_dim: int = 32
    latent_dim: int = 32
    codebook_dim: int = 16
    hidden: int = 16
    intermediate: int = 32
    layers: int = 2
    heads: int = 4
    head_dim: int = 8
    sliding_window: int = 72
    encoder_hidden: int = 16
    encoder_filters: int = 2
    encoder_layers: int = 1
    encoder_codebook: int = 16
    encoder_codebook_dim: int = 4

    def __post_init__(self) -> None:
        _check_positive(self)
        if self.decoder_dim % 16 or self.codebook_dim % 2 or self.head_dim % 2 or self.encoder_filters % 2:
            raise ConfigError(
                f"decoder_dim {self.decoder_dim} must be a multiple of 16; codebook_dim {self.codebook_dim}, head_dim "
                f"{self.head_dim} and encoder_filters {self.encoder_filters} must be even"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSize:
    """Sizes of a mixture of experts: how many, how many a row takes, their width, and that of the shared one (0: none).

    Attributes
    ----------
    experts, chosen, intermediate, shared : int
    """

    experts: int
    chosen: int
    intermediate: int
    shared: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.chosen <= self.experts or self.intermediate < 1 or self.shared < 0:
            raise ConfigError(f"{self} is no mixture: chosen must lie between 1 and experts, and widths be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioSize:
    """Sizes of a Qwen3-Omni's audio encoder.

    Attributes
    ----------
    width, layers, heads, intermediate : int
        The transformer.
    channels : int
        Of the convolutions.
    """

    width: int = 32
    layers: int = 2
    heads: int = 4
    intermediate: int = 48
    channels: int = 6

    def __post_init__(self) -> None:
        _check_positive(self)

    @classmethod
    def released(cls) -> AudioSize:
        """Return the sizes of the released model."""
        return cls(width=1280, layers=32, heads=20, intermediate=5120, channels=480)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSize:
    """Sizes of a Qwen3-Omni's vision encoder.

    Attributes
    ----------
    width, layers, heads, intermediate : int
        The transformer.
    positions : int
        Learned positions along a side.
    deepstack : tuple of int
        The layers behind which the features of the Thinker's first layers are taken.
    """

    width: int = 16
    layers: int = 3
    heads: int = 2
    intermediate: int = 24
    positions: int = 8
    deepstack: tuple[int, ...] = (0, 2)

    def __post_init__(self) -> None:
        _check_positive(self)

    @classmethod
    def released(cls) -> VisionSize:
        """Return the sizes of the released model."""
        return cls(width=1152, layers=27, heads=16, intermediate=4304, positions=48, deepstack=(8, 16, 24))


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechSpec:
    """What to generate of a model that speaks.

    Attributes
    ----------
    talker, code_predictor : DecoderSize
        ``small_to_mtp_projection`` is written when their hidden sizes differ, as in the releases.
    text_vocab : int
        Rows of the text embedding; the tokenizer needs some 400.
    num_code_groups : int
        Codes of a frame, G, at least 2.
    codebook_size : int
        V, for the code predictor and the codec; the Talker has V + 1024 codes, whose control codes, languages and
        speakers stand where the releases have them for V = 2048, shifted by V - 2048.
    codec : CodecSize
    dtype : str
        ``F32``, ``F16`` or ``BF16``, of ``model.safetensors``; the speech tokenizer is always F32, as in the releases.
    shard_bytes : int
        Largest file of weights; more is split into shards with an index.
    seed : int
        Not negative. Every tensor depends on the seed and its own name alone.
    agreement : float
        In [0, 1]: how much drafts agree with targets; the module docstring says how, and what was measured.

    Raises
    ------
    ConfigError
        A value outside its range, by name.
    """

    talker: DecoderSize
    code_predictor: DecoderSize
    text_vocab: int
    num_code_groups: int = 16
    codebook_size: int = _RELEASED_CODEBOOK
    codec: CodecSize = field(default_factory=CodecSize)
    dtype: str = "BF16"
    shard_bytes: int = 5_000_000_000
    seed: int = 0
    agreement: float = 0.75

    def __post_init__(self) -> None:
        _check_positive(self)
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype is {self.dtype!r}; {did_you_mean(str(self.dtype), DTYPES)}")
        if not _is_share(self.agreement):
            raise ConfigError(f"agreement is {self.agreement!r}; it must lie between 0 and 1")
        if self.num_code_groups < 2 or self.codebook_size < 2:
            raise ConfigError(
                f"num_code_groups {self.num_code_groups} and codebook_size {self.codebook_size} must be at least 2"
            )
        needed = sum(map(len, self.tokens))
        if self.text_vocab < needed:
            raise ConfigError(f"text_vocab is {self.text_vocab}; the tokenizer needs at least {needed}")

    @classmethod
    def _preset(cls: type[AnySpec], changes: Mapping[str, Any], **preset: Any) -> AnySpec:
        names = [item.name for item in fields(cls)]
        for name in changes:
            if name not in names:
                raise ConfigError(f"{name!r} is no field of {cls.__name__}; {did_you_mean(name, names)}")
        return cls(**{**preset, **changes})

    @property
    def words(self) -> tuple[str, ...]:
        """Words that are one token each."""
        return _WORDS

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Tokens that no text gives."""
        return _SPECIAL_TOKENS

    @property
    def tokens(self) -> tuple[dict[str, int], dict[str, int]]:
        """The ids of ordinary and of special tokens."""
        vocabulary = _vocabulary(_merges(self.words))
        return vocabulary, {token: len(vocabulary) + i for i, token in enumerate(self.special_tokens)}

    @property
    def projected(self) -> bool:
        """Whether ``small_to_mtp_projection`` exists."""
        return self.talker.hidden != self.code_predictor.hidden

    @property
    def talker_vocab(self) -> int:
        """Codes of the Talker, V + 1024."""
        return self.codebook_size + _SPECIAL_CODES

    def code_id(self, released_id: int) -> int:
        """Return this model's id of a control code, language or speaker, given the released one."""
        return released_id + self.codebook_size - _RELEASED_CODEBOOK


AnySpec = TypeVar("AnySpec", bound=SpeechSpec)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticSpec(SpeechSpec):
    """What to generate of Qwen3-TTS.

    Attributes
    ----------
    text_hidden : int
        Width of the text embedding.
    speaker_channels : int
        Channels of the speaker encoder, a multiple of 8; used by ``base`` only.
    tts_model_type : str
        ``custom_voice``, ``voice_design`` or ``base``.
    tts_model_size : str
        As the releases say it: ``0b6`` or ``1b7``.
    """

    text_hidden: int
    speaker_channels: int = 16
    tts_model_type: str = "custom_voice"
    tts_model_size: str = "0b6"

    def __post_init__(self) -> None:
        SpeechSpec.__post_init__(self)
        if self.tts_model_type not in MODEL_TYPES:
            raise ConfigError(
                f"tts_model_type is {self.tts_model_type!r}; {did_you_mean(str(self.tts_model_type), MODEL_TYPES)}"
            )
        if self.speaker_channels % 8:
            raise ConfigError(f"speaker_channels is {self.speaker_channels}; it must be a multiple of 8")

    @classmethod
    def tiny(cls, **changes: Any) -> SyntheticSpec:
        """Return the size for tests: hidden 32, F32, about 10 MB; ``changes`` are fields to set otherwise."""
        size = DecoderSize(hidden=32, intermediate=64, layers=2, heads=4, kv_heads=2, head_dim=16)
        return cls._preset(changes, talker=size, code_predictor=size, text_hidden=32, text_vocab=512, dtype="F32")

    @classmethod
    def demo(cls, **changes: Any) -> SyntheticSpec:
        """Return the size for a demonstration on a CPU: hidden 128, BF16; ``changes`` are fields to set otherwise."""
        return cls._preset(
            changes,
            talker=DecoderSize(hidden=128, intermediate=384, layers=4, heads=4, kv_heads=2, head_dim=32),
            code_predictor=DecoderSize(hidden=128, intermediate=384, layers=3, heads=4, kv_heads=2, head_dim=32),
            text_hidden=128, text_vocab=1024,
            codec=CodecSize(decoder_dim=64, latent_dim=64, codebook_dim=32, hidden=32, intermediate=64),
        )  # fmt: skip

    @classmethod
    def released_0b6(cls, **changes: Any) -> SyntheticSpec:
        """Return the sizes of the released 0.6B models; ``changes`` are fields to set otherwise."""
        return cls._preset(changes, **_released(1024, 3072), tts_model_size="0b6")

    @classmethod
    def released_1b7(cls, **changes: Any) -> SyntheticSpec:
        """Return the sizes of the released 1.7B models; ``changes`` are fields to set otherwise."""
        return cls._preset(changes, **_released(2048, 6144), tts_model_size="1b7")


@dataclass(frozen=True, slots=True, kw_only=True)
class OmniSpec(SpeechSpec):
    """What to generate of Qwen3-Omni.

    Attributes
    ----------
    thinker : DecoderSize
        Its ``intermediate`` counts where it has no experts; the Talker's is also the width of its projections.
    thinker_experts, talker_experts : ExpertSize or None
        Both or none: with none the checkpoint is a dense one.
    accept_hidden_layer : int
        After how many of the Thinker's layers the Talker hears what it saw.
    audio : AudioSize or None
    vision : VisionSize or None
        The encoders; None is a checkpoint without that one.
    """

    thinker: DecoderSize
    thinker_experts: ExpertSize | None = None
    talker_experts: ExpertSize | None = None
    accept_hidden_layer: int = 1
    audio: AudioSize | None = None
    vision: VisionSize | None = None

    def __post_init__(self) -> None:
        SpeechSpec.__post_init__(self)
        if (self.thinker_experts is None) != (self.talker_experts is None):
            raise ConfigError("thinker_experts and talker_experts: give both, or none for a dense checkpoint")
        if self.accept_hidden_layer >= self.thinker.layers:
            raise ConfigError(
                f"accept_hidden_layer {self.accept_hidden_layer} must be below the Thinker's {self.thinker.layers} "
                f"layers"
            )
        if self.codec.latent_dim != self.codec.hidden:
            raise ConfigError(f"codec: latent_dim {self.codec.latent_dim} must be hidden {self.codec.hidden}")

    @classmethod
    def tiny(cls, **changes: Any) -> OmniSpec:
        """Return the size for tests: hidden 32, 8 experts, F32, 9 MB; ``changes`` are fields to set otherwise."""
        size = DecoderSize(hidden=32, intermediate=64, layers=2, heads=4, kv_heads=2, head_dim=16)
        return cls._preset(
            changes, thinker=size, talker=size, code_predictor=size, text_vocab=512, dtype="F32",
            codec=CodecSize(latent_dim=16, hidden=16, heads=4, head_dim=4),
            thinker_experts=ExpertSize(experts=8, chosen=2, intermediate=16),
            talker_experts=ExpertSize(experts=8, chosen=2, intermediate=16, shared=32),
        )  # fmt: skip

    @classmethod
    def released_30b_a3b(cls, **changes: Any) -> OmniSpec:
        """Return the sizes of the released 30B-A3B model, 68 GB; ``changes`` are fields to set otherwise."""
        return cls._preset(
            changes,
            thinker=DecoderSize(hidden=2048, intermediate=768, layers=48, heads=32, kv_heads=4, head_dim=128),
            thinker_experts=ExpertSize(experts=128, chosen=8, intermediate=768),
            talker=DecoderSize(hidden=1024, intermediate=2048, layers=20, heads=16, kv_heads=2, head_dim=128),
            talker_experts=ExpertSize(experts=128, chosen=6, intermediate=384, shared=768),
            code_predictor=DecoderSize(hidden=1024, intermediate=3072, layers=5, heads=16, kv_heads=8, head_dim=128),
            text_vocab=152064, accept_hidden_layer=24,
            codec=CodecSize(
                decoder_dim=1536, latent_dim=1024, hidden=1024, intermediate=3072, layers=8, heads=16, head_dim=64,
                codebook_dim=512,
            ),
        )  # fmt: skip

    @property
    def words(self) -> tuple[str, ...]:
        """Words that are one token each."""
        return (*_WORDS, *_OMNI_WORDS)

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Tokens that no text gives."""
        return (*_SPECIAL_TOKENS, *_OMNI_SPECIAL_TOKENS)


def _released(hidden: int, intermediate: int) -> dict[str, Any]:
    codec = CodecSize(
        decoder_dim=1536, latent_dim=1024, codebook_dim=512, hidden=512, intermediate=1024, layers=8, heads=16,
        head_dim=64, encoder_hidden=512, encoder_filters=64, encoder_layers=8, encoder_codebook=2048,
        encoder_codebook_dim=256,
    )  # fmt: skip
    talker = DecoderSize(hidden=hidden, intermediate=intermediate, layers=28, heads=16, kv_heads=8, head_dim=128)
    predictor = DecoderSize(hidden=1024, intermediate=3072, layers=5, heads=16, kv_heads=8, head_dim=128)
    return {
        "talker": talker, "code_predictor": predictor, "text_hidden": 2048, "text_vocab": 151936, "codec": codec,
        "speaker_channels": 512,
    }  # fmt: skip


def _is_share(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1


def _check_positive(sizes: Any) -> None:
    for item in fields(sizes):
        value = getattr(sizes, item.name)
        if item.type == "int" and (
            isinstance(value, bool) or not isinstance(value, int) or value < (item.name != "seed")
        ):
            least = 0 if item.name == "seed" else 1
            raise ConfigError(f"{item.name} is {value!r}; it must be an integer of at least {least}")


def write_checkpoint(folder: Path, spec: SyntheticSpec | OmniSpec, *, progress: Progress | None = None) -> None:
    """Write a whole checkpoint folder; about one block of 4 MiB is in memory at a time.

    Parameters
    ----------
    folder : Path
        Created when missing; it must be empty, so that no file of an older checkpoint stays behind.
    spec : SyntheticSpec or OmniSpec
    progress : callable, optional
        See :data:`Progress`.

    Raises
    ------
    ConfigError
        The folder is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not an empty folder; give a new one")
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(spec, OmniSpec):
        _write_omni(folder, spec, progress)
    else:
        _write_tts(folder, spec, progress)


def _write_tts(folder: Path, spec: SyntheticSpec, progress: Progress | None) -> None:
    codec_folder = folder / "speech_tokenizer"
    codec_folder.mkdir()
    _write_weights(codec_folder, _codec_tensors(spec), "F32", spec, progress)
    _write_weights(folder, _model_tensors(spec), spec.dtype, spec, progress)
    _write_tokenizer(folder, spec, "Qwen3TTSProcessor")
    _write_json(codec_folder / "config.json", _codec_config(spec))
    _write_json(codec_folder / "configuration.json", _CODEC_CONFIGURATION)
    _write_json(codec_folder / "preprocessor_config.json", _CODEC_PREPROCESSOR)
    _write_json(folder / "preprocessor_config.json", _PREPROCESSOR)
    _write_json(folder / "generation_config.json", _GENERATION)
    # Last, so that an interrupted folder is not taken for a checkpoint.
    _write_json(folder / "config.json", _model_config(spec))


def _write_omni(folder: Path, spec: OmniSpec, progress: Progress | None) -> None:
    _write_weights(folder, _omni_tensors(spec), spec.dtype, spec, progress)
    _write_tokenizer(folder, spec, "Qwen3OmniMoeProcessor")
    hears_or_sees = spec.audio is not None or spec.vision is not None
    if hears_or_sees:
        _write_json(folder / "preprocessor_config.json", _OMNI_PREPROCESSOR)
    template = _MEDIA_TEMPLATE if hears_or_sees else _CHAT_TEMPLATE
    _write_json(folder / "chat_template.json", {"chat_template": template})
    _write_json(folder / "generation_config.json", _OMNI_GENERATION)
    _write_json(folder / "config.json", _omni_config(spec))


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# ---- tensors: how values are made -----------------------------------------------------------------------------------

Edit = Callable[[F32, int], None]
"""Changes a block of whole rows in place, given the index of its first row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recipe:
    """A tensor of normal values, and what is changed in them."""

    shape: tuple[int, ...]
    std: float
    mean: float = 0.0
    edit: Edit | None = None

    def blocks(self, seed: int, name: str) -> Iterator[F32]:
        """Yield blocks [rows, ...] float32 of whole rows."""
        digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
        random = np.random.Generator(np.random.SFC64([seed, *np.frombuffer(digest, "<u4").tolist()]))
        row_values = math.prod(self.shape[1:])
        step = max(1, _BLOCK_VALUES // row_values)
        for start in range(0, self.shape[0], step):
            shape = (min(step, self.shape[0] - start), *self.shape[1:])
            block = random.standard_normal(shape, np.float32)
            block *= np.float32(self.std)
            block += np.float32(self.mean)
            if self.edit is not None:
                self.edit(block, start)
            yield block


Recipes = dict[str, _Recipe]


def _linear(out: int, fan_in: int, gain: float = 1.0, edit: Edit | None = None) -> _Recipe:
    return _Recipe(shape=(out, fan_in), std=gain / math.sqrt(fan_in), edit=edit)


def _conv(out: int, fan_in: int, kernel: int, gain: float = 1.0, edit: Edit | None = None) -> _Recipe:
    return _Recipe(shape=(out, fan_in, kernel), std=gain / math.sqrt(fan_in * kernel), edit=edit)


def _vector(size: int, *, std: float, mean: float = 0.0, edit: Edit | None = None) -> _Recipe:
    return _Recipe(shape=(size,), std=std, mean=mean, edit=edit)


def _norm(size: int, edit: Edit | None = None) -> _Recipe:
    return _vector(size, std=0.1, mean=1.0, edit=edit)


def _first_row_zero(block: F32, start: int) -> None:
    if start == 0:
        block[0] = 0.0


def _write_weights(folder: Path, recipes: Recipes, dtype: str, spec: SpeechSpec, progress: Progress | None) -> None:
    sizes = {
        name: StreamedTensor(dtype=dtype, shape=r.shape, blocks=lambda: iter(())).nbytes for name, r in recipes.items()
    }
    shards = _shards(sizes, spec.shard_bytes)
    weight_map = {}
    for number, names in enumerate(shards, 1):
        single = len(shards) == 1
        file = "model.safetensors" if single else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        report = _reporter(progress, sum(sizes[name] for name in names))
        write_tensors(folder / file, {name: _streamed(recipes[name], name, dtype, spec.seed, report) for name in names})
        weight_map.update(dict.fromkeys(names, file))
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(folder / "model.safetensors.index.json", index)


def _shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, nbytes in sizes.items():
        if shards[-1] and filled + nbytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += nbytes
    return shards


def _reporter(progress: Progress | None, total: int) -> Callable[[str, int], None]:
    done = 0

    def report(name: str, nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(name, done, total)

    return report


def _streamed(recipe: _Recipe, name: str, dtype: str, seed: int, report: Callable[[str, int], None]) -> StreamedTensor:
    def blocks() -> Iterator[F32]:
        yield from recipe.blocks(seed, name)
        report(name, tensor.nbytes)

    tensor = StreamedTensor(dtype=dtype, shape=recipe.shape, blocks=blocks)
    return tensor


# ---- tensors of the Talker and the code predictor -------------------------------------------------------------------


def _model_tensors(spec: SyntheticSpec) -> Recipes:
    talker, text = spec.talker, spec.text_hidden
    table = _Recipe(shape=(spec.talker_vocab, talker.hidden), std=_FLAG, edit=_embedding_edit(spec))
    tensors = {
        "talker.model.codec_embedding.weight": table,
        "talker.model.text_embedding.weight": _Recipe(shape=(spec.text_vocab, text), std=0.7),
        "talker.text_projection.linear_fc1.weight": _linear(text, text, 1.2),
        "talker.text_projection.linear_fc1.bias": _vector(text, std=0.1),
        "talker.text_projection.linear_fc2.weight": _linear(talker.hidden, text, 0.7, _first_row_zero),
        "talker.text_projection.linear_fc2.bias": _vector(talker.hidden, std=0.1, edit=_first_row_zero),
        "talker.codec_head.weight": _codec_head(spec),
    }
    tensors |= _decoder_tensors("talker.model", talker, norm_edit=_first_row_zero, out_edit=_first_row_zero)
    tensors["talker.model.norm.weight"] = _norm(talker.hidden, _negative_flag)
    tensors |= _predictor_tensors("talker.code_predictor", spec)
    if spec.tts_model_type == "base":
        tensors |= _speaker_tensors("speaker_encoder", spec)
    return tensors


def _predictor_tensors(prefix: str, spec: SpeechSpec) -> Recipes:
    size, vocab = spec.code_predictor, spec.codebook_size
    quiet = 1.0 if spec.projected else _own_code_share(spec.agreement)
    norm_edit = _upper_half_edit(size.hidden, quiet)
    flag = _attention_to_row_0(spec.agreement)
    # Norms that shut channels shrink the logits; the heads make up for it.
    head = _linear(vocab, size.hidden, _LOGIT_STD / math.sqrt((1 + quiet**2) / 2))
    table = _Recipe(shape=(vocab, spec.talker.hidden), std=_FLAG, edit=_embedding_edit(spec))
    out_edit = _output_edit(size.hidden, quiet)
    tensors = _decoder_tensors(f"{prefix}.model", size, norm_edit=norm_edit, out_edit=out_edit, flag=flag)
    tensors[f"{prefix}.model.norm.weight"] = _norm(size.hidden, norm_edit)
    for depth in range(spec.num_code_groups - 1):
        tensors[f"{prefix}.model.codec_embedding.{depth}.weight"] = table
        tensors[f"{prefix}.lm_head.{depth}.weight"] = head
    if spec.projected:
        name = f"{prefix}.small_to_mtp_projection"
        tensors[f"{name}.weight"] = _linear(size.hidden, spec.talker.hidden, edit=_projection_edit(spec))
        tensors[f"{name}.bias"] = _vector(size.hidden, std=0.05, edit=_first_row_zero)
    return tensors


def _decoder_tensors(
    prefix: str,
    size: DecoderSize,
    *,
    norm_edit: Edit | None,
    out_edit: Edit | None,
    flag: float | None = None,
    experts: ExpertSize | None = None,
) -> Recipes:
    """Return the layers of a decoder; ``flag`` is how strongly queries and keys read channel 0."""
    out_gain = 1 / math.sqrt(2 * size.layers)  # the residual stream stays O(1) at any number of layers
    query_edit = None if flag is None else _flag_edit(size.head_dim, flag)
    key_edit = None if flag is None else _flag_edit(size.head_dim, -flag)
    queries, keys = size.heads * size.head_dim, size.kv_heads * size.head_dim
    tensors: Recipes = {}
    for layer in range(size.layers):
        base = f"{prefix}.layers.{layer}"
        tensors |= {
            f"{base}.input_layernorm.weight": _norm(size.hidden, norm_edit),
            f"{base}.self_attn.q_proj.weight": _linear(queries, size.hidden, edit=query_edit),
            f"{base}.self_attn.k_proj.weight": _linear(keys, size.hidden, edit=key_edit),
            f"{base}.self_attn.v_proj.weight": _linear(keys, size.hidden),
            f"{base}.self_attn.o_proj.weight": _linear(size.hidden, queries, out_gain, out_edit),
            f"{base}.self_attn.q_norm.weight": _vector(size.head_dim, std=0.1, mean=1.2),
            f"{base}.self_attn.k_norm.weight": _vector(size.head_dim, std=0.1, mean=1.2),
            f"{base}.post_attention_layernorm.weight": _norm(size.hidden, norm_edit),
        }
        if experts is None:
            tensors |= _mlp_tensors(f"{base}.mlp", size.hidden, size.intermediate, out_gain, out_edit)
        else:
            tensors |= _mixture_tensors(f"{base}.mlp", size.hidden, experts, out_gain, out_edit)
    return tensors


def _mlp_tensors(base: str, hidden: int, intermediate: int, out_gain: float, out_edit: Edit | None) -> Recipes:
    return {
        f"{base}.gate_proj.weight": _linear(intermediate, hidden),
        f"{base}.up_proj.weight": _linear(intermediate, hidden),
        f"{base}.down_proj.weight": _linear(hidden, intermediate, out_gain, out_edit),
    }


def _mixture_tensors(base: str, hidden: int, size: ExpertSize, out_gain: float, out_edit: Edit | None) -> Recipes:
    tensors = {f"{base}.gate.weight": _linear(size.experts, hidden, _ROUTER_GAIN)}
    for expert in range(size.experts):
        tensors |= _mlp_tensors(f"{base}.experts.{expert}", hidden, size.intermediate, out_gain, out_edit)
    if size.shared:
        tensors |= _mlp_tensors(f"{base}.shared_expert", hidden, size.shared, out_gain, out_edit)
        tensors[f"{base}.shared_expert_gate.weight"] = _linear(1, hidden)
    return tensors


_ROUTER_GAIN = 1.5
"""Spread of the router's logits: the best expert of a row has about a third of the k shares."""


def _omni_tensors(spec: OmniSpec) -> Recipes:
    talker, thinker, inner = spec.talker, spec.thinker, spec.talker.intermediate
    tensors = {
        "thinker.model.embed_tokens.weight": _Recipe(shape=(spec.text_vocab, thinker.hidden), std=0.7),
        "thinker.lm_head.weight": _linear(spec.text_vocab, thinker.hidden, _LOGIT_STD, _speechless_edit(spec)),
        "talker.model.codec_embedding.weight": _Recipe(
            shape=(spec.talker_vocab, talker.hidden), std=_FLAG, edit=_embedding_edit(spec)
        ),
        "talker.codec_head.weight": _codec_head(spec),
    }
    tensors |= _decoder_tensors("thinker.model", thinker, norm_edit=None, out_edit=None, experts=spec.thinker_experts)
    tensors["thinker.model.norm.weight"] = _norm(thinker.hidden)
    tensors |= _decoder_tensors(
        "talker.model", talker, norm_edit=_first_row_zero, out_edit=_first_row_zero, experts=spec.talker_experts
    )
    tensors["talker.model.norm.weight"] = _norm(talker.hidden, _negative_flag)
    for name in ("talker.text_projection", "talker.hidden_projection"):
        tensors |= {
            f"{name}.linear_fc1.weight": _linear(inner, thinker.hidden, 1.2),
            f"{name}.linear_fc1.bias": _vector(inner, std=0.1),
            f"{name}.linear_fc2.weight": _linear(talker.hidden, inner, 0.7, _first_row_zero),
            f"{name}.linear_fc2.bias": _vector(talker.hidden, std=0.1, edit=_first_row_zero),
        }
    tensors |= _predictor_tensors("talker.code_predictor", spec)
    tensors |= _omni_codec_tensors(spec)
    if spec.audio is not None:
        tensors |= _audio_tensors("thinker.audio_tower", spec.audio, thinker.hidden)
    if spec.vision is not None:
        tensors |= _vision_tensors("thinker.visual", spec.vision, thinker.hidden)
    return tensors


def _audio_tensors(prefix: str, size: AudioSize, out: int) -> Recipes:
    width, channels, gain = size.width, size.channels, 1 / math.sqrt(2 * size.layers)
    tensors: Recipes = {}
    for stage, before in ((1, 1), (2, channels), (3, channels)):
        tensors[f"{prefix}.conv2d{stage}.weight"] = _Recipe(
            shape=(channels, before, 3, 3), std=1.5 / math.sqrt(9 * before)
        )
        tensors[f"{prefix}.conv2d{stage}.bias"] = _vector(channels, std=0.1)
    tensors[f"{prefix}.conv_out.weight"] = _linear(width, channels * _MEL_BINS // 8)
    for layer in range(size.layers):
        base = f"{prefix}.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj"):
            tensors |= _biased(f"{base}.self_attn.{name}", _linear(width, width))
        tensors |= _biased(f"{base}.self_attn.out_proj", _linear(width, width, gain))
        tensors |= _biased(f"{base}.fc1", _linear(size.intermediate, width))
        tensors |= _biased(f"{base}.fc2", _linear(width, size.intermediate, gain))
        for name in ("self_attn_layer_norm", "final_layer_norm"):
            tensors |= _biased(f"{base}.{name}", _norm(width))
    tensors |= _biased(f"{prefix}.ln_post", _norm(width))
    tensors |= _biased(f"{prefix}.proj1", _linear(width, width))
    return tensors | _biased(f"{prefix}.proj2", _linear(out, width))


def _vision_tensors(prefix: str, size: VisionSize, out: int) -> Recipes:
    width, gain, patch = size.width, 1 / math.sqrt(2 * size.layers), _OMNI_PREPROCESSOR["patch_size"]
    shape = (width, 3, _OMNI_PREPROCESSOR["temporal_patch_size"], patch, patch)
    tensors: Recipes = {
        f"{prefix}.patch_embed.proj.weight": _Recipe(shape=shape, std=1 / math.sqrt(math.prod(shape[1:]))),
        f"{prefix}.patch_embed.proj.bias": _vector(width, std=0.1),
        f"{prefix}.pos_embed.weight": _Recipe(shape=(size.positions**2, width), std=0.3),
    }
    for layer in range(size.layers):
        base = f"{prefix}.blocks.{layer}"
        tensors |= _biased(f"{base}.attn.qkv", _linear(3 * width, width))
        tensors |= _biased(f"{base}.attn.proj", _linear(width, width, gain))
        tensors |= _biased(f"{base}.mlp.linear_fc1", _linear(size.intermediate, width))
        tensors |= _biased(f"{base}.mlp.linear_fc2", _linear(width, size.intermediate, gain))
        tensors |= _biased(f"{base}.norm1", _norm(width)) | _biased(f"{base}.norm2", _norm(width))
    square = width * _OMNI_PREPROCESSOR["merge_size"] ** 2
    mergers = [("merger", width), *((f"merger_list.{i}", square) for i in range(len(size.deepstack)))]
    for name, normed in mergers:
        tensors |= _biased(f"{prefix}.{name}.ln_q", _norm(normed))
        tensors |= _biased(f"{prefix}.{name}.mlp.0", _linear(square, square))
        tensors |= _biased(f"{prefix}.{name}.mlp.2", _linear(out, square))
    return tensors


def _speechless_edit(spec: OmniSpec) -> Edit:
    """Return what keeps the Thinker to ordinary tokens: the rows of the others are small, so they hardly ever win."""
    ordinary = len(spec.tokens[0])

    def edit(block: F32, start: int) -> None:
        block[max(ordinary - start, 0) :] *= np.float32(0.02)

    return edit


def _omni_codec_tensors(spec: OmniSpec) -> Recipes:
    size, name = spec.codec, "code2wav"
    rows = spec.num_code_groups * spec.codebook_size
    tensors = {f"{name}.code_embedding.weight": _Recipe(shape=(rows, size.hidden), std=math.sqrt(spec.num_code_groups))}
    tensors |= _codec_layer_tensors(f"{name}.pre_transformer", size)
    for i, factor in enumerate(_UPSAMPLING_RATIOS):
        tensors |= _upsample_tensors(f"{name}.upsample.{i}", size.latent_dim, factor)
    return tensors | _vocoder_tensors(f"{name}.decoder", size)


def _own_code_share(agreement: float) -> float:
    """Return how much of a code's own embedding the code predictor sees, 1 to 0."""
    return float((1.0 - agreement) ** 1.5)


def _attention_to_row_0(agreement: float) -> float:
    """Return how strongly queries and keys read the flag: below about 1 the attention is an ordinary random one."""
    return _FLAG_ATTENTION * agreement


def _embedding_edit(spec: SpeechSpec) -> Edit:
    """Return what sets the flag of a codec table and shrinks its lower half; the upper half the Talker keeps."""
    share, half = np.float32(_own_code_share(spec.agreement)), spec.talker.hidden // 2

    def edit(block: F32, start: int) -> None:
        block[:, :half] *= share
        # Equal lengths: a code that the code predictor cannot see must not change the RMS of its row either.
        upper = block[:, half:]
        upper *= _FLAG / np.sqrt(np.square(upper).mean(axis=1, keepdims=True))
        block[:, 0] = _FLAG

    return edit


def _upper_half_edit(hidden: int, share: float) -> Edit:
    def edit(block: F32, start: int) -> None:
        block[hidden // 2 :] *= np.float32(share)

    return edit


def _output_edit(hidden: int, share: float) -> Edit:
    """Return what keeps a layer from writing to the flag, and nearly from writing where it can hardly read."""

    def edit(block: F32, start: int) -> None:
        rows = start + np.arange(len(block))
        block[rows >= hidden // 2] *= np.float32(share)
        block[rows == 0] = 0.0

    return edit


def _projection_edit(spec: SpeechSpec) -> Edit:
    """Return what passes the flag on alone and mutes the upper half, which holds the codes' own share."""
    share, half = np.float32(_own_code_share(spec.agreement)), spec.talker.hidden // 2

    def edit(block: F32, start: int) -> None:
        block[:, half:] *= share
        block[:, 0] = 0.0
        if start == 0:
            block[0] = 0.0
            block[0, 0] = 1.0

    return edit


def _flag_edit(head_dim: int, strength: float) -> Edit:
    """Return what makes a query or key projection read the flag into the slow half of the rotary pairs.

    Rows of codes carry a positive flag and row 0 a negative one, so with opposite signs in queries and keys every code
    attends to row 0. The slow pairs hardly turn over the length of a frame.
    """
    slow = np.arange(head_dim) % (head_dim // 2) >= head_dim // 4

    def edit(block: F32, start: int) -> None:
        place = (start + np.arange(len(block))) % head_dim
        block[:, 0] = np.where(slow[place], np.float32(strength), np.float32(0))

    return edit


def _negative_flag(block: F32, start: int) -> None:
    block[0] = -1.0


def _codec_head(spec: SpeechSpec) -> _Recipe:
    """Return the Talker's head; the end-of-speech row alone reads the flag, as a bias (see the module docstring)."""
    eos, flag, hidden = spec.code_id(_CONTROL["codec_eos_token_id"]), _expected_flag(spec), spec.talker.hidden
    logit = _TEMPERATURE * (_expected_log_mass(spec.codebook_size) - math.log(MEAN_FRAMES) - _SPREAD / hidden)

    def edit(block: F32, start: int) -> None:
        block[:, 0] = 0.0
        if start <= eos < start + len(block):
            block[eos - start] *= np.float32(0.1)
            block[eos - start, 0] = logit / flag

    # The hidden state has RMS 1 with its flag, which this head ignores: what is left is made up for.
    return _linear(spec.talker_vocab, hidden, _LOGIT_STD / math.sqrt(1 - flag**2 / hidden), edit)


def _expected_flag(spec: SpeechSpec) -> float:
    """Return channel 0 of the Talker's hidden state while it decodes: negated, over the residual stream's RMS."""
    total = _FLAG * spec.num_code_groups
    codes = spec.num_code_groups * _FLAG**2 * (1 + _own_code_share(spec.agreement) ** 2) / 2
    return -total / math.sqrt(codes + _OTHER_POWER + total**2 / spec.talker.hidden)


_SPREAD = 60.0
"""The narrower the model, the more the flag and the logits vary, and the more chances of an early end; as measured."""
_OTHER_POWER = 0.35
"""Mean square that the text side and the layers add to the Talker's residual stream, as measured."""


def _expected_log_mass(vocab: int) -> float:
    """Return log of the sum of exp(logit / temperature) over the top-k of ``vocab`` normal logits."""
    normal = NormalDist(0.0, _LOGIT_STD / _TEMPERATURE)
    return math.log(sum(math.exp(normal.inv_cdf(1 - (i + 0.5) / vocab)) for i in range(min(_TOP_K, vocab))))


def _speaker_tensors(prefix: str, spec: SyntheticSpec) -> Recipes:
    """Return the ECAPA-TDNN speaker encoder, which turns a reference voice into an x-vector."""
    config = _speaker_config(spec)
    channels, kernels, scale = config["enc_channels"], config["enc_kernel_sizes"], config["enc_res2net_scale"]
    wide, squeeze, attention = channels[-1], config["enc_se_channels"], config["enc_attention_channels"]
    convs: dict[str, tuple[int, int, int]] = {"blocks.0": (channels[0], config["mel_dim"], kernels[0])}
    for i in range(1, len(channels) - 1):
        c = channels[i]
        convs |= {f"blocks.{i}.tdnn1": (c, channels[i - 1], 1), f"blocks.{i}.tdnn2": (c, c, 1)}
        convs |= {
            f"blocks.{i}.res2net_block.blocks.{j}": (c // scale, c // scale, kernels[i]) for j in range(scale - 1)
        }
        convs |= {f"blocks.{i}.se_block.conv1": (squeeze, c, 1), f"blocks.{i}.se_block.conv2": (c, squeeze, 1)}
    convs |= {"mfa": (wide, wide, kernels[-1]), "asp.tdnn": (attention, 3 * wide, 1)}
    convs |= {"asp.conv": (wide, attention, 1), "fc": (config["enc_dim"], 2 * wide, 1)}
    tensors: Recipes = {}
    for name, (out, fan_in, kernel) in convs.items():
        # A time-delay block wraps its convolution once more; the others are the convolution.
        path = name if "se_block" in name or name in ("asp.conv", "fc") else f"{name}.conv"
        tensors[f"{prefix}.{path}.weight"] = _conv(out, fan_in, kernel)
        tensors[f"{prefix}.{path}.bias"] = _vector(out, std=0.05)
    return tensors


# ---- tensors of the speech tokenizer --------------------------------------------------------------------------------

_UPSAMPLE_RATES = (8, 5, 4, 3)
_UPSAMPLING_RATIOS = (2, 2)
_ENCODER_RATIOS = (8, 6, 5, 4)
_ENCODER_QUANTIZERS = 32


def _biased(name: str, recipe: _Recipe, size: int | None = None) -> Recipes:
    """Return a weight and its bias; ``size`` is the bias's where the weight's first axis is its input."""
    return {f"{name}.weight": recipe, f"{name}.bias": _vector(size or recipe.shape[0], std=0.03)}


def _codec_tensors(spec: SyntheticSpec) -> Recipes:
    size = spec.codec
    tensors = _quantizer_tensors("decoder.quantizer", spec)
    tensors |= _biased("decoder.pre_conv.conv", _conv(size.latent_dim, size.codebook_dim, 3))
    tensors |= _codec_transformer_tensors("decoder.pre_transformer", size)
    for i, factor in enumerate(_UPSAMPLING_RATIOS):
        tensors |= _upsample_tensors(f"decoder.upsample.{i}", size.latent_dim, factor)
    tensors |= _vocoder_tensors("decoder.decoder", size)
    return tensors | _encoder_tensors("encoder", size)


def _quantizer_tensors(prefix: str, spec: SyntheticSpec) -> Recipes:
    width, entry = spec.codec.codebook_dim, spec.codec.codebook_dim // 2
    tensors: Recipes = {}
    for part, layers in (("rvq_first", 1), ("rvq_rest", spec.num_code_groups - 1)):
        tensors[f"{prefix}.{part}.input_proj.weight"] = _conv(entry, width, 1)
        tensors[f"{prefix}.{part}.output_proj.weight"] = _conv(width, entry, 1)
        for i in range(layers):
            book = f"{prefix}.{part}.vq.layers.{i}._codebook"
            tensors[f"{book}.cluster_usage"] = _vector(spec.codebook_size, std=2.0, mean=10.0, edit=_usage_edit)
            tensors[f"{book}.embedding_sum"] = _Recipe(shape=(spec.codebook_size, entry), std=10.0)
    return tensors


def _usage_edit(block: F32, start: int) -> None:
    # A usage near zero would blow an entry up: the codec divides by it.
    np.maximum(block, 2.0, out=block)


def _codec_transformer_tensors(prefix: str, size: CodecSize) -> Recipes:
    tensors = _biased(f"{prefix}.input_proj", _linear(size.hidden, size.latent_dim))
    tensors |= _codec_layer_tensors(prefix, size)
    return tensors | _biased(f"{prefix}.output_proj", _linear(size.latent_dim, size.hidden))


def _codec_layer_tensors(prefix: str, size: CodecSize) -> Recipes:
    width = size.heads * size.head_dim
    tensors: Recipes = {}
    for layer in range(size.layers):
        base = f"{prefix}.layers.{layer}"
        tensors |= {
            f"{base}.input_layernorm.weight": _norm(size.hidden),
            f"{base}.self_attn_layer_scale.scale": _vector(size.hidden, std=0.05, mean=0.3),
            f"{base}.self_attn.o_proj.weight": _linear(size.hidden, width),
            f"{base}.post_attention_layernorm.weight": _norm(size.hidden),
            f"{base}.mlp_layer_scale.scale": _vector(size.hidden, std=0.05, mean=0.3),
            f"{base}.mlp.gate_proj.weight": _linear(size.intermediate, size.hidden),
            f"{base}.mlp.up_proj.weight": _linear(size.intermediate, size.hidden),
            f"{base}.mlp.down_proj.weight": _linear(size.hidden, size.intermediate),
        }
        tensors |= {f"{base}.self_attn.{p}_proj.weight": _linear(width, size.hidden) for p in "qkv"}
    tensors[f"{prefix}.norm.weight"] = _norm(size.hidden)
    return tensors


def _upsample_tensors(prefix: str, dim: int, factor: int) -> Recipes:
    # With kernel and stride equal, an output sample sees one tap of every input channel.
    wide = _Recipe(shape=(dim, dim, factor), std=1 / math.sqrt(dim))
    tensors = _biased(f"{prefix}.0.conv", wide)
    tensors |= _biased(f"{prefix}.1.dwconv.conv", _conv(dim, 1, 7))
    tensors |= _biased(f"{prefix}.1.norm", _norm(dim))
    tensors |= _biased(f"{prefix}.1.pwconv1", _linear(4 * dim, dim))
    tensors |= _biased(f"{prefix}.1.pwconv2", _linear(dim, 4 * dim))
    tensors[f"{prefix}.1.gamma"] = _vector(dim, std=0.1, mean=0.5)
    return tensors


def _vocoder_tensors(prefix: str, size: CodecSize) -> Recipes:
    dim = size.decoder_dim
    tensors = _biased(f"{prefix}.0.conv", _conv(dim, size.latent_dim, 7))
    for stage, rate in enumerate(_UPSAMPLE_RATES, 1):
        base, out = f"{prefix}.{stage}.block", dim // 2
        tensors |= _snake(f"{base}.0", dim)
        # Kernel twice the stride: an output sample sees two taps of every input channel.
        up = _Recipe(shape=(dim, out, 2 * rate), std=0.7 / math.sqrt(2 * dim))
        tensors |= _biased(f"{base}.1.conv", up, out)
        for unit in (2, 3, 4):
            tensors |= _snake(f"{base}.{unit}.act1", out) | _snake(f"{base}.{unit}.act2", out)
            tensors |= _biased(f"{base}.{unit}.conv1.conv", _conv(out, out, 7, 0.4))
            tensors |= _biased(f"{base}.{unit}.conv2.conv", _conv(out, out, 1, 0.4))
        dim = out
    tensors |= _snake(f"{prefix}.{len(_UPSAMPLE_RATES) + 1}", dim)
    last = f"{prefix}.{len(_UPSAMPLE_RATES) + 2}.conv"
    tensors[f"{last}.weight"] = _conv(1, dim, 7, _WAVE_GAIN, _no_offset)
    tensors[f"{last}.bias"] = _vector(1, std=0.0)
    return tensors


_WAVE_GAIN = 0.2
"""Gain of the last convolution: a waveform of about 0.1 to 0.2 RMS."""


def _snake(name: str, channels: int) -> Recipes:
    # Both are logarithms: near zero, the activation is near x + sin(x)^2.
    return {f"{name}.{parameter}": _vector(channels, std=0.1) for parameter in ("alpha", "beta")}


def _no_offset(block: F32, start: int) -> None:
    # The activations have a positive mean; taps that sum to zero keep it out of the waveform.
    block -= block.mean(axis=-1, keepdims=True)


def _encoder_tensors(prefix: str, size: CodecSize) -> Recipes:
    dim = size.encoder_filters
    tensors = _biased(f"{prefix}.encoder.layers.0.conv", _conv(dim, 1, 7))
    for stage, rate in enumerate(reversed(_ENCODER_RATIOS)):
        block, down = f"{prefix}.encoder.layers.{3 * stage + 1}.block", f"{prefix}.encoder.layers.{3 * stage + 3}.conv"
        tensors |= _biased(f"{block}.1.conv", _conv(dim // 2, dim, 3)) | _biased(
            f"{block}.3.conv", _conv(dim, dim // 2, 1)
        )
        tensors |= _biased(down, _conv(2 * dim, dim, 2 * rate))
        dim *= 2
    tensors |= _biased(f"{prefix}.encoder.layers.14.conv", _conv(size.encoder_hidden, dim, 3))
    tensors[f"{prefix}.downsample.conv.weight"] = _conv(size.encoder_hidden, size.encoder_hidden, 4)
    for layer in range(size.encoder_layers):
        tensors |= _encoder_layer_tensors(f"{prefix}.encoder_transformer.layers.{layer}", size)
    for part, count in (("semantic", 1), ("acoustic", _ENCODER_QUANTIZERS - 1)):
        tensors |= _encoder_quantizer_tensors(f"{prefix}.quantizer.{part}_residual_vector_quantizer", count, size)
    return tensors


def _encoder_layer_tensors(base: str, size: CodecSize) -> Recipes:
    hidden, wide = size.encoder_hidden, 4 * size.encoder_hidden
    tensors = _biased(f"{base}.input_layernorm", _norm(hidden)) | _biased(
        f"{base}.post_attention_layernorm", _norm(hidden)
    )
    tensors |= {f"{base}.self_attn.{p}_proj.weight": _linear(hidden, hidden) for p in "qkvo"}
    tensors |= {f"{base}.mlp.fc1.weight": _linear(wide, hidden), f"{base}.mlp.fc2.weight": _linear(hidden, wide)}
    scales = ("self_attn_layer_scale", "mlp_layer_scale")
    return tensors | {f"{base}.{name}.scale": _vector(hidden, std=0.0, mean=0.01) for name in scales}


def _encoder_quantizer_tensors(base: str, count: int, size: CodecSize) -> Recipes:
    entry = size.encoder_codebook_dim
    tensors = {
        f"{base}.input_proj.weight": _conv(entry, size.encoder_hidden, 1),
        f"{base}.output_proj.weight": _conv(size.encoder_hidden, entry, 1),
    }
    for i in range(count):
        book = f"{base}.layers.{i}.codebook"
        tensors[f"{book}.initialized"] = _vector(1, std=0.0, mean=1.0)
        tensors[f"{book}.cluster_usage"] = _vector(size.encoder_codebook, std=1.0, mean=4.0, edit=_usage_edit)
        tensors[f"{book}.embed_sum"] = _Recipe(shape=(size.encoder_codebook, entry), std=4.0)
    return tensors


# ---- configs --------------------------------------------------------------------------------------------------------

_PREPROCESSOR = {
    "padding_side": "left", "padding_value": 0.0, "processor_class": "Qwen3TTSProcessor", "return_attention_mask": True,
}  # fmt: skip
_GENERATION = {
    "do_sample": True, "repetition_penalty": 1.05, "temperature": 0.9, "top_p": 1.0, "top_k": 50,
    "subtalker_dosample": True, "subtalker_temperature": 0.9, "subtalker_top_p": 1.0, "subtalker_top_k": 50,
    "max_new_tokens": 8192,
}  # fmt: skip
_CODEC_CONFIGURATION = {"framework": "pytorch", "task": "feature-extraction", "allow_remote": True}
_CODEC_PREPROCESSOR = {
    "chunk_length_s": None, "feature_extractor_type": "EncodecFeatureExtractor", "feature_size": 1, "overlap": None,
    "padding_side": "right", "padding_value": 0.0, "return_attention_mask": True, "sampling_rate": 24000,
}  # fmt: skip
_DECODER_COMMON = {
    "attention_bias": False, "attention_dropout": 0, "hidden_act": "silu", "initializer_range": 0.02,
    "rope_theta": 1000000, "rms_norm_eps": 1e-06, "sliding_window": None, "use_cache": True,
    "use_sliding_window": False,
}  # fmt: skip


def _decoder_config(size: DecoderSize) -> dict[str, Any]:
    return _DECODER_COMMON | {
        "hidden_size": size.hidden, "intermediate_size": size.intermediate, "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads, "num_key_value_heads": size.kv_heads, "head_dim": size.head_dim,
    }  # fmt: skip


def _model_config(spec: SyntheticSpec) -> dict[str, Any]:
    vocabulary, special = spec.tokens
    config: dict[str, Any] = {
        "architectures": ["Qwen3TTSForConditionalGeneration"],
        "assistant_token_id": vocabulary["assistant"],
        **{key: special[token] for key, token in _TOKEN_KEYS.items()},
        "model_type": "qwen3_tts",
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        "tts_model_size": spec.tts_model_size,
        "tts_model_type": spec.tts_model_type,
        "talker_config": _talker_config(spec),
    }
    if spec.tts_model_type == "base":
        config["speaker_encoder_config"] = _speaker_config(spec)
    return config


def _talker_config(spec: SyntheticSpec) -> dict[str, Any]:
    custom = spec.tts_model_type == "custom_voice"
    speakers = _SPEAKERS if custom else {}
    return _decoder_config(spec.talker) | {
        "model_type": "qwen3_tts_talker",
        "code_predictor_config": _predictor_config(spec),
        **{key: spec.code_id(value) for key, value in _CONTROL.items()},
        "codec_language_id": _ids(spec, _LANGUAGES | (_DIALECTS if custom else {})),
        "spk_id": _ids(spec, speakers),
        "spk_is_dialect": {name: _SPEAKER_DIALECT.get(name, False) for name in speakers},
        "max_position_embeddings": 32768,
        "num_code_groups": spec.num_code_groups,
        "position_id_per_seconds": 13,
        "rope_scaling": _rope_scaling(spec.talker),
        "text_hidden_size": spec.text_hidden,
        "text_vocab_size": spec.text_vocab,
        "vocab_size": spec.talker_vocab,
    }  # fmt: skip


_OMNI_GENERATION = {
    "talker_max_new_tokens": 4096, "talker_repetition_penalty": 1.05, "talker_temperature": 0.9, "talker_top_k": 50,
    "talker_top_p": 1.0,
}  # fmt: skip
_CHAT_TEMPLATE = (
    "{%- for message in messages -%}\n"
    "{{- '<|im_start|>' + message.role + '\\n' -}}\n"
    "{%- if message.content is string -%}{{- message.content -}}\n"
    "{%- else -%}{%- for part in message.content -%}{{- part.text -}}{%- endfor -%}{%- endif -%}\n"
    "{{- '<|im_end|>\\n' -}}\n"
    "{%- endfor -%}\n{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}\n"
)
_MEDIA_TEMPLATE = (
    "{%- for message in messages -%}\n"
    "{{- '<|im_start|>' + message.role + '\\n' -}}\n"
    "{%- if message.content is string -%}{{- message.content -}}\n"
    "{%- else -%}{%- for part in message.content -%}\n"
    "{%- if 'image' in part -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}\n"
    "{%- elif 'audio' in part -%}{{- '<|audio_start|><|audio_pad|><|audio_end|>' -}}\n"
    "{%- else -%}{{- part.text -}}{%- endif -%}{%- endfor -%}{%- endif -%}\n"
    "{{- '<|im_end|>\\n' -}}\n"
    "{%- endfor -%}\n{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}\n"
)
_MEL_BINS = 128
_OMNI_PREPROCESSOR: dict[str, Any] = {
    "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": _MEL_BINS, "hop_length": 160, "n_fft": 400,
    "sampling_rate": 16000, "chunk_length": 300, "n_samples": 4800000, "dither": 0.0, "padding_value": 0.0,
    "image_processor_type": "Qwen2VLImageProcessor", "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 16, "merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
_OMNI_SPEAKERS = {"chelsie": 2301, "ethan": 2302, "aiden": 2303}
_OMNI_MEDIA = {"audio_token_id": "<|audio_pad|>", "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}


def _omni_config(spec: OmniSpec) -> dict[str, Any]:
    vocabulary, special = spec.tokens
    media = {key: special[token] for key, token in _OMNI_MEDIA.items()}
    dense = spec.thinker_experts is None
    family = "qwen3_omni" if dense else "qwen3_omni_moe"
    control = {key: spec.code_id(value) for key, value in _CONTROL.items() if key != "codec_think_id"}
    return {
        "architectures": ["Qwen3OmniForConditionalGeneration" if dense else "Qwen3OmniMoeForConditionalGeneration"],
        "model_type": family,
        "enable_audio_output": True,
        **{f"{role}_token_id": vocabulary[role] for role in ("system", "user", "assistant")},
        **{key: special[token] for key, token in _TOKEN_KEYS.items()},
        "thinker_config": {
            "model_type": f"{family}_thinker",
            "text_config": _omni_decoder_config(spec.thinker, spec.thinker_experts, spec.text_vocab),
            **media,
            **_encoder_configs(spec),
        },
        "talker_config": {
            "accept_hidden_layer": spec.accept_hidden_layer,
            "code_predictor_config": _predictor_config(spec) | {"max_position_embeddings": 32768},
            "num_code_groups": spec.num_code_groups,
            "speaker_id": _ids(spec, _OMNI_SPEAKERS),
            "text_config": _omni_decoder_config(spec.talker, spec.talker_experts, spec.talker_vocab),
            "thinker_hidden_size": spec.thinker.hidden,
            **control,
            **media,
        },
        "code2wav_config": _omni_codec_config(spec),
    }


def _encoder_configs(spec: OmniSpec) -> dict[str, Any]:
    configs: dict[str, Any] = {}
    if spec.audio is not None:
        configs["audio_config"] = {
            "activation_function": "gelu", "d_model": spec.audio.width, "downsample_hidden_size": spec.audio.channels,
            "encoder_attention_heads": spec.audio.heads, "encoder_ffn_dim": spec.audio.intermediate,
            "encoder_layers": spec.audio.layers, "max_source_positions": 1500, "n_window": 50, "n_window_infer": 800,
            "num_mel_bins": _MEL_BINS, "output_dim": spec.thinker.hidden, "scale_embedding": False,
        }  # fmt: skip
    if spec.vision is not None:
        sizes = {key: _OMNI_PREPROCESSOR[key] for key in ("patch_size", "temporal_patch_size")}
        configs["vision_config"] = sizes | {
            "deepstack_visual_indexes": list(spec.vision.deepstack), "depth": spec.vision.layers,
            "hidden_act": "gelu_pytorch_tanh", "hidden_size": spec.vision.width, "in_channels": 3,
            "intermediate_size": spec.vision.intermediate, "num_heads": spec.vision.heads,
            "num_position_embeddings": spec.vision.positions**2, "out_hidden_size": spec.thinker.hidden,
            "spatial_merge_size": _OMNI_PREPROCESSOR["merge_size"],
        }  # fmt: skip
    return configs


def _omni_decoder_config(size: DecoderSize, experts: ExpertSize | None, vocab: int) -> dict[str, Any]:
    config = _decoder_config(size) | {
        "max_position_embeddings": 65536, "rope_scaling": _rope_scaling(size), "tie_word_embeddings": False,
        "vocab_size": vocab,
    }  # fmt: skip
    if experts is None:
        return config
    return config | {
        "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": experts.intermediate,
        "norm_topk_prob": True, "num_experts": experts.experts, "num_experts_per_tok": experts.chosen,
        "shared_expert_intermediate_size": experts.shared,
    }  # fmt: skip


def _omni_codec_config(spec: OmniSpec) -> dict[str, Any]:
    config = _codec_decoder_config(spec)
    # The width around the transformer is its own, and a head's follows from it.
    return {key: value for key, value in config.items() if key not in ("latent_dim", "head_dim")}


def _rope_scaling(size: DecoderSize) -> dict[str, Any]:
    pairs = size.head_dim // 2
    side = pairs * 5 // 16
    return {
        "interleaved": True, "mrope_section": [pairs - 2 * side, side, side], "rope_type": "default",
        "type": "default",
    }  # fmt: skip


def _ids(spec: SpeechSpec, released: Mapping[str, int]) -> dict[str, int]:
    return {name: spec.code_id(value) for name, value in released.items()}


def _predictor_config(spec: SpeechSpec) -> dict[str, Any]:
    return _decoder_config(spec.code_predictor) | {
        "model_type": "qwen3_tts_talker_code_predictor",
        "layer_types": ["full_attention"] * spec.code_predictor.layers,
        "max_length": 20,
        "max_position_embeddings": 65536,
        "max_window_layers": 28,
        "num_code_groups": spec.num_code_groups,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "vocab_size": spec.codebook_size,
    }


def _speaker_config(spec: SyntheticSpec) -> dict[str, Any]:
    width = spec.speaker_channels
    return {
        "mel_dim": 128, "enc_dim": spec.talker.hidden, "enc_channels": [width] * 4 + [3 * width],
        "enc_kernel_sizes": [5, 3, 3, 3, 1], "enc_dilations": [1, 2, 3, 4, 1],
        "enc_attention_channels": min(128, width), "enc_res2net_scale": 8, "enc_se_channels": min(128, width),
        "sample_rate": 24000,
    }  # fmt: skip


def _codec_config(spec: SyntheticSpec) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3TTSTokenizerV2Model"],
        "model_type": "qwen3_tts_tokenizer_12hz",
        "encoder_config": _codec_encoder_config(spec.codec),
        "decoder_config": _codec_decoder_config(spec),
        "encoder_valid_num_quantizers": min(spec.num_code_groups, _ENCODER_QUANTIZERS),
        "input_sample_rate": 24000,
        "output_sample_rate": 24000,
        "decode_upsample_rate": math.prod(_UPSAMPLE_RATES) * math.prod(_UPSAMPLING_RATIOS),
        "encode_downsample_rate": 1920,
    }


def _codec_decoder_config(spec: SpeechSpec) -> dict[str, Any]:
    size = spec.codec
    return {
        "attention_bias": False, "attention_dropout": 0.0, "codebook_size": spec.codebook_size, "hidden_act": "silu",
        "layer_scale_initial_scale": 0.01, "max_position_embeddings": 8000, "num_quantizers": spec.num_code_groups,
        "num_semantic_quantizers": 1, "rope_theta": 10000, "semantic_codebook_size": 4096,
        "upsample_rates": list(_UPSAMPLE_RATES), "upsampling_ratios": list(_UPSAMPLING_RATIOS),
        "vector_quantization_hidden_dimension": 512, "codebook_dim": size.codebook_dim, "rms_norm_eps": 1e-05,
        "latent_dim": size.latent_dim, "hidden_size": size.hidden, "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers, "num_attention_heads": size.heads, "num_key_value_heads": size.heads,
        "head_dim": size.head_dim, "sliding_window": size.sliding_window, "decoder_dim": size.decoder_dim,
    }  # fmt: skip


def _codec_encoder_config(size: CodecSize) -> dict[str, Any]:
    heads = math.gcd(8, size.encoder_hidden)
    return {
        "_frame_rate": 12.5, "attention_bias": False, "attention_dropout": 0.0, "audio_channels": 1,
        "codebook_dim": size.encoder_codebook_dim, "codebook_size": size.encoder_codebook, "compress": 2,
        "dilation_growth_rate": 2, "head_dim": size.encoder_hidden // heads, "hidden_act": "gelu",
        "hidden_size": size.encoder_hidden, "initializer_range": 0.02, "intermediate_size": 4 * size.encoder_hidden,
        "kernel_size": 7, "last_kernel_size": 3, "layer_scale_initial_scale": 0.01, "max_position_embeddings": 8000,
        "norm_eps": 1e-05, "num_attention_heads": heads, "num_filters": size.encoder_filters,
        "num_hidden_layers": size.encoder_layers, "num_key_value_heads": heads,
        "num_quantizers": _ENCODER_QUANTIZERS, "num_residual_layers": 1, "num_semantic_quantizers": 1,
        "pad_mode": "constant", "residual_kernel_size": 3, "rope_theta": 10000.0, "sampling_rate": 24000,
        "sliding_window": 250, "trim_right_ratio": 1.0, "upsample_groups": size.encoder_hidden,
        "upsampling_ratios": list(_ENCODER_RATIOS), "use_cache": False, "use_causal_conv": True,
        "use_conv_shortcut": False, "use_streaming": False,
        "vector_quantization_hidden_dimension": size.encoder_codebook_dim,
    }  # fmt: skip


# ---- tokenizer ------------------------------------------------------------------------------------------------------


def _write_tokenizer(folder: Path, spec: SpeechSpec, processor: str) -> None:
    merges = _merges(spec.words)
    vocabulary, special = spec.tokens
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    added = {str(number): {"content": token, **flags} for token, number in special.items()}
    config = {
        "add_bos_token": False, "add_prefix_space": False, "added_tokens_decoder": added,
        "additional_special_tokens": list(spec.special_tokens[1:]), "audio_bos_token": "<|audio_start|>",
        "audio_eos_token": "<|audio_end|>", "audio_token": "<|audio_pad|>", "bos_token": None,
        "clean_up_tokenization_spaces": False, "eos_token": "<|im_end|>", "errors": "replace",
        "model_max_length": 131072, "pad_token": "<|endoftext|>", "processor_class": processor,
        "split_special_tokens": False, "tokenizer_class": "Qwen2Tokenizer", "unk_token": None,
    }  # fmt: skip
    _write_json(folder / "tokenizer_config.json", config)


def _byte_letters() -> list[str]:
    """Return the 256 characters of byte-level BPE: printable bytes stand for themselves, the others from U+0100 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = 256 - len(printable)
    return [chr(byte) for byte in printable] + [chr(0x100 + i) for i in range(others)]


def _merges(words: Sequence[str]) -> list[tuple[str, str]]:
    """Return merges that make one token of every word of the list.

    A later merge has a lower priority, so it cannot undo an earlier word.
    """
    ranks: dict[tuple[str, str], int] = {}
    for word in words:
        while len(symbols := _apply_merges(word, ranks)) > 1:
            ranks[symbols[0], symbols[1]] = len(ranks)
    return list(ranks)


def _apply_merges(word: str, ranks: Mapping[tuple[str, str], int]) -> list[str]:
    symbols = list(word)
    while True:
        pairs = [(ranks[pair], i) for i in range(len(symbols) - 1) if (pair := (symbols[i], symbols[i + 1])) in ranks]
        if not pairs:
            return symbols
        _, i = min(pairs)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


def _vocabulary(merges: list[tuple[str, str]]) -> dict[str, int]:
    tokens = dict.fromkeys([*_byte_letters(), *(left + right for left, right in merges)])
    return {token: i for i, token in enumerate(tokens)}
