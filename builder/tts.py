"""From a Qwen3-TTS checkpoint to the engine folders ``talker``, ``code_predictor`` and ``code2wav``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trt_cpspec.config import MAX_VERIFY_SIZE, DecoderSpec
from trt_cpspec.errors import ConfigError
from trt_cpspec.runtime import GRAPH_FILE
from trt_cpspec.tensorfile import StreamedTensor, write_tensors

from .checkpoint import SPECIAL_CODES, TtsCheckpoint, Weights, read_checkpoint
from .code2wav import CodecSpec, read_codec_spec, write_code2wav
from .decoder import write_decoder
from .engine import Backend, EngineOptions, Report, check_precision
from .graph import GraphWriter, write_heads_graph
from .rebuild import Outcome, RebuildOptions, build_component
from .sidecar import PLAN_FILES

Progress = Callable[[], None]

ONNX_RUNTIME = Backend(name="onnxruntime", binding=None)
"""The backend that runs the graphs as they are."""

COMPONENTS = ("talker", "code_predictor", "code2wav")
PROJECTION = "talker.code_predictor.small_to_mtp_projection"
PRECISIONS = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
CONFIG_FILE = "config.json"
HEADS_FILE = "heads.onnx"
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json", "special_tokens_map.json")
_NATIVE_TEMPLATE_MARKER = "chat_template.model"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """What an engine is built for.

    Attributes
    ----------
    precision : str
        ``fp32`` or ``fp16``: how weights and side files are stored. The codec is always FP32.
    max_input_len : int
        Rows of the Talker's prefill.
    max_kv_cache_capacity : int
        Positions of the Talker: prefill rows and frames.
    max_batch_size : int
    max_verify_size : int
        Positions that one CodePredictor pass may take for a row; 1 builds an engine that cannot verify.
    """

    precision: str = "fp32"
    max_input_len: int = 1024
    max_kv_cache_capacity: int = 4096
    max_batch_size: int = 4
    max_verify_size: int = MAX_VERIFY_SIZE

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ConfigError(f"unknown precision {self.precision!r}; allowed: {', '.join(PRECISIONS)}")
        for name in ("max_input_len", "max_kv_cache_capacity", "max_batch_size", "max_verify_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if self.max_verify_size > MAX_VERIFY_SIZE:
            raise ConfigError(f"max_verify_size is {self.max_verify_size}, the widest window is {MAX_VERIFY_SIZE}")
        if self.max_kv_cache_capacity <= self.max_input_len:
            raise ConfigError(
                f"max_kv_cache_capacity {self.max_kv_cache_capacity} must exceed max_input_len {self.max_input_len}: "
                f"every frame takes one position behind the prefill"
            )

    @property
    def dtype(self) -> str:
        """Stored type of the weights, in the words of safetensors."""
        return PRECISIONS[self.precision]


class TtsBuild:
    """The build of one checkpoint: everything is checked when it is made, each component is written by a call.

    Use it as a context manager. Components are built aside, and :meth:`commit` puts them in place together; leaving
    without it leaves the engine folder as it was.

    Parameters
    ----------
    checkpoint_dir, engine_dir : Path
    options : BuildOptions
    backend : Backend
        What the graphs are written for; plans are built by :meth:`build_plan`.
    engine_options : EngineOptions or None
        How plans are built.

    Raises
    ------
    ConfigError
        The checkpoint cannot be built, or the options do not fit it. Nothing has been written then.
    """

    def __init__(
        self,
        checkpoint_dir: Path,
        engine_dir: Path,
        options: BuildOptions,
        *,
        backend: Backend = ONNX_RUNTIME,
        engine_options: EngineOptions | None = None,
    ) -> None:
        self._backend, self._engine_options = backend, engine_options or EngineOptions()
        self._narrow = backend.binding is not None
        _check_precision(options.precision, backend)
        self.checkpoint = read_checkpoint(checkpoint_dir)
        self.codec = read_codec_spec(checkpoint_dir)
        self.weights = Weights(checkpoint_dir)
        self.engine_dir, self.options = engine_dir, options
        self._staging = engine_dir / ".partial"
        _check_codec(self.checkpoint, self.codec)
        _check_projection(self.checkpoint, self.weights)
        limit = self.checkpoint.talker.max_position_embeddings
        if options.max_kv_cache_capacity > limit:
            raise ConfigError(
                f"max_kv_cache_capacity {options.max_kv_cache_capacity} exceeds the Talker's "
                f"max_position_embeddings {limit}"
            )
        for component in COMPONENTS:
            _check_replaceable(engine_dir / component)

    def __enter__(self) -> TtsBuild:
        """Prepare a folder to build in."""
        shutil.rmtree(self._staging, ignore_errors=True)
        try:
            for component in COMPONENTS:
                (self._staging / component).mkdir(parents=True)
        except OSError as error:
            raise ConfigError(f"the engine folder {self.engine_dir} cannot be written: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        """Remove what was not committed."""
        shutil.rmtree(self._staging, ignore_errors=True)
        with suppress(OSError):
            self.engine_dir.rmdir()  # succeeds only when this build made nothing of it

    def commit(self) -> None:
        """Put the built components in place of older ones, which are removed when all the new ones are there."""
        for component in COMPONENTS:
            _check_replaceable(self.engine_dir / component)
        former = self._staging / "former"
        former.mkdir()
        for component in COMPONENTS:
            target = self.engine_dir / component
            if target.exists():
                target.rename(former / component)
            (self._staging / component).rename(target)

    @property
    def components(self) -> list[tuple[str, int, Callable[[Progress], None]]]:
        """Return name, number of progress steps and build function of each component, in order."""
        talker_steps = self.checkpoint.talker.num_hidden_layers + 1
        predictor_steps = self.checkpoint.code_predictor.num_hidden_layers + 1
        steps = (talker_steps, predictor_steps, self.codec.progress_steps)
        return list(
            zip(COMPONENTS, steps, (self.build_talker, self.build_code_predictor, self.build_code2wav), strict=True)
        )

    def build_talker(self, progress: Progress = lambda: None) -> None:
        """Write ``talker/``: graph, codec and text embeddings, text projection, codec head, tokenizer, config."""
        ck = self.checkpoint
        hidden, text_hidden = ck.talker.hidden_size, ck.text_hidden_size
        folder = self._staging / "talker"
        self._write_graph(folder, "talker", ck.talker, "talker.model", progress)
        self._side_file(
            folder, "embedding", {"embedding": ("talker.model.codec_embedding.weight", (ck.talker.vocab_size, hidden))}
        )
        self._side_file(
            folder,
            "text_embedding",
            {"text_embedding": ("talker.model.text_embedding.weight", (ck.text_vocab_size, text_hidden))},
        )
        self._side_file(
            folder, "codec_head", {"codec_head.weight": ("talker.codec_head.weight", (ck.talker.vocab_size, hidden))}
        )
        shapes = {
            "linear_fc1.weight": (text_hidden, text_hidden), "linear_fc1.bias": (text_hidden,),
            "linear_fc2.weight": (hidden, text_hidden), "linear_fc2.bias": (hidden,),
        }  # fmt: skip
        self._side_file(folder, "text_projection", {k: (f"talker.text_projection.{k}", v) for k, v in shapes.items()})
        _copy_tokenizer(ck.folder, folder)
        _write_json(folder / CONFIG_FILE, self._talker_config())
        progress()

    def build_code_predictor(self, progress: Progress = lambda: None) -> None:
        """Write ``code_predictor/``: graph, embeddings, heads, projection where there is one, config."""
        ck, prefix = self.checkpoint, "talker.code_predictor"
        spec, talker_width = ck.code_predictor, ck.talker.hidden_size
        depths = range(ck.num_code_groups - 1)
        folder = self._staging / "code_predictor"
        self._write_graph(folder, "code_predictor", spec, f"{prefix}.model", progress)
        shape = (spec.vocab_size, talker_width)
        self._side_file(
            folder,
            "codec_embeddings",
            {f"embedding_{i}": (f"{prefix}.model.codec_embedding.{i}.weight", shape) for i in depths},
        )
        shape = (spec.vocab_size, spec.hidden_size)
        self._side_file(
            folder, "lm_heads", {f"lm_head_{i}.weight": (f"{prefix}.lm_head.{i}.weight", shape) for i in depths}
        )
        write_heads_graph(folder / HEADS_FILE)
        if f"{PROJECTION}.weight" in self.weights:
            shapes = {"weight": (spec.hidden_size, talker_width), "bias": (spec.hidden_size,)}
            self._side_file(folder, "small_to_mtp_projection", {k: (f"{PROJECTION}.{k}", v) for k, v in shapes.items()})
        _write_json(folder / CONFIG_FILE, self._predictor_config())
        progress()

    def build_plan(self, component: str, report: Report) -> Outcome:
        """Build the plan of a component that has been written, for the backend at hand."""
        options = RebuildOptions(
            max_verify_size=self.options.max_verify_size, engine=self._engine_options, backup=False
        )
        folder = self._staging / component
        return build_component(folder, folder, self._backend, options, report=report)

    def build_code2wav(self, progress: Progress = lambda: None) -> None:
        """Write ``code2wav/``: the codec's decoder, in FP32."""
        write_code2wav(self.checkpoint.folder, self._staging / "code2wav", progress)

    def _write_graph(self, folder: Path, name: str, spec: DecoderSpec, prefix: str, progress: Progress) -> None:
        with GraphWriter(folder, name) as graph:
            write_decoder(
                graph, spec, self.weights, prefix, dtype=self.options.dtype, narrow=self._narrow, progress=progress
            )
            graph.save(index=name == "code_predictor")

    def _side_file(self, folder: Path, stem: str, sources: dict[str, tuple[str, tuple[int, ...]]]) -> None:
        """Write ``stem.safetensors`` whose keys come from checkpoint tensors of known shapes."""
        tensors = {}
        for key, (name, shape) in sources.items():
            self.weights.check(name, shape)
            tensors[key] = StreamedTensor(
                dtype=self.options.dtype, shape=shape, blocks=partial(self.weights.chunks, name), source=name
            )
        write_tensors(folder / f"{stem}.safetensors", tensors)

    def _common_config(self, model: str, spec: DecoderSpec) -> dict[str, Any]:
        options = self.options
        return {
            "model": model,
            "spec_decode_type": "none",
            "engine_role": "llm",
            "precision": options.precision,
            "kv_cache_dtype": "fp32",
            **asdict(spec),
            "rope_scaling": None,
            "partial_rotary_factor": 1.0,
            "num_deepstack_features": 0,
            "num_code_groups": self.checkpoint.num_code_groups,
            "builder_config": {
                "max_input_len": options.max_input_len,
                "max_batch_size": options.max_batch_size,
                "max_kv_cache_capacity": options.max_kv_cache_capacity,
            },
        }

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

    def _predictor_config(self) -> dict[str, Any]:
        ck, options = self.checkpoint, self.options
        config = self._common_config("qwen3_tts_code_predictor", ck.code_predictor)
        config |= {"use_embeddings_input": True, "talker_hidden_size": ck.talker.hidden_size}
        # A frame stands at positions 0 to G - 1; drafts never reach beyond, the rest is room for padding.
        config["builder_config"] |= {
            "max_input_len": max(2, options.max_verify_size),
            "max_kv_cache_capacity": ck.num_code_groups + MAX_VERIFY_SIZE,
            "max_verify_size": options.max_verify_size,
        }
        return config


def _check_precision(precision: str, backend: Backend) -> None:
    if backend.binding is not None:
        check_precision(backend.binding, precision)


def _check_codec(checkpoint: TtsCheckpoint, codec: CodecSpec) -> None:
    """Check that every code the model can emit is one that the codec can decode."""
    if codec.num_quantizers != checkpoint.num_code_groups:
        raise ConfigError(
            f"{checkpoint.folder}: speech_tokenizer num_quantizers is {codec.num_quantizers}, "
            f"talker_config.num_code_groups is {checkpoint.num_code_groups}"
        )
    first, others = checkpoint.talker.vocab_size - SPECIAL_CODES, checkpoint.code_predictor.vocab_size
    if max(first, others) > codec.codebook_size:
        raise ConfigError(
            f"{checkpoint.folder}: the Talker emits codes below {first} (vocab_size less {SPECIAL_CODES}) and the "
            f"CodePredictor below {others} (vocab_size), the codec's codebook_size is {codec.codebook_size}"
        )


def _check_projection(checkpoint: TtsCheckpoint, weights: Weights) -> None:
    """Check that the projection is there where the two widths differ; equal widths may go without (0.6B)."""
    talker_width, width = checkpoint.talker.hidden_size, checkpoint.code_predictor.hidden_size
    if talker_width != width and f"{PROJECTION}.weight" not in weights:
        raise ConfigError(
            f"{checkpoint.folder}: the checkpoint has no {PROJECTION}, which is required as the Talker's hidden_size "
            f"{talker_width} is not the CodePredictor's {width}"
        )


def _check_replaceable(folder: Path) -> None:
    """Refuse to replace a folder that holds anything but an engine."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        plans = [folder / name for name in (GRAPH_FILE, *PLAN_FILES)]
        if ("model" in config or "model_type" in config) and any(path.is_file() for path in plans):
            return
    except (OSError, ValueError, TypeError):
        pass
    raise ConfigError(f"{folder} exists and is no engine folder: it is left as it is, choose another --engineDir")


def _copy_tokenizer(source: Path, target: Path) -> None:
    found = [name for name in _TOKENIZER_FILES if (source / name).is_file()]
    if "tokenizer.json" not in found and not {"vocab.json", "merges.txt", "tokenizer_config.json"} <= set(found):
        raise ConfigError(
            f"{source} has no tokenizer: tokenizer.json, or vocab.json, merges.txt and tokenizer_config.json"
        )
    for name in found:
        shutil.copyfile(source / name, target / name)
    # Edge-LLM's marker of a template that the runtime applies by itself.
    (target / _NATIVE_TEMPLATE_MARKER).touch()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
