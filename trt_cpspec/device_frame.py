"""The frame on the device: prefill and all rounds of draft, verify and accept as one CUDA graph launch.

The same rounds as :func:`trt_cpspec.frame.decode_frame`, with the kernels of :mod:`trt_cpspec.cuda_sampling` in place
of numpy and the engine captured between them. A conditional node repeats the round for as long as a row of the batch
misses codes; the host uploads once, launches once and waits once a frame.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .config import CodePredictorSpec, Mode, SamplingParams, Window
from .cuda import Device, DeviceArray, Graph
from .cuda_sampling import NO_ERROR, REQUEST, KernelCalls, KernelSizes, request_entry
from .errors import NumericsError
from .frame import Codes, FrameResult, Round
from .nvrtc import Call, KernelLibrary
from .sampling import Use
from .tensorfile import TensorFile
from .trt_session import TensorRTDecoderSession

_ALIGNMENT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTables:
    """The side files of a CodePredictor in device memory, in their stored dtype.

    Attributes
    ----------
    heads : DeviceArray
        ``[G - 1, V, C]``.
    embeddings : DeviceArray
        ``[G - 1, V, Ht]``.
    talker_embedding : DeviceArray
        ``[Vt, Ht]``.
    projection : tuple of DeviceArray, or None
        ``small_to_mtp_projection``: weight ``[C, Ht]`` in the stored dtype, bias ``[C]`` float32.
    dtype : {"F32", "F16", "BF16"}
    """

    heads: DeviceArray
    embeddings: DeviceArray
    talker_embedding: DeviceArray
    projection: tuple[DeviceArray, DeviceArray] | None
    dtype: str

    @classmethod
    def from_dir(cls, device: Device, folder: Path, talker_dir: Path, spec: CodePredictorSpec) -> DeviceTables:
        """Upload the tables of an engine folder, whose shapes the host side has checked."""
        depths = range(spec.num_code_groups - 1)
        heads = TensorFile(folder / "lm_heads.safetensors")
        tables = TensorFile(folder / "codec_embeddings.safetensors")
        dtype, projection = heads.info("lm_head_0.weight").dtype, None
        if (folder / "small_to_mtp_projection.safetensors").is_file():
            file = TensorFile(folder / "small_to_mtp_projection.safetensors")
            projection = (_uploaded(device, [file.stored("weight", dtype)]), _uploaded(device, [file.read("bias")]))
        return cls(
            heads=_uploaded(device, [heads.stored(f"lm_head_{depth}.weight", dtype) for depth in depths]),
            embeddings=_uploaded(device, [tables.stored(f"embedding_{depth}", dtype) for depth in depths]),
            talker_embedding=_uploaded(
                device, [TensorFile(talker_dir / "embedding.safetensors").stored("embedding", dtype)]
            ),
            projection=projection,
            dtype=dtype,
        )


def _uploaded(device: Device, parts: Sequence[NDArray[Any]]) -> DeviceArray:
    """Upload arrays of one shape one behind the other."""
    whole = device.empty((len(parts), *parts[0].shape), parts[0].dtype)
    for index, part in enumerate(parts):
        device.upload_at(whole.address + index * part.nbytes, np.ascontiguousarray(part))
        device.synchronize()  # the part may be a mapped file's pages
    return whole


class FrameIO:
    """What goes in and out of a captured frame, page-locked on the host and mirrored on the device.

    Attributes
    ----------
    address : dict of str to int
        On the device: ``requests``, ``talker_hidden``, ``counter`` (two words that are 0 before each launch), which go
        in; ``codes``, which goes both ways; ``history``, ``rounds``, ``errors``, ``embedded``, which come out.
    """

    def __init__(self, device: Device, batch: int, groups: int, talker_width: int) -> None:
        self._block = _Block(
            device,
            {
                "requests": ((batch,), REQUEST),
                "talker_hidden": ((batch, talker_width), np.float32),
                "counter": ((2,), np.uint32),
                "codes": ((batch, groups), np.int32),
                "history": ((batch, groups, 3), np.int32),
                "rounds": ((batch,), np.int32),
                "errors": ((batch,), np.int32),
                "embedded": ((batch, talker_width), np.float32),
            },
        )
        self.address = self._block.address

    def fill(
        self, talker_hidden: NDArray[np.float32], code0: Codes, rows: Sequence[tuple[SamplingParams, int, int]]
    ) -> None:
        """Write the page-locked inputs of the next launch."""
        host = self._block.host
        requests = host["requests"]
        for index, (params, seed, frame) in enumerate(rows):
            requests[index] = request_entry(params, seed, frame)
        host["talker_hidden"][...] = talker_hidden
        host["codes"][:, 0] = code0

    def upload(self) -> None:
        """Copy the inputs to the device, on the stream."""
        self._block.upload("requests", "codes")

    def download(self) -> None:
        """Copy what came out to the host, on the stream."""
        self._block.download("codes", "embedded")

    def result(self, window: Window) -> FrameResult:
        """Read what came back, after the stream has been waited for.

        Raises
        ------
        NumericsError
            The model gave logits that describe no law, in row ``error.row``.
        """
        host = self._block.host
        errors = host["errors"].tolist()
        if min(errors) != NO_ERROR:
            row = errors.index(min(errors))
            raise NumericsError(f"CodePredictor, depth {errors[row]}: the logits describe no law", row=row)
        history = host["history"]
        rounds = [list(_rounds_of(history[row, :count].tobytes())) for row, count in enumerate(host["rounds"].tolist())]
        return FrameResult(codes=host["codes"].copy(), rounds=rounds, window=window, embedded=host["embedded"].copy())


@lru_cache(maxsize=4096)
def _rounds_of(history: bytes) -> tuple[Round, ...]:
    """Read a row's rounds. Many frames have the same ones, and reading them takes longer than all else of a result."""
    return tuple(map(Round._make, np.frombuffer(history, np.int32).reshape(-1, 3).tolist()))


class CapturedFrame(Protocol):
    """A frame of one batch size, number of drafts and mode, which owns the memory that its graph uses."""

    io: FrameIO
    graph: Graph


class CapturedFrames(ABC):
    """Decodes frames on the device, one launch each; keeps one graph for each batch, window and mode.

    Attributes
    ----------
    wait_seconds : float
        Time that the host has waited for frames so far; the rest of a call is its own work.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._frames: dict[tuple[int, int, Mode], CapturedFrame] = {}
        self.wait_seconds = 0.0

    @abstractmethod
    def _capture(self, batch: int, drafts: int, mode: Mode) -> CapturedFrame:
        """Capture the frame of a batch size, a number of drafts and a mode."""

    def prepare(self, batch: int, window: Window, mode: Mode) -> None:
        """Capture the frame of a batch size, window and mode, if it was not captured before.

        Raises
        ------
        EngineError
            It cannot be captured here: the driver is too old, or a kernel cannot be compiled.
        """
        key = (batch, window.max_drafts, mode)
        self._device.make_current()
        if key not in self._frames:
            self._frames[key] = self._capture(*key)

    def decode(
        self,
        talker_hidden: NDArray[np.float32],
        code0: Codes,
        rows: Sequence[tuple[SamplingParams, int, int]],
        *,
        window: Window,
        mode: Mode,
    ) -> FrameResult:
        """Decode one frame for every row of a batch, as it was prepared.

        Parameters
        ----------
        talker_hidden : ndarray, shape [B, Ht], float32
        code0 : ndarray, shape [B], int32
        rows : sequence of (SamplingParams, seed, frame)
        window : Window
        mode : {"rejection", "coupled"}

        Raises
        ------
        NumericsError
            The model gave logits that describe no law, in row ``error.row``.
        """
        frame = self._frames[len(rows), window.max_drafts, mode]
        frame.io.fill(talker_hidden, code0, rows)
        frame.graph.launch()
        started = time.perf_counter()
        self._device.synchronize()
        self.wait_seconds += time.perf_counter() - started
        return frame.io.result(window)


class DeviceFrames(CapturedFrames):
    """Frames whose passes are those of a TensorRT engine, captured between the kernels.

    Parameters
    ----------
    session : TensorRTDecoderSession
    tables : DeviceTables
    spec : CodePredictorSpec
    """

    def __init__(self, session: TensorRTDecoderSession, tables: DeviceTables, spec: CodePredictorSpec) -> None:
        super().__init__(session.device)
        self._session, self._tables, self._spec = session, tables, spec
        self._sizes = KernelSizes(
            codebook_size=spec.decoder.vocab_size,
            num_code_groups=spec.num_code_groups,
            hidden_size=spec.decoder.hidden_size,
            talker_hidden_size=spec.talker_hidden_size,
            weight_dtype=tables.dtype,
        )
        self._library = KernelLibrary(self._sizes.macros())

    def _capture(self, batch: int, drafts: int, mode: Mode) -> CapturedFrame:
        self._session.start(batch, self._spec.num_code_groups + self._spec.max_verify_size)
        return _EngineFrame(self._session, self._tables, self._sizes, self._library, batch, drafts, mode)


class _Block:
    """Several arrays in one piece of memory, on the device and page-locked on the host: neighbours go in one copy."""

    def __init__(self, device: Device, layout: dict[str, tuple[tuple[int, ...], Any]]) -> None:
        offsets: dict[str, int] = {}
        self._end: dict[str, int] = {}
        total = 0
        for name, (shape, dtype) in layout.items():
            offsets[name] = total
            self._end[name] = total + int(np.prod(shape)) * np.dtype(dtype).itemsize
            total = -(-self._end[name] // _ALIGNMENT) * _ALIGNMENT
        self._device_side = device.zeros((total,), np.uint8)
        self._host_side = device.pinned((total,), np.uint8)
        self._device, self._offsets = device, offsets
        self.host: dict[str, NDArray[Any]] = {}
        self.address: dict[str, int] = {}
        for name, (shape, dtype) in layout.items():
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            self.host[name] = self._host_side[offsets[name] : offsets[name] + size].view(dtype).reshape(shape)
            self.address[name] = self._device_side.address + offsets[name]

    def upload(self, first: str, last: str) -> None:
        """Copy the arrays from one to another to the device, on the stream."""
        start, end = self._offsets[first], self._end[last]
        self._device.upload_at(self._device_side.address + start, self._host_side[start:end])

    def download(self, first: str, last: str) -> None:
        """Copy the arrays from one to another to the host, on the stream."""
        start, end = self._offsets[first], self._end[last]
        self._device.download_at(self._host_side[start:end], self._device_side.address + start)


class _EngineFrame:
    """The frame of one batch, number of drafts and mode: its memory and its graph."""

    def __init__(
        self,
        session: TensorRTDecoderSession,
        tables: DeviceTables,
        sizes: KernelSizes,
        library: KernelLibrary,
        batch: int,
        drafts: int,
        mode: Mode,
    ) -> None:
        self._device, self._buffers, self._tables = session.device, session.buffers, tables
        self._calls, self._library = KernelCalls(sizes), library
        self._batch, self._drafts, self._coupled = batch, drafts, mode == "coupled"
        self._groups, self._width = sizes.num_code_groups, drafts + 1
        groups, codebook = sizes.num_code_groups, sizes.codebook_size
        self.io = FrameIO(self._device, batch, groups, sizes.talker_hidden_size)
        self._last = self._device.zeros((batch,), np.int32)
        self._states = self._device.zeros((batch,), np.int32)
        self._logits = self._device.zeros((batch, self._width, codebook), np.float32)
        self._picks = self._device.zeros((batch, self._width), np.int32)
        self._draft_codes = self._device.zeros((batch, max(drafts, 1)), np.int32)
        # Coupled mode compares codes, and a plain step commits its pick: neither looks at a law.
        needs_laws = drafts > 0 and not self._coupled
        self._target_laws = self._device.zeros((batch, self._width, codebook), np.float32) if needs_laws else None
        self._draft_laws = self._device.zeros((batch, drafts, codebook), np.float32) if needs_laws else None
        self.graph = self._captured()

    def _captured(self) -> Graph:
        # What happens on a first run (TensorRT's set-up, the loading of a kernel) cannot be captured.
        self._begin()
        self._verify()
        self._end()
        self._library.load("repeat_round")
        self._device.synchronize()
        return self._device.capture_loop(self._begin, self._round, self._end)

    def _begin(self) -> None:
        """Prefill, the first code, and the first drafts."""
        self.io.upload()
        buffers, state = self._buffers, self.io.address
        weight, bias = self._projection()
        self._run(
            self._calls.start_frame(
                talker_hidden=self.io.address["talker_hidden"],
                talker_table=self._tables.talker_embedding.address,
                projection=weight,
                bias=bias,
                codes=state["codes"],
                embeds=buffers.embeds.address,
                positions=buffers.positions.address,
                last=self._last.address,
                states=self._states.address,
                rounds=state["rounds"],
                errors=state["errors"],
                rows=self._batch,
            )
        )
        buffers.enqueue(2)
        second_row = buffers.hidden.address + buffers.hidden.shape[-1] * buffers.hidden.dtype.itemsize
        self._heads(second_row, rows_of_hidden=2, width=1, deepest=1, read_states=True)
        self._select(self._picks, None, Use.TARGET, width=1, deepest=1)
        self._accept(drafts=0, record=False)
        self._draft(second_row, rows_of_hidden=2)

    def _round(self, handle: int) -> None:
        """Run a round, and say whether a row still misses codes."""
        self._verify()
        self._run(self._calls.repeat_round(handle=handle, last=self._last.address, rows=self._batch))

    def _verify(self) -> None:
        """Verify the drafts, commit, and draft the next."""
        buffers, state = self._buffers, self.io.address
        weight, bias = self._projection()
        self._run(
            self._calls.embed_project(
                tables=self._tables.embeddings.address,
                projection=weight,
                bias=bias,
                codes=state["codes"],
                drafts=self._draft_codes.address,
                last=self._last.address,
                embeds=buffers.embeds.address,
                positions=buffers.positions.address,
                rows=self._batch,
                drafts_per_row=self._drafts,
                padding=buffers.slots - 1,
            )
        )
        buffers.enqueue(self._width)
        self._heads(
            buffers.hidden.address,
            rows_of_hidden=self._width,
            width=self._width,
            deepest=self._groups - 1,
            read_states=False,
        )
        self._select(self._picks, self._target_laws, Use.TARGET, width=self._width, deepest=self._groups - 1)
        self._accept(drafts=self._drafts, record=True)
        self._draft(buffers.hidden.address, rows_of_hidden=self._width)

    def _end(self) -> None:
        """Sum the frame's embeddings, and bring everything back."""
        self._run(
            self._calls.sum_embeddings(
                talker_table=self._tables.talker_embedding.address,
                tables=self._tables.embeddings.address,
                codes=self.io.address["codes"],
                sums=self.io.address["embedded"],
                rows=self._batch,
            )
        )
        self.io.download()

    def _draft(self, hidden: int, *, rows_of_hidden: int) -> None:
        if self._drafts == 0:
            return
        deepest = self._groups - 2
        self._heads(hidden, rows_of_hidden=rows_of_hidden, width=self._drafts, deepest=deepest, read_states=True)
        use = Use.TARGET if self._coupled else Use.DRAFT
        self._select(self._draft_codes, self._draft_laws, use, width=self._drafts, deepest=deepest)

    def _heads(self, hidden: int, *, rows_of_hidden: int, width: int, deepest: int, read_states: bool) -> None:
        self._run(
            self._calls.draft_heads(
                heads=self._tables.heads.address,
                hidden=hidden,
                states=self._states.address if read_states else 0,
                last=self._last.address,
                logits=self._logits.address,
                rows=self._batch,
                width=width,
                rows_of_hidden=rows_of_hidden,
                deepest=deepest,
            )
        )

    def _select(self, codes: DeviceArray, laws: DeviceArray | None, use: Use, *, width: int, deepest: int) -> None:
        self._run(
            self._calls.select_sample(
                logits=self._logits.address,
                requests=self.io.address["requests"],
                last=self._last.address,
                codes=codes.address,
                laws=laws.address if laws else 0,
                errors=self.io.address["errors"],
                rows=self._batch,
                width=width,
                use=use,
                deepest=deepest,
            )
        )

    def _accept(self, *, drafts: int, record: bool) -> None:
        state = self.io.address
        self._run(
            self._calls.accept(
                drafts=self._draft_codes.address,
                draft_laws=self._draft_laws.address if self._draft_laws else 0,
                picks=self._picks.address,
                target_laws=self._target_laws.address if self._target_laws else 0,
                requests=self.io.address["requests"],
                last=self._last.address,
                codes=state["codes"],
                states=self._states.address,
                rounds=state["rounds"] if record else 0,
                history=state["history"] if record else 0,
                rows=self._batch,
                drafts_per_row=drafts,
                coupled=self._coupled,
            )
        )

    def _projection(self) -> tuple[int, int]:
        if self._tables.projection is None:
            return 0, 0
        weight, bias = self._tables.projection
        return weight.address, bias.address

    def _run(self, call: Call) -> None:
        self._library.run_on(self._device.stream, call)
