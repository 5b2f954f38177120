"""Engines that several test files share: built once a session, from the golden and from generated checkpoints."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trt_cpspec.builder.engine import load_binding
from trt_cpspec.builder.omni import OmniBuild
from trt_cpspec.builder.synthetic import DecoderSize, SyntheticSpec, write_checkpoint
from trt_cpspec.builder.tts import BuildOptions, TtsBuild

from trt_cpspec.errors import EngineError
from trt_cpspec.omni import Qwen3Omni, Reply
from trt_cpspec.pipeline import PreparedRequest, Qwen3TTS, Speech
from trt_cpspec.requests import Request
from trt_cpspec.tensorfile import TensorFile

GOLDEN = Path(__file__).parent / "golden"
PROMPTS = {
    name: json.loads((GOLDEN / name / "golden.json").read_text(encoding="utf-8"))["prompts"]
    for name in ("tts_a", "tts_b")
}
TOLERANCE = 1e-4
"""Of the largest magnitude of an array."""


def build_engine(checkpoint: Path, engine: Path, **options: Any) -> Path:
    """Build every component of a Qwen3-TTS; return ``engine``."""
    return _run_build(TtsBuild(checkpoint, engine, BuildOptions(**options)), engine)


def build_omni_engine(checkpoint: Path, engine: Path, **options: Any) -> Path:
    """Build every component of a Qwen3-Omni; return ``engine``."""
    return _run_build(OmniBuild(checkpoint, engine, BuildOptions(**options)), engine)


def _run_build(run: TtsBuild | OmniBuild, engine: Path) -> Path:
    with run as build:
        for _, _, write in build.components:
            write()
        build.commit()
    return engine


def assert_close(actual: np.ndarray, expected: np.ndarray, tolerance: float = TOLERANCE) -> None:
    """Compare within a share of the largest finite magnitude; what is not finite must be equal."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(actual[~finite], expected[~finite])
    largest = np.abs(expected[finite]).max(initial=0)
    np.testing.assert_allclose(actual[finite], expected[finite], rtol=0, atol=tolerance * largest)


class Variant:
    """One golden checkpoint, its arrays, and the engines built from it."""

    def __init__(self, name: str, engine: Path) -> None:
        self.name = name
        self.checkpoint = GOLDEN / name / "checkpoint"
        self.engine = build_engine(self.checkpoint, engine)
        self.arrays = dict(np.load(GOLDEN / name / "golden.npz"))
        self.prompts = PROMPTS[name]
        self.tts = Qwen3TTS.from_engine_dir(engine, threads=1)


class Case:
    """One golden prompt: ``case["codes"]`` is its array of that name, ``case.speak()`` what we make of it."""

    def __init__(self, variant: Variant, prompt: dict[str, Any]) -> None:
        self.variant, self.prompt, self.tts = variant, prompt, variant.tts
        request = dict(prompt["request"])
        assert not request.pop("do_sample")
        assert not request.pop("subtalker_dosample")
        # The reference samples one code 0 that gets no frame.
        request["max_audio_length"] = request.pop("max_new_tokens") - 1
        self.text: str = request.pop("text")
        self.penalty: float = request["repetition_penalty"]
        # A JSON request with an empty instruct has none.
        request["instruct"] = request["instruct"] or None
        self.options = {**request, "talker_temperature": 0.0, "subtalker_temperature": 0.0, "seed": 1}

    def __contains__(self, name: str) -> bool:
        return f"{self.prompt['id']}.{name}" in self.variant.arrays

    def __getitem__(self, name: str) -> np.ndarray:
        return self.variant.arrays[f"{self.prompt['id']}.{name}"]

    @property
    def trailing(self) -> np.ndarray:
        """What joins the Talker's input after each frame, ``[F, H]``: the trailing rows, then the pad."""
        rows = np.tile(self["tts_pad_embed"], (len(self["codes"]), 1))
        given = self["trailing_embeds"][: len(rows)]
        rows[: len(given)] = given
        return rows

    def prepare(self) -> PreparedRequest:
        """Resolve the request as the pipeline does."""
        return self.tts.prepare(Request(text=self.text, **self.options))

    def speak(self, **options: Any) -> Speech:
        """Speak the prompt with both samplers off."""
        return self.tts.synthesize(self.text, **self.options, **options)


class OmniVariant:
    """The golden Qwen3-Omni, its arrays, and the engines built from it."""

    def __init__(self, engine: Path) -> None:
        folder = GOLDEN / "omni_a"
        self.checkpoint = folder / "checkpoint"
        self.engine = build_omni_engine(self.checkpoint, engine)
        self.arrays = dict(np.load(folder / "golden.npz"))
        self.golden = json.loads((folder / "golden.json").read_text(encoding="utf-8"))
        self.model = Qwen3Omni.from_engine_dir(engine, threads=1)

    def case(self, index: int) -> OmniCase:
        """One of the golden conversations."""
        return OmniCase(self, index)


class OmniCase:
    """One golden conversation: ``case["codes"]`` is its array of that name, ``case.respond()`` what we make of it."""

    def __init__(self, variant: OmniVariant, index: int) -> None:
        self.variant, self.index, self.model = variant, index, variant.model
        self.prompt: dict[str, Any] = variant.golden["prompts"][index]
        self.options = {
            "speaker": variant.golden["speaker"],
            "seed": 1,
            **dict.fromkeys(("temperature", "talker_temperature", "subtalker_temperature"), 0.0),
            "max_generate_length": self.prompt["thinker_max_new_tokens"],
            # The reference samples one code 0 that gets no frame.
            "max_audio_length": self.prompt["talker_max_new_tokens"] - 1,
        }

    def __getitem__(self, name: str) -> np.ndarray:
        return self.variant.arrays[f"p{self.index}_{name}"]

    def respond(self, **options: Any) -> Reply:
        """Answer the conversation with all three samplers off."""
        return self.model.respond(self.prompt["messages"], **{**self.options, **options})


@pytest.fixture(scope="session")
def rtx_binding() -> Any:
    """TensorRT-RTX, which builds without a GPU; CPSPEC_REQUIRE_RTX=1 makes its absence a failure, else it is a skip."""
    try:
        return load_binding("tensorrt_rtx")
    except EngineError as error:
        if os.environ.get("CPSPEC_REQUIRE_RTX") == "1":
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def variants(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Variant]:
    """Both golden checkpoints, built in FP32."""
    return {name: Variant(name, tmp_path_factory.mktemp(name) / "engine") for name in PROMPTS}


@pytest.fixture(
    params=[(name, index) for name, prompts in PROMPTS.items() for index in range(len(prompts))],
    ids=lambda param: f"{param[0]}-p{param[1]}",
)
def case(request: pytest.FixtureRequest, variants: dict[str, Variant]) -> Case:
    """Each golden prompt in turn."""
    name, index = request.param
    return Case(variants[name], PROMPTS[name][index])


@pytest.fixture(scope="session")
def omni(tmp_path_factory: pytest.TempPathFactory) -> OmniVariant:
    """The golden Qwen3-Omni, built in FP32."""
    return OmniVariant(tmp_path_factory.mktemp("omni") / "engine")


@pytest.fixture(params=[0, 1], ids=["p0", "p1"])
def omni_case(request: pytest.FixtureRequest, omni: OmniVariant) -> OmniCase:
    """Each golden conversation in turn."""
    return omni.case(request.param)


@pytest.fixture
def omni_copy(omni: OmniVariant, tmp_path: Path) -> Path:
    """A copy of the engine folder, to be damaged."""
    return shutil.copytree(omni.engine, tmp_path / "omni_copy")


@pytest.fixture(scope="session")
def close() -> Callable[..., None]:
    """``close(actual, expected, tolerance=1e-4)`` asserts equality up to a share of the largest magnitude."""
    return assert_close


@pytest.fixture(scope="session")
def build() -> Callable[..., Path]:
    """``build(checkpoint, engine, **options)`` builds every component."""
    return build_engine


@pytest.fixture(scope="session")
def build_omni() -> Callable[..., Path]:
    """``build_omni(checkpoint, engine, **options)`` builds every component of a Qwen3-Omni."""
    return build_omni_engine


@pytest.fixture
def edited_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """``edited_checkpoint(edit, name="tts_a")`` copies a golden checkpoint; ``edit`` changes its config in place."""

    def copy(edit: Callable[[dict[str, Any]], None] = lambda config: None, name: str = "tts_a") -> Path:
        folder = tmp_path / "checkpoint"
        shutil.copytree(GOLDEN / name / "checkpoint", folder, copy_function=shutil.copyfile)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        edit(config)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return folder

    return copy


@pytest.fixture
def engine_copy(variants: dict[str, Variant], tmp_path: Path) -> Callable[..., Path]:
    """``engine_copy("tts_a")`` copies an engine folder, to be damaged."""

    def copy(name: str = "tts_a", to: str = "engine_copy") -> Path:
        return shutil.copytree(variants[name].engine, tmp_path / to)

    return copy


@pytest.fixture(scope="session")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``synthetic(**fields)`` writes a tiny generated checkpoint; equal fields share one folder."""
    made: dict[str, Path] = {}

    def write(**fields: Any) -> Path:
        key = repr(sorted(fields.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("synthetic") / "checkpoint"
            write_checkpoint(made[key], SyntheticSpec.tiny(**fields))
        return made[key]

    return write


@pytest.fixture(scope="session")
def lively(synthetic: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Qwen3TTS:
    """A small model whose drafts are right about half of the time: small codebook, wide Talker, batches of 4."""
    wide = DecoderSize(hidden=48, intermediate=64, layers=2, heads=4, kv_heads=2, head_dim=16)
    checkpoint = synthetic(agreement=0.8, codebook_size=256, talker=wide)
    engine = build_engine(checkpoint, tmp_path_factory.mktemp("lively") / "engine", max_batch_size=4)
    return Qwen3TTS.from_engine_dir(engine, threads=1)


@pytest.fixture(scope="session")
def demo_engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engines of ``cpspec demo``."""
    folder = tmp_path_factory.mktemp("demo")
    write_checkpoint(folder / "checkpoint", SyntheticSpec.demo())
    return build_engine(folder / "checkpoint", folder / "engines")


@pytest.fixture(scope="session")
def overwrite() -> Callable[..., None]:
    """``overwrite(path, tensor, value)`` fills a tensor of a safetensors file, or one ``place`` of it, with a value."""

    def fill(path: Path, tensor: str, value: float, place: int | None = None) -> None:
        info = TensorFile(path).info(tensor)
        dtype = {"F32": np.float32, "F16": np.float16}[info.dtype]
        values = np.memmap(path, dtype, "r+", info.offset, info.shape).reshape(-1)
        values[slice(None) if place is None else place] = value
        values.flush()

    return fill
