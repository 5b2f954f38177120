"""From a Qwen3-Omni checkpoint to the engine folders of its Thinker, its Talker and what makes the sound."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trt_cpspec.config import Section
from trt_cpspec.durable import write_file
from trt_cpspec.errors import ConfigError

from .build import (
    CONFIG_FILE,
    HEADS_FILE,
    ONNX_RUNTIME,
    BuildOptions,
    EngineBuild,
    Progress,
    Write,
    copy_tokenizer,
    write_json,
)
from .code2wav import write_omni_code2wav
from .encoders import write_audio_encoder, write_vision_encoder
from .engine import Backend, EngineOptions
from .graph import write_heads_graph
from .omni_checkpoint import OmniCheckpoint, read_omni_checkpoint

CODEC_FOLDER = "multimodal/code2wav"
OMNI_COMPONENTS = ("thinker", "talker", "code_predictor", CODEC_FOLDER)
ENCODER_FOLDERS = {"audio": "multimodal/audio", "vision": "multimodal/visual"}
"""Where the encoders go that a checkpoint has."""
_TEMPLATE_FILE = "chat_template.jinja"
_ROLE_IDS = {"system_role_id": "system_token_id", "user_role_id": "user_token_id"}
_ROLE_IDS |= {"assistant_role_id": "assistant_token_id"}
"""Names of role tokens in a Talker's engine config, and in the checkpoint's."""


class OmniBuild(EngineBuild):
    """The build of one Qwen3-Omni checkpoint (see :class:`~.build.EngineBuild`).

    Parameters
    ----------
    checkpoint_dir : Path
    engine_dir, options, backend, engine_options
        As of :class:`~.build.EngineBuild`; the limits of the Talker hold for the Thinker too.
    """

    folders: tuple[str, ...] = OMNI_COMPONENTS
    predictor_model = "qwen3_omni_moe_talker_code_predictor"
    checkpoint: OmniCheckpoint

    def __init__(
        self,
        checkpoint_dir: Path,
        engine_dir: Path,
        options: BuildOptions,
        *,
        backend: Backend = ONNX_RUNTIME,
        engine_options: EngineOptions | None = None,
    ) -> None:
        checkpoint = read_omni_checkpoint(checkpoint_dir)
        encoders = [name for name in ENCODER_FOLDERS if getattr(checkpoint.encoders, name) is not None]
        self.folders = (*OMNI_COMPONENTS, *(ENCODER_FOLDERS[name] for name in encoders))
        super().__init__(
            checkpoint, checkpoint.codec, engine_dir, options, backend=backend, engine_options=engine_options
        )
        self._check_capacity("Thinker", checkpoint.thinker)
        self._template = _chat_template(checkpoint_dir)

    def _parts(self) -> list[tuple[int, Write]]:
        ck = self.checkpoint
        parts: list[tuple[int, Write]] = [
            (ck.thinker.num_hidden_layers + 1, self.build_thinker),
            (ck.talker.num_hidden_layers + 1, self.build_talker),
            (ck.code_predictor.num_hidden_layers + 1, self.build_code_predictor),
            (self.codec.progress_steps, self.build_code2wav),
        ]
        if ck.encoders.audio is not None:
            parts.append((ck.encoders.audio.encoder_layers + 2, self.build_audio_encoder))
        if ck.encoders.vision is not None:
            parts.append((ck.encoders.vision.depth + 2, self.build_vision_encoder))
        return parts

    @property
    def _sections(self) -> tuple[Sequence[int] | None, Sequence[int] | None]:
        """How Thinker and Talker share their channels among three axes; None where no image is to be seen."""
        if self.checkpoint.encoders.vision is None:
            return None, None
        return self.checkpoint.thinker_rope["mrope_section"], self.checkpoint.talker_rope["mrope_section"]

    @property
    def _deepstack(self) -> int:
        vision = self.checkpoint.encoders.vision
        return 0 if vision is None else len(vision.deepstack_visual_indexes)

    def build_thinker(self, progress: Progress = lambda: None) -> None:
        """Write ``thinker/``: graph, text embedding, head, tokenizer, chat template, config."""
        ck, folder = self.checkpoint, self._staging / "thinker"
        shape = (ck.thinker.vocab_size, ck.thinker.hidden_size)
        self._write_graph(
            folder,
            "thinker",
            ck.thinker,
            "thinker.model",
            progress,
            moe=ck.thinker_moe,
            accept_hidden_layer=ck.accept_hidden_layer,
            rotary_sections=self._sections[0],
            deepstack_layers=self._deepstack,
        )
        self._table(folder, "embedding", "embedding", "thinker.model.embed_tokens.weight", shape)
        self._table(folder, "lm_head", "lm_head.weight", "thinker.lm_head.weight", shape)
        write_heads_graph(folder / HEADS_FILE)
        copy_tokenizer(ck.folder, folder)
        write_file(folder / _TEMPLATE_FILE, self._template.encode())
        write_json(folder / CONFIG_FILE, self._thinker_config())
        progress()

    def build_talker(self, progress: Progress = lambda: None) -> None:
        """Write ``talker/``: graph, codec embedding, the projections of text and of hidden states, head, config."""
        ck, folder = self.checkpoint, self._staging / "talker"
        shape = (ck.talker.vocab_size, ck.talker.hidden_size)
        self._write_graph(
            folder,
            "talker",
            ck.talker,
            "talker.model",
            progress,
            moe=ck.talker_moe,
            rotary_sections=self._sections[1],
        )
        self._table(folder, "embedding", "embedding", "talker.model.codec_embedding.weight", shape)
        self._table(folder, "codec_head", "codec_head.weight", "talker.codec_head.weight", shape)
        for stem in ("text_projection", "hidden_projection"):
            # The reference takes the Talker's own MLP width for both.
            sizes = ck.thinker.hidden_size, ck.talker.intermediate_size, ck.talker.hidden_size
            self._projection(folder, stem, *sizes)
        write_json(folder / CONFIG_FILE, self._talker_config())
        progress()

    def build_code2wav(self, progress: Progress = lambda: None) -> None:
        """Write ``multimodal/code2wav/``: the codec's decoder, in FP32."""
        write_omni_code2wav(self.weights, self.codec, self._staging / CODEC_FOLDER, progress)

    def build_audio_encoder(self, progress: Progress = lambda: None) -> None:
        """Write ``multimodal/audio/``."""
        encoders, folder = self.checkpoint.encoders, self._staging / ENCODER_FOLDERS["audio"]
        assert encoders.audio is not None
        assert encoders.audio_front is not None
        config = write_audio_encoder(
            self.weights, encoders.audio, encoders.audio_front, folder, **self._stored_as, progress=progress
        )
        write_json(folder / CONFIG_FILE, {"precision": self.options.precision, **config})
        progress()

    def build_vision_encoder(self, progress: Progress = lambda: None) -> None:
        """Write ``multimodal/visual/``; an image may have as many rows as a prefill."""
        encoders, folder = self.checkpoint.encoders, self._staging / ENCODER_FOLDERS["vision"]
        assert encoders.vision is not None
        assert encoders.image_front is not None
        config = write_vision_encoder(
            self.weights,
            encoders.vision,
            encoders.image_front,
            folder,
            max_rows=self.options.max_input_len,
            **self._stored_as,
            progress=progress,
        )
        write_json(folder / CONFIG_FILE, {"precision": self.options.precision, **config})
        progress()

    @property
    def _stored_as(self) -> dict[str, Any]:
        return {"dtype": self.options.dtype, "narrow": self._narrow}

    def _thinker_config(self) -> dict[str, Any]:
        ck = self.checkpoint
        config = self._common_config(f"{ck.model_type}_text", ck.thinker)
        return config | {
            **ck.text_ids,
            "rope_scaling": ck.thinker_rope,
            "eos_token_id": ck.text_ids["im_end_token_id"],
            "accept_hidden_layer": ck.accept_hidden_layer,
            "generation_config": ck.generation,
            "num_deepstack_features": self._deepstack,
            **self._axes,
        }

    @property
    def _axes(self) -> dict[str, int]:
        """Of a model that sees: how many positions its decoders take for each row."""
        return {} if self.checkpoint.encoders.vision is None else {"rotary_axes": 3}

    def _talker_config(self) -> dict[str, Any]:
        ck = self.checkpoint
        config = self._common_config(f"{ck.model_type}_talker", ck.talker)
        return config | {
            **ck.ids,
            **ck.text_ids,
            **{name: ck.text_ids[key] for name, key in _ROLE_IDS.items()},
            "rope_scaling": ck.talker_rope,
            "accept_hidden_layer": ck.accept_hidden_layer,
            "thinker_hidden_size": ck.thinker.hidden_size,
            "text_vocab_size": ck.thinker.vocab_size,
            "speaker_id": ck.speakers,
            "generation_config": ck.generation,
            **self._axes,
        }


def _chat_template(folder: Path) -> str:
    """Return a checkpoint's chat template: a file of its own, or a key of one of two JSON files."""
    if (folder / _TEMPLATE_FILE).is_file():
        return (folder / _TEMPLATE_FILE).read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        if (folder / name).is_file() and (section := Section.from_file(folder / name)).has("chat_template"):
            return section.text("chat_template")
    raise ConfigError(
        f"{folder} has no chat template: {_TEMPLATE_FILE}, or the key chat_template in chat_template.json or "
        f"tokenizer_config.json"
    )
