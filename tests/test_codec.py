"""The codec decoder: built from the golden checkpoints, compared with the reference's waveforms."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from trt_cpspec.builder.checkpoint import Weights
from trt_cpspec.builder.code2wav import MAX_CODE_LEN, read_codec_spec, rotary_tables, write_code2wav

from trt_cpspec.codec import Code2Wav, CodecConfig
from trt_cpspec.config import Section
from trt_cpspec.errors import ConfigError, EngineError
from trt_cpspec.runtime import Runtime

GOLDEN = Path(__file__).parent / "golden"
NAMES = ("tts_a", "tts_b")
PROMPTS = [(name, prompt) for name, count in (("tts_a", 4), ("tts_b", 3)) for prompt in range(count)]
TOLERANCE = 1e-4
"""Of the largest magnitude of an array."""

TINY = CodecConfig(num_quantizers=3, codebook_size=10, sample_rate=100, samples_per_frame=4, max_code_len=400)


class Golden:
    """One golden checkpoint, its arrays, and the codec built from it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.checkpoint = GOLDEN / name / "checkpoint"
        self.arrays = np.load(GOLDEN / name / "golden.npz")
        self.long = json.loads((GOLDEN / name / "golden.json").read_text(encoding="utf-8"))["codec_long"]
        self.folder = folder
        self.steps = 0
        write_code2wav(self.checkpoint, folder, progress=self.step)
        self.codec = Code2Wav.from_engine_dir(folder, runtime=Runtime(threads=1))

    def step(self) -> None:
        self.steps += 1


@pytest.fixture(scope="session")
def goldens(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Golden]:
    return {name: Golden(name, tmp_path_factory.mktemp(name) / "code2wav") for name in NAMES}


@pytest.fixture(params=NAMES)
def golden(request: pytest.FixtureRequest, goldens: dict[str, Golden]) -> Golden:
    return goldens[request.param]


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == np.float32
    assert np.abs(actual - expected).max() <= TOLERANCE * np.abs(expected).max()


# -- parity with the reference ------------------------------------------------------------------------------------


def test_short_decode(golden: Golden) -> None:
    assert_close(golden.codec.decode(golden.arrays["codec.short_codes"]), golden.arrays["codec.short_wav"])


def test_long_decode_in_one_call(golden: Golden) -> None:
    assert_close(golden.codec.decode(golden.arrays["codec.long_codes"]), golden.arrays["codec.long_wav_oneshot"])


def test_long_decode_in_chunks(golden: Golden) -> None:
    codes, expected = golden.arrays["codec.long_codes"], golden.arrays["codec.long_wav_chunked"]
    assert_close(golden.codec.decode(codes, chunk=golden.long["chunk"], left_context=golden.long["ctx"]), expected)


def test_decode_longer_than_the_default_chunk(goldens: dict[str, Golden]) -> None:
    golden = goldens["tts_a"]
    codes, tail = golden.arrays["codec.xl_codes"], golden.long["xl"]["tail_frames"] * 1920
    assert_close(golden.codec.decode(codes)[-tail:], golden.arrays["codec.xl_wav_tail_chunked"])
    oneshot = golden.codec.decode(codes, chunk=len(codes), left_context=0)
    assert_close(oneshot[-tail:], golden.arrays["codec.xl_wav_tail_oneshot"])


@pytest.mark.parametrize(("name", "prompt"), PROMPTS)
def test_waveform_of_each_prompt(goldens: dict[str, Golden], name: str, prompt: int) -> None:
    golden = goldens[name]
    codes = golden.arrays[f"p{prompt}.codes"]
    assert_close(golden.codec.decode(codes), golden.arrays[f"p{prompt}.wav"])


# -- shapes and causality -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("frames", [1, 2, 7])
def test_a_prefix_of_the_codes_gives_a_prefix_of_the_waveform(golden: Golden, frames: int) -> None:
    codes = golden.arrays["codec.long_codes"]
    expected = golden.arrays["codec.long_wav_oneshot"][: frames * 1920]
    assert_close(golden.codec.decode(codes[:frames].astype(np.uint16)), expected)


def test_no_frames_give_no_samples(golden: Golden) -> None:
    waveform = golden.codec.decode(np.zeros((0, 16), np.int64))
    assert waveform.shape == (0,)
    assert waveform.dtype == np.float32


def test_rows_of_a_batch_are_independent(golden: Golden) -> None:
    codes = golden.arrays["codec.long_codes"].astype(np.int32)
    batch = np.stack([codes[:4].T, codes[9:13].T])
    graph: Any = golden.codec._graph
    state = {name: np.zeros((2, *shape[1:]), np.float32) for name, shape in graph._state_shapes.items()}
    waveform = graph.run({"codes": batch, "position": np.zeros(1, np.int32), **state})["waveform"]
    assert waveform.shape == (2, 1, 4 * 1920)
    for row, part in zip(waveform, (codes[:4], codes[9:13]), strict=True):
        assert_close(np.clip(row[0], -1, 1), golden.codec.decode(part))


def test_the_longest_call_works(goldens: dict[str, Golden]) -> None:
    golden = goldens["tts_b"]
    # Rotary angles act by their difference only, so constant codes must sound the same in every frame far from the
    # start: tables that end early, or lose precision on the way, would show.
    codes = np.tile(golden.arrays["codec.short_codes"][:1], (MAX_CODE_LEN, 1))
    frames = golden.codec.decode(codes, chunk=MAX_CODE_LEN, left_context=0).reshape(MAX_CODE_LEN, 1920)
    assert np.abs(frames[1000:] - frames[1000]).max() < 1e-3


def test_rotary_tables_are_those_of_exact_angles() -> None:
    spec = read_codec_spec(GOLDEN / "tts_a" / "checkpoint")
    cos, sin = rotary_tables(spec)
    frequencies = float(spec.rope_theta) ** -(np.arange(0, spec.head_dim, 2) / spec.head_dim)
    angles = np.arange(MAX_CODE_LEN)[:, None] * frequencies
    np.testing.assert_allclose(cos, np.cos(angles), atol=3e-4)
    np.testing.assert_allclose(sin, np.sin(angles), atol=3e-4)


@pytest.mark.parametrize(
    ("frames", "chunk", "left_context", "calls"),
    [
        (620, 300, 25, [(0, 300), (275, 600), (575, 620)]),
        (9, 4, 6, [(0, 4), (0, 8), (2, 9)]),
        (9, 4, 0, [(0, 4), (4, 8), (8, 9)]),
        (0, 4, 6, []),
    ],
)
def test_chunks_cover_every_frame_once(
    frames: int, chunk: int, left_context: int, calls: list[tuple[int, int]]
) -> None:
    graph = CountingGraph(carries_state=False)
    codes = np.stack([np.arange(frames)] * 3, axis=1)
    config = replace(TINY, codebook_size=frames + 1)
    waveform = Code2Wav(graph, config).decode(codes, chunk=chunk, left_context=left_context)
    np.testing.assert_array_equal(waveform, np.repeat(np.arange(frames) / 1000, 4).astype(np.float32))
    assert [(call[0], call[-1] + 1) for call in graph.calls] == calls


# -- streams ----------------------------------------------------------------------------------------------------------

PCM16_STEP = 1 / 32768


def pieces(codes: np.ndarray, size: int) -> list[np.ndarray]:
    return [codes[start : start + size] for start in range(0, len(codes), size)]


@pytest.mark.parametrize("size", [1, 2, 7, 25])
def test_a_stream_is_the_waveform_of_the_whole(golden: Golden, size: int) -> None:
    codes = golden.arrays["codec.long_codes"]
    stream = golden.codec.stream()
    found = [stream.push(piece) for piece in pieces(codes, size)]
    assert [len(part) for part in found] == [1920 * len(piece) for piece in pieces(codes, size)]
    assert np.abs(np.concatenate(found) - golden.codec.decode(codes)).max() < PCM16_STEP
    assert_close(np.concatenate(found), golden.arrays["codec.long_wav_oneshot"])


@pytest.mark.parametrize("size", [1, 2, 7, 25])
def test_a_stream_begins_anew_where_the_chunks_of_the_reference_do(golden: Golden, size: int) -> None:
    codes, how = golden.arrays["codec.long_codes"], {"chunk": golden.long["chunk"], "left_context": golden.long["ctx"]}
    stream = golden.codec.stream(**how)
    found = np.concatenate([stream.push(piece) for piece in pieces(codes, size)])
    assert np.abs(found - golden.codec.decode(codes, **how)).max() < PCM16_STEP
    assert_close(found, golden.arrays["codec.long_wav_chunked"])


@pytest.mark.parametrize("size", [7, 25])
def test_a_stream_beyond_the_default_chunk(goldens: dict[str, Golden], size: int) -> None:
    golden = goldens["tts_a"]
    codes = golden.arrays["codec.xl_codes"]
    assert len(codes) > 300
    stream = golden.codec.stream()
    found = np.concatenate([stream.push(piece) for piece in pieces(codes, size)])
    assert np.abs(found - golden.codec.decode(codes)).max() < PCM16_STEP


def test_two_streams_do_not_meet(golden: Golden) -> None:
    first, second = golden.arrays["codec.long_codes"][:6], golden.arrays["codec.long_codes"][6:12]
    streams = golden.codec.stream(), golden.codec.stream()
    found = [[stream.push(codes[i : i + 1]) for stream, codes in zip(streams, (first, second), strict=True)]
             for i in range(6)]  # fmt: skip
    for place, codes in enumerate((first, second)):
        assert_close(np.concatenate([pair[place] for pair in found]), golden.codec.decode(codes))


def test_pieces_meet_the_chunks_of_the_offline_decode() -> None:
    graph = CountingGraph(carries_state=True)
    stream = Code2Wav(graph, replace(TINY, codebook_size=40, carries_state=True)).stream(chunk=5, left_context=2)
    codes = np.stack([np.arange(14)] * 3, axis=1)
    found = [stream.push(piece) for piece in (codes[:3], codes[3:7], codes[7:7], codes[7:8], codes[8:])]
    np.testing.assert_array_equal(np.concatenate(found), np.repeat(np.arange(14) / 1000, 4).astype(np.float32))
    assert graph.calls == [[0, 1, 2], [3, 4], [3, 4, 5, 6], [7], [8, 9], [8, 9, 10, 11, 12, 13]]
    assert graph.positions == [0, 3, 0, 4, 5, 0]
    assert graph.begun == 3
    assert stream.frames == 14


def test_a_code_that_cannot_be_streamed_is_named_by_its_frame() -> None:
    stream = Code2Wav(CountingGraph(carries_state=True), replace(TINY, carries_state=True)).stream()
    stream.push(np.zeros((4, 3), np.int32))
    with pytest.raises(ConfigError, match="code 10 at frame 5, depth 1"):
        stream.push(np.array([[0, 0, 0], [0, 10, 0]]))


def test_a_codec_of_before_decodes_and_does_not_stream() -> None:
    codec = Code2Wav(CountingGraph(carries_state=False), TINY)
    assert len(codec.decode(np.zeros((2, 3), np.int32))) == 8
    with pytest.raises(EngineError, match=r"built before streaming .* build the engine folder again with cpspec-build"):
        codec.stream()


def test_a_graph_that_is_not_its_configs_is_refused(goldens: dict[str, Golden], tmp_path: Path) -> None:
    folder = tmp_path / "code2wav"
    shutil.copytree(goldens["tts_a"].folder, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config.pop("carries_state") is True
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(EngineError, match=r"of different builds \(carries_state\); build it again"):
        Code2Wav.from_engine_dir(folder)


# -- what the builder writes --------------------------------------------------------------------------------------


def test_engine_config_and_progress(golden: Golden) -> None:
    config = json.loads((golden.folder / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "qwen3_tts_code2wav"
    assert config["builder_config"] == {"min_code_len": 1, "opt_code_len": 300, "max_code_len": 2000}
    codec = config["code2wav_config"]
    assert (codec["num_quantizers"], codec["codebook_size"]) == (16, 2048)
    assert (codec["upsample_rates"], codec["upsampling_ratios"]) == ([8, 5, 4, 3], [2, 2])
    assert codec["sliding_window"] == {"tts_a": 72, "tts_b": 8}[golden.checkpoint.parent.name]
    assert (golden.codec.sample_rate, golden.codec.samples_per_frame) == (24000, 1920)
    assert golden.steps == read_codec_spec(golden.checkpoint).progress_steps
    assert sorted(file.name for file in golden.folder.iterdir()) == ["config.json", "model.onnx", "model.onnx.data"]


def test_graph_uses_only_portable_nodes(golden: Golden) -> None:
    graph = onnx.load(golden.folder / "model.onnx", load_external_data=False).graph
    kinds = {node.op_type for node in graph.node}
    assert not kinds & {"NonZero", "Clip", "Einsum", "If", "Loop", "Scan", "LayerNormalization"}
    types = {value.name: value.type.tensor_type.elem_type for value in graph.input}
    assert [name for name, kind in types.items() if kind == onnx.TensorProto.INT32] == ["codes", "position"]
    state = [name for name in types if name not in ("codes", "position")]
    assert [value.name for value in graph.output] == [
        *(name.replace("past_", "present_") for name in state),
        "waveform",
    ]
    layers = read_codec_spec(golden.checkpoint).num_hidden_layers
    tails = 1 + 2 + 1 + 4 * (1 + 3) + 1  # pre_conv, both stretches, the first of the vocoder, its blocks, the last
    assert len(state) == 2 * layers + tails
    floats = {tensor.data_type for tensor in graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL}
    assert floats == {onnx.TensorProto.FLOAT}


def test_the_codec_weights_have_unused_rows() -> None:
    # Guards the parity tests above: without a zero usage they could not see a missing floor.
    weights = Weights(GOLDEN / "tts_a" / "checkpoint" / "speech_tokenizer")
    usage = weights.read("decoder.quantizer.rvq_first.vq.layers.0._codebook.cluster_usage")
    assert (usage == 0).any()


# -- errors of a checkpoint ---------------------------------------------------------------------------------------


def edited_checkpoint(folder: Path, decoder: dict[str, object], top: dict[str, object]) -> Path:
    """Copy the codec of a golden checkpoint with some keys of its config changed; None removes one."""
    source, target = GOLDEN / "tts_a" / "checkpoint" / "speech_tokenizer", folder / "checkpoint" / "speech_tokenizer"
    target.mkdir(parents=True)
    shutil.copy(source / "model.safetensors", target)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    for section, changes in ((config["decoder_config"], decoder), (config, top)):
        section.update(changes)
        for key in [key for key, value in changes.items() if value is None]:
            del section[key]
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return target.parent


USED_KEYS = [
    "num_quantizers",
    "codebook_size",
    "codebook_dim",
    "latent_dim",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "sliding_window",
    "rope_theta",
    "rms_norm_eps",
    "decoder_dim",
    "upsample_rates",
    "upsampling_ratios",
    "hidden_act",
    "attention_bias",
]


@pytest.mark.parametrize("key", USED_KEYS)
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    checkpoint = edited_checkpoint(tmp_path, {key: None}, {})
    with pytest.raises(ConfigError, match=f"key {key} is missing"):
        read_codec_spec(checkpoint)


@pytest.mark.parametrize("key", ["model_type", "decoder_config", "output_sample_rate", "decode_upsample_rate"])
def test_a_missing_top_level_key_is_named(tmp_path: Path, key: str) -> None:
    checkpoint = edited_checkpoint(tmp_path, {}, {key: None})
    with pytest.raises(ConfigError, match=f"key {key} is missing"):
        read_codec_spec(checkpoint)


@pytest.mark.parametrize(
    ("decoder", "top", "words"),
    [
        ({}, {"model_type": "mimi"}, "model_type is 'mimi', only 'qwen3_tts_tokenizer_12hz'"),
        ({}, {"decode_upsample_rate": 960}, "decode_upsample_rate is 960, but upsample_rates"),
        ({"upsample_rates": [8, 5, 4]}, {}, "decode_upsample_rate is 1920"),
        ({"upsample_rates": []}, {}, r"upsample_rates is \[\]"),
        ({"upsampling_ratios": [2, 0]}, {}, r"upsampling_ratios is \[2, 0\]"),
        ({"hidden_act": "gelu"}, {}, "hidden_act is 'gelu', only 'silu'"),
        ({"attention_bias": True}, {}, "attention_bias is True"),
        ({"num_key_value_heads": 2}, {}, "num_key_value_heads is 2, only 4"),
        ({"num_semantic_quantizers": 2}, {}, "num_semantic_quantizers is 2"),
        ({"num_quantizers": 1}, {}, "num_quantizers is 1, it must be at least 2"),
        ({"decoder_dim": 40}, {}, "decoder_dim 40 cannot be halved 4 times"),
        ({"head_dim": 7}, {}, "head_dim is 7, it must be even"),
        ({"rope_theta": -1.0}, {}, "rope_theta -1.0"),
        ({"rope_scaling": {"rope_type": "yarn"}}, {}, "rope_scaling is .* only plain rope_theta"),
        ({"sliding_window": "72"}, {}, "sliding_window must be an integer"),
    ],
)
def test_a_config_that_cannot_be_used(tmp_path: Path, decoder: dict, top: dict, words: str) -> None:
    checkpoint = edited_checkpoint(tmp_path, decoder, top)
    with pytest.raises(ConfigError, match=words):
        read_codec_spec(checkpoint)


@pytest.mark.parametrize(
    ("decoder", "words"),
    [
        ({"latent_dim": 32}, r"pre_conv.conv.weight has shape \[24, 8, 3\], its config asks for \[32, 8, 3\]"),
        ({"codebook_size": 1024}, r"cluster_usage has shape \[2048\], its config asks for \[1024\]"),
        ({"num_quantizers": 17}, "no tensor decoder.quantizer.rvq_rest.vq.layers.15"),
        ({"num_hidden_layers": 3}, "no tensor decoder.pre_transformer.layers.2"),
        ({"head_dim": 4}, r"q_proj.weight has shape \[32, 16\], its config asks for \[16, 16\]"),
    ],
)
def test_weights_that_contradict_the_config(tmp_path: Path, decoder: dict, words: str) -> None:
    checkpoint = edited_checkpoint(tmp_path, decoder, {})
    with pytest.raises(ConfigError, match=words):
        write_code2wav(checkpoint, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


# -- errors of a decode -------------------------------------------------------------------------------------------


class CountingGraph:
    """Frame ``t`` sounds as a thousandth of its first code, 4 samples long."""

    def __init__(self, *, carries_state: bool) -> None:
        self.carries_state, self.begun = carries_state, 0
        self.calls: list[list[int]] = []
        self.positions: list[int] = []

    def begin(self) -> CountingGraph:
        self.begun += 1
        return self

    def run(self, feeds: dict[str, np.ndarray], /) -> dict[str, np.ndarray]:
        assert feeds.keys() == ({"codes", "position"} if self.carries_state else {"codes"})
        self.calls.append(feeds["codes"][0, 0].tolist())
        self.positions += [int(feeds["position"][0])] if self.carries_state else []
        return {"waveform": np.repeat(feeds["codes"][:, :1] / 1000, 4, axis=2).astype(np.float32)}


class FakeGraph:
    """Returns one waveform, whatever the codes."""

    def __init__(self, waveform: np.ndarray) -> None:
        self.waveform = waveform

    def run(self, feeds: dict[str, np.ndarray], /) -> dict[str, np.ndarray]:
        assert feeds["codes"].dtype == np.int32
        return {"waveform": self.waveform}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_waveform_that_is_not_finite_is_an_error(value: float) -> None:
    waveform = np.zeros((1, 1, 8), np.float32)
    waveform[0, 0, 5] = value
    with pytest.raises(EngineError, match="not finite, first in frame 1"):
        Code2Wav(FakeGraph(waveform), TINY).decode(np.zeros((2, 3), np.int64))


def test_a_waveform_of_another_length_is_an_error() -> None:
    with pytest.raises(EngineError, match=r"shape \[1, 1, 7\] for 2 frame\(s\)"):
        Code2Wav(FakeGraph(np.zeros((1, 1, 7), np.float32)), TINY).decode(np.zeros((2, 3), np.int64))


def test_the_waveform_is_clipped() -> None:
    graph = FakeGraph(np.array([[[-3, -1, 0.5, 2]]], np.float32))
    np.testing.assert_array_equal(Code2Wav(graph, TINY).decode(np.zeros((1, 3), np.int64)), [-1, -1, 0.5, 1])


@pytest.mark.parametrize(
    ("codes", "words"),
    [
        (np.zeros((2, 4), np.int64), r"shape \[frames, 3\], they are int64 of shape \[2, 4\]"),
        (np.zeros(3, np.int64), r"of shape \[3\]"),
        (np.zeros((2, 3), np.float32), "they are float32"),
        (np.array([[0, 9, 10]]), "code 10 at frame 0, depth 2 is outside the codebook"),
        (np.array([[0, 0, 0], [0, -1, 0]]), "code -1 at frame 1, depth 1"),
        (np.array([[0, 2**32, 0]]), "code 4294967296"),
    ],
)
def test_codes_that_cannot_be_decoded(codes: np.ndarray, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Code2Wav(FakeGraph(np.zeros((1, 1, 8), np.float32)), TINY).decode(codes)


@pytest.mark.parametrize(("chunk", "left_context"), [(0, 0), (1, -1), (400, 1), (376, 25)])
def test_chunks_that_the_graph_cannot_take(chunk: int, left_context: int) -> None:
    codec = Code2Wav(FakeGraph(np.zeros((1, 1, 8), np.float32)), TINY)
    with pytest.raises(ConfigError, match="together at most 400"):
        codec.decode(np.zeros((2, 3), np.int64), chunk=chunk, left_context=left_context)


def test_an_engine_folder_without_its_files(goldens: dict[str, Golden], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        Code2Wav.from_engine_dir(tmp_path)
    shutil.copy(goldens["tts_a"].folder / "config.json", tmp_path)
    with pytest.raises(EngineError, match=r"model\.onnx is missing"):
        Code2Wav.from_engine_dir(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mimi_code2wav"}, "model_type is 'mimi_code2wav', only qwen3_tts_code2wav and qwen3_omni"),
        ({"samples_per_frame": 960}, "samples_per_frame is 960, only 1920"),
        ({"sample_rate": 0}, "sample_rate is 0"),
        ({"builder_config": {}}, "key max_code_len is missing"),
    ],
)
def test_an_engine_config_that_cannot_be_used(goldens: dict[str, Golden], changes: dict, words: str) -> None:
    config = json.loads((goldens["tts_a"].folder / "config.json").read_text(encoding="utf-8")) | changes
    with pytest.raises(ConfigError, match=words):
        CodecConfig.from_section(Section(config, "config.json"))
