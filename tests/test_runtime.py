"""Where engines run: the choice of device, the checks of a plan, and decoder sessions on a stand-in for TensorRT."""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import re
import shutil
import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from trt_cpspec.builder.engine import Backend, EngineOptions
from trt_cpspec.builder.rebuild import RebuildOptions, build_component

from trt_cpspec import CodePredictor, runtime, trt_session
from trt_cpspec.config import DecoderSpec, Section
from trt_cpspec.errors import ConfigError, EngineError
from trt_cpspec.pipeline import Qwen3TTS
from trt_cpspec.runtime import PlanRecord, Runtime, open_runtime
from trt_cpspec.session import DecoderSession, GraphSession, PassExtras
from trt_cpspec.trt_session import Plan, TensorRTDecoderSession, TensorRTGraphSession, import_binding, plan_bytes

HIDDEN, KV_HEADS, HEAD_DIM = 6, 2, 4
SPEC = DecoderSpec(
    vocab_size=8, hidden_size=HIDDEN, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, max_position_embeddings=512, rope_theta=1e4, rms_norm_eps=1e-6,
)  # fmt: skip
CACHES = [f"{kind}_{layer}" for layer in range(2) for kind in ("key", "value")]
VERSION = "11.1.0"
PLAN = b"ftrt a plan"


# ---- a stand-in for a device: its memory is the host's --------------------------------------------------------------


class FakeArray:
    allocated: ClassVar[weakref.WeakSet[FakeArray]] = weakref.WeakSet()

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.host = np.full(shape, 99, dtype)  # what is not initialised is no zero
        self.shape, self.dtype, self.nbytes = shape, self.host.dtype, self.host.nbytes
        self.address = self.host.ctypes.data
        self.allocated.add(self)

    def zero(self) -> None:
        self.host[...] = 0


def is_allocated(address: int) -> bool:
    return any(array.address <= address < array.address + array.nbytes for array in FakeArray.allocated)


class FakeDevice:
    """Has the methods of ``trt_cpspec.cuda.Device`` that sessions use. Work is done at once, or recorded in a graph."""

    def __init__(self, capability: tuple[int, int] = (9, 0)) -> None:
        self.compute_capability, self.name, self.stream = capability, "Fake", 7
        self.driver = SimpleNamespace(
            CUDA_MEMCPY2D=SimpleNamespace, CUmemorytype=SimpleNamespace(CU_MEMORYTYPE_DEVICE="device")
        )
        self.captured = self.launched = 0
        self.required: list[tuple[int, str]] = []
        self.pins: list[weakref.ref[np.ndarray]] = []
        self.recorded: list[Callable[[], None]] | None = None

    def make_current(self) -> None:
        pass

    def require(self, nbytes: int, what: str) -> None:
        self.required.append((nbytes, what))

    def empty(self, shape: tuple[int, ...], dtype: Any) -> FakeArray:
        return FakeArray(shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> FakeArray:
        array = FakeArray(shape, dtype)
        array.zero()
        return array

    def pinned(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        array = np.zeros(shape, dtype)
        self.pins.append(weakref.ref(array))
        return array

    def put(self, work: Callable[[], None]) -> None:
        if self.recorded is None:
            work()
        else:
            self.recorded.append(work)

    def upload(self, target: FakeArray, source: np.ndarray) -> None:
        assert source.nbytes <= target.nbytes
        address = target.address  # a graph keeps no array alive
        self.put(lambda: self._copy(address, source.ctypes.data, source.nbytes, address))

    def download(self, target: np.ndarray, source: FakeArray) -> None:
        assert target.nbytes <= source.nbytes
        address = source.address
        self.put(lambda: self._copy(target.ctypes.data, address, target.nbytes, address))

    def _copy(self, target: int, source: int, nbytes: int, on_device: int) -> None:
        assert is_allocated(on_device)
        ctypes.memmove(target, source, nbytes)

    def synchronize(self) -> None:
        pass

    def capture(self, work: Callable[[], None]) -> Any:
        self.captured += 1
        steps = self.recorded = []
        try:
            work()
        finally:
            self.recorded = None

        def launch() -> None:
            self.launched += 1
            for step in steps:
                step()

        return SimpleNamespace(launch=launch)

    def call(self, function: str, *arguments: Any) -> None:
        assert arguments[-1] == self.stream
        if function == "cuMemcpyDtoDAsync":
            ctypes.memmove(*arguments[:3])
            return
        assert function == "cuMemcpy2DAsync"
        (copy, _) = arguments
        assert copy.srcMemoryType == copy.dstMemoryType == "device"
        for row in range(copy.Height):
            target, source = copy.dstDevice + row * copy.dstPitch, copy.srcDevice + row * copy.srcPitch
            ctypes.memmove(target, source, copy.WidthInBytes)


def at(address: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_byte * size).from_address(address), dtype).reshape(shape)


# ---- a stand-in for TensorRT: a decoder that counts what its cache holds --------------------------------------------


class FakeContext:
    """What TensorRT leaves undefined fails: freed memory, a capture behind a change, a graph whose context changed.

    A change that is not done leaves nothing of what it changes.
    """

    def __init__(self, engine: FakeEngine) -> None:
        self.engine, self.shapes, self.addresses = engine, dict[str, tuple[int, ...]](), dict[str, int]()
        self.profile: int | None = None
        self.changes = 0
        self.enqueued_at = -1
        engine.alive.add(self)

    def _change(self, *call: str) -> bool:
        assert self.engine.device.recorded is None
        self.changes += 1
        return self.engine.done(*call)

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.profile, self.shapes = None, {}
        if not self._change("set_optimization_profile_async"):
            return False
        self.engine.selected.append(profile)
        self.profile = profile
        return True

    def set_device_memory(self, address: int, size: int) -> None:
        assert size == self.engine.device_memory_size_v2

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        low, _, high = self.engine.get_tensor_profile_shape(name, self.profile)
        assert all(a <= b <= c for a, b, c in zip(low, shape, high, strict=True)), (name, shape)
        self.shapes.pop(name, None)
        if not self._change("set_input_shape", name):
            return False
        self.shapes[name] = tuple(shape)
        return True

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.engine.output_shapes(self.shapes)[name]

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses.pop(name, None)
        if not self._change("set_tensor_address", name):
            return False
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        assert self.addresses.keys() == set(self.engine.names)
        assert self.shapes.keys() == self.engine.profiles[0].keys()
        if not self.engine.done("execute_async_v3"):
            return False
        assert self.engine.device.recorded is None or self.enqueued_at == self.changes  # changes take effect uncaptured
        self.enqueued_at = self.changes
        self.engine.device.put(partial(_execute, weakref.ref(self), self.changes))
        return True


def _execute(reference: weakref.ref[FakeContext], changes: int) -> None:
    context = reference()
    assert context is not None
    assert context.changes == changes
    assert all(is_allocated(address) for address in context.addresses.values())
    context.engine.passes.append((context.profile, dict(context.shapes)))
    context.engine.work(context)


class FakeEngine:
    """``present = past`` with the mean of each row in its slot; ``hidden = embeds + sum of the slots up to it``."""

    def __init__(self, *, context_rows: int = 16, width: int = 8, positions_width: int | None = None) -> None:
        batch, slots = 4, 129
        self.inputs: dict[str, tuple[tuple[int, ...], ...]] = {}
        self.profiles: list[dict[str, tuple[tuple[int, ...], ...]]] = []
        for rows, other in (
            (context_rows, context_rows),
            (width, width if positions_width is None else positions_width),
        ):
            cache = ((1, KV_HEADS, 1, HEAD_DIM), (1, KV_HEADS, 64, HEAD_DIM), (batch, KV_HEADS, slots, HEAD_DIM))
            self.profiles.append(
                {"inputs_embeds": ((1, 1, HIDDEN), (1, 1, HIDDEN), (batch, rows, HIDDEN))}
                | {"positions": ((1, 1), (1, 1), (batch, other))}
                | {f"past_{name}": cache for name in CACHES}
            )
        self.names = [*self.profiles[0], "hidden_states", *(f"present_{name}" for name in CACHES)]
        self.device_memory_size_v2, self.contexts = 1024, 0
        self.device = FakeDevice()
        self.selected: list[int] = []
        self.refused: tuple[str, ...] = ()
        self.say: Callable[[int, str], None]
        self.alive = weakref.WeakSet[FakeContext]()
        self.passes: list[tuple[int | None, dict[str, tuple[int, ...]]]] = []

    def done(self, *call: str) -> bool:
        """Return whether a call is done. One that is not logs why."""
        if call == self.refused:
            self.say(ILogger.WARNING, "slow")
            self.say(ILogger.ERROR, f"{' '.join(call)}: not today\n")
        return call != self.refused

    @property
    def num_io_tensors(self) -> int:
        return len(self.names)

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_tensor_dtype(self, name: str) -> str:
        return "int32" if name == "positions" else "float32"

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (-1,)

    def get_tensor_profile_shape(self, name: str, profile: int | None) -> tuple[tuple[int, ...], ...]:
        assert profile is not None
        return self.profiles[profile][name]

    def create_execution_context(self, strategy: str) -> FakeContext:
        assert strategy == "user managed"
        self.contexts += 1
        return FakeContext(self)

    def output_shapes(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        raise NotImplementedError

    def work(self, context: FakeContext) -> None:
        shape = context.shapes["inputs_embeds"]
        embeds = at(context.addresses["inputs_embeds"], shape, np.float32)
        positions = at(context.addresses["positions"], shape[:2], np.int32)
        hidden = at(context.addresses["hidden_states"], shape, np.float32)
        for name in CACHES:
            assert context.addresses[f"past_{name}"] == context.addresses[f"present_{name}"]
        cache = at(context.addresses["past_key_0"], context.shapes["past_key_0"], np.float32)
        for row, slots in enumerate(positions):
            for place, slot in enumerate(slots):
                cache[row, :, slot] = embeds[row, place].mean()
            for place, slot in enumerate(slots):
                hidden[row, place] = embeds[row, place] + cache[row, 0, : slot + 1, 0].sum()


class FakeCodec(FakeEngine):
    """``waveform[b, 0, 2 t + i]`` is the sum of frame t's codes."""

    def __init__(self) -> None:
        super().__init__()
        self.profiles = [{"codes": ((1, 3, 1), (1, 3, 4), (1, 3, 9))}]
        self.names = ["codes", "waveform"]

    def get_tensor_dtype(self, name: str) -> str:
        return "int32" if name == "codes" else "float32"

    def output_shapes(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        batch, _, frames = shapes["codes"]
        return {"waveform": (batch, 1, 2 * frames)}

    def work(self, context: FakeContext) -> None:
        codes = at(context.addresses["codes"], context.shapes["codes"], np.int32)
        waveform = at(context.addresses["waveform"], context.get_tensor_shape("waveform"), np.float32)
        waveform[:, 0] = np.repeat(codes.sum(axis=1), 2, axis=1)


class FakeCarryingCodec(FakeCodec):
    """The sum goes on from frame to frame and from call to call: ``past_tail_0`` is what came to so far."""

    STATE = ("past_tail_0", "present_tail_0")

    def __init__(self) -> None:
        super().__init__()
        self.profiles[0] |= {"position": ((1,),) * 3, "past_tail_0": ((1, 1, 2),) * 3}
        self.names = ["codes", "position", *self.STATE, "waveform"]
        self.positions: list[int] = []

    def get_tensor_dtype(self, name: str) -> str:
        return "int32" if name == "position" else super().get_tensor_dtype(name)

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (-1, 1, 2) if name in self.STATE else (-1,)

    def work(self, context: FakeContext) -> None:
        super().work(context)
        assert context.shapes["past_tail_0"] == (1, 1, 2)
        past, present = (at(context.addresses[name], (1, 1, 2), np.float32) for name in self.STATE)
        assert context.addresses["past_tail_0"] != context.addresses["present_tail_0"]
        self.positions.append(int(at(context.addresses["position"], (1,), np.int32)[0]))
        waveform = at(context.addresses["waveform"], context.get_tensor_shape("waveform"), np.float32)
        waveform[0, 0] = waveform[0, 0].cumsum() + past[0, 0, 0]
        present[...] = waveform[0, 0, -1]


class FakeSight(FakeEngine):
    """A decoder that sees: ``hidden = embeds + rotary . (1, 10, 100)``; accepted are the embeds and both halves."""

    def __init__(self) -> None:
        super().__init__()
        for profile in self.profiles:
            low, best, high = profile["inputs_embeds"]
            for name, width in (("rotary_positions", 3), ("deepstack_embeds", 2 * HIDDEN)):
                profile[name] = tuple((*shape[:2], width) for shape in (low, best, high))
        self.names += ["rotary_positions", "deepstack_embeds", "accept_hidden_states"]

    def get_tensor_dtype(self, name: str) -> str:
        return "int32" if name in ("positions", "rotary_positions") else "float32"

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (-1, -1, 3 if name == "rotary_positions" else 2 * HIDDEN)

    def work(self, context: FakeContext) -> None:
        shape, found = context.shapes["inputs_embeds"], context.addresses
        embeds = at(found["inputs_embeds"], shape, np.float32)
        rotary = at(found["rotary_positions"], context.shapes["rotary_positions"], np.int32)
        stack = at(found["deepstack_embeds"], context.shapes["deepstack_embeds"], np.float32)
        at(found["hidden_states"], shape, np.float32)[:] = embeds + (rotary @ [1, 10, 100])[..., None]
        at(found["accept_hidden_states"], shape, np.float32)[:] = embeds + stack[..., :HIDDEN] + stack[..., HIDDEN:]


class FakeEncoder(FakeCodec):
    """``whole`` is a plus twice b, ``half`` is a."""

    def __init__(self) -> None:
        super().__init__()
        self.profiles = [dict.fromkeys("ab", ((1, 2), (2, 2), (4, 2)))]
        self.names = ["a", "b", "whole", "half"]

    def get_tensor_dtype(self, name: str) -> str:
        return "int32" if name == "b" else "float32"

    def output_shapes(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        return {"whole": shapes["a"], "half": shapes["a"]}

    def work(self, context: FakeContext) -> None:
        shape, kinds = context.shapes["a"], {"a": np.float32, "b": np.int32, "whole": np.float32, "half": np.float32}
        a, b, whole, half = (at(context.addresses[name], shape, kind) for name, kind in kinds.items())
        whole[:], half[:] = a + 2 * b, a


class ILogger:
    INTERNAL_ERROR, ERROR, WARNING = range(3)


def binding_of(engine: Any, *said: tuple[int, str], name: str = "tensorrt") -> Any:
    """Return a module whose runtime gives ``engine`` after it said something."""

    class FakeRuntime:
        def __init__(self, logger: Any) -> None:
            self._logger = logger

        def deserialize_cuda_engine(self, data: bytes) -> Any:
            assert data == PLAN
            for severity, message in said:
                self._logger.log(severity, message)
            if engine is not None:
                engine.say = self._logger.log
            return engine

    return SimpleNamespace(
        __name__=name, __version__=VERSION, ILogger=ILogger, Runtime=FakeRuntime, nptype=np.dtype,
        ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED="user managed"),
    )  # fmt: skip


def plan_of(folder: Path, engine: Any, *said: tuple[int, str]) -> Plan:
    return Plan(folder / "llm.engine", binding_of(engine, *said), PLAN)  # no such file: it is not read again


def session_of(folder: Path, engine: FakeEngine, **options: Any) -> tuple[TensorRTDecoderSession, FakeDevice]:
    device: Any = FakeDevice()
    engine.device = device
    return TensorRTDecoderSession(plan_of(folder, engine), device, SPEC, **{"capacity": 128, **options}), device


# ---- the choice of device -------------------------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Component folders with plans, by their names alone."""
    for name, plan in (("talker", "llm.engine"), ("code_predictor", "llm.engine"), ("code2wav", "code2wav.engine")):
        (tmp_path / name).mkdir()
        (tmp_path / name / plan).write_bytes(PLAN)
    return sorted(tmp_path.iterdir())


def without_cuda() -> Any:
    raise EngineError("no CUDA device can be used: CUDA_ERROR_NO_DEVICE")


def test_auto_takes_the_device_where_every_folder_has_a_plan(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = FakeDevice()
    monkeypatch.setattr(runtime, "Device", lambda: device)
    with caplog.at_level(logging.INFO):
        assert open_runtime("auto", folders).cuda is device
    assert caplog.messages == ["running on Fake"]
    assert open_runtime("cuda", folders).cuda is device
    assert open_runtime("cpu", folders, threads=3) == Runtime(threads=3)


def test_auto_without_a_device_warns_and_takes_the_cpu(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runtime, "Device", without_cuda)
    assert open_runtime("auto", folders, threads=2) == Runtime(threads=2)
    assert caplog.messages == [
        "the engines have plans, but no CUDA device can be used: CUDA_ERROR_NO_DEVICE; running on the CPU"
    ]
    with pytest.raises(EngineError, match=r"^no CUDA device can be used: CUDA_ERROR_NO_DEVICE$"):
        open_runtime("cuda", folders)


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_auto_takes_the_cpu_where_a_plan_is_missing_and_names_the_folders(
    kept: int, folders: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runtime, "Device", FakeDevice)
    for folder in folders[kept:]:
        for path in folder.iterdir():
            path.unlink()
    assert open_runtime("auto", folders) == Runtime()
    assert len(caplog.messages) == (kept > 0)  # a folder of graphs alone is no surprise
    if kept:
        names = ", ".join(str(folder) for folder in folders[kept:])
        assert caplog.messages[0].startswith(f"only some folders have plans, without one: {names}")
        assert caplog.messages[0].endswith("; running on the CPU")
    caplog.clear()
    assert open_runtime("cpu", folders) == Runtime()
    assert not caplog.messages


def test_the_cpu_is_taken_without_a_look_at_cuda(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "Device", without_cuda)
    assert open_runtime("cpu", folders) == Runtime()


def test_an_unknown_device_is_named() -> None:
    with pytest.raises(ConfigError, match="unknown device 'gpu'; allowed: auto, cpu, cuda"):
        open_runtime("gpu", [])


def test_a_missing_cuda_python_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(EngineError, match=r'CUDA needs cuda-python: pip install "trt_cpspec\[cuda\]"'):
        open_runtime("cuda", [])


def test_on_the_cpu_the_graphs_are_opened(variants: dict[str, Any]) -> None:
    folder = variants["tts_a"].engine
    spec = DecoderSpec.from_section(Section.from_file(folder / "code_predictor" / "config.json"))
    assert isinstance(Runtime(threads=1).decoder(folder / "code_predictor", spec, 24), DecoderSession)
    assert isinstance(Runtime(threads=1).graph(folder / "code2wav"), GraphSession)


# ---- is a plan what its sidecar says? -------------------------------------------------------------------------------


def sidecar_of(content: bytes = PLAN, name: str = "llm.engine", **changes: Any) -> dict[str, Any]:
    plan = {"file": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    record = {"flavour": "tensorrt", "tensorrt_version": VERSION, "compute_capabilities": ["9.0"], "plan": plan}
    return {"builder_config": {"engine": record | changes}}


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``opened(config, plan, capability)`` opens a decoder of a folder with these contents, on a stand-in."""

    def of(config: dict[str, Any], plan: bytes | None = PLAN, capability: tuple[int, int] = (9, 0)) -> Any:
        for flavour in ("tensorrt", "tensorrt_rtx"):
            monkeypatch.setitem(sys.modules, flavour, binding_of(FakeEngine(), name=flavour))
        (tmp_path / "config.json").write_text(json.dumps(config))
        if plan is not None:
            (tmp_path / "llm.engine").write_bytes(plan)
        device: Any = FakeDevice(capability)
        return Runtime(cuda=device).decoder(tmp_path, SPEC, 128)

    return of


def test_a_plan_that_its_sidecar_describes_is_opened(opened: Callable[..., Any]) -> None:
    session = opened(sidecar_of())
    assert isinstance(session, TensorRTDecoderSession)
    assert session.plan.binding.__name__ == "tensorrt"
    assert opened(sidecar_of(flavour="tensorrt_rtx")).plan.binding.__name__ == "tensorrt_rtx"
    assert opened(sidecar_of(compute_capabilities=["8.6", "9.0"])).max_positions() == 8
    assert opened(sidecar_of(flavour="tensorrt_rtx", compute_capabilities=[])).max_positions() == 8  # its default set


def test_any_thread_may_open_a_plan(opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that first needs an encoder opens it: it makes the device its own before it calls TensorRT."""
    calls: list[str] = []
    monkeypatch.setattr(FakeDevice, "make_current", lambda self: calls.append("device"))
    monkeypatch.setattr("trt_cpspec.runtime.Plan", lambda *given: (calls.append("plan"), Plan(*given))[1])
    opened(sidecar_of())
    assert calls == ["device", "plan"]


ONNX = b"\x08\x08\x12\x07pytorch:\xb5X\n7"
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no plan": (sidecar_of(), {"plan": None}, r"llm.engine does not exist, --device cuda needs a plan; build one with"),
    "no record": ({"builder_config": {}}, {}, r"has no record of llm.engine .*Plans are code, .*cpspec-build"),
    "null record": ({"builder_config": {"engine": None}}, {}, "has no record of llm.engine"),
    "older": (sidecar_of(tensorrt_version="8.6.1"), {}, "built by tensorrt 8.6.1, 11.1.0 is installed; .*cpspec-build"),
    "device": (sidecar_of(), {"capability": (8, 6)}, "compute capability 9.0, this device has 8.6; .*cpspec-build"),
    "devices": (
        sidecar_of(compute_capabilities=["8.6", "12.0"]), {}, "compute capability 8.6, 12.0, this device has 9.0",
    ),
    "another plan": (sidecar_of(b"another"), {}, r"is not the plan that .*config.json describes \(its SHA"),
    "cut short": (sidecar_of(), {"plan": PLAN[:5]}, "SHA-256 differs"),
    "flavour": (sidecar_of(flavour="onednn"), {}, "unknown engine flavour 'onednn'; known: tensorrt, tensorrt_rtx"),
    "empty": (sidecar_of(b""), {"plan": b""}, "llm.engine is empty: the build was cut short; build it again"),
    "a graph": (sidecar_of(ONNX), {"plan": ONNX}, "is an ONNX graph, not a plan; build the plan with cpspec-build"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_plan_that_cannot_be_trusted_is_refused(case: str, opened: Callable[..., Any]) -> None:
    config, options, message = REFUSED[case]
    with pytest.raises(EngineError, match=message) as caught:
        opened(config, **options)
    assert "llm.engine" in str(caught.value) or case == "flavour"


@pytest.mark.parametrize("case", ["older", "device", "another plan"])
def test_a_plan_that_is_not_at_home_says_what_else_can_be_done(
    case: str, opened: Callable[..., Any], tmp_path: Path
) -> None:
    config, options, _ = REFUSED[case]
    again = f"; build it again with cpspec-build --engineDir {tmp_path}"
    with pytest.raises(EngineError) as caught:
        opened(config, **options)
    assert str(caught.value).endswith(again)
    (tmp_path / "model.onnx").touch()
    with pytest.raises(EngineError) as caught:
        opened(config, **options)
    assert str(caught.value).endswith(f"{again}, or run the graph with --device cpu")


def test_what_is_checked_is_what_is_loaded(opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_bytes

    def read_and_replace(path: Path) -> bytes:
        data = read(path)
        path.write_bytes(b"another plan")
        return data

    monkeypatch.setattr(Path, "read_bytes", read_and_replace)
    assert isinstance(opened(sidecar_of()), TensorRTDecoderSession)  # neither the hash nor the runtime sees the other


def test_a_plan_that_cannot_be_trusted_never_reaches_tensorrt(
    opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = []
    monkeypatch.setattr(runtime, "Plan", lambda *arguments: reached.append(arguments))
    for case, (config, options, message) in REFUSED.items():
        if case != "no plan":  # the folder has one by now
            with pytest.raises(EngineError, match=message):
                opened(config, **{"plan": PLAN, **options})
    assert reached == []


@pytest.mark.parametrize("key", ["flavour", "tensorrt_version", "plan"])
def test_an_incomplete_record_names_its_key(key: str, opened: Callable[..., Any]) -> None:
    config = sidecar_of()
    del config["builder_config"]["engine"][key]
    with pytest.raises(ConfigError, match=f"config.json: builder_config: engine: the key {key} is missing"):
        opened(config)


@pytest.mark.parametrize(("flavour", "extra"), [("tensorrt", "tensorrt"), ("tensorrt_rtx", "rtx")])
def test_a_flavour_that_is_not_installed_names_its_extra(
    flavour: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, flavour, None)
    (tmp_path / "config.json").write_text(json.dumps(sidecar_of(flavour=flavour)))
    (tmp_path / "llm.engine").write_bytes(PLAN)
    device: Any = FakeDevice()
    with pytest.raises(EngineError, match=rf'{flavour} is not installed: pip install "trt_cpspec\[{extra}\]"'):
        Runtime(cuda=device).decoder(tmp_path, SPEC, 128)


@pytest.mark.parametrize(
    "error", ["OSError('libnvinfer.so.11 is missing')", "RuntimeError('no loader')", "KeyError('x')"]
)
def test_a_flavour_whose_import_fails_says_why(error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tensorrt.py").write_text(f"raise {error}\n")
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EngineError, match=r"^tensorrt is not installed: pip install") as caught:
        import_binding("tensorrt")
    assert type(caught.value.__cause__).__name__ in error
    assert str(caught.value).endswith(f"({caught.value.__cause__})")


def test_the_record_that_the_builder_writes_is_read(rtx_binding: Any, variants: dict[str, Any], tmp_path: Path) -> None:
    folder = shutil.copytree(variants["tts_a"].engine / "code_predictor", tmp_path / "code_predictor")
    backend = Backend(name="tensorrt_rtx", binding=rtx_binding)
    options = EngineOptions(compute_capabilities=("8.6", "12.0"), optimization_level=0)
    build_component(folder, folder, backend, RebuildOptions(engine=options))
    section, path = Section.from_file(folder / "config.json"), folder / "llm.engine"
    found = PlanRecord.from_section(section, "llm.engine")
    assert (found.flavour, found.compute_capabilities) == ("tensorrt_rtx", ("8.6", "12.0"))
    data, version = plan_bytes(path), rtx_binding.__version__
    for capability in ((8, 6), (12, 0)):
        found.check(path, data, version, capability)
    with pytest.raises(EngineError, match=r"this device has 8\.9"):
        found.check(path, data, version, (8, 9))
    with pytest.raises(EngineError, match=r"its SHA-256 differs"):
        found.check(path, data[:-1], version, (8, 6))


# ---- a plan that TensorRT cannot use --------------------------------------------------------------------------------


def test_tensorrts_own_words_are_repeated(tmp_path: Path) -> None:
    said = [
        (ILogger.WARNING, "a warning"),
        (ILogger.ERROR, " version tag 1 != 2 \n"),
        (ILogger.INTERNAL_ERROR, "assert"),
    ]
    message = (
        r"llm.engine cannot be used by tensorrt 11.1.0: version tag 1 != 2 / assert; build it again on this machine"
    )
    with pytest.raises(EngineError, match=message):
        plan_of(tmp_path, None, *said)
    with pytest.raises(EngineError, match="it gave no reason; build it again"):
        plan_of(tmp_path, None)


@pytest.mark.parametrize("share", [0.001, 0.5, 0.999])
def test_what_the_real_runtime_says_of_a_truncated_plan(
    share: float, rtx_binding: Any, rtx_plan: bytes, tmp_path: Path
) -> None:
    message = (
        rf"llm.engine cannot be used by tensorrt_rtx {re.escape(rtx_binding.__version__)}: .*[Ss]erializ.*; build it"
    )
    with pytest.raises(EngineError, match=message):
        Plan(tmp_path / "llm.engine", rtx_binding, rtx_plan[: int(share * len(rtx_plan))])


@pytest.fixture(scope="module")
def rtx_plan(rtx_binding: Any) -> bytes:
    """A plan of the smallest network there is."""
    builder = rtx_binding.Builder(rtx_binding.Logger(rtx_binding.Logger.ERROR))
    network = builder.create_network(0)
    given = network.add_input("x", rtx_binding.float32, (2, 2))
    layer = network.add_unary(given, rtx_binding.UnaryOperation.NEG)
    network.mark_output(layer.get_output(0))
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(rtx_binding.ComputeCapability.SM86, 0)
    return bytes(builder.build_serialized_network(network, config))


def test_a_plan_is_read_as_it_is(rtx_plan: bytes, tmp_path: Path) -> None:
    for content in (PLAN, rtx_plan, b"\x09", b"a\x08"):
        (tmp_path / "llm.engine").write_bytes(content)
        assert plan_bytes(tmp_path / "llm.engine") == content


@pytest.mark.parametrize("content", [None, b""])
def test_a_plan_that_is_no_file_or_empty(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "llm.engine").write_bytes(content)
    words = "cannot be read: .*; build it with" if content is None else "is empty: .*; build it again with"
    with pytest.raises(EngineError, match=f"llm.engine {words} cpspec-build"):
        plan_bytes(tmp_path / "llm.engine")


def test_a_graph_that_passes_for_a_plan(variants: dict[str, Any], tmp_path: Path) -> None:
    for component in ("talker", "code_predictor", "code2wav"):
        shutil.copyfile(variants["tts_a"].engine / component / "model.onnx", tmp_path / "llm.engine")
        with pytest.raises(EngineError, match="is an ONNX graph, not a plan"):
            plan_bytes(tmp_path / "llm.engine")


def test_every_missing_and_every_unknown_tensor_is_named(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.names = [name for name in engine.names if name not in ("positions", "present_value_1")]
    engine.names += ["rope_rotary_cos_sin", "context_lengths"]
    message = (
        r"missing \['positions', 'present_value_1'\], unknown \['context_lengths', 'rope_rotary_cos_sin'\]; build it"
    )
    with pytest.raises(EngineError, match=message):
        session_of(tmp_path, engine)
    engine = FakeEngine()
    engine.names.remove("hidden_states")
    with pytest.raises(EngineError, match=r"missing \['hidden_states'\], unknown none"):
        session_of(tmp_path, engine)


# ---- a decoder session ----------------------------------------------------------------------------------------------


class Expected:
    """What the stand-in's decoder must give: each row's memory is a dictionary of its own."""

    def __init__(self, batch: int) -> None:
        self.rows: list[dict[int, float]] = [{} for _ in range(batch)]

    def forward(self, embeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
        out = np.zeros_like(embeds)
        for row, memory in enumerate(self.rows):
            real = [place for place in range(positions.shape[1]) if positions[row, place] >= 0]
            memory.update({int(positions[row, place]): float(embeds[row, place].mean()) for place in real})
            for place in real:
                out[row, place] = embeds[row, place] + sum(v for k, v in memory.items() if k <= positions[row, place])
        return out


def test_a_plan_that_cannot_be_captured_runs_without_graphs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    session, device = session_of(tmp_path, FakeEngine())
    attempts = []

    def refuse(work: Callable[[], None]) -> Any:
        attempts.append(1)
        raise EngineError("this engine is not stream capturable")

    device.capture = refuse
    session.start(2, 8)
    rng = np.random.default_rng(0)
    results = []
    for position in range(4):
        embeds = rng.standard_normal((2, 1, SPEC.hidden_size)).astype(np.float32)
        results.append(session.forward(embeds, np.full((2, 1), position)).copy())
    plain, _ = session_of(tmp_path, FakeEngine(), use_graphs=False)
    plain.start(2, 8)
    rng = np.random.default_rng(0)
    for position, result in enumerate(results):
        embeds = rng.standard_normal((2, 1, SPEC.hidden_size)).astype(np.float32)
        np.testing.assert_array_equal(plain.forward(embeds, np.full((2, 1), position)), result)
    assert len(attempts) == 1
    assert [record.message for record in caplog.records] == [
        "its passes are put on the stream one by one, not as CUDA graphs: this engine is not stream capturable"
    ]


@pytest.mark.parametrize("unread", [[], ["accept_hidden_states"]])
def test_memory_is_compared_before_it_is_taken(unread: list[str], tmp_path: Path) -> None:
    """What is asked for is what the arrays of a batch then take, and where it is refused none of them is made."""
    engine = FakeEngine()
    engine.names += unread
    session, device = session_of(tmp_path, engine)
    assert device.required[0] == (engine.device_memory_size_v2, f"{session.plan.path}: its workspace")
    made: list[int] = []
    real = device.empty

    def empty(shape: tuple[int, ...], dtype: Any) -> FakeArray:
        array = real(shape, dtype)
        made.append(array.nbytes)
        return array

    device.empty = device.zeros = empty
    session.start(3, 8)
    assert sum(made) == device.required[-1][0]
    made.clear()
    session.forward(np.zeros((3, 20, HIDDEN), np.float32), np.tile(np.arange(20), (3, 1)))
    assert sum(made) == device.required[-1][0]

    def refuse(nbytes: int, what: str) -> None:
        raise EngineError(f"{what} needs {nbytes}")

    made.clear()
    device.require = refuse
    with pytest.raises(EngineError, match=r"the KV cache of 2 row\(s\) and 96 positions needs"):
        session.start(2, 80)
    assert made == []
    del device.require
    session.start(3, 8)


@pytest.mark.parametrize("unread", [[], ["accept_hidden_states"]])
@pytest.mark.parametrize("use_graphs", [True, False])
@pytest.mark.parametrize("keep_buffers", [True, False])
def test_passes_rewinds_padding_growth_and_rows(
    keep_buffers: bool, use_graphs: bool, unread: list[str], tmp_path: Path
) -> None:
    engine = FakeEngine()
    engine.names += unread
    session, device = session_of(tmp_path, engine, use_graphs=use_graphs, keep_buffers=keep_buffers)
    rng = np.random.default_rng(0)
    expected = Expected(3)

    def check(positions: Any) -> None:
        places = np.array(positions)
        embeds = rng.standard_normal((*places.shape, HIDDEN)).astype(np.float32)
        found = session.forward(embeds, places)
        real = places >= 0
        np.testing.assert_allclose(found[real], expected.forward(embeds, places)[real], rtol=1e-5, atol=1e-5)

    session.start(3, 20)
    assert (session.batch, session.slots) == (3, 64)
    check([list(range(12))] * 3)
    for _ in range(4):  # enqueued, then captured, then launched
        check([[12, 13, 14], [12, 13, -1], [12, -1, -1]])
        check([[12], [13], [-1]])
    assert (device.captured > 0, device.launched > 0) == (use_graphs, use_graphs)
    check([[62, 63, 64]] * 3)  # beyond the bucket: the cache moves and keeps what it held
    assert session.slots == 96
    check([[5], [13], [64]])
    session.keep_rows(np.array([2, 0]))
    expected.rows = [expected.rows[2], expected.rows[0]]
    assert (session.batch, session.slots) == (2, 96)
    check([[65], [65]])
    check([list(range(66, 76))] * 2)
    session.clear()
    expected.rows = [{}, {}]
    check([[3], [4]])
    with pytest.raises(EngineError, match="position 128 is beyond the KV capacity of 128"):
        check([[127, 128]] * 2)
    assert session.run_seconds > 0


CUTS: dict[str, tuple[int, int, int, int, list[tuple[int, int]]]] = {
    "the context profile's limit": (16, 8, 512, 50, [(0, 16), (0, 16), (0, 16), (1, 2)]),
    "as long as a context pass may be": (16, 8, 512, 16, [(0, 16)]),
    "one more": (16, 8, 512, 17, [(0, 16), (1, 1)]),
    "the chunk": (32, 2, 12, 26, [(0, 12), (0, 12), (1, 2)]),
    "generation is wider than context": (3, 8, 512, 20, [(1, 8), (1, 8), (1, 4)]),
    "generation takes all": (3, 8, 512, 8, [(1, 8)]),
    "generation is wider than the chunk": (32, 24, 12, 50, [(1, 24), (1, 24), (1, 2)]),
}


@pytest.mark.parametrize("case", CUTS)
def test_a_long_prefill_is_cut_to_what_one_pass_takes(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context_rows, width, chunk, length, passes = CUTS[case]
    monkeypatch.setattr(trt_session, "PREFILL_CHUNK", chunk)
    engine = FakeEngine(context_rows=context_rows, width=width)
    session, _ = session_of(tmp_path, engine)
    session.start(2, length)
    embeds = np.random.default_rng(0).standard_normal((2, length, HIDDEN)).astype(np.float32)
    places = np.tile(np.arange(length), (2, 1))
    found = session.forward(embeds, places)
    np.testing.assert_allclose(found, Expected(2).forward(embeds, places), rtol=1e-5, atol=1e-5)
    assert [(profile, shapes["inputs_embeds"][1]) for profile, shapes in engine.passes] == passes


class Speech:
    """Sequences on a session, each pass of which is compared with what it must give."""

    def __init__(self, session: TensorRTDecoderSession) -> None:
        self.session, self._rng = session, np.random.default_rng(0)

    def start(self, batch: int, length: int) -> None:
        self.session.start(batch, length)
        self.session.clear()
        self.expected, self.at = Expected(batch), 0

    def run(self, length: int) -> None:
        batch = len(self.expected.rows)
        places = np.tile(np.arange(self.at, self.at + length), (batch, 1))
        embeds = self._rng.standard_normal((batch, length, HIDDEN)).astype(np.float32)
        found = self.session.forward(embeds, places)
        np.testing.assert_allclose(found, self.expected.forward(embeds, places), rtol=1e-4, atol=1e-4)
        self.at += length

    def speak(self, batch: int, prompt: int, steps: int) -> None:
        self.start(batch, prompt + 1)
        self.run(prompt)
        for _ in range(steps):
            self.run(1)

    def keep_rows(self, *rows: int) -> None:
        self.session.keep_rows(np.array(rows))
        self.expected.rows = [self.expected.rows[row] for row in rows]


def test_two_contexts_serve_every_request(tmp_path: Path) -> None:
    """Of any prompt length, batch and cache extent; none is created once the session is open."""
    engine = FakeEngine(context_rows=40, width=1)
    session, device = session_of(tmp_path, engine)
    speech = Speech(session)
    assert engine.contexts == 2
    for batch, prompt, steps in ((1, 9, 4), (1, 12, 4), (1, 9, 4), (3, 3, 4), (1, 70, 4), (2, 41, 80), (4, 1, 4)):
        speech.speak(batch, prompt, steps)  # 70 and 41 are more than a pass takes: another prompt pass, and a step
    assert {shapes["past_key_0"][2] for _, shapes in engine.passes} == {64, 96, 128}
    speech.start(4, 11)
    speech.run(10)
    for rows in ((3, 1, 0), (2, 0), (1,)):
        speech.keep_rows(*rows)
        for _ in range(4):
            speech.run(1)
    speech.run(6)  # a prompt behind steps, and steps behind it
    for _ in range(4):
        speech.run(1)
    assert engine.contexts == len(engine.alive) == 2
    assert sorted(engine.selected) == [0, 1]  # a profile is selected once for each context
    assert device.launched > 80


def test_kept_buffers_have_contexts_of_their_own(tmp_path: Path) -> None:
    engine = FakeEngine()
    session, device = session_of(tmp_path, engine, keep_buffers=True)
    speech = Speech(session)
    assert engine.contexts == 0
    for batch in (1, 2):
        for _ in range(3):
            speech.start(batch, 20)
            for length in (2, 1, 3):
                speech.run(length)
    assert (engine.contexts, device.captured, device.launched) == (6, 6, 6)
    for batch in (2, 1, 2):  # what was captured is used again
        speech.start(batch, 20)
        for length in (2, 1, 3):
            speech.run(length)
    assert (engine.contexts, device.captured, device.launched) == (6, 6, 15)


def test_a_context_is_bound_anew_only_for_another_pass(tmp_path: Path) -> None:
    engine = FakeEngine(context_rows=40, width=1)
    session, _ = session_of(tmp_path, engine, use_graphs=False)
    speech = Speech(session)
    speech.speak(1, 10, 2)
    before = sum(context.changes for context in engine.alive)
    for _ in range(3):  # the same sizes again: neither buffers nor shapes are others
        speech.speak(1, 10, 2)
    assert sum(context.changes for context in engine.alive) == before
    speech.speak(1, 9, 2)  # the prompt's context alone
    assert sum(context.changes for context in engine.alive) == before + len(engine.profiles[0]) + len(engine.names)


def test_of_prompts_no_staging_is_kept(tmp_path: Path) -> None:
    session, device = session_of(tmp_path, FakeEngine(context_rows=40))
    speech = Speech(session)
    for prompt in (40, 9, 20, 2, 33):
        speech.speak(1, prompt, 0)
        assert [pin for pin in device.pins if pin() is not None] == []
    speech.speak(1, 8, 3)
    assert len([pin for pin in device.pins if pin() is not None]) == 3


@pytest.mark.parametrize("made", [0, 1, 2])
def test_a_longer_pass_without_memory_leaves_the_buffers_as_they_are(made: int, tmp_path: Path) -> None:
    """To them contexts are bound, and of them graphs were captured."""
    session, device = session_of(tmp_path, FakeEngine())
    speech = Speech(session)
    speech.speak(1, 5, 4)
    plain, room = device.zeros, [True] * made

    def zeros(shape: tuple[int, ...], dtype: Any) -> FakeArray:
        if not room:
            raise EngineError("no memory")
        room.pop()
        return plain(shape, dtype)

    device.zeros = zeros
    with pytest.raises(EngineError, match="no memory"):
        speech.run(12)
    assert not room
    for length in (1, 3, 1, 1):
        speech.run(length)
    del device.zeros
    speech.speak(1, 12, 4)


def test_a_batch_that_the_profile_does_not_admit_leaves_the_session_usable(tmp_path: Path) -> None:
    engine = FakeEngine(context_rows=40, width=1)
    session, _ = session_of(tmp_path, engine)
    speech = Speech(session)
    speech.speak(2, 10, 4)
    speech.start(5, 20)
    for length in (10, 1):
        with pytest.raises(EngineError, match="outside the profile's"):
            speech.run(length)
    speech.speak(2, 10, 4)
    assert engine.contexts == 2


def test_what_a_profile_does_not_admit_is_named(tmp_path: Path) -> None:
    session, _ = session_of(tmp_path, FakeEngine())
    session.start(5, 20)
    message = (
        r"inputs_embeds of shape \[5, 1, 6\] is outside the profile's \[1, 1, 6\] to \[4, .*, 6\]; build the engine"
    )
    with pytest.raises(EngineError, match=message):
        session.forward(np.zeros((5, 1, HIDDEN), np.float32), np.zeros((5, 1), np.int64))


def test_a_pass_before_start_is_an_error(tmp_path: Path) -> None:
    session, _ = session_of(tmp_path, FakeEngine())
    embeds, positions = np.zeros((1, 1, HIDDEN), np.float32), np.zeros((1, 1), np.int64)
    with pytest.raises(EngineError, match=r"start\(\) must be called before a pass"):
        session.forward(embeds, positions)


DECODER_CALLS = [
    (("set_optimization_profile_async",), "selecting profile 1"),
    (("set_input_shape", "inputs_embeds"), "binding inputs_embeds of shape [1, 2, 6]"),
    (("set_input_shape", "positions"), "binding positions of shape [1, 2]"),
    (("set_input_shape", "past_value_1"), "binding past_value_1 of shape [1, 2, 64, 4]"),
    (("set_tensor_address", "inputs_embeds"), "binding the address of inputs_embeds"),
    (("set_tensor_address", "hidden_states"), "binding the address of hidden_states"),
    (("set_tensor_address", "present_key_1"), "binding the address of present_key_1"),
    (("execute_async_v3",), "a pass of 1 x 2 positions"),
]


@pytest.mark.parametrize(("call", "what"), DECODER_CALLS)
def test_a_call_of_a_decoder_that_is_not_done_repeats_tensorrts_words(
    call: tuple[str, ...], what: str, tmp_path: Path
) -> None:
    engine = FakeEngine()
    session, _ = session_of(tmp_path, engine)
    session.start(1, 20)
    engine.refused = call
    embeds, positions = np.zeros((1, 2, HIDDEN), np.float32), np.arange(2)[None]
    with pytest.raises(EngineError) as caught:
        session.forward(embeds, positions)
    assert str(caught.value) == f"{tmp_path / 'llm.engine'}: {what} failed: {' '.join(call)}: not today"
    assert engine.passes == []
    engine.refused = ()
    session.forward(embeds, positions)  # nothing half made is left behind
    assert len(engine.passes) == 1


REBINDING_CALLS = [
    ("set_optimization_profile_async",),
    *(("set_input_shape", name) for name in ("inputs_embeds", "positions", "past_key_0", "past_value_1")),
    *(("set_tensor_address", name) for name in ("inputs_embeds", "hidden_states", "past_key_0", "present_value_1")),
]


@pytest.mark.parametrize("call", REBINDING_CALLS)
def test_a_context_that_was_bound_half_is_bound_again(call: tuple[str, ...], tmp_path: Path) -> None:
    """Also where the pass to which it was bound before is the one that comes next."""
    engine = FakeEngine(width=8)
    session, _ = session_of(tmp_path, engine)
    speech = Speech(session)
    for length in (12, 3, 12, 3):  # the profile of a prompt changes, too
        speech.start(1, 20)
        speech.run(12)
        speech.run(3)
        engine.refused = call
        with pytest.raises(EngineError, match="not today"):
            session.forward(np.zeros((1, 12, HIDDEN), np.float32), np.arange(20, 32)[None])
        engine.refused = ()
        speech.run(length)
        speech.run(15 - length)
        for _ in range(4):
            speech.run(1)
    assert engine.contexts == 2


def test_steps_whose_context_was_bound_half_are_captured_anew(tmp_path: Path) -> None:
    engine = FakeEngine(context_rows=40, width=1)
    session, device = session_of(tmp_path, engine)
    speech = Speech(session)
    speech.speak(2, 10, 4)
    speech.keep_rows(1)
    for call in REBINDING_CALLS[1:]:
        engine.refused = call
        with pytest.raises(EngineError, match="not today"):
            session.forward(np.zeros((1, 1, HIDDEN), np.float32), np.array([[20]]))
    engine.refused = ()
    launched = device.launched
    for _ in range(4):
        speech.run(1)
    assert device.launched == launched + 2  # put on the stream, captured, and launched twice


def test_a_call_that_is_not_done_without_a_word_is_an_error(tmp_path: Path) -> None:
    engine = FakeEngine()
    session, _ = session_of(tmp_path, engine)
    session.start(1, 20)
    engine.refused, engine.say = ("execute_async_v3",), lambda severity, message: None
    session.plan.errors.clear()
    with pytest.raises(EngineError, match="a pass of 1 x 1 positions failed: it gave no reason"):
        session.forward(np.zeros((1, 1, HIDDEN), np.float32), np.zeros((1, 1), np.int64))


def test_contexts_of_older_versions_are_made_by_their_own_call(tmp_path: Path) -> None:
    class Older(FakeEngine):
        def __init__(self) -> None:
            super().__init__()
            self.device_memory_size = 512
            del self.device_memory_size_v2
            self.made: list[Any] = []

        def create_execution_context_without_device_memory(self) -> Any:
            context = FakeContext(self)
            context.set_device_memory = None
            self.made.append(OlderContext(context))
            return self.made[-1]

    class OlderContext:
        def __init__(self, inner: FakeContext) -> None:
            self._inner, self.device_memory = inner, 0

        def __getattr__(self, name: str) -> Any:
            if name == "set_device_memory":
                raise AttributeError(name)
            return getattr(self._inner, name)

    engine = Older()
    plan = plan_of(tmp_path, engine)
    del plan.binding.ExecutionContextAllocationStrategy
    device: Any = FakeDevice()
    session = TensorRTDecoderSession(plan, device, SPEC, capacity=128)
    session.start(1, 20)
    session.forward(np.zeros((1, 2, HIDDEN), np.float32), np.arange(2)[None])
    session.forward(np.zeros((1, 1, HIDDEN), np.float32), np.arange(1)[None])
    assert len(engine.made) == 2
    assert len({context.device_memory for context in engine.made}) == 1  # shared
    assert engine.made[0].device_memory != 0


# ---- the window -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "positions", "window"), [(8, 8, 8), (8, 1, 1), (1, 8, 1), (8, 3, 3), (5, 8, 5)])
def test_the_window_is_the_least_over_the_token_aligned_inputs(
    width: int, positions: int, window: int, tmp_path: Path
) -> None:
    session, _ = session_of(tmp_path, FakeEngine(width=width, positions_width=positions))
    assert session.max_positions() == window


class NarrowDecoder:
    """The graph's own session, behind a plan's limit."""

    def __init__(self, inner: Any, width: int) -> None:
        self._inner, self._width = inner, width

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def max_positions(self) -> int:
        return self._width


@pytest.mark.parametrize("width", [1, 2])
def test_a_narrow_plan_switches_speculation_off_and_says_how_to_widen_it(
    width: int, variants: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = variants["tts_a"].engine / "code_predictor"
    plain = Runtime.decoder
    monkeypatch.setattr(Runtime, "decoder", lambda *args, **options: NarrowDecoder(plain(*args, **options), width))
    predictor = CodePredictor.from_engine_dir(folder, device="cpu", threads=1)
    assert predictor.max_verify_size == width  # although config.json says 8
    for _ in range(2):
        window = predictor.window(3)
        assert (window.requested, window.verify_size) == (3, 0)
        assert window.reason is not None
        assert f"takes at most {width} position(s) a pass and 3 were asked" in window.reason
        assert "cpspec-build --engineDir ENG --onlyCodePredictor --maxVerifySize 3" in window.reason
        assert window.reason.endswith("or where there is none build again from the checkpoint with --maxVerifySize 3")
    assert caplog.messages == [f"CodePredictor speculation is off: {window.reason}; decoding autoregressively"]
    hidden = np.random.default_rng(0).standard_normal((1, predictor.spec.talker_hidden_size))
    frames = [predictor.decode_frame(hidden, [5], seeds=[1], verify_size=n) for n in (0, 3)]
    np.testing.assert_array_equal(frames[0].codes, frames[1].codes)
    if width == 2:
        assert predictor.window(2).verify_size == 2


# ---- the codec's session --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_buffers", [True, False])
@pytest.mark.parametrize("length", [1, 5, 12, 44])
def test_a_decoder_that_sees_is_fed_three_axes_and_deepstack_features(
    length: int, keep_buffers: bool, tmp_path: Path
) -> None:
    """In passes that are captured, in longer ones, and in parts; nothing of an image stays for the text behind it."""
    session, device = session_of(tmp_path, FakeSight(), keep_buffers=keep_buffers)
    rng = np.random.default_rng(length)
    shape = (2, length, HIDDEN)
    embeds = rng.integers(-9, 9, shape).astype(np.float32)
    positions = np.arange(length)[None].repeat(2, axis=0)
    rotary, stack = rng.integers(0, 9, (2, length, 3)), rng.integers(-9, 9, (2, length, 12)).astype(np.float32)
    session.start(2, 100)
    for _ in range(3):  # the third pass of a short length is a captured one
        accepted = np.zeros(shape, np.float32)
        extras = PassExtras(rotary=rotary, deepstack=stack, accepted=accepted)
        found = session.forward(embeds, positions, extras)
        np.testing.assert_array_equal(found, embeds + (rotary @ [1, 10, 100])[..., None])
        np.testing.assert_array_equal(accepted, embeds + stack[..., :HIDDEN] + stack[..., HIDDEN:])
        np.testing.assert_array_equal(session.forward(embeds, positions), embeds + 111 * positions[..., None])
        session.forward(embeds, positions, PassExtras(accepted=accepted))
        np.testing.assert_array_equal(accepted, embeds)
    assert (device.captured > 0) == (length <= (8 if keep_buffers else 1))


def test_a_decoder_that_does_not_see_takes_no_image(tmp_path: Path) -> None:
    session, _ = session_of(tmp_path, FakeEngine())
    session.start(1, 2)
    extras = PassExtras(rotary=np.zeros((1, 1, 3), np.int64))
    with pytest.raises(EngineError, match=r"llm.engine has no rotary_positions: it was built without the vision encod"):
        session.forward(np.zeros((1, 1, HIDDEN), np.float32), np.zeros((1, 1), np.int64), extras)


def test_a_graph_without_state_may_have_several_tensors(tmp_path: Path) -> None:
    device: Any = FakeDevice()
    session = TensorRTGraphSession(plan_of(tmp_path, FakeEncoder()), device, dict.fromkeys(("a", "b", "whole", "half")))
    a, b = np.ones((3, 2), np.float32), np.arange(6).reshape(3, 2)
    found = session.run({"a": a, "b": b})
    np.testing.assert_array_equal(found["whole"], a + 2 * b)
    np.testing.assert_array_equal(found["half"], a)
    with pytest.raises(EngineError, match=r"a of shape \[5, 2\] is outside the profile's"):
        session.run({"a": np.ones((5, 2), np.float32), "b": np.ones((5, 2), np.int64)})


def codec_of(folder: Path) -> TensorRTGraphSession:
    device: Any = FakeDevice()
    return TensorRTGraphSession(plan_of(folder, FakeCodec()), device)


def test_a_graph_without_state_runs(tmp_path: Path) -> None:
    session = codec_of(tmp_path)
    for frames in (4, 1, 9):
        codes = np.random.default_rng(frames).integers(0, 9, (1, frames, 3)).transpose(0, 2, 1)  # not contiguous
        found = session.run({"codes": codes})
        assert found.keys() == {"waveform"}
        np.testing.assert_array_equal(found["waveform"][0, 0], np.repeat(codes[0].sum(axis=0), 2))


def test_a_graph_carries_its_state_on_the_device(tmp_path: Path) -> None:
    device: Any = FakeDevice()
    engine = FakeCarryingCodec()
    session = TensorRTGraphSession(plan_of(tmp_path, engine), device)
    assert session.carries_state
    assert not codec_of(tmp_path).carries_state
    codes = np.arange(27).reshape(1, 3, 9)
    whole = session.begin().run({"codes": codes, "position": np.zeros(1, np.int32)})["waveform"]
    np.testing.assert_array_equal(whole[0, 0], np.repeat(codes[0].sum(axis=0), 2).cumsum())
    for size in (1, 2, 4):
        calls, other = session.begin(), session.begin()
        found = []
        for start in range(0, 9, size):
            feeds = {"codes": codes[:, :, start : start + size], "position": np.array([start], np.int32)}
            outputs = calls.run(feeds)
            assert outputs.keys() == {"waveform"}
            found.append(outputs["waveform"])
            other.run(feeds | {"codes": feeds["codes"] * 3})  # a stream beside it does not disturb it
        np.testing.assert_array_equal(np.concatenate(found, axis=2), whole)
    assert engine.positions == [0, *np.repeat(np.arange(9), 2), 0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 0, 0, 4, 4, 8, 8]


def test_a_graph_that_carries_half_a_state_is_not_opened(tmp_path: Path) -> None:
    device: Any = FakeDevice()
    engine = FakeCarryingCodec()
    engine.names.remove("present_tail_0")
    with pytest.raises(EngineError, match=r"missing \['present_tail_0'\], unknown none; build it again"):
        TensorRTGraphSession(plan_of(tmp_path, engine), device)


def test_a_graph_names_what_it_cannot_take(tmp_path: Path) -> None:
    with pytest.raises(
        EngineError, match=r"codes of shape \[1, 3, 10\] is outside the profile's \[1, 3, 1\] to \[1, 3, 9\]"
    ):
        codec_of(tmp_path).run({"codes": np.zeros((1, 3, 10), np.int32)})


def test_a_graph_of_other_tensors_is_not_opened(tmp_path: Path) -> None:
    device: Any = FakeDevice()
    codec = FakeCodec()
    codec.names = ["frames", "waveform"]
    with pytest.raises(EngineError, match=r"missing \['codes'\], unknown \['frames'\]; build it again"):
        TensorRTGraphSession(plan_of(tmp_path, codec), device)
    with pytest.raises(EngineError, match=r"missing \['codes', 'waveform'\], unknown \['hidden_states', "):
        TensorRTGraphSession(plan_of(tmp_path, FakeEngine()), device)
    assert codec.contexts == 0


CODEC_CALLS = [
    (("set_input_shape", "codes"), "binding codes of [1, 3, 2]"),
    (("set_tensor_address", "codes"), "binding the address of codes"),
    (("set_tensor_address", "waveform"), "binding the address of waveform"),
    (("execute_async_v3",), "a run"),
]


@pytest.mark.parametrize(("call", "what"), CODEC_CALLS)
def test_a_call_of_a_graph_that_is_not_done_repeats_tensorrts_words(
    call: tuple[str, ...], what: str, tmp_path: Path
) -> None:
    device: Any = FakeDevice()
    codec = FakeCodec()
    session = TensorRTGraphSession(plan_of(tmp_path, codec), device)
    codec.refused = call
    with pytest.raises(EngineError) as caught:
        session.run({"codes": np.ones((1, 3, 2), np.int32)})
    assert str(caught.value) == f"{tmp_path / 'llm.engine'}: {what} failed: {' '.join(call)}: not today"


def test_a_graph_whose_profile_cannot_be_selected_is_not_opened(tmp_path: Path) -> None:
    device: Any = FakeDevice()
    codec = FakeCodec()
    codec.refused = ("set_optimization_profile_async",)
    message = "selecting profile 0 failed: set_optimization_profile_async: not today"
    with pytest.raises(EngineError, match=message):
        TensorRTGraphSession(plan_of(tmp_path, codec), device)


# ---- end to end -----------------------------------------------------------------------------------------------------


def test_a_model_on_cuda_names_the_component_whose_plan_is_missing(
    variants: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "Device", FakeDevice)
    with pytest.raises(EngineError, match=r"talker/llm.engine does not exist, --device cuda needs a plan"):
        Qwen3TTS.from_engine_dir(variants["tts_a"].engine, device="cuda")
