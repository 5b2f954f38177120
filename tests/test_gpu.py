"""The runtime on a CUDA device with a real TensorRT, on the tiny golden checkpoints.

Plans are built once. ``CPSPEC_ENGINE_CACHE`` names a folder to keep them in, for builds that take long.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crash import Children
from load import make_asks, speak_all, speak_alone, with_broken_speaker
from media_case import MediaCase
from safetensors.numpy import load_file
from trt_cpspec.builder.engine import EngineOptions, choose_backend
from trt_cpspec.builder.omni import OmniBuild
from trt_cpspec.builder.rebuild import RebuildOptions, rebuild
from trt_cpspec.builder.synthetic import DecoderSize, SyntheticSpec, write_checkpoint
from trt_cpspec.builder.tts import BuildOptions, TtsBuild

from trt_cpspec import trt_session
from trt_cpspec.config import SamplingParams
from trt_cpspec.contexts import random_contexts
from trt_cpspec.cuda import Device
from trt_cpspec.errors import ConfigError, EngineError, NumericsError
from trt_cpspec.image_input import read_image
from trt_cpspec.memory import memory_needed
from trt_cpspec.omni import Qwen3Omni
from trt_cpspec.pipeline import Qwen3TTS
from trt_cpspec.predictor import CodePredictor
from trt_cpspec.runtime import Runtime
from trt_cpspec.talker import Talker
from trt_cpspec.verify import VerifyOptions, format_report, verify

pytestmark = pytest.mark.gpu
logger = logging.getLogger(__name__)

GOLDEN = Path(__file__).parent / "golden"
QUICK = EngineOptions(optimization_level=0)


@pytest.fixture(scope="session", autouse=True)
def _device() -> None:
    """Skip where there is no device, and fail instead where one is required."""
    try:
        Device()
    except EngineError as error:
        if os.environ.get("CPSPEC_REQUIRE_GPU") == "1":
            raise
        pytest.skip(str(error))


def build_plans(variant: str, precision: str, folder: Path, max_verify_size: int = 8) -> Path:
    """Build a golden checkpoint, or one in a folder, for TensorRT; an engine that is there is used as it is."""
    if not folder.is_dir():
        options = BuildOptions(precision=precision, max_verify_size=max_verify_size)
        backend, kind = choose_backend("tensorrt"), OmniBuild if variant.startswith("omni") else TtsBuild
        with kind(GOLDEN / variant / "checkpoint", folder, options, backend=backend, engine_options=QUICK) as build:
            for name, _, write in build.components:
                write()
                build.build_plan(name, lambda phase, done: None)
            build.commit()
    return folder


@pytest.fixture(scope="session")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    cache = os.environ.get("CPSPEC_ENGINE_CACHE")
    root = Path(cache) if cache else tmp_path_factory.mktemp("plans")
    return lambda variant, precision: build_plans(variant, precision, root / f"{variant}_{precision}")


class Model:
    """A golden variant on the GPU, beside the FP32 graphs on the CPU."""

    def __init__(self, variant: str, precision: str, folder: Path) -> None:
        self.variant, self.precision, self.folder = variant, precision, folder
        self.golden = json.loads((GOLDEN / variant / "golden.json").read_text(encoding="utf-8"))
        self.arrays = np.load(GOLDEN / variant / "golden.npz")
        self.tts = Qwen3TTS.from_engine_dir(folder, device="cuda")
        self.host = CodePredictor.from_engine_dir(folder / "code_predictor", device="cuda")
        self.host.drive_from_host()

    def speak(self, prompt: dict[str, Any], **options: Any) -> Any:
        request = prompt["request"]
        return self.tts.synthesize(
            request["text"],
            language=request["language"] or "",
            speaker=request.get("speaker") or "",
            instruct=request["instruct"] or "",
            non_streaming_mode=request["non_streaming_mode"],
            repetition_penalty=request["repetition_penalty"],
            max_audio_length=request["max_new_tokens"] - 1,
            **options,
        )


@pytest.fixture(scope="session", params=["tts_a-fp32", "tts_a-fp16", "tts_b-fp32", "tts_b-fp16"])
def model(request: pytest.FixtureRequest, plans: Callable[[str, str], Path]) -> Model:
    variant, precision = request.param.split("-")
    return Model(variant, precision, plans(variant, precision))


@pytest.fixture(scope="session", params=["tts_a", "tts_b"])
def fp32_model(request: pytest.FixtureRequest, plans: Callable[[str, str], Path]) -> Model:
    return Model(request.param, "fp32", plans(request.param, "fp32"))


GREEDY = {"talker_temperature": 0.0, "subtalker_temperature": 0.0}


def test_a_frame_is_one_launch(model: Model) -> None:
    assert model.tts.predictor.frame_on_device
    assert not model.host.frame_on_device


@pytest.mark.parametrize(
    ("verify_size", "mode"), [(0, "rejection"), (3, "rejection"), (8, "rejection"), (8, "coupled")]
)
def test_greedy_codes_are_the_reference_s(fp32_model: Model, verify_size: int, mode: str) -> None:
    model = fp32_model
    for prompt in model.golden["prompts"]:
        speech = model.speak(prompt, verify_size=verify_size, mode=mode, **GREEDY)
        wave = model.arrays[f"{prompt['id']}.wav"]
        np.testing.assert_array_equal(speech.codes, model.arrays[f"{prompt['id']}.codes"])
        assert speech.finish_reason == {"max": "length", "eos": "eos"}[prompt["finish_reason"]]
        assert np.abs(speech.waveform - wave).max() < 1e-4 * np.abs(wave).max()


def test_hidden_states_at_every_width(model: Model) -> None:
    """Teacher forced: each frame's golden codes, in passes of 1, 2, 3 and 8 positions."""
    bound = {"fp32": 1e-4, "fp16": 1e-2}[model.precision]
    worst = 0.0
    for prompt in model.golden["prompts"]:
        codes, hidden = model.arrays[f"{prompt['id']}.codes"], model.arrays[f"{prompt['id']}.cp_hidden"]
        talker_hidden = model.arrays[f"{prompt['id']}.talker_hidden"]
        for frame, width in np.ndindex(len(hidden), 4):
            found = frame_states(model.host, talker_hidden[frame], codes[frame], (1, 2, 3, 8)[width])
            worst = max(worst, np.linalg.norm(found - hidden[frame]) / np.linalg.norm(hidden[frame]))
    logger.info(f"{model.variant} {model.precision}: relative error of hidden states {worst:.2e}")
    assert worst < bound


def frame_states(predictor: CodePredictor, talker_hidden: np.ndarray, codes: np.ndarray, width: int) -> np.ndarray:
    """Return the hidden states ``[G - 1, C]`` of a frame whose codes are given."""
    states = [predictor.prefill(talker_hidden[None], codes[None, 0].astype(np.int32))[0]]
    for depth in range(1, len(codes) - 1, width):
        part = codes[depth : min(depth + width, len(codes) - 1)]
        passed = predictor.forward(part[None].astype(np.int32), np.array([depth]), np.array([len(part)]))
        states += list(passed[0].copy())
    return np.stack(states)


def test_fp16_codes_follow_where_the_margin_allows(model: Model) -> None:
    """Teacher-forced codes equal wherever the winning margin exceeds twice the measured logit error."""
    differing = counted = 0
    for prompt in model.golden["prompts"]:
        codes, logits = model.arrays[f"{prompt['id']}.codes"], model.arrays[f"{prompt['id']}.cp_logits"]
        talker_hidden = model.arrays[f"{prompt['id']}.talker_hidden"]
        for frame in range(len(logits)):
            states = frame_states(model.host, talker_hidden[frame], codes[frame], 3)
            found = np.stack(
                [model.host.target_logits(state[None], depth + 1)[0] for depth, state in enumerate(states)]
            )
            error = np.abs(found - logits[frame]).max()
            two = np.sort(logits[frame], axis=1)[:, -2:]
            same = found.argmax(axis=1) == logits[frame].argmax(axis=1)
            clear = two[:, 1] - two[:, 0] > 2 * error
            assert same[clear].all()
            counted += len(same)
            differing += int((~same).sum())
    logger.info(f"{model.variant} {model.precision}: {differing} of {counted} codes differ within the rounding")


@pytest.mark.parametrize("mode", ["rejection", "coupled"])
@pytest.mark.parametrize("verify_size", [0, 2, 3, 8])
def test_the_device_decodes_what_the_host_does(model: Model, verify_size: int, mode: Any) -> None:
    """One engine, two loops: kernels on the device and numpy on the host give the same codes and rounds."""
    rng = np.random.default_rng(7)
    batch, width = 3, model.host.spec.talker_hidden_size
    params = [SamplingParams(), SamplingParams(top_k=0, top_p=0.8, temperature=1.0), SamplingParams(temperature=0)]
    same = frames = 0
    for number in range(20):
        options = {
            "params": params, "seeds": [1, 2**63 + 5, 3], "frames": number, "verify_size": verify_size, "mode": mode,
        }  # fmt: skip
        hidden = rng.standard_normal((batch, width)).astype(np.float32)
        code0 = rng.integers(0, 2048, batch)
        here, there = (
            model.tts.predictor.decode_frame(hidden, code0, **options),
            model.host.decode_frame(hidden, code0, **options),
        )
        np.testing.assert_array_equal(here.embedded, model.host.embed_frame(here.codes))
        for row in range(batch):
            frames += 1
            same += np.array_equal(here.codes[row], there.codes[row]) and here.rounds[row] == there.rounds[row]
    # The heads are summed in another order, so a decision on the edge may fall the other way.
    logger.info(f"{model.variant} {model.precision} N={verify_size} {mode}: {same} of {frames} frames equal")
    assert same >= 0.95 * frames


def test_coupled_equals_plain_decoding(model: Model) -> None:
    """Up to the engine's rounding between a pass of one position and one of several."""
    rng = np.random.default_rng(3)
    width = model.host.spec.talker_hidden_size
    equal = dict.fromkeys((2, 3, 4, 8), 0)
    for number in range(40):
        hidden, code0 = rng.standard_normal(width).astype(np.float32), int(rng.integers(0, 2048))
        plain = model.tts.predictor.decode_frame(hidden, code0, seeds=9, frames=number)
        for size in equal:
            other = model.tts.predictor.decode_frame(
                hidden, code0, seeds=9, frames=number, verify_size=size, mode="coupled"
            )
            equal[size] += np.array_equal(plain.codes, other.codes)
    logger.info(f"{model.variant} {model.precision}: frames equal to N=0 of 40: {equal}")
    assert min(equal.values()) >= (40 if model.precision == "fp32" else 36)


def test_a_row_does_not_depend_on_its_neighbours(model: Model) -> None:
    rng = np.random.default_rng(5)
    width = model.host.spec.talker_hidden_size
    hidden, code0 = rng.standard_normal((4, width)).astype(np.float32), rng.integers(0, 2048, 4)
    options = {"verify_size": 4, "mode": "coupled", "frames": 11}
    alone = [model.tts.predictor.decode_frame(hidden[i], code0[i], seeds=i, **options).codes[0] for i in range(4)]
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        batch = model.tts.predictor.decode_frame(hidden[order], code0[order], seeds=order, **options).codes
        for place, row in enumerate(order):
            np.testing.assert_array_equal(batch[place], alone[row])


def test_a_frame_repeats_bit_for_bit(model: Model) -> None:
    hidden = np.random.default_rng(1).standard_normal(model.host.spec.talker_hidden_size).astype(np.float32)
    first = model.tts.predictor.decode_frame(hidden, 5, seeds=2, frames=3, verify_size=3)
    for _ in range(100):
        again = model.tts.predictor.decode_frame(hidden, 5, seeds=2, frames=3, verify_size=3)
        assert np.array_equal(first.codes, again.codes)
        assert first.rounds == again.rounds
    other = model.tts.predictor.decode_frame(hidden, 5, seeds=2, frames=4, verify_size=3)
    assert not np.array_equal(first.codes, other.codes)


def test_a_nan_names_its_row_and_depth_and_goes_away(model: Model) -> None:
    predictor = model.tts.predictor
    hidden = np.random.default_rng(1).standard_normal((2, model.host.spec.talker_hidden_size)).astype(np.float32)
    before = predictor.decode_frame(hidden, [5, 6], seeds=2)
    frames: Any = predictor._device_frames
    heads, device = frames._tables.heads, frames._session.device
    head_bytes = heads.nbytes // heads.shape[0]
    kept = np.empty(head_bytes, np.uint8)
    device.call("cuMemcpyDtoH", kept.ctypes.data, heads.address + 6 * head_bytes, head_bytes)
    device.upload_at(heads.address + 6 * head_bytes, np.full(head_bytes, 0xFF, np.uint8))
    with pytest.raises(NumericsError, match="depth 7") as caught:
        predictor.decode_frame(hidden, [5, 6], seeds=2, verify_size=3)
    assert caught.value.row == 0
    device.upload_at(heads.address + 6 * head_bytes, kept)
    np.testing.assert_array_equal(predictor.decode_frame(hidden, [5, 6], seeds=2).codes, before.codes)


def test_a_batch_of_texts_equals_each_alone(fp32_model: Model) -> None:
    model = fp32_model
    texts = ["Hello there.", "Hi", "This one is a longer text."]
    options = {"seed": 4, "verify_size": 3, "mode": "coupled", "max_audio_length": 12}
    together = model.tts.synthesize(texts, **options)
    for text, speech in zip(texts, together, strict=True):
        np.testing.assert_array_equal(model.tts.synthesize(text, **options).codes, speech.codes)


def talker_states(talker: Talker, batch: int, prompt: int, steps: int) -> list[np.ndarray]:
    """Return the states ``[B, H]`` behind a prompt and each step; half-way the last of several rows ends."""
    rng = np.random.default_rng([batch, prompt])
    width = talker.spec.decoder.hidden_size
    states = [talker.prefill(list(rng.standard_normal((batch, prompt, width), dtype=np.float32))).copy()]
    for step in range(steps):
        if step == steps // 2 and batch > 1:
            talker.keep_rows(np.arange(batch - 1))
        states.append(talker.step(rng.standard_normal((len(talker), width), dtype=np.float32)))
    return states


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_contexts_that_are_bound_anew_give_what_new_ones_give(
    precision: str, plans: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, of several batches, prompt lengths and cache extents; a Talker creates two contexts and no more."""
    created, create = [], trt_session._new_context
    monkeypatch.setattr(trt_session, "_new_context", lambda *given: (created.append(1), create(*given))[1])
    folder, runtime = plans("tts_a", precision) / "talker", Runtime(cuda=Device())
    asks = [(1, 9, 6), (1, 12, 6), (3, 12, 8), (1, 58, 10), (2, 5, 8), (1, 1, 4), (1, 100, 4), (1, 9, 6)]
    talker = Talker.from_engine_dir(folder, runtime=runtime)
    found = [talker_states(talker, *ask) for ask in asks]
    assert len(created) == 2
    for ask, states in zip(asks, found, strict=True):
        alone = talker_states(Talker.from_engine_dir(folder, runtime=runtime), *ask)
        for state, expected in zip(states, alone, strict=True):
            np.testing.assert_array_equal(state, expected, err_msg=str(ask))


def test_a_narrow_engine_falls_back_and_is_widened(
    plans: Callable[[str, str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = build_plans("tts_a", "fp32", tmp_path / "narrow", max_verify_size=1)
    tts = Qwen3TTS.from_engine_dir(engine, device="cuda")
    plain = tts.synthesize("Hi", seed=1, max_audio_length=4)
    fallen = tts.synthesize("Hi", seed=1, max_audio_length=4, verify_size=3)
    assert "--maxVerifySize 3" in fallen.stats.window.reason
    assert caplog.records
    np.testing.assert_array_equal(plain.codes, fallen.codes)
    options = RebuildOptions(max_verify_size=8, only_code_predictor=True, engine=QUICK)
    backend = choose_backend("tensorrt")
    assert [outcome.action for outcome in rebuild(None, engine, backend, options)] == ["built"]
    assert [outcome.action for outcome in rebuild(None, engine, backend, options)] == ["unchanged"]
    wide = Qwen3TTS.from_engine_dir(engine, device="cuda").synthesize("Hi", seed=1, max_audio_length=4, verify_size=3)
    assert wide.stats.window.verify_size == 3
    assert wide.stats.proposed > 0


@pytest.mark.parametrize(
    ("verify_size", "mode"), [(0, "rejection"), (3, "rejection"), (8, "rejection"), (8, "coupled")]
)
def test_greedy_answers_are_spoken_as_the_reference_speaks_them(
    verify_size: int, mode: str, plans: Callable[[str, str], Path]
) -> None:
    golden = json.loads((GOLDEN / "omni_a" / "golden.json").read_text(encoding="utf-8"))
    arrays = np.load(GOLDEN / "omni_a" / "golden.npz")
    model = Qwen3Omni.from_engine_dir(plans("omni_a", "fp32"), device="cuda")
    assert model.voice is not None
    assert model.voice.predictor.frame_on_device
    for index, prompt in enumerate(golden["prompts"]):
        reply = model.respond(
            prompt["messages"],
            speaker=golden["speaker"],
            temperature=0.0,
            max_generate_length=prompt["thinker_max_new_tokens"],
            max_audio_length=prompt["talker_max_new_tokens"] - 1,
            verify_size=verify_size,
            mode=mode,
            **GREEDY,
        )
        wave = arrays[f"p{index}_waveform"]
        assert list(reply.token_ids) == arrays[f"p{index}_thinker_ids"].tolist()
        assert (reply.text, reply.finish_reason) == (prompt["text"], prompt["thinker_finish"])
        np.testing.assert_array_equal(reply.speech.codes, arrays[f"p{index}_codes"])
        assert reply.speech.finish_reason == prompt["talker_finish"]
        assert np.abs(reply.speech.waveform - wave).max() < 1e-4 * np.abs(wave).max()


def test_conversations_in_a_batch_equal_each_alone(plans: Callable[[str, str], Path]) -> None:
    model = Qwen3Omni.from_engine_dir(plans("omni_a", "fp32"), device="cuda")
    texts = ["Hello there.", "Hi", "Tell me a short story about the river."]
    options = {"seed": 4, "verify_size": 3, "mode": "coupled", "max_generate_length": 8, "max_audio_length": 6}
    for text, reply in zip(texts, model.respond_all(texts, **options), strict=True):
        alone = model.respond(text, **options)
        assert alone.token_ids == reply.token_ids
        np.testing.assert_array_equal(alone.speech.codes, reply.speech.codes)


@pytest.mark.parametrize(("verify_size", "mode"), [(0, "rejection"), (3, "rejection"), (8, "coupled")])
@pytest.mark.parametrize("name", ["heard", "seen"])
def test_what_is_heard_and_seen_is_answered_as_the_reference_does(
    name: str, verify_size: int, mode: Any, plans: Callable[[str, str], Path], tmp_path: Path
) -> None:
    model = Qwen3Omni.from_engine_dir(plans("omni_a", "fp32"), device="cuda")
    case = MediaCase(name, model, tmp_path)
    reply = case.respond(verify_size=verify_size, mode=mode)
    assert list(reply.token_ids) == case["thinker_ids"].tolist()
    assert (reply.text, reply.finish_reason) == (case.prompt["text"], case.prompt["thinker_finish"])
    assert reply.speech is not None
    np.testing.assert_array_equal(reply.speech.codes, case["codes"])
    assert np.abs(reply.speech.waveform - case["waveform"]).max() < 1e-3


@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-3), ("fp16", 1e-2)])
def test_the_encoders(precision: str, bound: float, plans: Callable[[str, str], Path], tmp_path: Path) -> None:
    """FP32 within an absolute difference, FP16 within a share of the norm."""
    model = Qwen3Omni.from_engine_dir(plans("omni_a", precision), device="cuda", audio=False)
    heard, seen = (MediaCase(name, model, tmp_path) for name in ("heard", "seen"))
    audio, vision = model.encoders.audio(), model.encoders.vision()
    patches = read_image(seen.picture, vision.front, max_patches=vision.max_patches)
    picture = vision.encode(patches)
    found = {"heard_audio_embeds": audio.encode([heard["audio_features"]])[0], "seen_image_embeds": picture.embeds}
    found["seen_image_deepstack"] = picture.deepstack[None]
    for name, rows in found.items():
        wanted = heard.arrays[name]
        error = np.abs(rows - wanted).max()
        share = np.linalg.norm(rows - wanted) / np.linalg.norm(wanted)
        logger.info(f"{name} {precision}: largest difference {error:.2e}, share of the norm {share:.2e}")
        assert (error if precision == "fp32" else share) < bound
    # A window and a bit, and what one call does not take.
    mel = np.random.default_rng(0).standard_normal((128, 7300)).astype(np.float32)
    whole = audio.encode([mel])[0]
    assert whole.shape == (audio.rows_of(7300), 64)
    np.testing.assert_allclose(whole[:104], audio.encode([mel[:, :800]])[0], rtol=0, atol=10 * bound)


def test_media_in_a_batch_equal_each_alone(plans: Callable[[str, str], Path], tmp_path: Path) -> None:
    model = Qwen3Omni.from_engine_dir(plans("omni_a", "fp32"), device="cuda")
    heard, seen = (MediaCase(name, model, tmp_path) for name in ("heard", "seen"))
    talks: list[Any] = [heard.messages, "Hello there.", seen.messages]
    options = {"seed": 4, "verify_size": 3, "mode": "coupled", "max_generate_length": 8, "max_audio_length": 6}
    for talk, reply in zip(talks, model.respond_all(talks, **options), strict=True):
        alone = model.respond(talk, **options)
        assert alone.token_ids == reply.token_ids
        np.testing.assert_array_equal(alone.speech.codes, reply.speech.codes)


def test_verify_passes_and_finds_seeds_by_the_slot(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The frame on the device keeps the law, and its plan computes what its graph does."""
    predictor = model.tts.predictor
    contexts, options = random_contexts(predictor, 16), VerifyOptions(frames=24)
    report = verify(predictor, contexts, options)
    logger.info(format_report(report))
    assert (report["verdict"], report["errors"]) == ("pass", [])
    real = CodePredictor.decode_frame

    def decode_frame(self: CodePredictor, *args: Any, seeds: Any, **kwargs: Any) -> Any:
        shifted = [seed + slot for slot, seed in enumerate(seeds)]
        return real(self, *args, seeds=shifted, **kwargs)

    monkeypatch.setattr(CodePredictor, "decode_frame", decode_frame)
    assert any(error.startswith("rows: ") for error in verify(predictor, contexts, options)["errors"])


@pytest.mark.parametrize("chunk_frames", [1, 2, 7, 25])
def test_a_stream_is_the_speech(model: Model, chunk_frames: int) -> None:
    """The codec's state stays on the device from chunk to chunk; the offline decode begins from the same plan."""
    options = {"seed": 3, "max_audio_length": 30, "verify_size": 3}
    whole = model.tts.synthesize("Hello there, this is a longer text.", **options)
    with model.tts.synthesize_stream(
        "Hello there, this is a longer text.", chunk_frames=chunk_frames, **options
    ) as stream:
        chunks = list(stream)
    found = np.concatenate(chunks)
    np.testing.assert_array_equal(stream.result.codes, whole.codes)
    assert [len(chunk) // 1920 for chunk in chunks[:-1]] == [chunk_frames] * (len(chunks) - 1)
    error = np.abs(found - whole.waveform).max()
    logger.info(
        f"{model.variant} {model.precision}, chunks of {chunk_frames}: {len(whole.codes)} frames, largest difference "
        f"{error:.2e}, first audio {stream.result.time_to_first_audio_ms:.1f} ms"
    )
    assert error < 1 / 32768


@pytest.mark.parametrize("chunk_frames", [1, 25])
def test_a_stream_begins_anew_on_the_device(fp32_model: Model, chunk_frames: int) -> None:
    """Through the reference's chunks of 300 frames, behind 25 of context; beside another stream."""
    codec = fp32_model.tts.codec
    codes = np.random.default_rng(2).integers(0, codec.config.codebook_size, (620, codec.config.num_quantizers))
    streams = codec.stream(), codec.stream()
    found: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for start in range(0, len(codes), chunk_frames):
        for parts, stream, order in zip(found, streams, (1, -1), strict=True):
            parts.append(stream.push(codes[::order][start : start + chunk_frames]))
    for parts, order in zip(found, (1, -1), strict=True):
        assert np.abs(np.concatenate(parts) - codec.decode(codes[::order])).max() < 1 / 32768


@pytest.mark.parametrize("chunk_frames", [1, 2, 7, 25])
def test_a_streamed_answer_is_the_answer(plans: Callable[[str, str], Path], chunk_frames: int) -> None:
    model = Qwen3Omni.from_engine_dir(plans("omni_a", "fp32"), device="cuda")
    options = {"seed": 3, "verify_size": 3, "mode": "coupled", "max_generate_length": 12, "max_audio_length": 30}
    whole = model.respond("Hi", **options)
    stream = model.respond_stream("Hi", chunk_frames=chunk_frames, **options)
    waveform = np.concatenate(list(stream))
    assert stream.result.text == whole.text
    np.testing.assert_array_equal(stream.result.speech.codes, whole.speech.codes)
    assert np.abs(waveform - whole.speech.waveform).max() < 1 / 32768


def test_a_stream_of_the_fused_executor(tmp_path: Path) -> None:
    """The golden checkpoints are narrower than the kernel takes: a generated one is spoken."""
    size = DecoderSize(hidden=128, intermediate=192, layers=2, heads=2, kv_heads=1, head_dim=64)
    write_checkpoint(tmp_path / "checkpoint", SyntheticSpec.tiny(code_predictor=size, talker=size))
    engine = build_plans(str(tmp_path), "fp16", tmp_path / "engine")
    tts = Qwen3TTS.from_engine_dir(engine, device="cuda", executor="fused")
    options = {"seed": 3, "max_audio_length": 20, "verify_size": 3}
    whole = tts.synthesize("Hello there.", **options)
    for chunk_frames in (1, 2, 7, 25):
        stream = tts.synthesize_stream("Hello there.", chunk_frames=chunk_frames, **options)
        waveform = np.concatenate(list(stream))
        np.testing.assert_array_equal(stream.result.codes, whole.codes)
        assert np.abs(waveform - whole.waveform).max() < 1 / 32768


# ---- load, faults ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def fusable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FP16 plans of a generated checkpoint whose CodePredictor the fused kernel can run, too."""
    cache = os.environ.get("CPSPEC_ENGINE_CACHE")
    folder = (Path(cache) if cache else tmp_path_factory.mktemp("fusable")) / "fusable_fp16"
    if not folder.is_dir():
        size = DecoderSize(hidden=64, intermediate=64, layers=2, heads=2, kv_heads=1, head_dim=64)
        checkpoint = tmp_path_factory.mktemp("fusable") / "checkpoint"
        write_checkpoint(checkpoint, SyntheticSpec.tiny(talker=size, code_predictor=size, codebook_size=256))
        backend = choose_backend("tensorrt")
        with TtsBuild(
            checkpoint, folder, BuildOptions(precision="fp16"), backend=backend, engine_options=QUICK
        ) as build:
            for name, _, write in build.components:
                write()
                build.build_plan(name, lambda phase, done: None)
            build.commit()
    return folder


@pytest.fixture(params=["engine", "fused"])
def loaded(
    request: pytest.FixtureRequest, plans: Callable[[str, str], Path], fusable: Path, tmp_path: Path
) -> tuple[Path, str]:
    """An engine folder with a speaker that breaks its row, and the executor that is to run it."""
    source = fusable if request.param == "fused" else plans("tts_a", "fp32")
    return with_broken_speaker(shutil.copytree(source, tmp_path / "loaded")), request.param


def test_two_hundred_requests_from_four_threads(loaded: tuple[Path, str]) -> None:
    """Each good one has the codes of its solo run, each bad one its own error."""
    engine, executor = loaded
    model = Qwen3TTS.from_engine_dir(engine, device="cuda", executor=executor)
    assert model.predictor.device_facts()["engine"] == "fused kernel" or executor == "engine"
    # FP16 plans round by the size of a batch: there the threads ask for one text at a time.
    asks = make_asks(200, "vivian", modes=("coupled",))
    other = Qwen3TTS.from_engine_dir(engine, device="cuda", executor=executor)
    alone = [speak_alone(other, ask) for ask in asks]
    together = speak_all(model, asks, largest=1 if executor == "fused" else 4)
    assert sum(isinstance(outcome, str) for outcome in alone) == sum(ask.error is not None for ask in asks)
    for ask, expected, found in zip(asks, alone, together, strict=True):
        if isinstance(expected, str):
            assert found == expected, ask
        else:
            np.testing.assert_array_equal(found, expected, err_msg=str(ask))


def test_nothing_is_kept_on_the_device(loaded: tuple[Path, str]) -> None:
    """After four rounds of requests from four threads: device memory and files as they are, memory within 16 MiB."""
    engine, executor = loaded
    script = Path(__file__).parent / "helpers" / "load.py"
    command = [sys.executable, str(script), str(engine), "10", "50", "cuda", executor]
    # With an arena for each thread, memory grows until every arena has had the largest request, whenever that is.
    environment = os.environ | {"MALLOC_ARENA_MAX": "1"}
    child = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=environment)
    assert child.returncode == 0, child.stderr
    warm = [json.loads(line) for line in child.stdout.splitlines()][3:]
    logger.info(f"{executor}: {warm}")
    assert len(warm) == 7
    assert {state["files"] for state in warm} == {warm[0]["files"]}
    assert {state["free_device_bytes"] for state in warm} == {warm[0]["free_device_bytes"]}
    assert max(state["resident_bytes"] for state in warm) - warm[0]["resident_bytes"] < 16 * 2**20


def test_models_that_are_dropped_give_their_memory_back(plans: Callable[[str, str], Path]) -> None:
    device, free = Device(), []
    for _ in range(6):
        model = Qwen3TTS.from_engine_dir(plans("tts_a", "fp32"), device="cuda", executor="engine")
        model.synthesize(["Hi", "Hello there."], seed=1, max_audio_length=3, verify_size=3)
        del model
        device.synchronize()
        free.append(device.free_bytes())
    logger.info(f"free device memory after each model: {free}")
    assert len(set(free[2:])) == 1


def test_memory_is_what_inspect_says(plans: Callable[[str, str], Path]) -> None:
    """The KV cache is exact; all of it together stays below the estimate and what the driver takes for itself."""
    engine = plans("tts_a", "fp32")
    needs = {need.folder: need for need in memory_needed(engine, batch=4)}
    device = Device()
    before = device.free_bytes()
    model = Qwen3TTS.from_engine_dir(engine, device="cuda", executor="engine")
    model.synthesize(["Hi", "Hello there.", "One", "Two"], seed=1, max_audio_length=3, verify_size=8)
    used, total = before - device.free_bytes(), sum(need.total_bytes for need in needs.values())
    logger.info(f"used {used / 1e6:.1f} MB, inspect --memory says {total / 1e6:.1f} MB")
    session: Any = model.talker._session
    session.start(4, model.talker.spec.limits.max_kv_cache_capacity)
    assert sum(array.nbytes for array in session.buffers.cache.values()) == needs["talker"].kv_cache_bytes
    assert used < total + 512e6


@pytest.fixture
def full_device(plans: Callable[[str, str], Path]) -> Iterator[tuple[Qwen3TTS, Device]]:
    """A model on a device that other programs have filled, all but a few MB."""
    model = Qwen3TTS.from_engine_dir(plans("tts_a", "fp32"), device="cuda", executor="engine")
    device, ballast = Device(), []
    size = device.free_bytes() // 2
    while size >= 2**21:
        try:
            ballast.append(device.empty((size,), np.uint8))
        except EngineError:
            size //= 2
    yield model, device
    ballast.clear()


def test_too_little_device_memory_is_said_with_both_numbers(full_device: tuple[Qwen3TTS, Device]) -> None:
    model, device = full_device
    session: Any = model.talker._session
    free = device.free_bytes()
    need = 2 * 2 * 4 * 4097 * model.talker.spec.decoder.num_key_value_heads * model.talker.spec.decoder.head_dim * 4
    if need <= free:  # the driver kept a larger piece than it gave away
        device.require(free, "what is free")
        with pytest.raises(EngineError, match=r"needs [\d,.]+ MB of device memory, [\d,.]+ MB are free"):
            device.require(free + 1, "one byte more")
        return
    with pytest.raises(
        EngineError, match=r"llm\.engine: the KV cache of 4 row\(s\) and 4097 positions needs [\d,.]+ MB"
    ):
        session.start(4, 4096)
    assert device.free_bytes() >= free, "nothing was allocated"


def test_a_command_on_a_full_device_ends_in_one_error(
    full_device: tuple[Qwen3TTS, Device], plans: Callable[[str, str], Path], tmp_path: Path
) -> None:
    child = command_line(plans("tts_a", "fp32"), tmp_path)
    assert child.returncode in (1, 2), child.stdout
    assert "Traceback" not in child.stderr
    assert "memory" in child.stderr.lower()
    assert not list(tmp_path.rglob("*.wav"))


def test_a_mixture_of_precisions_is_refused(plans: Callable[[str, str], Path], fusable: Path, tmp_path: Path) -> None:
    """An FP32 Talker's embedding is no table for the kernels of an FP16 CodePredictor."""
    engine = shutil.copytree(fusable, tmp_path / "engine")
    for name in ("embedding.safetensors", "config.json"):
        shutil.copyfile(plans("tts_a", "fp32") / "talker" / name, engine / "talker" / name)
    with pytest.raises((ConfigError, EngineError)):
        CodePredictor.from_engine_dir(engine / "code_predictor", device="cuda", executor="fused")


def command_line(engine: Path, folder: Path, *, before: str = "") -> subprocess.CompletedProcess[str]:
    """Speak a text in a process of its own, behind some lines of Python."""
    code = f"{before}\nfrom trt_cpspec.cli import tts\ntts()"
    args = ["--talkerEngineDir", engine / "talker", "--text", "Hello there.", "--device", "cuda", "--seed", "1"]
    args += ["--outputAudioDir", folder / "audio", "--outputFile", folder / "out.json"]
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


TRAP = """
from cuda.core import LaunchConfig, Program, ProgramOptions, Stream, launch
from trt_cpspec.pipeline import Qwen3TTS
real = Qwen3TTS.prepare
def prepare(self, *args, **kwargs):
    made = real(self, *args, **kwargs)
    device = self.predictor._session.device
    arch = "sm_%d%d" % device.compute_capability
    source = 'extern "C" __global__ void spoil() { asm("trap;"); }'
    kernel = Program(source, "c++", ProgramOptions(arch=arch)).compile("cubin").get_kernel("spoil")
    launch(Stream.from_handle(device.stream), LaunchConfig(grid=1, block=1), kernel)
    return made
Qwen3TTS.prepare = prepare
"""


@pytest.mark.parametrize("executor", ["engine", "fused"])
def test_a_device_that_goes_away_ends_in_one_error(
    executor: str, plans: Callable[[str, str], Path], fusable: Path, tmp_path: Path
) -> None:
    """A kernel traps on the stream of the model: every call behind it fails, once and in words."""
    child = command_line(fusable if executor == "fused" else plans("tts_a", "fp32"), tmp_path, before=TRAP)
    logger.info(child.stderr)
    assert child.returncode == 1
    assert "Traceback" not in child.stderr
    assert child.stderr.count("requests[0] failed: ") == 1
    (response,) = json.loads((tmp_path / "out.json").read_text())["responses"]
    assert response["output_text"] == "FAILED"
    assert not list(tmp_path.rglob("*.wav"))


def test_a_killed_run_and_a_killed_build_on_the_device(plans: Callable[[str, str], Path], tmp_path: Path) -> None:
    """The next run speaks as if nothing had been, the next build completes the engine."""
    engine = plans("tts_a", "fp32")
    build = ["--checkpointDir", GOLDEN / "tts_a" / "checkpoint", "--engineDir", tmp_path / "engine"]
    build += ["--backend", "tensorrt", "--precision", "fp32", "--builderOptimizationLevel", "0"]

    def args(folder: Path) -> list[str | Path]:
        given = ["--talkerEngineDir", engine / "talker", "--text", "Hi.", "--seed", "1", "--device", "cuda"]
        return [*given, "--outputAudioDir", folder / "audio", "--outputFile", folder / "out.json"]

    with Children() as children:
        # The first run compiles kernels, and their cache flushes files too, which would be counted.
        children.run("tts", *args(tmp_path / "first"), watched=tmp_path / "first")
        good = children.run("tts", *args(tmp_path / "good"), watched=tmp_path / "good")
        assert good["code"] == 0, good
        codes = load_file(tmp_path / "good" / "audio" / "rvq_req0.safetensors")["rvq_codes"]
        for moment in range(4, len(good["changes"]), 4):
            folder = tmp_path / str(moment)
            run = children.run("tts", *args(folder), watched=folder, moment=moment)
            assert run["killed"], (moment, run, good)
            run = children.run("tts", *args(folder), watched=folder)
            assert run["code"] == 0, run
            again = load_file(folder / "audio" / "rvq_req0.safetensors")["rvq_codes"]
            np.testing.assert_array_equal(again, codes)
        whole = children.run("build", *build, watched=tmp_path / "engine")
        assert whole["code"] == 0, whole
        for moment in (len(whole["changes"]) - 20, len(whole["changes"]) - 12):
            run = children.run("build", *build, watched=tmp_path / "engine", moment=moment)
            assert run["killed"]
            try:
                Qwen3TTS.from_engine_dir(tmp_path / "engine", device="cpu")
            except (ConfigError, EngineError) as error:
                logger.info(str(error))
        assert children.run("build", *build, watched=tmp_path / "engine")["code"] == 0
        spoken = args(tmp_path / "last")
        spoken[1] = tmp_path / "engine" / "talker"
        assert children.run("tts", *spoken, watched=tmp_path / "last")["code"] == 0
