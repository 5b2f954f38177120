"""Where engines run: ONNX Runtime on the CPU, or TensorRT on a CUDA device. It opens the sessions of a model."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .config import EXECUTORS, DecoderSpec, Section
from .cuda import Device
from .durable import check_finished, check_inside
from .errors import ConfigError, CpSpecError, EngineError, did_you_mean
from .fused import fused_refusal
from .session import NO_EXTRAS, DecoderSession, Float32, GraphSession, HeadSession, PassExtras, Shapes
from .trt_session import (
    CODEC_TENSORS,
    Plan,
    TensorRTDecoderSession,
    TensorRTGraphSession,
    import_binding,
    plan_bytes,
)

logger = logging.getLogger(__name__)

GRAPH_FILE = "model.onnx"
HEADS_FILE = "heads.onnx"
DECODER_PLAN = "llm.engine"
CODEC_PLAN = "code2wav.engine"
AUDIO_PLAN = "audio_encoder.engine"
VISION_PLAN = "visual.engine"
PLAN_FILES = (DECODER_PLAN, CODEC_PLAN, AUDIO_PLAN, VISION_PLAN)
"""The plan of each kind of component."""

OPENED_LATER = (AUDIO_PLAN, VISION_PLAN)
"""Those that are opened for the first conversation that needs them."""

BUILD_HINT = "build one with cpspec-build --backend tensorrt (or tensorrt_rtx)"


class Decoder(Protocol):
    """A decoder with its KV cache, on whatever device (see :class:`~trt_cpspec.session.DecoderSession`)."""

    run_seconds: float

    def start(self, batch: int, positions: int) -> None:
        """Begin new sequences."""
        ...

    def clear(self) -> None:
        """Zero the cache."""
        ...

    def keep_rows(self, rows: NDArray[np.intp]) -> None:
        """Keep the sequences of these rows."""
        ...

    def forward(self, embeds: Float32, positions: NDArray[np.int64]) -> Float32:
        """Run rows ``[B, T, H]`` at positions ``[B, T]``; return ``[B, T, H]``."""
        ...

    def max_positions(self) -> int | None:
        """Return the positions that one decode pass takes for each row; None is no limit."""
        ...


class PromptDecoder(Decoder, Protocol):
    """A decoder whose prompts may hold more than text."""

    def forward(self, embeds: Float32, positions: NDArray[np.int64], extras: PassExtras = NO_EXTRAS) -> Float32:
        """Run rows ``[B, T, H]`` at positions ``[B, T]``, with what media bring; return ``[B, T, H]``."""
        ...


class StaticGraph(Protocol):
    """A graph without state."""

    def run(self, feeds: dict[str, NDArray[Any]], /) -> dict[str, NDArray[Any]]:
        """Run it once."""
        ...


class CodecGraph(StaticGraph, Protocol):
    """The codec's graph, whose calls may follow each other."""

    @property
    def carries_state(self) -> bool:
        """Whether a call can go on where another ended; else :meth:`run` is all there is."""
        ...

    def begin(self) -> StaticGraph:
        """Return what runs calls that follow each other, from an empty state."""
        ...


@dataclass(slots=True)
class Runtime:
    """The device of a model.

    Attributes
    ----------
    cuda : Device or None
        None is the CPU.
    threads : int or None
        Threads of one pass on the CPU; None takes all cores.
    """

    cuda: Device | None = None
    threads: int | None = None

    def decoder(self, folder: Path, spec: DecoderSpec, capacity: int, *, keep_buffers: bool = False) -> PromptDecoder:
        """Open the decoder of a component folder.

        ``keep_buffers`` keeps the device memory of every batch size that was used, with its captured passes: for a
        decoder with a short cache whose batch changes often.
        """
        if self.cuda is None:
            return DecoderSession(folder / GRAPH_FILE, spec, capacity=capacity, threads=self.threads)
        plan = self._plan(folder, DECODER_PLAN)
        return TensorRTDecoderSession(plan, self.cuda, spec, capacity=capacity, keep_buffers=keep_buffers)

    def heads(self, folder: Path) -> HeadSession | None:
        """Open the graph that applies a CodePredictor's heads; None where numpy does: on a GPU host, or without it."""
        path = folder / HEADS_FILE
        return HeadSession(path, threads=self.threads) if self.cuda is None and path.is_file() else None

    def graph(self, folder: Path, plan: str = CODEC_PLAN, tensors: Shapes = CODEC_TENSORS) -> CodecGraph:
        """Open the codec's graph, or an encoder's by the name of its plan and by its tensors."""
        if self.cuda is None:
            graph = GraphSession(folder / GRAPH_FILE, threads=self.threads)
            graph.check_tensors(tensors)
            return graph
        return TensorRTGraphSession(self._plan(folder, plan), self.cuda, tensors)

    def _plan(self, folder: Path, name: str) -> Plan:
        assert self.cuda is not None
        path = folder / name
        if not path.is_file():
            raise EngineError(f"{path} does not exist, --device cuda needs a plan; {BUILD_HINT}")
        check_inside(path, folder)
        record = PlanRecord.from_section(Section.from_file(folder / "config.json"), name)
        binding = import_binding(record.flavour)
        self.cuda.make_current()  # an encoder is opened by the thread that first needs it
        if name in OPENED_LATER:
            self.cuda.require(path.stat().st_size, f"opening {path}")
        data = plan_bytes(path)
        record.check(path, data, str(binding.__version__), self.cuda.compute_capability)
        return Plan(path, binding, data)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """What ``config.json`` records of a plan (``builder_config.engine``)."""

    flavour: str
    tensorrt_version: str
    compute_capabilities: tuple[str, ...]
    sha256: str

    @classmethod
    def from_section(cls, section: Section, plan_name: str) -> PlanRecord:
        """Read the record of a plan; an EngineError says when there is none."""
        limits = section.section("builder_config")
        if not limits.has("engine"):
            raise EngineError(
                f"{section.where} has no record of {plan_name} (builder_config.engine): it was not built by "
                f"cpspec-build. Plans are code, and only a plan that its sidecar describes is loaded; {BUILD_HINT}"
            )
        engine = limits.section("engine")
        return cls(
            flavour=engine.text("flavour"),
            tensorrt_version=engine.text("tensorrt_version"),
            compute_capabilities=tuple(str(item) for item in engine.list("compute_capabilities")),
            sha256=engine.section("plan").text("sha256"),
        )

    def check(self, path: Path, data: bytes, version: str, capability: tuple[int, int]) -> None:
        """Raise an EngineError when the plan is another one, or of another version or device than those at hand."""
        again = f"build it again with cpspec-build --engineDir {path.parent}"
        if (path.parent / GRAPH_FILE).is_file():
            again += ", or run the graph with --device cpu"
        if self.tensorrt_version != version:
            raise EngineError(
                f"{path} was built by {self.flavour} {self.tensorrt_version}, {version} is installed; {again}"
            )
        device = f"{capability[0]}.{capability[1]}"
        if self.compute_capabilities and device not in self.compute_capabilities:
            raise EngineError(
                f"{path} was built for compute capability {', '.join(self.compute_capabilities)}, this device has "
                f"{device}; {again}"
            )
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise EngineError(f"{path} is not the plan that its config.json describes (its SHA-256 differs); {again}")


def plan_sizes(folders: Sequence[Path]) -> dict[Path, int]:
    """Return the bytes of the plan of each component folder, 0 where there is none."""
    plans = {folder: [folder / name for name in PLAN_FILES] for folder in folders}
    return {folder: sum(path.stat().st_size for path in paths if path.is_file()) for folder, paths in plans.items()}


def _with_room(runtime: Runtime, folders: Sequence[Path]) -> Runtime:
    """Return a runtime on a device that has room for the plans of all folders, before any of them is opened.

    Those of encoders do not count: each is compared when the first conversation needs it.
    """
    sizes = plan_sizes([folder for folder in folders if not any((folder / name).is_file() for name in OPENED_LATER)])
    if runtime.cuda is not None:
        parts = ", ".join(f"{folder.name} {size / 1e6:,.1f} MB" for folder, size in sizes.items())
        runtime.cuda.require(sum(sizes.values()), f"opening the plans ({parts})")
    return runtime


def checked_executor(name: str) -> str:
    """Return the name of a CodePredictor's executor; a ConfigError names those that there are."""
    if name not in EXECUTORS:
        raise ConfigError(f"unknown executor {name!r}; {did_you_mean(name, EXECUTORS)}")
    return name


def open_runtime(
    device: str,
    folders: Sequence[Path],
    *,
    threads: int | None = None,
    code_predictor: Path | None = None,
    executor: str = "engine",
) -> Runtime:
    """Choose where the engines of these component folders run.

    Parameters
    ----------
    device : {"auto", "cpu", "cuda"}
        ``auto`` is CUDA where every folder has a plan and a device is there, else the CPU; it is logged.
    folders : sequence of Path
    threads : int or None
    code_predictor : Path or None
        The folder among them that the fused kernel may run without a plan, unless ``executor`` is ``engine``.
    executor : {"auto", "fused", "engine"}

    Raises
    ------
    ConfigError
        An unknown device.
    EngineError
        ``cuda`` was asked for and cannot be had, or a build was stopped half-way through a folder.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"unknown device {device!r}; allowed: auto, cpu, cuda")
    for folder in folders:
        check_finished(folder)
    if device == "cuda":
        return _with_room(Runtime(cuda=Device(), threads=threads), folders)
    without = [folder for folder in folders if not any((folder / name).is_file() for name in PLAN_FILES)]
    fusable = executor != "engine" and without == [code_predictor]
    if device == "auto" and (fusable or not without):
        try:
            runtime = Runtime(cuda=Device(), threads=threads)
            reason = fused_refusal(runtime.cuda, without[0]) if runtime.cuda and fusable else None
        except CpSpecError as error:
            if not fusable or len(folders) > 1:
                logger.warning("the engines have plans, but %s; running on the CPU", error)
        else:
            if reason is None:
                logger.info("running on %s", runtime.cuda.name if runtime.cuda else "")
                return _with_room(runtime, folders)
            logger.warning(
                "%s has no plan, and the fused kernel cannot run it: %s; running on the CPU", without[0], reason
            )
    elif device == "auto" and len(without) < len(folders):
        names = ", ".join(str(folder) for folder in without)
        logger.warning("only some folders have plans, without one: %s; running on the CPU", names)
    return Runtime(threads=threads)
