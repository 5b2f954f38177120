"""Runs the fused kernel on whatever runs kernels: the CPU shim, or a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trt_cpspec.config import CodePredictorSpec, SamplingParams, Section, Window
from trt_cpspec.cuda_sampling import NO_ERROR, request_array
from trt_cpspec.frame import FrameResult, Round
from trt_cpspec.fused import MODEL_FIELDS, NO_TIME, FusedPlan, model_arrays, work_layout

Array = NDArray[Any]
UNTOUCHED = {"f": np.nan, "i": -9, "u": 0xFFF7FFF7}
"""What memory holds before the kernel writes it, by kind; as split words it is a NaN."""


class FusedModel:
    """A CodePredictor folder on one set of kernels (``kernel_shim.HostKernels`` or ``kernel_device.DeviceKernels``)."""

    def __init__(self, kernels: Any, plan: FusedPlan, folder: Path, talker_dir: Path) -> None:
        self.kernels, self.plan = kernels, plan
        self.stamps: Array | None = None
        self._constant = {name: kernels.upload(value) for name, value in model_arrays(plan, folder, talker_dir).items()}

    def passes(self, steps: list[tuple[Array, Array]], *, order: int = 0) -> list[Array]:
        """Run passes one behind the other on one cache: ``[B, W, H]`` rows at positions ``[B, W]``."""
        results: list[Array] = []
        cache: dict[str, Array] = {}
        for rows, positions in steps:
            batch, width = positions.shape
            arrays = self._work(batch, 0) | cache
            arrays |= {"rows_in": rows.astype(np.float32), "at": positions.astype(np.int32)}
            arrays["states_out"] = np.full(rows.shape, np.nan, np.float32)
            arguments = ("rows_in", "at", "states_out", np.int32(batch), np.int32(width))
            after = self._run("fused_pass", arrays, arguments, order)
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
        arrays = self._work(batch, drafts) | {
            "requests": request_array(rows),
            "talker_hidden": talker_hidden.astype(np.float32),
            "codes": np.full((batch, groups), -9, np.int32),
            "history": np.full((batch, groups, 3), -9, np.int32),
            "rounds": np.full(batch, -9, np.int32),
            "errors": np.full(batch, -9, np.int32),
            "embedded": np.full((batch, self.plan.spec.talker_hidden_size), np.nan, np.float32),
        }
        arrays["codes"][:, 0] = code0
        if self.plan.stamped:
            arrays["stamps"] = np.full(self.plan.stamps_shape, NO_TIME)
        after = self._run("fused_frame", arrays, (np.int32(batch), np.int32(drafts), np.int32(coupled)), order)
        assert (after["errors"] == NO_ERROR).all(), after["errors"]
        history = [
            [Round(*entry) for entry in after["history"][row, : after["rounds"][row]].tolist()] for row in range(batch)
        ]
        self.stamps = after.get("stamps")
        size = drafts + 1 if drafts else 0
        window = Window(requested=size, verify_size=size)
        return FrameResult(codes=after["codes"], rounds=history, window=window, embedded=after["embedded"])

    def _work(self, batch: int, drafts: int) -> dict[str, Array]:
        layout = work_layout(self.plan, batch, drafts).items()
        arrays = {name: np.full(shape, UNTOUCHED[np.dtype(dtype).kind], dtype) for name, (shape, dtype) in layout}
        arrays["counter"][...] = 0
        return arrays

    def _run(self, kernel: str, arrays: dict[str, Array], arguments: tuple[Any, ...], order: int) -> dict[str, Array]:
        """Upload, run, download; an argument that is a name is the address of that array."""
        held = {name: self.kernels.upload(value) for name, value in arrays.items()}
        addresses = self._constant | held
        table = self.kernels.upload(np.array([addresses.get(name, 0) for name in MODEL_FIELDS], np.uint64))
        values = tuple(held[value] if isinstance(value, str) else value for value in arguments)
        self.kernels.run(self.plan.call(kernel, (table, *values)), order=order)
        after = {name: self.kernels.download(held[name], value) for name, value in arrays.items()}
        for address in (*held.values(), table):
            self.kernels.free(address)
        return after


def released_plan(**changes: Any) -> FusedPlan:
    """The plan of the released CodePredictor on an H200, with other values where a test says so."""
    limits = {"max_input_len": 8, "max_batch_size": 4, "max_kv_cache_capacity": 24, "max_verify_size": 8}
    config = {
        "model": "qwen3_tts_code_predictor", "vocab_size": 2048, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 5, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 65536, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "num_code_groups": 16,
        "talker_hidden_size": 1024, "builder_config": limits,
    }  # fmt: skip
    values = {"dtype": "BF16", "projected": False, "blocks": 132, "shared_bytes": 232_448}
    values |= {key: changes.pop(key) for key in list(changes) if key in values}
    spec = CodePredictorSpec.from_section(Section(config | changes, "config.json"))
    return FusedPlan(spec=spec, **values)
