"""From a Qwen3-TTS checkpoint to the engine folders ``talker``, ``code_predictor`` and ``code2wav``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .build import CONFIG_FILE, ONNX_RUNTIME, BuildOptions, EngineBuild, Progress, Write, copy_tokenizer, write_json
from .checkpoint import TtsCheckpoint, read_checkpoint
from .code2wav import read_codec_spec, write_code2wav
from .engine import Backend, EngineOptions

COMPONENTS = ("talker", "code_predictor", "code2wav")
_NATIVE_TEMPLATE_MARKER = "chat_template.model"


class TtsBuild(EngineBuild):
    """The build of one Qwen3-TTS checkpoint (see :class:`~.build.EngineBuild`).

    Parameters
    ----------
    checkpoint_dir : Path
    engine_dir, options, backend, engine_options
        As of :class:`~.build.EngineBuild`.
    """

    folders = COMPONENTS
    predictor_model = "qwen3_tts_code_predictor"
    checkpoint: TtsCheckpoint

    def __init__(
        self,
        checkpoint_dir: Path,
        engine_dir: Path,
        options: BuildOptions,
        *,
        backend: Backend = ONNX_RUNTIME,
        engine_options: EngineOptions | None = None,
    ) -> None:
        checkpoint, codec = read_checkpoint(checkpoint_dir), read_codec_spec(checkpoint_dir)
        super().__init__(checkpoint, codec, engine_dir, options, backend=backend, engine_options=engine_options)

    def _parts(self) -> list[tuple[int, Write]]:
        talker_steps = self.checkpoint.talker.num_hidden_layers + 1
        predictor_steps = self.checkpoint.code_predictor.num_hidden_layers + 1
        return [
            (talker_steps, self.build_talker),
            (predictor_steps, self.build_code_predictor),
            (self.codec.progress_steps, self.build_code2wav),
        ]

    def build_talker(self, progress: Progress = lambda: None) -> None:
        """Write ``talker/``: graph, codec and text embeddings, text projection, codec head, tokenizer, config."""
        ck = self.checkpoint
        hidden, text_hidden = ck.talker.hidden_size, ck.text_hidden_size
        codec_shape, text_shape = (ck.talker.vocab_size, hidden), (ck.text_vocab_size, text_hidden)
        folder = self._staging / "talker"
        self._write_graph(folder, "talker", ck.talker, "talker.model", progress)
        self._table(folder, "embedding", "embedding", "talker.model.codec_embedding.weight", codec_shape)
        self._table(folder, "text_embedding", "text_embedding", "talker.model.text_embedding.weight", text_shape)
        self._table(folder, "codec_head", "codec_head.weight", "talker.codec_head.weight", codec_shape)
        self._projection(folder, "text_projection", text_hidden, text_hidden, hidden)
        copy_tokenizer(ck.folder, folder)
        # Edge-LLM's marker of a template that the runtime applies by itself.
        (folder / _NATIVE_TEMPLATE_MARKER).touch()
        write_json(folder / CONFIG_FILE, self._talker_config())
        progress()

    def build_code2wav(self, progress: Progress = lambda: None) -> None:
        """Write ``code2wav/``: the codec's decoder, in FP32."""
        write_code2wav(self.checkpoint.folder, self._staging / "code2wav", progress)

    def _talker_config(self) -> dict[str, Any]:
        ck = self.checkpoint
        config = self._common_config("qwen3_tts_talker", ck.talker)
        config |= ck.ids
        config |= {
            "tts_model_type": ck.tts_model_type,
            "tts_model_size": ck.tts_model_size,
            "text_hidden_size": ck.text_hidden_size,
            "text_vocab_size": ck.text_vocab_size,
            "speaker_id": ck.speakers,
            "codec_language_id": ck.languages,
            "spk_is_dialect": ck.dialects,
            "generation_config": ck.generation,
        }
        return config
