"""The CodePredictor on its engine: embeddings, projection and heads around one decoder session."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from .config import (
    CodePredictorSpec,
    Mode,
    SamplingParams,
    Section,
    Window,
    checked_mode,
    checked_verify_size,
    resolve_window,
)
from .device_frame import CapturedFrames, DeviceFrames, DeviceTables
from .errors import ConfigError, CpSpecError, EngineError, NumericsError, shown
from .frame import Codes, FrameResult, FrameRow, decode_frame
from .fused import FusedFrames, FusedSession, open_fused
from .runtime import BUILD_HINT, DECODER_PLAN, Decoder, Runtime, checked_executor, open_runtime
from .sampling import PhiloxNoise
from .session import HeadSession
from .tensorfile import RowTable, TensorFile
from .trt_session import TensorRTDecoderSession
from .turns import ModelLock

logger = logging.getLogger(__name__)

Float32 = NDArray[np.float32]
T = TypeVar("T")

_DEFAULT_PARAMS = SamplingParams()


class CodePredictor:
    """Decodes the residual codes of audio frames, for people with a Talker of their own.

    Make one with :meth:`from_engine_dir`. :meth:`decode_frame`, :meth:`window` and :meth:`embed_frame` are safe for use
    from several threads: frames are decoded one after the other. The methods of a pass (:meth:`prefill`,
    :meth:`forward`, the logits) are for who holds :attr:`lock`.

    Attributes
    ----------
    lock : ModelLock
        Held while a frame is decoded; all that runs on the same device holds it too.
    spec : CodePredictorSpec
    num_code_groups : int
        G, the Talker's code included.
    codebook_size : int
        V, as the heads have it.
    """

    def __init__(
        self,
        spec: CodePredictorSpec,
        session: Decoder,
        tables: PredictorTables,
        code0_embedding: RowTable,
        *,
        head_session: HeadSession | None = None,
        device_frames: CapturedFrames | None = None,
    ) -> None:
        self.spec = spec
        self.num_code_groups = spec.num_code_groups
        self.codebook_size = tables.heads.shape[1]
        self._session = session
        self._tables = tables
        self._code0_embedding = code0_embedding
        self._head_session = head_session
        self._device_frames = device_frames
        self.lock = ModelLock()
        self._windows: dict[int, Window] = {}
        self._warned: set[str] = set()

    @classmethod
    def from_engine_dir(
        cls,
        folder: Path | str,
        *,
        talker_dir: Path | str | None = None,
        device: str = "auto",
        threads: int | None = None,
        runtime: Runtime | None = None,
        executor: str = "auto",
    ) -> CodePredictor:
        """Load a ``code_predictor`` folder that ``cpspec-build`` wrote.

        Parameters
        ----------
        folder : path
        talker_dir : path or None
            Where the Talker's ``embedding.safetensors`` lies; None is the sibling folder ``talker``.
        device : {"auto", "cpu", "cuda"}
            ``auto`` is CUDA where the folder has a plan and a device is there.
        threads : int or None
            Threads of one pass on the CPU; None takes all cores.
        runtime : Runtime or None
            A device that is shared with other components, in place of ``device`` and ``threads``.
        executor : {"auto", "fused", "engine"}
            On a CUDA device: the fused kernel, or the TensorRT engine. ``auto`` is the fused kernel where it can run
            this model, else the engine; what it takes is logged. A CPU has the engine alone.

        Raises
        ------
        ConfigError, EngineError
            A file is missing, damaged, or contradicts ``config.json``.
        """
        folder = Path(folder)
        checked_executor(executor)
        runtime = runtime or open_runtime(device, [folder], threads=threads, code_predictor=folder, executor=executor)
        spec = CodePredictorSpec.from_section(Section.from_file(folder / "config.json"))
        talker_dir = Path(talker_dir) if talker_dir is not None else folder.parent / "talker"
        embedding = TensorFile(talker_dir / "embedding.safetensors").rows("embedding")
        if embedding.shape[1] != spec.talker_hidden_size:
            raise EngineError(
                f"{talker_dir}: embedding has shape {list(embedding.shape)}, the CodePredictor needs rows of "
                f"talker_hidden_size {spec.talker_hidden_size}"
            )
        session, frames = _open_executor(runtime, folder, talker_dir, spec, executor)
        tables = PredictorTables.from_dir(folder, spec)
        return cls(spec, session, tables, embedding, head_session=runtime.heads(folder), device_frames=frames)

    @property
    def run_seconds(self) -> float:
        """Seconds spent in the engine so far; for frames on the device, waiting for them."""
        heads, frames = self._head_session, self._device_frames
        waited = frames.wait_seconds if frames is not None else 0.0
        return self._session.run_seconds + (heads.run_seconds if heads is not None else 0.0) + waited

    def device_facts(self) -> dict[str, str]:
        """Return what the passes run on, where that is a GPU; empty on the CPU."""
        session = self._session
        if isinstance(session, TensorRTDecoderSession):
            engine = f"{session.plan.binding.__name__} {session.plan.binding.__version__}"
        elif isinstance(session, FusedSession):
            engine = "fused kernel"
        else:
            return {}
        device = session.device
        driver = int(device.call("cuDriverGetVersion"))
        return {
            "device": device.name,
            "cuda_driver": f"{driver // 1000}.{driver % 1000 // 10}",
            "engine": engine,
            "loop": "device" if self.frame_on_device else "host",
        }

    @property
    def frame_on_device(self) -> bool:
        """Whether a frame is one launch on the GPU, and not a loop of the host."""
        return self._device_frames is not None

    def _prepare_device(self, batch: int, window: Window, mode: Mode) -> None:
        """Capture the frame on the device; where that cannot be, let the host drive from now on, and say so."""
        if self._device_frames is None:
            return
        try:
            self._device_frames.prepare(batch, window, mode)
        except EngineError as error:
            logger.warning("the rounds of a frame are driven by the host, one wait each: %s", error)
            self.drive_from_host()

    def drive_from_host(self) -> None:
        """Let the host run the rounds from now on, with numpy's sampling: to compare, or to find a fault."""
        self._device_frames = None

    @property
    def max_verify_size(self) -> int:
        """Positions of one pass: what the config promises, and no more than the engine's profile admits."""
        limit = self._session.max_positions()
        return self.spec.max_verify_size if limit is None else min(self.spec.max_verify_size, limit)

    def window(self, verify_size: int) -> Window:
        """Return the verification window that a requested size gives on this engine, and warn once of a fallback.

        Raises
        ------
        ConfigError
            ``verify_size`` is neither 0 nor 2 to 8.
        """
        window = self._windows.get(checked_verify_size(verify_size))
        if window is None:
            window = self._windows[verify_size] = resolve_window(
                verify_size,
                codebook_size=self.codebook_size,
                residual_depths=self.num_code_groups - 1,
                max_verify_size=self.max_verify_size,
            )
        if window.reason and window.reason not in self._warned:
            self._warned.add(window.reason)
            logger.warning("CodePredictor speculation is off: %s; decoding autoregressively", window.reason)
        return window

    def decode_frame(
        self,
        talker_hidden: NDArray[np.floating],
        code0: Sequence[int] | NDArray[np.integer] | int,
        *,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        seeds: int | Sequence[int] = 0,
        frames: int | Sequence[int] = 0,
        verify_size: int = 0,
        mode: Mode = "rejection",
    ) -> FrameResult:
        """Decode one frame for every row of a batch.

        Parameters
        ----------
        talker_hidden : ndarray, shape [B, Ht] or [Ht], floating
            The Talker's last hidden state, after its final norm.
        code0 : B integers, or one
            The Talker's code.
        params : SamplingParams, or B of them
            None is ``SamplingParams()``: 0.9 / 50 / 1.0.
        seeds, frames : int, or B of them
            Random numbers are a pure function of seed, frame number, depth and use: give each frame its own number.
        verify_size : int
            0 decodes autoregressively; 2 to 8 verifies that many positions in a pass.
        mode : {"rejection", "coupled"}
            ``coupled`` gives the very codes that ``verify_size=0`` gives for the same seed, up to the engine's
            rounding.

        Returns
        -------
        FrameResult
            ``codes`` is ``[B, G]``, B = 1 for a single row.

        Raises
        ------
        ConfigError
            A shape, a code or a number of rows does not fit, or more rows than ``max_batch_size``.
        NumericsError
            The model gave logits that describe no law; the cache is cleared, other frames can go on.
        """
        hidden = _rows_of(np.asarray(talker_hidden, np.float32), 2)
        first = _rows_of(np.asarray(code0), 1)
        self._check_inputs(hidden, first)
        batch = len(hidden)
        draws = [
            (row_params, _in_range("seed", seed, 64), _in_range("frame", frame, 32))
            for row_params, seed, frame in zip(
                _per_row(params or _DEFAULT_PARAMS, batch, "params"),
                _per_row(seeds, batch, "seeds"),
                _per_row(frames, batch, "frames"),
                strict=True,
            )
        ]
        window, checked = self.window(verify_size), checked_mode(mode)
        with self.lock:
            return self._decode(hidden, first.astype(np.int32), draws, window, checked)

    def _decode(
        self,
        hidden: Float32,
        first: Codes,
        draws: list[tuple[SamplingParams, int, int]],
        window: Window,
        checked: Mode,
    ) -> FrameResult:
        batch = len(hidden)
        self._prepare_device(batch, window, checked)
        try:
            if self._device_frames is not None:
                return self._device_frames.decode(hidden, first, draws, window=window, mode=checked)
            rows = [FrameRow(row_params, PhiloxNoise(seed, frame)) for row_params, seed, frame in draws]
            return decode_frame(self, hidden, first, rows, window=window, mode=checked)
        except (NumericsError, EngineError):
            if not isinstance(self._session, FusedSession):  # whose passes read nothing beyond their own positions
                with suppress(EngineError):  # a device that is gone cannot be cleared: what it said before is told
                    self._start(batch)
                    self._session.clear()
            raise

    def embed_frame(self, codes: Codes) -> Float32:
        """Return the sum of each frame's G embedded codes, ``[B, G]`` to ``[B, Ht]``.

        It is the Talker's next input, before the text side is added.
        """
        total = self._code0_embedding[codes[:, 0]].copy()
        for depth in range(1, self.num_code_groups):
            total += self._tables.embeddings[depth - 1][codes[:, depth]]
        return total

    def prefill(self, talker_hidden: NDArray[np.floating], code0: Codes) -> Float32:
        """Start a frame (see :class:`~trt_cpspec.frame.FrameModel`)."""
        batch = len(code0)
        self._start(batch)
        inputs = np.stack([talker_hidden, self._code0_embedding[code0]], axis=1).astype(np.float32)
        positions = np.broadcast_to(np.arange(2), (batch, 2))
        return self._session.forward(self._tables.project(inputs), positions)[:, -1].copy()

    def forward(self, codes: Codes, depths: NDArray[np.int64], counts: NDArray[np.int64]) -> Float32:
        """Run one pass (see :class:`~trt_cpspec.frame.FrameModel`). The code of depth s stands at position s + 1."""
        width = codes.shape[1]
        inputs = np.zeros((len(codes), width, self.spec.talker_hidden_size), np.float32)
        for row in np.flatnonzero(counts):
            for i in range(counts[row]):
                inputs[row, i] = self._tables.embeddings[depths[row] + i - 1][codes[row, i]]
        offsets = np.arange(width)
        positions = np.where(offsets < counts[:, None], depths[:, None] + 1 + offsets, -1)
        return self._session.forward(self._tables.project(inputs), positions)

    def draft_logits(self, hidden: NDArray[np.floating], depth: int, count: int) -> Float32:
        """Apply the heads of the next depths to one state (see :class:`~trt_cpspec.frame.FrameModel`)."""
        heads = self._tables.heads[depth - 1 : depth - 1 + count]
        return self._apply_heads(heads.reshape(-1, heads.shape[-1]), hidden).reshape(count, -1)

    def target_logits(self, hidden: NDArray[np.floating], depth: int) -> Float32:
        """Apply each depth's own head to its row (see :class:`~trt_cpspec.frame.FrameModel`)."""
        # Row by row: a product of one row does not depend on how many rows the pass had.
        return np.stack([self._apply_heads(self._tables.heads[depth - 1 + i], row) for i, row in enumerate(hidden)])

    def _start(self, batch: int) -> None:
        self._session.start(batch, self.num_code_groups + self.spec.max_verify_size)

    def _apply_heads(self, heads: Float32, hidden: NDArray[np.floating]) -> Float32:
        if self._head_session is not None:
            return self._head_session.apply(heads, hidden)
        logits: Float32 = heads @ hidden
        return logits

    def _check_inputs(self, hidden: Float32, code0: NDArray[np.integer]) -> None:
        width, limit = self.spec.talker_hidden_size, self.spec.limits.max_batch_size
        if hidden.ndim != 2 or hidden.shape[1] != width or not len(hidden):
            raise ConfigError(f"talker_hidden has shape {list(hidden.shape)}, [B, {width}] is needed")
        if code0.shape != (len(hidden),) or code0.dtype.kind not in "iu":
            raise ConfigError(f"code0 must be {len(hidden)} integer(s), it has shape {list(code0.shape)} {code0.dtype}")
        if len(hidden) > limit:
            raise ConfigError(f"a batch of {len(hidden)} exceeds the engine's max_batch_size {limit}")
        codes, vocabulary = code0.tolist(), len(self._code0_embedding)
        if min(codes) < 0 or max(codes) >= vocabulary:
            raise ConfigError(f"code0 must lie in [0, {vocabulary}), it is {codes}")
        if not np.isfinite(hidden).all():
            raise NumericsError("talker_hidden is not finite", row=int(np.argmin(np.isfinite(hidden).all(axis=1))))


def _open_executor(
    runtime: Runtime, folder: Path, talker_dir: Path, spec: CodePredictorSpec, executor: str
) -> tuple[Decoder, CapturedFrames | None]:
    """Return what runs the passes, and the frame loop of the GPU where it runs on one."""
    if executor == "fused" and runtime.cuda is None:
        raise EngineError("the fused executor needs a CUDA device: give --device cuda")
    if runtime.cuda is not None and executor != "engine":
        try:
            model = open_fused(runtime.cuda, spec, folder, talker_dir)
            logger.info("the CodePredictor runs as one fused kernel")
            return FusedSession(model), FusedFrames(model)
        except CpSpecError as error:
            if executor == "fused":
                raise
            if not (folder / DECODER_PLAN).is_file():
                raise EngineError(
                    f"{folder}: the fused kernel cannot run it ({error}), and there is no {DECODER_PLAN} in its place; "
                    f"{BUILD_HINT}, or give --device cpu"
                ) from error
            logger.warning("the CodePredictor runs on its engine, not as one fused kernel: %s", error)
    session = runtime.decoder(folder, spec.decoder, spec.limits.max_kv_cache_capacity, keep_buffers=True)
    if not isinstance(session, TensorRTDecoderSession):
        return session, None
    try:
        return session, DeviceFrames(session, DeviceTables.from_dir(session.device, folder, talker_dir, spec), spec)
    except CpSpecError as error:
        logger.warning("the rounds of a frame are driven by the host, one wait each: %s", error)
        return session, None


class PredictorTables:
    """The side files of a CodePredictor, with Edge-LLM's names and keys.

    ``codec_embeddings`` (``embedding_{i}``, ``[V, Ht]``), ``lm_heads`` (``lm_head_{i}.weight``, ``[V, C]``), and where
    the checkpoint has one ``small_to_mtp_projection`` (``weight`` ``[C, Ht]``, ``bias`` ``[C]``).

    Attributes
    ----------
    embeddings : list of RowTable
        G - 1 tables ``[V, Ht]``, mapped: a row is read when it is used.
    heads : ndarray, shape [G - 1, V, C], float32
    """

    def __init__(self, embeddings: list[RowTable], heads: Float32, projection: tuple[Float32, Float32] | None) -> None:
        self.embeddings = embeddings
        self.heads = heads
        self._projection = projection

    @classmethod
    def from_dir(cls, folder: Path, spec: CodePredictorSpec) -> PredictorTables:
        """Read ``codec_embeddings``, ``lm_heads`` and ``small_to_mtp_projection`` and check them against the spec."""
        count, decoder, width = spec.num_code_groups - 1, spec.decoder, spec.talker_hidden_size
        head_file = TensorFile(folder / "lm_heads.safetensors")
        table_file = TensorFile(folder / "codec_embeddings.safetensors")
        for file in (head_file, table_file):
            if len(file.names()) != count:
                raise EngineError(f"{file.path} has {len(file.names())} entries, num_code_groups asks for {count}")
        shape = (decoder.vocab_size, decoder.hidden_size)
        for index in range(count):  # before memory is taken for what only config.json says
            head_file.check(f"lm_head_{index}.weight", shape)
        heads = np.empty((count, *shape), np.float32)
        for index in range(count):
            heads[index] = head_file.read_weight(f"lm_head_{index}.weight", shape)
        names = [f"embedding_{index}" for index in range(count)]
        for name in names:
            table_file.check(name, (decoder.vocab_size, width))
        return cls([table_file.rows(name) for name in names], heads, _read_projection(folder, spec))

    def project(self, inputs: Float32) -> Float32:
        """Apply ``small_to_mtp_projection`` to ``[..., Ht]``, or nothing where the checkpoint has none."""
        if self._projection is None:
            return inputs
        weight, bias = self._projection
        return inputs @ weight.T + bias


def _read_projection(folder: Path, spec: CodePredictorSpec) -> tuple[Float32, Float32] | None:
    path, decoder = folder / "small_to_mtp_projection.safetensors", spec.decoder
    if path.is_file():
        file = TensorFile(path)
        weight = file.read_weight("weight", (decoder.hidden_size, spec.talker_hidden_size))
        file.check("bias", (decoder.hidden_size,))
        return weight, file.read("bias")
    if spec.talker_hidden_size != decoder.hidden_size:
        raise EngineError(
            f"{path} (small_to_mtp_projection) is required: the talker_hidden_size {spec.talker_hidden_size} is not "
            f"the CodePredictor's hidden_size {decoder.hidden_size}"
        )
    return None


def _rows_of(values: NDArray[Any], dimensions: int) -> NDArray[Any]:
    """Put an axis of rows in front of the values of a single row."""
    return values[None] if values.ndim == dimensions - 1 else values


def _in_range(name: str, value: int, bits: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**bits:
        raise ConfigError(f"{name} is {shown(value)}; it must be an integer from 0 to 2**{bits} - 1")
    return value


def _per_row(value: T | Sequence[T], batch: int, name: str) -> Sequence[T]:
    """Return one value for each row: the same one, or those that were given."""
    if isinstance(value, (int, SamplingParams)):  # first: asking for a Sequence is slow, and this runs every frame
        return [value] * batch
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, Sequence):
        return [value] * batch
    if len(value) != batch:
        raise ConfigError(f"{name} has {len(value)} entries for a batch of {batch}")
    return value
