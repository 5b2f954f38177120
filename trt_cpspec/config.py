"""What is fixed before a run: model shapes, sampling parameters, the verification window. All their rules are here."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from .errors import ConfigError, EngineError, did_you_mean, shown

MAX_VERIFY_SIZE = 8
"""Widest verification window."""

MAX_SPECULATIVE_CODEBOOK = 4096
"""Largest codebook for which speculation is offered, on every device."""

MIN_SPECULATIVE_DEPTHS = 3
"""Residual depths of which one can be drafted: the first comes from the prefill, the last is always a bonus."""

SPECIAL_CODES = 1024
"""Ids at the top of the Talker's vocabulary that are no audio codes: suppressed, all but the end (``qwen_tts``)."""

CODE_PREDICTOR_SUFFIX = "_code_predictor"
"""A folder is a CodePredictor when its config's ``model`` ends with this (reference: Edge-LLM)."""

Mode = Literal["rejection", "coupled"]
MODES: tuple[Mode, ...] = get_args(Mode)
AUTO: Literal["auto"] = "auto"
"""In a verify size's place: the fastest of a short measurement."""

EXECUTORS = ("auto", "fused", "engine")
"""What may run the CodePredictor: see :meth:`~trt_cpspec.predictor.CodePredictor.from_engine_dir`."""

TRIAL_TEXT = (
    "The quick brown fox jumps over the lazy dog, and then it rests for a while in the warm light of the evening."
)
"""What is spoken for a measurement where no text is given."""

FinishReason = Literal["eos", "length"]

MAX_INTEGER = 2**31 - 1
"""Largest integer of a config: sizes, limits and ids are 32-bit numbers in every graph and every plan."""

MAX_LAYERS = 1024
MAX_CODE_GROUPS = 1024
MAX_SAMPLE_RATE = 768_000
"""Bounds of what is counted one by one, or multiplied, before any tensor confirms it; no release comes near them."""


class Section:
    """A strict reader of one JSON object: a missing key or a wrong type is a ConfigError that names it.

    Parameters
    ----------
    values : mapping
    where : str
        What the messages call this object, for example ``config.json: talker_config``.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where} must be a JSON object, it is {values!r:.80}")
        self.values = values
        self.where = where

    @classmethod
    def from_file(cls, path: Path) -> Section:
        """Read a JSON file."""
        if not path.is_file():
            raise ConfigError(f"{path} does not exist; is {path.parent} the right folder?")
        try:
            return cls(json.loads(path.read_text(encoding="utf-8")), str(path))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path} cannot be read as JSON: {error}") from error

    def has(self, key: str) -> bool:
        """Return whether the key is there and not null."""
        return self.values.get(key) is not None

    def integer(self, key: str, *, minimum: int | None = None, maximum: int = MAX_INTEGER) -> int:
        """Return an integer; ``true`` and ``"16"`` are none, and neither is what 32 bits do not hold."""
        value: int = self._typed(key, int, "an integer")
        if minimum is not None and value < minimum:
            raise ConfigError(f"{self.where}: {key} is {shown(value)}, it must be at least {minimum}")
        if not -maximum <= value <= maximum:
            raise ConfigError(f"{self.where}: {key} is {shown(value)}, it must be at most {maximum}")
        return value

    def number(self, key: str) -> float:
        """Return a finite number as float."""
        value = self._typed(key, (int, float), "a number")
        if not abs(value) <= sys.float_info.max:
            raise ConfigError(f"{self.where}: {key} is {shown(value)}, it must be finite")
        return float(value)

    def text(self, key: str) -> str:
        """Return a string."""
        value: str = self._typed(key, str, "a string")
        return value

    def boolean(self, key: str) -> bool:
        """Return true or false."""
        value: bool = self._typed(key, bool, "true or false")
        return value

    def section(self, key: str) -> Section:
        """Return a nested object."""
        return Section(self._typed(key, Mapping, "an object"), f"{self.where}: {key}")

    def integers(self, key: str) -> tuple[int, ...]:
        """Return a list of integers."""
        value = self.list(key)
        if not all(isinstance(item, int) and not isinstance(item, bool) and abs(item) <= MAX_INTEGER for item in value):
            raise ConfigError(f"{self.where}: {key} must hold integers of 32 bits only, it is {value!r:.80}")
        return tuple(value)

    def list(self, key: str) -> list[Any]:
        """Return a list."""
        value: list[Any] = self._typed(key, list, "a list")
        return value

    def require(self, key: str, expected: Any) -> None:
        """Check that a key has the one value that is supported."""
        value = self._get(key)
        if value != expected or type(value) is not type(expected):
            raise ConfigError(f"{self.where}: {key} is {value!r:.80}, only {expected!r:.80} is supported")

    def _get(self, key: str) -> Any:
        if key not in self.values:
            raise ConfigError(
                f"{self.where}: the key {key} is missing; it has no default here, take it from the release"
            )
        return self.values[key]

    def _typed(self, key: str, kind: Any, words: str) -> Any:
        value = self._get(key)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ConfigError(f"{self.where}: {key} must be {words}, it is {value!r:.80}")
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Shape of one transformer decoder; the field names are the keys of the official and of the engine config."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}, rotary embedding needs an even one")
        if self.rope_theta <= 0 or self.rms_norm_eps <= 0:
            raise ConfigError(f"rope_theta {self.rope_theta} and rms_norm_eps {self.rms_norm_eps} must be positive")

    @classmethod
    def from_section(cls, section: Section) -> DecoderSpec:
        """Read every field from a config object; errors name the key."""
        floats = {"rope_theta": section.number("rope_theta"), "rms_norm_eps": section.number("rms_norm_eps")}
        integers = {f.name: section.integer(f.name, minimum=1) for f in fields(cls) if f.name not in floats}
        section.integer("num_hidden_layers", maximum=MAX_LAYERS)
        try:
            return cls(**integers, **floats)  # type: ignore[arg-type]
        except ConfigError as error:
            raise ConfigError(f"{section.where}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What an engine was built for (``builder_config``)."""

    max_input_len: int
    max_batch_size: int
    max_kv_cache_capacity: int

    @classmethod
    def from_section(cls, section: Section) -> EngineLimits:
        """Read the limits from a config's ``builder_config``."""
        return cls(**{item.name: section.integer(item.name, minimum=1) for item in fields(cls)})


@dataclass(frozen=True, slots=True, kw_only=True)
class CodePredictorSpec:
    """A CodePredictor engine, as its ``config.json`` describes it.

    Attributes
    ----------
    decoder : DecoderSpec
        ``vocab_size`` is the codebook size V.
    num_code_groups : int
        G, the Talker's code included.
    talker_hidden_size : int
        Width of the Talker's hidden state and of every embedding table.
    max_verify_size : int
        Positions that one pass may take for each row.
    limits : EngineLimits
    """

    decoder: DecoderSpec
    num_code_groups: int
    talker_hidden_size: int
    max_verify_size: int
    limits: EngineLimits

    @classmethod
    def from_section(cls, section: Section) -> CodePredictorSpec:
        """Read an engine's config; a folder that is no CodePredictor is an EngineError."""
        if not section.text("model").endswith(CODE_PREDICTOR_SUFFIX):
            raise EngineError(
                f"{section.where}: model is {section.text('model')!r}, that of a CodePredictor ends with "
                f"{CODE_PREDICTOR_SUFFIX!r}; name the code_predictor folder"
            )
        builder = section.section("builder_config")
        return cls(
            decoder=DecoderSpec.from_section(section),
            num_code_groups=section.integer("num_code_groups", minimum=2, maximum=MAX_CODE_GROUPS),
            talker_hidden_size=section.integer("talker_hidden_size", minimum=1),
            max_verify_size=builder.integer("max_verify_size", minimum=1),
            limits=EngineLimits.from_section(builder),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One sampling law: temperature, then top-k, then top-p, in Hugging Face's order and meaning.

    Attributes
    ----------
    temperature : float
        0 is argmax; otherwise at least 1e-5.
    top_k : int
        Keep the k largest; 0 or anything from the vocabulary size up keeps all.
    top_p : float
        In (0, 1]; the token that crosses the boundary stays whole; 1 keeps all.
    repetition_penalty : float
        Positive; 1 is none. Only the Talker has a history to penalise.

    Raises
    ------
    ConfigError
        A value outside its range, by name.
    """

    temperature: float = 0.9
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "repetition_penalty"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
                raise ConfigError(f"{name} must be a finite number, it is {shown(value)}")
        if self.temperature < 0 or 0 < self.temperature < 1e-5:
            raise ConfigError(f"temperature is {self.temperature}; give 0 for argmax, or at least 1e-5")
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or not 0 <= self.top_k <= MAX_INTEGER:
            raise ConfigError(f"top_k is {shown(self.top_k)}; give 0 for all codes, or an integer up to {MAX_INTEGER}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if self.repetition_penalty <= 0:
            raise ConfigError(f"repetition_penalty is {self.repetition_penalty}; it must be positive, 1 is none")


# The reference package's own (qwen_tts 0.1.1), for checkpoints whose generation_config.json is silent.
_REFERENCE_SAMPLING: dict[str, Any] = {
    "do_sample": True, "temperature": 0.9, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.05,
    "subtalker_dosample": True, "subtalker_temperature": 0.9, "subtalker_top_k": 50, "subtalker_top_p": 1.0,
}  # fmt: skip

# The same of Qwen3-Omni's generate (transformers 4.57.3), which fixes the CodePredictor's.
_REFERENCE_OMNI_SAMPLING: dict[str, Any] = {
    "talker_do_sample": True, "talker_temperature": 0.9, "talker_top_k": 50, "talker_top_p": 1.0,
    "talker_repetition_penalty": 1.05,
    "subtalker_dosample": True, "subtalker_temperature": 1.0, "subtalker_top_k": 50, "subtalker_top_p": 0.8,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """How a checkpoint samples when a request does not say."""

    talker: SamplingParams
    subtalker: SamplingParams

    @classmethod
    def from_section(cls, section: Section) -> SamplingDefaults:
        """Read a ``generation_config``; what it does not say is as in the reference package.

        Sampling that is switched off there is a temperature of 0.
        """
        return cls._read(section, _REFERENCE_SAMPLING, "")

    @classmethod
    def from_omni_section(cls, section: Section) -> SamplingDefaults:
        """Read the ``generation_config`` of a Qwen3-Omni, whose keys of the Talker begin with ``talker_``."""
        return cls._read(section, _REFERENCE_OMNI_SAMPLING, "talker_")

    @classmethod
    def _read(cls, section: Section, reference: dict[str, Any], talker: str) -> SamplingDefaults:
        known = Section(reference | {k: v for k, v in section.values.items() if v is not None}, section.where)

        def params(prefix: str, switch: str, penalty: float) -> SamplingParams:
            return SamplingParams(
                temperature=known.number(f"{prefix}temperature") if known.boolean(switch) else 0.0,
                top_k=known.integer(f"{prefix}top_k"),
                top_p=known.number(f"{prefix}top_p"),
                repetition_penalty=penalty,
            )

        try:
            return cls(
                talker=params(talker, f"{talker}do_sample", known.number(f"{talker}repetition_penalty")),
                subtalker=params("subtalker_", "subtalker_dosample", 1.0),
            )
        except ConfigError as error:
            raise ConfigError(f"{section.where}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkerIds:
    """Special ids of a Talker: codes of its own vocabulary, and text tokens.

    ``codec_think_id`` begins a language block; it is -1 for a Qwen3-Omni, which has none.
    """

    codec_pad_id: int
    codec_bos_id: int
    codec_eos_token_id: int
    codec_think_id: int
    codec_nothink_id: int
    codec_think_bos_id: int
    codec_think_eos_id: int
    tts_pad_token_id: int
    tts_bos_token_id: int
    tts_eos_token_id: int

    @classmethod
    def from_section(cls, section: Section, *, omni: bool) -> TalkerIds:
        """Read every id from an engine's config."""
        names = [item.name for item in fields(cls) if not (omni and item.name == "codec_think_id")]
        return cls(**{"codec_think_id": -1} | {name: section.integer(name, minimum=0) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkerSpec:
    """A Talker engine, as its ``config.json`` describes it.

    Attributes
    ----------
    is_omni : bool
        It speaks the answers of a Thinker: no languages, no dialects, no text embedding of its own.
    decoder : DecoderSpec
    num_code_groups : int
    text_hidden_size, text_vocab_size : int
        Of the text embedding. The vocabulary of a Qwen3-Omni is the Thinker's to state, here it is 0.
    projection_size : int
        Width inside the projection of text.
    min_frames : int
        Steps at which the end of speech is forbidden (``qwen_tts``: ``min_new_tokens`` 2; Qwen3-Omni has no such rule).
    ids : TalkerIds
    tts_model_type, tts_model_size : str
        Empty for a Qwen3-Omni.
    speakers, languages : dict of str to int
        Lower-case name to codec id.
    dialects : dict of str to str
        Speaker to the dialect that replaces Chinese for them.
    defaults : SamplingDefaults
    limits : EngineLimits
    """

    is_omni: bool
    decoder: DecoderSpec
    num_code_groups: int
    text_hidden_size: int
    text_vocab_size: int
    projection_size: int
    min_frames: int
    ids: TalkerIds
    tts_model_type: str
    tts_model_size: str
    speakers: dict[str, int]
    languages: dict[str, int]
    dialects: dict[str, str]
    defaults: SamplingDefaults
    limits: EngineLimits

    @classmethod
    def from_section(cls, section: Section) -> TalkerSpec:
        """Read an engine's config; a folder that is no Talker is an EngineError."""
        if "talker" not in section.text("model") or section.text("model").endswith(CODE_PREDICTOR_SUFFIX):
            raise EngineError(f"{section.where}: model is {section.text('model')!r}, no Talker; name the talker folder")
        return cls._of_omni(section) if "omni" in section.text("model") else cls._of_tts(section)

    @classmethod
    def _of_tts(cls, section: Section) -> TalkerSpec:
        languages, width = section.section("codec_language_id"), section.integer("text_hidden_size", minimum=1)
        return cls(
            is_omni=False,
            text_hidden_size=width,
            text_vocab_size=section.integer("text_vocab_size", minimum=1),
            projection_size=width,
            min_frames=2,
            tts_model_type=section.text("tts_model_type"),
            tts_model_size=section.text("tts_model_size"),
            languages={name.lower(): languages.integer(name, minimum=0) for name in languages.values},
            dialects={k.lower(): v for k, v in section.section("spk_is_dialect").values.items() if v},
            defaults=SamplingDefaults.from_section(section.section("generation_config")),
            **cls._common(section, omni=False),
        )._checked(section.where)

    @classmethod
    def _of_omni(cls, section: Section) -> TalkerSpec:
        common = cls._common(section, omni=True)
        if not common["speakers"]:
            raise ConfigError(f"{section.where}: speaker_id is empty, a Qwen3-Omni speaks with one of its speakers")
        return cls(
            is_omni=True,
            text_hidden_size=section.integer("thinker_hidden_size", minimum=1),
            text_vocab_size=0,
            projection_size=common["decoder"].intermediate_size,
            min_frames=0,
            tts_model_type="",
            tts_model_size="",
            languages={},
            dialects={},
            defaults=SamplingDefaults.from_omni_section(section.section("generation_config")),
            **common,
        )._checked(section.where)

    def _checked(self, where: str) -> TalkerSpec:
        """Return itself, once every id is one of its table and every dialect a language."""
        codes = {name: value for name, value in asdict(self.ids).items() if name.startswith("codec_")}
        codes |= {f"speaker {name}": value for name, value in self.speakers.items()}
        codes |= {f"language {name}": value for name, value in self.languages.items()}
        for name, value in codes.items():
            if value >= self.decoder.vocab_size:
                raise ConfigError(f"{where}: {name} is {value}, vocab_size is {self.decoder.vocab_size}")
        for name in () if self.is_omni else ("tts_pad_token_id", "tts_bos_token_id", "tts_eos_token_id"):
            if getattr(self.ids, name) >= self.text_vocab_size:
                raise ConfigError(
                    f"{where}: {name} is {getattr(self.ids, name)}, text_vocab_size is {self.text_vocab_size}"
                )
        for speaker, dialect in self.dialects.items():
            if not isinstance(dialect, str) or dialect not in self.languages:
                raise ConfigError(
                    f"{where}: spk_is_dialect of {speaker} is {dialect!r:.80}, no key of codec_language_id"
                )
        if self.decoder.vocab_size <= SPECIAL_CODES:
            raise ConfigError(
                f"{where}: vocab_size is {self.decoder.vocab_size}, it must exceed the {SPECIAL_CODES} ids that are no "
                f"audio codes"
            )
        return self

    @staticmethod
    def _common(section: Section, *, omni: bool) -> dict[str, Any]:
        speakers = section.section("speaker_id")
        return {
            "decoder": DecoderSpec.from_section(section),
            "num_code_groups": section.integer("num_code_groups", minimum=2, maximum=MAX_CODE_GROUPS),
            "ids": TalkerIds.from_section(section, omni=omni),
            "speakers": {name.lower(): speakers.integer(name, minimum=0) for name in speakers.values},
            "limits": EngineLimits.from_section(section.section("builder_config")),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleIds:
    """Tokens by which a conversation's segments are told apart: the start of one, and the role behind it."""

    im_start_token_id: int
    system_token_id: int
    user_token_id: int
    assistant_token_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaIds:
    """Placeholder tokens: each stands for one row of a clip or an image."""

    audio_token_id: int
    image_token_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkerSpec:
    """A Thinker engine, as its ``config.json`` describes it.

    Attributes
    ----------
    decoder : DecoderSpec
    eos_token_ids : frozenset of int
        Each of them ends an answer.
    roles : RoleIds
    media : MediaIds
    num_deepstack_features : int or None
        Layers that take features of images; None is a Thinker that takes no image.
    limits : EngineLimits
    """

    decoder: DecoderSpec
    eos_token_ids: frozenset[int]
    roles: RoleIds
    media: MediaIds
    num_deepstack_features: int | None
    limits: EngineLimits

    @classmethod
    def from_section(cls, section: Section) -> ThinkerSpec:
        """Read an engine's config; a folder that is no Thinker is an EngineError."""
        if not is_thinker(section.text("model")):
            raise EngineError(
                f"{section.where}: model is {section.text('model')!r}, no Thinker; name the thinker folder"
            )
        several = isinstance(section.values.get("eos_token_id"), list)
        return cls(
            decoder=DecoderSpec.from_section(section),
            eos_token_ids=frozenset(
                section.integers("eos_token_id") if several else [section.integer("eos_token_id", minimum=0)]
            ),
            roles=RoleIds(**{item.name: section.integer(item.name, minimum=0) for item in fields(RoleIds)}),
            media=MediaIds(**{item.name: section.integer(item.name, minimum=0) for item in fields(MediaIds)}),
            num_deepstack_features=(
                section.integer("num_deepstack_features", minimum=0) if section.has("rotary_axes") else None
            ),
            limits=EngineLimits.from_section(section.section("builder_config")),
        )


def is_plain_file(path: Path) -> bool:
    """Return whether a path that somebody gave is a file: no pipe, no device, and no name that cannot be one."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long, or with a null byte
        return False


def is_thinker(model: str) -> bool:
    """Return whether a config's ``model`` is a Thinker's: ``qwen3_omni_moe_text`` (the Talker's has ``talker``)."""
    return "omni" in model and model.endswith("_text") and "talker" not in model


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The verification window that is in force: what was asked, what is done, and why they differ.

    Attributes
    ----------
    requested : int
        As the user gave it.
    verify_size : int
        Positions of one verify pass: the committed code and ``verify_size - 1`` drafts. 0 is autoregressive.
    reason : str or None
        Why ``verify_size`` is 0 although more was asked.
    """

    requested: int = 0
    verify_size: int = 0
    reason: str | None = None

    @property
    def max_drafts(self) -> int:
        """Drafts a round at most."""
        return max(self.verify_size - 1, 0)


def resolve_window(requested: int, *, codebook_size: int, residual_depths: int, max_verify_size: int) -> Window:
    """Decide whether a request for speculation can be served; a fallback is a value with its reason.

    Parameters
    ----------
    requested : int
        0, or 2 to 8.
    codebook_size : int
    residual_depths : int
        Codes of a frame that the CodePredictor makes, ``G - 1``.
    max_verify_size : int
        Positions that one pass of the engine can take.

    Raises
    ------
    ConfigError
        ``requested`` is 1, negative or above 8.
    """
    checked_verify_size(requested)
    reason = None
    if requested == 0:
        return Window()
    if codebook_size > MAX_SPECULATIVE_CODEBOOK:
        reason = f"the codebook of {codebook_size} exceeds the largest supported one, {MAX_SPECULATIVE_CODEBOOK}"
    elif max_verify_size < requested:
        reason = (
            f"the CodePredictor engine takes at most {max_verify_size} position(s) a pass and {requested} were asked; "
            f"widen its plan with cpspec-build --engineDir ENG --onlyCodePredictor --maxVerifySize {requested}, or "
            f"where there is none build again from the checkpoint with --maxVerifySize {requested}"
        )
    elif residual_depths < MIN_SPECULATIVE_DEPTHS:
        reason = f"{residual_depths} residual depth(s) leave no draft slot"
    return Window(requested=requested, verify_size=0 if reason else requested, reason=reason)


def checked_verify_size(requested: int) -> int:
    """Return a verify size of 0 or 2 to 8; anything else is a ConfigError that says so."""
    allowed = (0, *range(2, MAX_VERIFY_SIZE + 1))
    if isinstance(requested, bool) or not isinstance(requested, int) or requested not in allowed:
        raise ConfigError(
            f"a verify size of {shown(requested)} is not possible: give 0 to switch speculation off, or 2 to "
            f"{MAX_VERIFY_SIZE} (the committed code and 1 to {MAX_VERIFY_SIZE - 1} drafts)"
        )
    return requested


def checked_mode(mode: str) -> Mode:
    """Return the verification mode, or raise a ConfigError with the allowed ones."""
    for known in MODES:
        if mode == known:
            return known
    raise ConfigError(f"unknown verification mode {mode!r}; {did_you_mean(mode, MODES)}")


def with_overrides(params: SamplingParams, **changes: float | None) -> SamplingParams:
    """Return ``params`` with every change that is not None."""
    return replace(params, **{name: value for name, value in changes.items() if value is not None})  # type: ignore[arg-type]
