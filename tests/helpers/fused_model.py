"""Runs the fused kernel on whatever runs kernels: the CPU shim, or a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trt_cpspec.config import SamplingParams
from trt_cpspec.cuda_sampling import NO_ERROR, request_array
from trt_cpspec.frame import FrameResult, Round
from trt_cpspec.config import Window
from trt_cpspec.fused import MODEL_FIELDS, STREAMING_THREADS, FusedPlan, model_arrays, work_layout
from trt_cpspec.nvrtc import Call

Array = NDArray[Any]


class FusedModel:
    """A CodePredictor folder on one set of kernels (``kernel_shim.HostKernels`` or ``kernel_device.DeviceKernels``)."""

    def __init__(self, kernels: Any, plan: FusedPlan, folder: Path, talker_dir: Path) -> None:
        self.kernels, self.plan = kernels, plan
        self._constant = {name: kernels.upload(value) for name, value in model_arrays(plan, folder, talker_dir).items()}

    def _run(
        self, kernel: str, arrays: dict[str, Array], arguments: tuple[Any, ...], *, order: int = 0
    ) -> dict[str, Array]:
        held = {name: self.kernels.upload(value) for name, value in arrays.items()}
        addresses = self._constant | held
        model = self.kernels.upload(np.array([addresses.get(name, 0) for name in MODEL_FIELDS], np.uint64))
        values = tuple(held[value] if isinstance(value, str) else value for value in arguments)
        call = Call(kernel, (self.plan.blocks, 1, 1), self.plan.threads + STREAMING_THREADS, (model, *values), self.plan.shared_bytes, True)
        self.kernels.run(call, order=order)
        after = {name: self.kernels.download(held[name], value) for name, value in arrays.items()}
        for address in (*held.values(), model):
            self.kernels.free(address)
        return after

    def _work(self, batch: int, drafts: int) -> dict[str, Array]:
        layout = work_layout(self.plan, batch, drafts)
        # What is not written yet is not zero.
        arrays = {
            name: np.full(
                shape,
                np.nan if dtype is np.float32 else -9,
                np.dtype(dtype).type if dtype is not np.uint32 else np.int64,
            ).astype(dtype)
            for name, (shape, dtype) in layout.items()
        }
        arrays["counter"][...] = 0
        return arrays

    def passes(self, steps: list[tuple[Array, Array]], *, order: int = 0) -> list[Array]:
        """Run passes one behind the other on one cache: ``[B, W, H]`` rows at positions ``[B, W]``."""
        results, cache = [], {}
        for rows, positions in steps:
            batch, width = positions.shape
            arrays = self._work(batch, width - 1) | cache
            arrays |= {"rows_in": rows.astype(np.float32), "at": positions.astype(np.int32)}
            arrays["states_out"] = np.full(rows.shape, np.nan, np.float32)
            arguments = ("rows_in", "at", "states_out", np.int32(batch), np.int32(width))
            after = self._run("fused_pass", arrays, arguments, order=order)
            cache = {name: after[name] for name in ("keys", "values")}
            results.append(after["states_out"])
        return results

    def frame(
        self,
        talker_hidden: Array,
        code0: list[int],
        rows: list[tuple[SamplingParams, int, int]],
        *,
        drafts: int = 0,
        coupled: bool = False,
        order: int = 0,
    ) -> FrameResult:
        """Decode one frame for every row."""
        batch, groups = len(rows), self.plan.spec.num_code_groups
        codes = np.full((batch, groups), -9, np.int32)
        codes[:, 0] = code0
        arrays = self._work(batch, drafts) | {
            "requests": request_array(rows),
            "talker_hidden": talker_hidden.astype(np.float32),
            "codes": codes,
            "history": np.full((batch, groups, 3), -9, np.int32),
            "rounds": np.full(batch, -9, np.int32),
            "errors": np.full(batch, -9, np.int32),
            "embedded": np.full((batch, self.plan.spec.talker_hidden_size), np.nan, np.float32),
        }
        after = self._run("fused_frame", arrays, (np.int32(batch), np.int32(drafts), np.int32(coupled)), order=order)
        assert (after["errors"] == NO_ERROR).all(), after["errors"]
        history = [
            [Round(*entry) for entry in after["history"][row, : after["rounds"][row]].tolist()] for row in range(batch)
        ]
        window = Window(requested=drafts + 1 if drafts else 0, verify_size=drafts + 1 if drafts else 0)
        return FrameResult(codes=after["codes"], rounds=history, window=window, embedded=after["embedded"])
