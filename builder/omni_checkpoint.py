"""Read an official Hugging Face Qwen3-Omni checkpoint's configs, checked: dense or with mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trt_cpspec.config import DecoderSpec, Section
from trt_cpspec.errors import ConfigError

from .checkpoint import (
    SpeechCheckpoint,
    Weights,
    read_config,
    read_generation,
    read_ids,
    read_multimodal_decoder,
    read_names,
    read_predictor,
)
from .code2wav import CodecSpec, read_omni_codec_spec
from .encoders import OmniEncoders, VisionEncoderSpec, read_encoders
from .moe import MoeSpec

DENSE, MIXTURE = "qwen3_omni", "qwen3_omni_moe"
MODEL_TYPES = (DENSE, MIXTURE)

_CODEC_IDS = (
    "codec_pad_id", "codec_bos_id", "codec_eos_token_id", "codec_nothink_id", "codec_think_bos_id",
    "codec_think_eos_id",
)  # fmt: skip
_TEXT_IDS = (
    "tts_pad_token_id", "tts_bos_token_id", "tts_eos_token_id", "im_start_token_id", "im_end_token_id",
    "system_token_id", "user_token_id", "assistant_token_id",
)  # fmt: skip
_MEDIA_IDS = ("audio_token_id", "image_token_id", "video_token_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class OmniCheckpoint(SpeechCheckpoint):
    """What a Qwen3-Omni checkpoint says of itself, checked.

    Attributes
    ----------
    model_type : str
        ``qwen3_omni`` or ``qwen3_omni_moe``.
    thinker : DecoderSpec
    thinker_moe, talker_moe : MoeSpec or None
        The mixtures; None is a dense decoder.
    thinker_rope, talker_rope : dict
        ``rope_scaling``: how the three axes of a position share the channels.
    accept_hidden_layer : int
        After how many layers of the Thinker the Talker hears what it saw.
    text_ids : dict
        Ids of the Thinker's vocabulary that mark roles, turns and media.
    codec : CodecSpec
    encoders : OmniEncoders
        Those whose weights are there.
    """

    model_type: str
    thinker: DecoderSpec
    thinker_moe: MoeSpec | None
    talker_moe: MoeSpec | None
    thinker_rope: dict[str, Any]
    talker_rope: dict[str, Any]
    accept_hidden_layer: int
    text_ids: dict[str, int]
    codec: CodecSpec
    encoders: OmniEncoders


def read_omni_checkpoint(folder: Path) -> OmniCheckpoint:
    """Read and check the configs of a checkpoint folder.

    Raises
    ------
    ConfigError
        No Qwen3-Omni checkpoint, one without speech, or a key that is missing or contradicts another one. The message
        names the key.
    """
    config = read_config(folder)
    model_type = config.text("model_type")
    if model_type not in MODEL_TYPES:
        raise ConfigError(f"{config.where}: model_type is {model_type!r}, one of {', '.join(MODEL_TYPES)} is needed")
    if config.has("enable_audio_output"):
        config.require("enable_audio_output", True)
    thinker, talker = config.section("thinker_config"), config.section("talker_config")
    thinker_text, talker_text = thinker.section("text_config"), talker.section("text_config")
    thinker_spec, talker_spec = read_multimodal_decoder(thinker_text), read_multimodal_decoder(talker_text)
    talker.require("thinker_hidden_size", thinker_spec.hidden_size)
    for section in (thinker_text, talker_text):
        if section.has("tie_word_embeddings"):
            section.require("tie_word_embeddings", False)
    text_ids = read_ids(config, _TEXT_IDS, thinker_spec.vocab_size)
    text_ids |= read_ids(thinker, _MEDIA_IDS, thinker_spec.vocab_size)
    encoders = read_encoders(thinker, Weights(folder), thinker_spec.hidden_size)
    if encoders.vision is not None:
        _check_sight(thinker_text, encoders.vision, thinker_spec)
        for section in (thinker_text, talker_text):
            _check_axes(section.section("rope_scaling"))
    return OmniCheckpoint(
        folder=folder,
        model_type=model_type,
        thinker=thinker_spec,
        talker=talker_spec,
        code_predictor=read_predictor(talker),
        num_code_groups=talker.integer("num_code_groups", minimum=2),
        thinker_moe=_mixture(thinker_text, model_type),
        talker_moe=_mixture(talker_text, model_type),
        thinker_rope=dict(thinker_text.section("rope_scaling").values),
        talker_rope=dict(talker_text.section("rope_scaling").values),
        accept_hidden_layer=_accepted(talker, thinker_spec),
        ids=read_ids(talker, _CODEC_IDS, talker_spec.vocab_size),
        text_ids=text_ids,
        speakers=read_names(talker, "speaker_id", talker_spec),
        generation=read_generation(folder),
        codec=read_omni_codec_spec(config.section("code2wav_config")),
        encoders=encoders,
    )


def _mixture(section: Section, model_type: str) -> MoeSpec | None:
    return MoeSpec.from_section(section) if model_type == MIXTURE else None


def _check_sight(section: Section, vision: VisionEncoderSpec, thinker: DecoderSpec) -> None:
    count = len(vision.deepstack_visual_indexes)
    if count > thinker.num_hidden_layers:
        raise ConfigError(
            f"{section.where}: num_hidden_layers is {thinker.num_hidden_layers}, deepstack_visual_indexes needs {count}"
        )


def _check_axes(scaling: Section) -> None:
    """Check that the three axes of a position share the channels as the reference lets them, turn by turn."""
    for key in ("interleaved", "mrope_interleaved"):
        if scaling.has(key):
            scaling.require(key, True)
    sections = scaling.integers("mrope_section")
    if len(sections) != 3 or any(axis + 3 * (sections[axis] - 1) >= sum(sections) for axis in (1, 2)):
        raise ConfigError(
            f"{scaling.where}: mrope_section {list(sections)} must have three parts, of which height and width take "
            f"every third pair of channels"
        )


def _accepted(talker: Section, thinker: DecoderSpec) -> int:
    """Read ``accept_hidden_layer``: behind the last layer the reference gives the normed state, which is another."""
    layer = talker.integer("accept_hidden_layer", minimum=1)
    if layer >= thinker.num_hidden_layers:
        raise ConfigError(
            f"{talker.where}: accept_hidden_layer is {layer}, it must be below the Thinker's num_hidden_layers "
            f"{thinker.num_hidden_layers}"
        )
    return layer
