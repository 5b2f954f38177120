"""From a checkpoint to engine folders: what is the same for every family of models."""

from __future__ import annotations

import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from trt_cpspec.config import MAX_VERIFY_SIZE, DecoderSpec
from trt_cpspec.durable import (
    PARTIAL_SUFFIX,
    STAGING,
    UNFINISHED,
    clear_unfinished,
    copy_file,
    mark_unfinished,
    replacing,
    write_file,
)
from trt_cpspec.errors import ConfigError
from trt_cpspec.runtime import GRAPH_FILE, PLAN_FILES
from trt_cpspec.tensorfile import StreamedTensor, write_tensors

from .checkpoint import SPECIAL_CODES, SpeechCheckpoint, Weights
from .code2wav import CodecSpec
from .decoder import write_decoder
from .engine import Backend, EngineOptions, Report, check_precision
from .graph import GraphWriter, write_heads_graph
from .moe import MoeSpec
from .rebuild import Outcome, RebuildOptions, build_component

Progress = Callable[[], None]
Write = Callable[[Progress], None]
Build = TypeVar("Build", bound="EngineBuild")

ONNX_RUNTIME = Backend(name="onnxruntime", binding=None)
"""The backend that runs the graphs as they are."""

PROJECTION = "talker.code_predictor.small_to_mtp_projection"
PRECISIONS = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
CONFIG_FILE = "config.json"
HEADS_FILE = "heads.onnx"
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """What an engine is built for.

    Attributes
    ----------
    precision : str
        ``fp32``, ``fp16`` or ``bf16``: how weights and side files are stored. The codec is always FP32.
    max_input_len : int
        Rows of a prefill.
    max_kv_cache_capacity : int
        Positions of the Talker, and of a Thinker: prefill rows and what is made behind them.
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


class EngineBuild(ABC):
    """The build of one checkpoint: everything is checked when it is made, each component is written by a call.

    Use it as a context manager. Components are built aside, and :meth:`commit` puts them in place together; leaving
    without it leaves the engine folder as it was. A build that is killed within its commit leaves a mark, by which the
    runtime refuses the folder and the next build takes back what was moved (:mod:`trt_cpspec.durable`).

    Parameters
    ----------
    checkpoint : SpeechCheckpoint
    codec : CodecSpec
    engine_dir : Path
    options : BuildOptions
    backend : Backend
        What the graphs are written for; plans are built by :meth:`build_plan`.
    engine_options : EngineOptions or None
        How plans are built.

    Attributes
    ----------
    folders : tuple of str
        Where the components lie in the engine folder, in the order in which they are built.
    predictor_model : str
        ``model`` in the CodePredictor's config.

    Raises
    ------
    ConfigError
        The checkpoint cannot be built, or the options do not fit it. Nothing has been written then.
    """

    folders: tuple[str, ...]
    predictor_model: str
    checkpoint: SpeechCheckpoint

    def __init__(
        self,
        checkpoint: SpeechCheckpoint,
        codec: CodecSpec,
        engine_dir: Path,
        options: BuildOptions,
        *,
        backend: Backend = ONNX_RUNTIME,
        engine_options: EngineOptions | None = None,
    ) -> None:
        self._backend, self._engine_options = backend, engine_options or EngineOptions()
        self._narrow = backend.binding is not None
        if backend.binding is not None:
            check_precision(backend.binding, options.precision)
        self.checkpoint, self.codec = checkpoint, codec
        self.weights = Weights(checkpoint.folder)
        self.engine_dir, self.options = engine_dir, options
        self._staging = engine_dir / STAGING
        self._lost: list[str] = []
        _check_codec(checkpoint, codec)
        _check_projection(checkpoint, self.weights)
        self._check_capacity("Talker", checkpoint.talker)
        for folder in self.folders:
            _check_replaceable(engine_dir / folder)

    def _check_capacity(self, who: str, spec: DecoderSpec) -> None:
        if self.options.max_kv_cache_capacity > spec.max_position_embeddings:
            raise ConfigError(
                f"max_kv_cache_capacity {self.options.max_kv_cache_capacity} exceeds the {who}'s "
                f"max_position_embeddings {spec.max_position_embeddings}"
            )

    def __enter__(self: Build) -> Build:
        """Prepare a folder to build in."""
        self._recover()
        self._remove_staging()
        try:
            for component in self.folders:
                (self._staging / component).mkdir(parents=True)
        except OSError as error:
            raise ConfigError(
                f"the engine folder {self.engine_dir} cannot be written: {error.strerror or error}"
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        """Remove what was not committed."""
        self._remove_staging()
        with suppress(OSError):
            self.engine_dir.rmdir()  # succeeds only when this build made nothing of it

    def commit(self) -> None:
        """Put the built components in place of older ones, which are removed when all the new ones are there.

        Raises
        ------
        ConfigError
            A folder in the way is no engine, or a failed commit could not be taken back, and where the older are.
        OSError
            A component cannot be moved; the older ones are where they were.
        """
        for component in self.folders:
            _check_replaceable(self.engine_dir / component)
        moves: list[tuple[Path, Path]] = []
        mark_unfinished(self.engine_dir, {name: _is_there(self.engine_dir / name) for name in self.folders})
        try:
            for component in self.folders:
                self._replace(component, moves)
            clear_unfinished(self.engine_dir)
        except BaseException as error:
            _undo(moves)
            self._lost = [component for component in self.folders if _is_there(self._former / component)]
            if self._lost:
                names = ", ".join(self._lost)
                raise ConfigError(f"{error}; the former {names} could not be put back from {self._former}") from error
            clear_unfinished(self.engine_dir)
            raise

    def _recover(self) -> None:
        """Take back what a build that was killed within its commit moved; it may have left the only copies aside."""
        for path in self.engine_dir.glob(f".*{PARTIAL_SUFFIX}"):
            path.unlink(missing_ok=True)
        if not (self.engine_dir / UNFINISHED).exists():
            # What an earlier version left, which set no mark.
            _undo([(self.engine_dir / name, self._former / name) for name in self.folders])
            return
        for name, was_there in _read_mark(self.engine_dir / UNFINISHED).items():
            target, aside = self.engine_dir / name, self._former / name
            if _is_there(target) and (_is_there(aside) or not was_there):
                shutil.rmtree(self._staging / name, ignore_errors=True)
                (self._staging / name).parent.mkdir(parents=True, exist_ok=True)
                target.rename(self._staging / name)
            _undo([(target, aside)])
        clear_unfinished(self.engine_dir)

    def _replace(self, component: str, moves: list[tuple[Path, Path]]) -> None:
        """Put a new component in the place of the former one; each move is noted before it is made."""
        target, former = self.engine_dir / component, self._former / component
        for parent in (target.parent, former.parent):
            parent.mkdir(parents=True, exist_ok=True)
        pairs = [(target, former)] if target.exists() else []
        for source, place in [*pairs, (self._staging / component, target)]:
            moves.append((source, place))
            source.rename(place)

    @property
    def _former(self) -> Path:
        """Where a commit keeps the older components."""
        return self._staging / "former"

    def _remove_staging(self) -> None:
        """Remove what was built aside, and the older components unless one of them belongs elsewhere."""
        there = {name: _is_there(self.engine_dir / name) for name in self.folders if _is_there(self._former / name)}
        if not self._lost and all(there.values()):
            shutil.rmtree(self._staging, ignore_errors=True)
            return
        for component in self.folders:
            shutil.rmtree(self._staging / component, ignore_errors=True)

    @property
    def components(self) -> list[tuple[str, int, Write]]:
        """Return folder, number of progress steps and build function of each component, in order."""
        return [(folder, *part) for folder, part in zip(self.folders, self._parts(), strict=True)]

    @abstractmethod
    def _parts(self) -> list[tuple[int, Write]]:
        """Return number of progress steps and build function of each of :attr:`folders`."""

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
        write_json(folder / CONFIG_FILE, self._predictor_config())
        progress()

    def build_plan(self, component: str, report: Report) -> Outcome:
        """Build the plan of a component that has been written, for the backend at hand."""
        options = RebuildOptions(
            max_verify_size=self.options.max_verify_size, engine=self._engine_options, backup=False
        )
        folder = self._staging / component
        return build_component(folder, folder, self._backend, options, report=report)

    def _write_graph(
        self,
        folder: Path,
        name: str,
        spec: DecoderSpec,
        prefix: str,
        progress: Progress,
        *,
        moe: MoeSpec | None = None,
        accept_hidden_layer: int | None = None,
        rotary_sections: Sequence[int] | None = None,
        deepstack_layers: int = 0,
    ) -> None:
        with GraphWriter(folder, name) as graph:
            write_decoder(
                graph,
                spec,
                self.weights,
                prefix,
                dtype=self.options.dtype,
                narrow=self._narrow,
                moe=moe,
                gathered_rows=moe.gathered_rows(self.options.max_batch_size) if moe is not None else 0,
                accept_hidden_layer=accept_hidden_layer,
                rotary_sections=rotary_sections,
                deepstack_layers=deepstack_layers,
                progress=progress,
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

    def _table(self, folder: Path, stem: str, key: str, source: str, shape: tuple[int, int]) -> None:
        """Write a side file of one matrix."""
        self._side_file(folder, stem, {key: (source, shape)})

    def _projection(self, folder: Path, stem: str, inward: int, inner: int, outward: int) -> None:
        """Write ``talker.<stem>``, an MLP of two linear layers with biases."""
        shapes = {
            "linear_fc1.weight": (inner, inward), "linear_fc1.bias": (inner,),
            "linear_fc2.weight": (outward, inner), "linear_fc2.bias": (outward,),
        }  # fmt: skip
        self._side_file(folder, stem, {key: (f"talker.{stem}.{key}", shape) for key, shape in shapes.items()})

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

    def _predictor_config(self) -> dict[str, Any]:
        ck, options = self.checkpoint, self.options
        config = self._common_config(self.predictor_model, ck.code_predictor)
        config |= {"use_embeddings_input": True, "talker_hidden_size": ck.talker.hidden_size}
        # A frame stands at positions 0 to G - 1; drafts never reach beyond, the rest is room for padding.
        config["builder_config"] |= {
            "max_input_len": max(2, options.max_verify_size),
            "max_kv_cache_capacity": ck.num_code_groups + MAX_VERIFY_SIZE,
            "max_verify_size": options.max_verify_size,
        }
        return config


def _check_codec(checkpoint: SpeechCheckpoint, codec: CodecSpec) -> None:
    """Check that every code the model can emit is one that the codec can decode."""
    if codec.num_quantizers != checkpoint.num_code_groups:
        raise ConfigError(
            f"{checkpoint.folder}: the codec's num_quantizers is {codec.num_quantizers}, "
            f"talker_config.num_code_groups is {checkpoint.num_code_groups}"
        )
    first, others = checkpoint.talker.vocab_size - SPECIAL_CODES, checkpoint.code_predictor.vocab_size
    if max(first, others) > codec.codebook_size:
        raise ConfigError(
            f"{checkpoint.folder}: the Talker emits codes below {first} (vocab_size less {SPECIAL_CODES}) and the "
            f"CodePredictor below {others} (vocab_size), the codec's codebook_size is {codec.codebook_size}"
        )


def _check_projection(checkpoint: SpeechCheckpoint, weights: Weights) -> None:
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


def _read_mark(path: Path) -> dict[str, bool]:
    """Read what a commit was about to exchange: the place of each component, and whether there was a former one."""
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(state, dict) and all(not {"..", "/", ""} & {*Path(name).parts, name} for name in state):
            return {name: bool(was_there) for name, was_there in state.items()}
    except (OSError, ValueError, RecursionError):
        pass
    raise ConfigError(f"{path} is damaged, and says no more what a killed build left: remove it, and build again")


def _undo(moves: list[tuple[Path, Path]]) -> None:
    """Take back moves, the last one first; one that was not made, or cannot be taken back, is passed over."""
    for source, place in reversed(moves):
        if _is_there(place) and not _is_there(source):
            with suppress(OSError):
                place.rename(source)


def _is_there(path: Path) -> bool:
    """Return whether something has this name; a link that was moved aside may lead nowhere and is the user's still."""
    return os.path.lexists(path)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy a checkpoint's tokenizer files; a ConfigError says which are missing."""
    found = [name for name in _TOKENIZER_FILES if (source / name).is_file()]
    if "tokenizer.json" not in found and not {"vocab.json", "merges.txt", "tokenizer_config.json"} <= set(found):
        raise ConfigError(
            f"{source} has no tokenizer: tokenizer.json, or vocab.json, merges.txt and tokenizer_config.json"
        )
    for name in found:
        with replacing(target / name) as partial:
            copy_file(source / name, partial, target / name)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file."""
    write_file(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())
