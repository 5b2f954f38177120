"""Read an official Hugging Face checkpoint: the configs of Qwen3-TTS, checked, and any weights, streamed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trt_cpspec.config import DecoderSpec, Section
from trt_cpspec.errors import ConfigError, did_you_mean
from trt_cpspec.tensorfile import TensorFile

MODEL_TYPE = "qwen3_tts"
TOKENIZER_TYPE = "qwen3_tts_tokenizer_12hz"
SUPPORTED_TTS_MODEL_TYPES = ("custom_voice", "voice_design")
SPECIAL_CODES = 1024
"""Ids at the top of the Talker's vocabulary that are no audio codes (``qwen_tts``: ``suppress_tokens``)."""

_CODEC_IDS = (
    "codec_pad_id", "codec_bos_id", "codec_eos_token_id", "codec_think_id", "codec_nothink_id",
    "codec_think_bos_id", "codec_think_eos_id",
)  # fmt: skip
_TEXT_IDS = (
    "tts_pad_token_id", "tts_bos_token_id", "tts_eos_token_id",
    "im_start_token_id", "im_end_token_id", "assistant_token_id",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechCheckpoint:
    """What checkpoints that speak say of themselves, checked.

    Attributes
    ----------
    folder : Path
    talker, code_predictor : DecoderSpec
    num_code_groups : int
        G.
    ids : dict
        Special codec and text ids, by their names in the Talker's engine config.
    speakers : dict of str to int
    generation : dict
        ``generation_config.json``, or empty where the checkpoint has none.
    """

    folder: Path
    talker: DecoderSpec
    code_predictor: DecoderSpec
    num_code_groups: int
    ids: dict[str, int]
    speakers: dict[str, int]
    generation: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TtsCheckpoint(SpeechCheckpoint):
    """What a Qwen3-TTS checkpoint says of itself, checked.

    Attributes
    ----------
    tts_model_type, tts_model_size : str
    text_hidden_size, text_vocab_size : int
    languages : dict of str to int
    dialects : dict
        Speaker to the name of its dialect, or False.
    """

    tts_model_type: str
    tts_model_size: str
    text_hidden_size: int
    text_vocab_size: int
    languages: dict[str, int]
    dialects: dict[str, Any]


def read_checkpoint(folder: Path) -> TtsCheckpoint:
    """Read and check the configs of a checkpoint folder.

    Raises
    ------
    ConfigError
        No Qwen3-TTS checkpoint, a kind that is not supported, or a key that is missing or contradicts another one.
        The message names the key.
    """
    config = read_config(folder)
    _check_kind(config)
    talker = config.section("talker_config")
    talker_spec, predictor_spec = read_multimodal_decoder(talker), read_predictor(talker)
    text_vocab = talker.integer("text_vocab_size", minimum=1)
    ids = read_ids(talker, _CODEC_IDS, talker_spec.vocab_size) | read_ids(config, _TEXT_IDS, text_vocab)
    speakers, languages = (
        read_names(talker, "spk_id", talker_spec),
        read_names(talker, "codec_language_id", talker_spec),
    )
    return TtsCheckpoint(
        folder=folder,
        tts_model_type=config.text("tts_model_type"),
        tts_model_size=config.text("tts_model_size"),
        talker=talker_spec,
        code_predictor=predictor_spec,
        num_code_groups=talker.integer("num_code_groups", minimum=2),
        text_hidden_size=talker.integer("text_hidden_size", minimum=1),
        text_vocab_size=text_vocab,
        ids=ids,
        speakers=speakers,
        languages=languages,
        dialects=_dialects(talker, speakers, languages),
        generation=read_generation(folder),
    )


def read_config(folder: Path) -> Section:
    """Read a checkpoint's ``config.json``; a ConfigError says where there is none."""
    if not folder.is_dir():
        raise ConfigError(f"the checkpoint folder {folder} does not exist")
    return Section.from_file(folder / "config.json")


def read_generation(folder: Path) -> dict[str, Any]:
    """Return ``generation_config.json``, or nothing where a checkpoint has none."""
    path = folder / "generation_config.json"
    return dict(Section.from_file(path).values) if path.is_file() else {}


def _check_kind(config: Section) -> None:
    if config.values.get("model_type") != MODEL_TYPE:
        raise ConfigError(
            f"{config.where}: model_type is {config.values.get('model_type')!r}, only {MODEL_TYPE!r} can be built"
        )
    kind = config.text("tts_model_type")
    if kind == "base":
        raise ConfigError(
            f"{config.where}: tts_model_type is 'base' (voice clone); it needs the clone encoders, which are not "
            f"supported yet. Use a custom_voice or voice_design checkpoint"
        )
    if kind not in SUPPORTED_TTS_MODEL_TYPES:
        raise ConfigError(
            f"{config.where}: unknown tts_model_type {kind!r}; {did_you_mean(kind, SUPPORTED_TTS_MODEL_TYPES)}"
        )
    config.require("tokenizer_type", TOKENIZER_TYPE)


def _read_decoder(section: Section) -> DecoderSpec:
    section.require("hidden_act", "silu")
    section.require("attention_bias", False)
    section.require("use_sliding_window", False)
    return DecoderSpec.from_section(section)


def read_multimodal_decoder(section: Section) -> DecoderSpec:
    """Read the shape of a Talker or Thinker; its rotary embedding must be the default one.

    The three axes of it are equal for speech and text, so their order is no matter.
    """
    spec = _read_decoder(section)
    scaling = section.section("rope_scaling")
    for key in ("rope_type", "type"):
        if scaling.has(key):
            scaling.require(key, "default")
    if not (scaling.has("rope_type") or scaling.has("type")):
        raise ConfigError(f"{scaling.where}: the key rope_type is missing")
    if sum(scaling.integers("mrope_section")) != spec.head_dim // 2:
        raise ConfigError(
            f"{scaling.where}: mrope_section {list(scaling.integers('mrope_section'))} does not sum to half of "
            f"head_dim {spec.head_dim}"
        )
    return spec


def read_predictor(talker: Section) -> DecoderSpec:
    """Read the shape of the CodePredictor from a ``talker_config``, and check that it fits the Talker."""
    predictor = talker.section("code_predictor_config")
    spec = _read_decoder(predictor)
    predictor.require("rope_scaling", None)
    groups = talker.integer("num_code_groups", minimum=2)
    if predictor.integer("num_code_groups") != groups:
        raise ConfigError(
            f"{predictor.where}: num_code_groups is {predictor.integer('num_code_groups')}, "
            f"talker_config.num_code_groups is {groups}"
        )
    if predictor.list("layer_types") != ["full_attention"] * spec.num_hidden_layers:
        raise ConfigError(
            f"{predictor.where}: layer_types must be 'full_attention' for each of the {spec.num_hidden_layers} "
            f"layers of num_hidden_layers"
        )
    return spec


def read_ids(section: Section, names: tuple[str, ...], vocabulary: int) -> dict[str, int]:
    """Read ids, each of which must be one of a vocabulary."""
    ids = {name: section.integer(name, minimum=0) for name in names}
    for name, value in ids.items():
        if value >= vocabulary:
            raise ConfigError(f"{section.where}: {name} is {value}, the vocabulary has {vocabulary} ids")
    return ids


def read_names(talker: Section, key: str, spec: DecoderSpec) -> dict[str, int]:
    """Read a map from names, in lower case, to codec ids."""
    section = talker.section(key)
    values = read_ids(section, tuple(section.values), spec.vocab_size)
    return {name.lower(): value for name, value in values.items()}


def _dialects(talker: Section, speakers: dict[str, int], languages: dict[str, int]) -> dict[str, Any]:
    section = talker.section("spk_is_dialect")
    dialects = {name.lower(): value for name, value in section.values.items()}
    for speaker in speakers:
        if speaker not in dialects:
            raise ConfigError(f"{section.where}: the speaker {speaker!r} of spk_id is missing")
        dialect = dialects[speaker]
        if dialect is not False and (not isinstance(dialect, str) or dialect not in languages):
            raise ConfigError(f"{section.where}: {speaker} is {dialect!r:.80}, no key of codec_language_id")
    return dialects


class Weights:
    """The tensors of one model folder, sharded or not, by their official names.

    Parameters
    ----------
    folder : Path
        Holds ``model.safetensors``, or ``model.safetensors.index.json`` and its shards.

    Raises
    ------
    ConfigError
        No weights, or a shard that is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        if index.is_file():
            names = Section.from_file(index).section("weight_map")
            shards = sorted({names.text(name) for name in names.values})
            for shard in shards:
                if Path(shard).name != shard or shard in ("", ".."):
                    raise ConfigError(f"{index}: the shard {shard!r:.80} is no file of this folder")
        elif single.is_file():
            shards = [single.name]
        else:
            raise ConfigError(f"{folder} holds neither {single.name} nor {index.name}")
        self._files: dict[str, TensorFile] = {}
        for shard in shards:
            file = TensorFile(folder / shard)
            self._files.update(dict.fromkeys(file.names(), file))

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._file(name).info(name).shape

    def read(self, name: str, shape: tuple[int, ...] | None = None) -> NDArray[np.float32]:
        """Read a tensor as float32, after checking its shape when one is given."""
        self.check(name, shape)
        return self._file(name).read(name)

    def chunks(self, name: str, shape: tuple[int, ...] | None = None) -> Iterator[NDArray[np.float32]]:
        """Yield a tensor as float32 blocks of whole rows, after checking its shape when one is given."""
        self.check(name, shape)
        return self._file(name).chunks(name)

    def check(self, name: str, shape: tuple[int, ...] | None) -> None:
        """Raise a ConfigError when a shape is given and the tensor is missing or has another one."""
        if shape is not None:
            self._file(name).check(name, shape)

    def _file(self, name: str) -> TensorFile:
        if name not in self._files:
            raise ConfigError(f"{self.folder}: the checkpoint has no tensor {name}")
        return self._files[name]
