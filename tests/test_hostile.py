"""Files and requests of an enemy: they end in an error that was meant, cost memory by their size, and write nowhere."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import onnx
import pytest
import soundfile
from click.testing import CliRunner
from hostile import INTEGERS, JSON_VALUES, changed, damaged, dumped, tried
from hypothesis import given
from media_case import MediaCase
from PIL import Image
from safetensors.numpy import save
from tokenizers import Tokenizer
from trt_cpspec.builder import sidecar
from trt_cpspec.builder.checkpoint import Weights, read_checkpoint
from trt_cpspec.builder.code2wav import read_codec_spec
from trt_cpspec.builder.engine import OnnxGraph
from trt_cpspec.builder.omni_checkpoint import read_omni_checkpoint
from trt_cpspec.builder.rebuild import RebuildOptions, build_component

from trt_cpspec import runtime
from trt_cpspec.audio_input import log_mel, read_clip
from trt_cpspec.chat import ChatTokenizer
from trt_cpspec.cli import llm, tts
from trt_cpspec.config import CodePredictorSpec, Section, TalkerSpec, ThinkerSpec
from trt_cpspec.errors import ConfigError, CpSpecError, EngineError
from trt_cpspec.fused import GraphWeights
from trt_cpspec.image_input import read_image
from trt_cpspec.inspection import describe_engine_dir, format_description
from trt_cpspec.memory import format_memory, memory_needed
from trt_cpspec.omni import Qwen3Omni
from trt_cpspec.pipeline import Qwen3TTS
from trt_cpspec.requests import make_chat, make_request, read_chat_file, read_request_file
from trt_cpspec.runtime import PlanRecord, Runtime
from trt_cpspec.session import DecoderSession, decoder_inputs
from trt_cpspec.tensorfile import TensorFile
from trt_cpspec.text import TextTokenizer

GOLDEN = Path(__file__).parent / "golden"
KEEP_MIB = 4
"""What may be taken whatever the size of the input: modules, tables of Python, caches."""


@contextmanager
def refused(*errors: type[Exception]) -> Iterator[None]:
    """Let the block end well, or in one of the errors that it may raise; any other is a bug."""
    try:
        yield
    except CpSpecError as error:
        if errors and not isinstance(error, errors):
            raise


@contextmanager
def bounded(nbytes: int, factor: int = 100) -> Iterator[None]:
    """Check that a block takes no more memory of Python's than a multiple of its input."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < factor * nbytes + KEEP_MIB * 2**20, f"{peak} bytes for an input of {nbytes}"


# ---- requests -------------------------------------------------------------------------------------------------------

TEXTS = {
    "batch_size": 2, "speaker": "a", "talker_top_k": 5,
    "requests": [
        {"messages": [{"role": "assistant", "content": "Hello there."}], "seed": 1, "max_audio_length": 3},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]},
                      {"role": "assistant", "content": "Two."}], "language": "auto", "subtalker_top_p": 0.5},
    ],
}  # fmt: skip
CHATS = {
    "temperature": 0.5, "streaming": {"enable": False},
    "requests": [{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}]}],
}  # fmt: skip


@tried(250)
@given(
    content=(changed(TEXTS) | changed(CHATS) | JSON_VALUES).map(dumped)
    | st.binary(max_size=200)
    | damaged(json.dumps(TEXTS).encode())
)
def test_input_files(content: bytes, tmp_path_factory: pytest.TempPathFactory, lively: Qwen3TTS) -> None:
    path = tmp_path_factory.getbasetemp() / "hostile.json"
    path.write_bytes(content)
    with bounded(len(content)), refused(ConfigError):
        for request in read_request_file(path).requests:
            lively.prepare(request)
    with bounded(len(content)), refused(ConfigError):
        read_chat_file(path)


OPTIONS = (
    "speaker", "language", "instruct", "non_streaming_mode", "seed", "max_audio_length", "talker_temperature",
    "talker_top_k", "talker_top_p", "repetition_penalty", "subtalker_temperature", "subtalker_top_k", "subtalker_top_p",
    "temperature", "top_k", "top_p", "max_generate_length",
)  # fmt: skip


@tried(150)
@given(
    options=st.dictionaries(st.sampled_from(OPTIONS) | st.text(max_size=5), JSON_VALUES | INTEGERS, max_size=3),
    text=st.text(max_size=20) | JSON_VALUES,
)
def test_options_in_python(options: dict[str, Any], text: Any, lively: Qwen3TTS) -> None:
    with refused(ConfigError):
        lively.prepare(make_request(text, options))
    with refused(ConfigError):
        make_chat([{"role": "user", "content": text}], options)


PATHS = ["../../out", "/etc/passwd", "..", "a/b", "C:\\x", "~", "\0", "x" * 5000, "-o", "%s%n", "$(id)"]


@pytest.mark.parametrize("key", ["speaker", "language", "instruct"])
def test_names_write_nothing_outside(key: str, lively_engine: Path, tmp_path: Path) -> None:
    """A name is one that the checkpoint knows, or an error; a file is named by its number alone."""
    good = {"messages": [{"role": "assistant", "content": "../../etc"}], "seed": 1, "max_audio_length": 2}
    for index, value in enumerate(PATHS):
        work = tmp_path / str(index)
        (work / "in").mkdir(parents=True)
        document = {"requests": [good, {**good, key: value}]}
        (work / "in" / "input.json").write_text(json.dumps(document))
        args = ["--inputFile", work / "in" / "input.json", "--outputFile", work / "out.json"]
        args += ["--outputAudioDir", work / "audio", "--talkerEngineDir", lively_engine / "talker"]
        result = CliRunner().invoke(tts, list(map(str, args)))
        assert result.exit_code in (0, 2), result.output
        assert (result.exit_code == 0) == (key == "instruct" and value != "\0"), value
        made = {str(path.relative_to(tmp_path)) for path in work.rglob("*") if path.is_file()}
        names = [f"{index}/audio/{name}" for name in ("audio_req0.wav", "audio_req1.wav")]
        names += [name.replace("audio_", "rvq_").replace(".wav", ".safetensors") for name in names]
        names = [*names, f"{index}/out.json"] if result.exit_code == 0 else []
        assert made == {f"{index}/in/input.json", *names}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(map(str, range(len(PATHS))))


@pytest.fixture(scope="module")
def lively_engine(synthetic: Callable[..., Path], build: Callable[..., Path], tmp_path_factory: Any) -> Path:
    return build(synthetic(), tmp_path_factory.mktemp("hostile") / "engine")


# ---- config.json ----------------------------------------------------------------------------------------------------

SPECS: dict[str, Callable[[Section], Any]] = {
    "talker": TalkerSpec.from_section,
    "code_predictor": CodePredictorSpec.from_section,
    "thinker": ThinkerSpec.from_section,
}


@tried(120)
@given(data=st.data())
def test_engine_configs(data: st.DataObject, variants: dict[str, Any], omni: Any) -> None:
    for engine in (variants["tts_a"].engine, omni.engine):
        for name, read in SPECS.items():
            if (engine / name).is_dir():
                config = data.draw(changed(json.loads((engine / name / "config.json").read_text())))
                with refused():
                    read(Section(config, "config.json"))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("speaker_id", {"vivian": -1}, "vivian is -1, it must be at least 0"),
        ("speaker_id", {"vivian": 10**6}, "speaker vivian is 1000000, vocab_size is"),
        ("codec_language_id", {"english": 10**6}, "language english is 1000000, vocab_size is"),
        ("codec_bos_id", 10**6, "codec_bos_id is 1000000, vocab_size is"),
        ("tts_pad_token_id", 10**6, "tts_pad_token_id is 1000000, text_vocab_size is"),
        ("spk_is_dialect", {"vivian": 5}, "spk_is_dialect of vivian is 5"),
        ("spk_is_dialect", {"vivian": "martian"}, "spk_is_dialect of vivian is 'martian'"),
        ("vocab_size", 1024, "vocab_size is"),
        ("num_hidden_layers", 2**20, "num_hidden_layers is 1048576, it must be at most 1024"),
        ("num_code_groups", 2**20, "num_code_groups is 1048576, it must be at most 1024"),
        ("hidden_size", 2**31, "hidden_size is 2147483648, it must be at most 2147483647"),
    ],
)
def test_ids_and_sizes_that_no_table_has(key: str, value: Any, words: str, variants: dict[str, Any]) -> None:
    """A negative id would take the last row in silence, one beyond the end would be a traceback."""
    config = json.loads((variants["tts_a"].engine / "talker" / "config.json").read_text())
    config[key] = value
    if key == "vocab_size":
        config |= {name: 1 for name in config if name.startswith("codec_") and name.endswith("_id")}
        config |= {"speaker_id": {"vivian": 1}, "codec_language_id": {}, "spk_is_dialect": {}}
    with pytest.raises(ConfigError, match=words):
        TalkerSpec.from_section(Section(config, "config.json"))


def test_tokens_beyond_the_embedding(variants: dict[str, Any], tmp_path: Path) -> None:
    """A tokenizer of another checkpoint: its ids are no rows of this one's table."""
    engine = shutil.copytree(variants["tts_a"].engine, tmp_path / "engine")
    model = Qwen3TTS.from_engine_dir(engine, threads=1)
    object.__setattr__(model.talker.spec, "text_vocab_size", 5)
    with pytest.raises(ConfigError, match="the Talker knows 5: they are of different checkpoints"):
        model.synthesize("Hello.", max_audio_length=1)


@tried(30)
@given(data=st.data())
def test_an_engine_with_a_hostile_config(data: st.DataObject, spoilt: Path, spoilt_omni: Path) -> None:
    """What is loaded all the same speaks, or fails as an engine may."""
    names = ("talker", "code_predictor", "code2wav")
    multimodal = [f"multimodal/{name}" for name in ("code2wav", "audio", "visual")]
    for engine, components in ((spoilt, names), (spoilt_omni, ("thinker", *names[:2], *multimodal))):
        path = engine / data.draw(st.sampled_from(components)) / "config.json"
        good = path.read_bytes()
        path.write_bytes(dumped(data.draw(changed(json.loads(good)))))
        try:
            with refused():
                format_description(describe_engine_dir(engine))
            with refused():
                format_memory(memory_needed(engine))
            with refused():
                if engine == spoilt:
                    Qwen3TTS.from_engine_dir(engine, threads=1).synthesize("Hi.", seed=1, max_audio_length=2)
                else:
                    omni = Qwen3Omni.from_engine_dir(engine, threads=1)
                    heard = MediaCase("heard" if path.parent.name == "audio" else "seen", omni, engine).messages
                    said = heard if path.parent.name in ("audio", "visual") else "Hi."
                    omni.respond(said, seed=1, max_generate_length=3, max_audio_length=2)
        finally:
            path.write_bytes(good)


@pytest.fixture(scope="module")
def spoilt(variants: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shutil.copytree(variants["tts_a"].engine, tmp_path_factory.mktemp("spoilt") / "engine")


@pytest.fixture(scope="module")
def spoilt_omni(omni: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shutil.copytree(omni.engine, tmp_path_factory.mktemp("spoilt_omni") / "engine")


@tried(60)
@given(data=st.data())
def test_checkpoint_configs(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.getbasetemp() / "hostile_checkpoint"
    for variant, files in (
        ("tts_a", ("config.json", "generation_config.json", "speech_tokenizer/config.json")),
        ("omni_a", ("config.json", "generation_config.json")),
    ):
        name = data.draw(st.sampled_from(files))
        for file in files:
            (root / variant / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(GOLDEN / variant / "checkpoint" / file, root / variant / file)
        content = json.loads((root / variant / name).read_text())
        (root / variant / name).write_bytes(dumped(data.draw(changed(content))))
        with refused():
            if variant == "omni_a":
                read_omni_checkpoint(root / variant)
            else:
                read_checkpoint(root / variant)
                read_codec_spec(root / variant)


@pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/x.safetensors", "..", "a/b.safetensors", ""])
def test_shards_lie_in_their_folder(shard: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(ConfigError, match="is no file of this folder"):
        Weights(tmp_path)


# ---- safetensors ----------------------------------------------------------------------------------------------------

TENSORS = save({"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.ones(5, np.float16), "c": np.ones(())})
HEADER = json.loads(TENSORS[8 : 8 + int.from_bytes(TENSORS[:8], "little")])
DATA = TENSORS[8 + int.from_bytes(TENSORS[:8], "little") :]


def with_header(header: bytes, data: bytes = DATA) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


@tried(400)
@given(content=changed(HEADER).map(dumped).map(with_header) | damaged(TENSORS) | st.binary(max_size=64))
def test_safetensors(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "hostile.safetensors"
    path.write_bytes(content)
    with bounded(len(content)), refused(ConfigError):
        file = TensorFile(path)
        spans = sorted((file.info(name).offset, file.info(name).nbytes) for name in file.names())
        assert sum(nbytes for _, nbytes in spans) <= len(content) - 8
        for (start, nbytes), (following, _) in zip(spans, [*spans[1:], (len(content), 0)], strict=True):
            assert start + nbytes == following, "the tensors cover the data, and none of it twice"
        for name in file.names():
            with refused(ConfigError):
                assert file.read(name).shape == file.info(name).shape
            with refused(ConfigError):
                assert file.rows(name)[0].dtype == np.float32


def entry(shape: list[Any], offsets: list[Any], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "size", "words"),
    [
        ({"a": entry([2], [0, 8]), "b": entry([2], [4, 12])}, 12, "overlap"),
        ({"a": entry([2], [0, 8]), "b": entry([2], [0, 8])}, 8, "overlap"),
        ({"a": entry([2], [8, 16])}, 16, "hole"),
        ({"a": entry([2], [0, 8]), "b": entry([1], [12, 16])}, 16, "hole at byte 8"),
        ({"a": entry([2], [0, 8])}, 9, "take 8 bytes, there are 9"),
        ({"a": entry([2**62], [0, 2**64])}, 8, "cut short"),
        ({"a": entry([2**32, 2**32], [0, 0])}, 0, "impossible shape"),
        ({"a": entry([0, 2**60], [0, 0])}, 0, "impossible shape"),
        ({"a": entry([1] * 9, [0, 4])}, 4, "impossible shape"),
        ({"a": entry([-1, -2], [0, 8])}, 8, "-1 stands where a size belongs"),
        ({"a": entry([2], [8, 0])}, 8, "hole|overlap|take"),
    ],
)
def test_headers_that_lie(header: dict[str, Any], size: int, words: str, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(with_header(json.dumps(header).encode(), bytes(size)))
    with pytest.raises(ConfigError, match=words):
        TensorFile(tmp_path / "x.safetensors")


def test_a_tensor_that_is_there_twice(tmp_path: Path) -> None:
    one = json.dumps(entry([2], [0, 8]))
    (tmp_path / "x.safetensors").write_bytes(with_header(f'{{"a": {one}, "a": {one}}}'.encode(), bytes(8)))
    with pytest.raises(ConfigError, match="twice"):
        TensorFile(tmp_path / "x.safetensors")


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(ConfigError, match="there is no such file"):
        TensorFile(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 1024}, r"missing \['past_key_10'"),
        ({"num_hidden_layers": 1}, r"unknown \['past_key_1'"),
        ({"head_dim": 2**20}, "config.json asks for"),
        ({"num_key_value_heads": 4}, "config.json asks for"),
        ({"hidden_size": 2**30}, "inputs_embeds has shape"),
    ],
)
def test_a_graph_that_is_not_the_config_s(change: dict[str, int], words: str, variants: dict[str, Any]) -> None:
    """It is noticed when the graph is opened, before memory is taken for what config.json says."""
    spec = replace(variants["tts_a"].tts.talker.spec.decoder, **change)
    with pytest.raises(EngineError, match=words):
        DecoderSession(variants["tts_a"].engine / "talker" / "model.onnx", spec, capacity=64, threads=1)


# ---- sidecars and plans ---------------------------------------------------------------------------------------------

RECORD = {
    "flavour": "tensorrt", "tensorrt_version": "11.1.0", "precision": "fp32", "strongly_typed": True,
    "compute_capabilities": ["9.0"], "verify_size": 8, "options": {"optimization_level": None},
    "profiles": [{"name": "context", "inputs": {"positions": [[1, 1], [1, 1], [1, 1]]}}],
    "plan": {"file": "llm.engine", "bytes": 4, "sha256": "0" * 64},
    "graph": {"model.onnx": "0"}, "side_files": {"lm_heads.safetensors": "0"},
}  # fmt: skip


@tried(60)
@given(data=st.data())
def test_sidecars(data: st.DataObject, predictor: Path) -> None:
    path = predictor / "config.json"
    good = json.loads(path.read_text())
    good["builder_config"]["engine"] = RECORD
    (predictor / "llm.engine").write_bytes(b"ftrt")
    kept = path.read_bytes()
    try:
        path.write_bytes(dumped(data.draw(changed(good))))
        with refused():
            build_component(predictor, predictor, None, RebuildOptions(dry_run=True))
        with refused():
            PlanRecord.from_section(Section.from_file(path), "llm.engine").check(path, b"ftrt", "11.1.0", (9, 0))
        (predictor / sidecar.NEXT_FILE).write_bytes(path.read_bytes())
        sidecar.recover(predictor)
        assert not (predictor / sidecar.NEXT_FILE).exists()
    finally:
        path.write_bytes(kept)


@pytest.fixture(scope="module")
def predictor(variants: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    engine = variants["tts_a"].engine
    return shutil.copytree(engine / "code_predictor", tmp_path_factory.mktemp("sidecars") / "code_predictor")


@tried(60)
@given(data=st.data())
def test_the_index_of_weights(data: st.DataObject, predictor: Path) -> None:
    path = predictor / "model.weights.json"
    good = path.read_bytes()
    index = json.loads(good)
    try:
        path.write_bytes(dumped(data.draw(changed(index))))
        with refused(EngineError):
            weights = GraphWeights(predictor)
            for name in index:
                for read in (weights.matrix, weights.vector):
                    with refused(EngineError):
                        read(name.removeprefix("model."))
            assert weights.dtype in ("F32", "F16", "BF16")
    finally:
        path.write_bytes(good)


@pytest.mark.parametrize("case", ["link", "folder link", "record", "backup", "next", "partial"])
@pytest.mark.parametrize("plan", ["llm.engine", "visual.engine"])
def test_only_the_plan_that_was_named_is_loaded(
    plan: str, case: str, predictor: Path, omni: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans are code. Of all files that look like one, the named folder's own is deserialized, or none."""
    loaded: list[bytes] = []
    binding = SimpleNamespace(__version__="11.1.0")
    monkeypatch.setattr(runtime, "import_binding", lambda flavour: binding)
    monkeypatch.setattr(runtime, "Plan", lambda path, binding, data: loaded.append(data))
    named, evil, good = tmp_path / "named", tmp_path / "evil.engine", b"ftrt the named one"
    source = predictor if plan == "llm.engine" else omni.engine / "multimodal" / "visual"
    shutil.copytree(source, named, ignore=shutil.ignore_patterns("*.engine"))
    evil.write_bytes(b"ftrt an evil one")
    config = json.loads((named / "config.json").read_text())
    record = {**RECORD, "plan": sidecar.plan_record(plan, evil.read_bytes())}
    if case == "record":
        record["plan"]["file"] = "../evil.engine"
    config["builder_config"]["engine"] = record
    (named / "config.json").write_text(json.dumps(config))
    if case == "link":
        (named / plan).symlink_to(evil)
    elif case == "folder link":  # which the user named
        (named / plan).write_bytes(evil.read_bytes())
        (tmp_path / "other").symlink_to(named)
        named = tmp_path / "other"
    else:
        (named / plan).write_bytes(good)
        name = {"backup": f"{plan}.bak", "next": f"{plan}.next", "partial": f".{plan}.x.partial"}.get(case)
        if name:
            (named / name).write_bytes(evil.read_bytes())
    device: Any = SimpleNamespace(
        compute_capability=(9, 0), make_current=lambda: None, require=lambda nbytes, what: None
    )
    if case == "folder link":
        Runtime(cuda=device)._plan(named, plan)
        assert loaded == [evil.read_bytes()]
        return
    words = r"is a link to .*evil\.engine, outside of" if case == "link" else "its SHA-256 differs"
    with pytest.raises(EngineError, match=words):
        Runtime(cuda=device)._plan(named, plan)
    assert loaded == []


def test_a_pending_sidecar_that_points_elsewhere_is_dropped(predictor: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(predictor, tmp_path / "named")
    (tmp_path / "evil.engine").write_bytes(b"ftrt an evil one")
    before = (folder / "config.json").read_bytes()
    config = json.loads(before)
    config["builder_config"]["engine"] = {"plan": sidecar.plan_record("../evil.engine", b"ftrt an evil one")}
    (folder / sidecar.NEXT_FILE).write_text(json.dumps(config))
    sidecar.recover(folder)
    assert (folder / "config.json").read_bytes() == before
    assert not (folder / sidecar.NEXT_FILE).exists()


# ---- tokenizers and templates ---------------------------------------------------------------------------------------

TOKENIZER_FILES = ("vocab.json", "merges.txt", "tokenizer_config.json")


@pytest.fixture(scope="module")
def whole_tokenizer() -> bytes:
    """The golden tokenizer as one file."""
    made: Tokenizer = TextTokenizer.from_dir(GOLDEN / "tts_a" / "checkpoint")._tokenizer
    return made.to_str().encode()


@tried(120)
@given(data=st.data())
def test_tokenizers(data: st.DataObject, whole_tokenizer: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "hostile_tokenizer"
    folder.mkdir(exist_ok=True)
    for name in TOKENIZER_FILES:
        shutil.copyfile(GOLDEN / "tts_a" / "checkpoint" / name, folder / name)
    (folder / "tokenizer.json").unlink(missing_ok=True)
    name = data.draw(st.sampled_from((*TOKENIZER_FILES, "tokenizer.json")))
    content = whole_tokenizer if name == "tokenizer.json" else (folder / name).read_bytes()
    change = damaged(content) if name == "merges.txt" else damaged(content) | changed(json.loads(content)).map(dumped)
    (folder / name).write_bytes(data.draw(change))
    with bounded(sum(path.stat().st_size for path in folder.iterdir())), refused(ConfigError):
        TextTokenizer.from_dir(folder).text_ids("Hello there, 你好.")


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
def test_tokenizers_that_would_fill_memory(part: str, whole_tokenizer: bytes, tmp_path: Path) -> None:
    """Each step doubles what the one before has made."""
    document = json.loads(whole_tokenizer)
    step = {"type": "Replace", "pattern": {"String": "Q"}, "content": "QQ"}
    listed = "normalizers" if part == "normalizer" else "decoders"
    for steps, content, good in ((40, "QQ", False), (1, "Q" * 1000, False), (2, "QQ", True)):
        document[part] = {"type": "Sequence", listed: [{**step, "content": content}] * steps}
        (tmp_path / "tokenizer.json").write_text(json.dumps(document))
        if good:
            TextTokenizer.from_dir(tmp_path).text_ids("Hello Q.")
        else:
            with pytest.raises(ConfigError, match="steps replace or prepend text"):
                TextTokenizer.from_dir(tmp_path)


BOMBS = [
    "{{ 'a' * 10000000000 }}",
    "{{ 'a'.center(10000000000) }}",
    "{{ 'a'.ljust(10000000000) }}",
    "{{ 'a' | center(10000000000) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '{:>10000000000}'.format(1) }}",
    "{{ [0] * 10000000000 }}",
    "{{ 10 ** 10 ** 10 }}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x.replace('a', n.x) %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x | replace('a', n.x) %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x.join([n.x, n.x]) %}{% endfor %}",
    "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
    "{{ messages | tojson(indent=1000000000) }}",
    "{{ lipsum(100000) }}",
    "{{ range(1000000000) | list }}",
]


@pytest.mark.parametrize("template", BOMBS, ids=range(len(BOMBS)))
def test_templates_that_would_fill_memory(template: str, chat_tokenizer: Tokenizer) -> None:
    with (
        bounded(2**22, factor=8),
        pytest.raises(ConfigError, match=r"template (refuses the messages|cannot be read)"),
    ):
        ChatTokenizer(chat_tokenizer, template, {}, "here").render([{"role": "user", "content": "Hi."}])


def test_templates_that_only_concatenate(chat_tokenizer: Tokenizer) -> None:
    source = (
        "{{ 'a' ~ 1 ~ none ~ 2.5 }}|{{ 'x' * 3 + 'y' }}|{{ 'aba'.replace('a', 'c') | replace('b', 'd') }}|{{ 7 % 4 }}"
    )
    chat = ChatTokenizer(chat_tokenizer, source + "|{{ ', '.join(['a', 'b']) }}|{{ 2 ** 8 }}", {}, "here")
    assert chat.render([]) == "a1None2.5|xxxy|cdc|3|a, b|256"


@pytest.fixture(scope="module")
def chat_tokenizer() -> Tokenizer:
    return TextTokenizer.from_dir(GOLDEN / "tts_a" / "checkpoint")._tokenizer


@tried(60)
@given(data=st.data())
def test_templates(data: st.DataObject, chat_tokenizer: Tokenizer) -> None:
    good = json.loads((GOLDEN / "omni_a" / "checkpoint" / "chat_template.json").read_text())["chat_template"]
    source = data.draw(damaged(good.encode()).map(lambda raw: raw.decode(errors="replace")) | st.text(max_size=40))
    with refused(ConfigError):
        ChatTokenizer(chat_tokenizer, source, {}, "here").render([{"role": "user", "content": "Hi."}])


# ---- ONNX -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def onnx_folder(variants: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    engine = variants["tts_a"].engine
    return shutil.copytree(engine / "code_predictor", tmp_path_factory.mktemp("onnx") / "code_predictor")


@tried(100)
@given(data=st.data())
def test_graphs(data: st.DataObject, onnx_folder: Path) -> None:
    path = onnx_folder / "model.onnx"
    good = path.read_bytes()
    model = onnx.load(str(path), load_external_data=False)
    try:
        if data.draw(st.booleans()):
            path.write_bytes(data.draw(damaged(good)))
        else:
            weights = [item for item in model.graph.initializer if item.external_data]
            for stored in data.draw(st.sampled_from(weights)).external_data:
                if data.draw(st.booleans()):
                    numbers = INTEGERS.filter(lambda n: abs(n) < 10**100).map(str)
                    stored.value = data.draw(st.text(max_size=10) | numbers | st.sampled_from(PATHS[:4]))
            for dim in data.draw(st.sampled_from(list(model.graph.input))).type.tensor_type.shape.dim:
                if data.draw(st.booleans()):
                    dim.dim_value = data.draw(st.integers(-(2**63), 2**63 - 1))
            path.write_bytes(model.SerializeToString())
        with bounded(len(good)), refused():
            build_component(onnx_folder, onnx_folder, None, RebuildOptions(dry_run=True))
        with refused(EngineError):
            runtime.GraphSession(path, threads=1)
    finally:
        path.write_bytes(good)


def set_location(weight: Any, location: str) -> None:
    next(item for item in weight.external_data if item.key == "location").value = location


def set_length(weight: Any, key: str, value: str) -> None:
    next(item for item in weight.external_data if item.key == key).value = value


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: set_location(w, "../secret.data"), "only files of the graph's own folder"),
        (lambda w: set_location(w, "a/../../secret.data"), "only files of the graph's own folder"),
        (lambda w: set_location(w, "/etc/passwd"), "only files of the graph's own folder"),
        (lambda w: set_location(w, "link.data"), r"is a link to .*secret\.data, outside of"),
        (lambda w: set_location(w, "folder/secret.data"), r"is a link to .*secret\.data, outside of"),
        (lambda w: set_location(w, "none.data"), "does not exist"),
        (lambda w: set_length(w, "offset", "-4"), "'-4', which is no size"),
        (lambda w: set_length(w, "offset", str(10**17)), "cut short or damaged"),
        (lambda w: set_length(w, "length", str(10**17)), "cut short or damaged"),
        (lambda w: set_length(w, "length", "1"), "cut short or damaged"),
        (lambda w: w.dims.append(2**62), "impossible shape"),
        (lambda w: w.dims.append(-1), "impossible shape"),
        (lambda w: w.dims.append(2), "cut short or damaged"),
    ],
    ids=range(13),
)
@pytest.mark.parametrize("nested", [False, True])
def test_graphs_that_reach_for_other_files(
    change: Callable[[Any], None], words: str, nested: bool, onnx_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(onnx_folder, tmp_path / "onnx")
    (tmp_path / "secret.data").write_bytes(bytes(2**20))
    (folder / "link.data").symlink_to(tmp_path / "secret.data")
    (folder / "folder").symlink_to(tmp_path)
    model = onnx.load(str(folder / "model.onnx"), load_external_data=False)
    weight = next(item for item in model.graph.initializer if item.external_data)
    OnnxGraph(folder / "model.onnx")
    if nested:  # in the branch of a condition
        inner = onnx.helper.make_graph([], "inner", [], [], [weight])
        change(inner.initializer[0])
        model.graph.node.append(onnx.helper.make_node("If", ["x"], ["y"], then_branch=inner, else_branch=inner))
    else:
        change(weight)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(EngineError, match=words):
        OnnxGraph(folder / "model.onnx")


def small_graph(path: Path, inputs: dict[str, list[Any]], outputs: dict[str, str]) -> None:
    """Write a graph of FP32 inputs whose outputs are some of them."""
    values = {name: onnx.helper.make_tensor_value_info(name, 1, shape) for name, shape in inputs.items()}
    nodes = [onnx.helper.make_node("Identity", [given], [name]) for name, given in outputs.items()]
    made = [onnx.helper.make_tensor_value_info(name, 1, inputs[given]) for name, given in outputs.items()]
    graph = onnx.helper.make_graph(nodes, "small", list(values.values()), made)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, str(path))


@pytest.mark.parametrize(
    ("extents", "words"),
    [
        ([1, 8, 4], None),
        ([1, 2**20, 2**20], "its state takes more than 1024 MiB"),
        (["batch", "channels", 4], r"an input past_\* has no fixed shape"),
    ],
)
def test_a_codec_whose_state_is_none(extents: list[Any], words: str | None, tmp_path: Path) -> None:
    inputs = {"codes": [1, 4, 2], "position": [1], "past_tail": extents}
    small_graph(tmp_path / "model.onnx", inputs, {"waveform": "codes", "present_tail": "past_tail"})
    if words is None:
        assert runtime.Runtime(threads=1).graph(tmp_path).carries_state
    else:
        with pytest.raises(EngineError, match=words):
            runtime.Runtime(threads=1).graph(tmp_path)


@pytest.mark.parametrize("width", [48, 2**40, "wide"])
def test_a_thinker_whose_deepstack_is_none(width: Any, tmp_path: Path, omni: Any) -> None:
    """It is a multiple of hidden_size, and not of more than the layers."""
    spec = omni.model.thinker.spec.decoder
    inputs = {name: [-1 if n is None else n for n in shape] for name, shape in decoder_inputs(spec).items()}
    inputs = {name: [f"n{at}" if n == -1 else n for at, n in enumerate(shape)] for name, shape in inputs.items()}
    inputs |= {"rotary_positions": ["n0", "n1", 3], "deepstack_embeds": ["n0", "n1", spec.hidden_size]}
    outputs = {"hidden_states": "inputs_embeds"}
    small_graph(tmp_path / "model.onnx", inputs, outputs)
    DecoderSession(tmp_path / "model.onnx", spec, capacity=64, threads=1)
    small_graph(tmp_path / "model.onnx", inputs | {"deepstack_embeds": ["n0", "n1", width]}, outputs)
    with pytest.raises(EngineError, match="its last extent must be hidden_size"):
        DecoderSession(tmp_path / "model.onnx", spec, capacity=64, threads=1)


@pytest.mark.parametrize("old", [b"model.onnx.data", b"inputs_embeds", b"ScatterElements", b"hidden_states"])
def test_graphs_whose_names_are_no_text(old: bytes, onnx_folder: Path, tmp_path: Path) -> None:
    """Protobuf gives such names as bytes."""
    folder = shutil.copytree(onnx_folder, tmp_path / "onnx")
    content = (folder / "model.onnx").read_bytes()
    (folder / "model.onnx").write_bytes(content.replace(old, b"\xff" * len(old)))
    with pytest.raises(EngineError, match=r"is not UTF-8|only files of the graph's own folder|is no ONNX graph"):
        OnnxGraph(folder / "model.onnx")


def test_a_graph_that_is_a_link_out_of_its_folder(onnx_folder: Path, tmp_path: Path) -> None:
    """TensorRT would look for the weights beside the place that the link leads to."""
    (tmp_path / "model.onnx").symlink_to(onnx_folder / "model.onnx")
    with pytest.raises(EngineError, match="is a link to"):
        OnnxGraph(tmp_path / "model.onnx")


# ---- audio and images -----------------------------------------------------------------------------------------------

CHAT_WITH_MEDIA = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "audio", "audio": "CLIP"}, {"type": "image", "image": "PICTURE"},
                                 {"type": "image", "image": "PICTURE", "max_pixels": 4096}, {"text": "What is it?"}]},
]  # fmt: skip


@pytest.fixture(scope="module")
def media_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file of each kind that is read."""
    folder, rng = tmp_path_factory.mktemp("media"), np.random.default_rng(5)
    clip, picture = 0.1 * rng.standard_normal((1600, 2)), rng.integers(0, 256, (40, 56, 4), np.uint8)
    for name in ("clip.wav", "clip.flac", "clip.mp3"):
        soundfile.write(folder / name, clip, 16000)
    soundfile.write(folder / "float.wav", clip, 44100, subtype="FLOAT")
    Image.fromarray(picture).save(folder / "picture.png")
    Image.fromarray(picture[..., 0]).save(folder / "grey.png")
    Image.fromarray(picture[..., :3]).save(folder / "picture.jpg", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0")
    return folder


@pytest.mark.filterwarnings("ignore:Corrupt EXIF", "ignore:Image size")
@tried(300)
@given(data=st.data())
def test_media_files(
    data: st.DataObject, media_files: Path, omni: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Bytes are read by what they are, not by the name of the file."""
    good = data.draw(st.sampled_from(sorted(media_files.iterdir()))).read_bytes()
    content = data.draw(damaged(good) | st.binary(max_size=64).map(lambda more: good[:12] + more) | st.just(good))
    path = tmp_path_factory.getbasetemp() / "hostile.media"
    path.write_bytes(content)
    audio, vision = omni.model.encoders.audio(), omni.model.encoders.vision()
    with bounded(len(good) + len(content), factor=2000), refused(ConfigError):
        (mel,) = log_mel([read_clip(path, audio.front)], audio.front)
        assert mel.shape[0] == audio.front.feature_size
        assert np.isfinite(mel).all()
    with bounded(len(good) + len(content), factor=2000), refused(ConfigError):
        patches = read_image(path, vision.front, max_patches=vision.max_patches)
        assert len(patches.values) == patches.rows * patches.columns <= vision.max_patches
        assert np.isfinite(patches.values).all()


@tried(80)
@given(data=st.data())
def test_conversations_with_media(data: st.DataObject, media_files: Path, omni: Any) -> None:
    files = {"CLIP": str(media_files / "clip.wav"), "PICTURE": str(media_files / "picture.png")}
    messages = with_values(data.draw(changed(CHAT_WITH_MEDIA)), files)
    with refused(ConfigError):
        omni.model.prepare(make_chat(messages, {"seed": 1, "max_audio_length": 2, "max_generate_length": 2}))


def with_values(document: Any, values: dict[str, str]) -> Any:
    """Replace texts of a document by others."""
    if isinstance(document, dict):
        return {key: with_values(value, values) for key, value in document.items()}
    if isinstance(document, list):
        return [with_values(value, values) for value in document]
    return values.get(document, document) if isinstance(document, str) else document


ENCODER_SIZES = {
    "audio": (
        "hidden_size", "window_chunks", "chunk_frames", "chunk_rows", "builder_config.max_windows",
        *(f"preprocessor.{key}" for key in ("feature_size", "sampling_rate", "hop_length", "n_fft", "chunk_length")),
    ),
    "visual": (
        "hidden_size", "num_deepstack_features", "positions_per_side", "builder_config.max_patches",
        *(f"preprocessor.{key}" for key in ("min_pixels", "max_pixels", "patch_size", "merge_size",
                                            "temporal_patch_size")),
    ),
}  # fmt: skip
HARMLESS = ("max_windows", "chunk_length", "max_pixels", "min_pixels", "sampling_rate", "n_fft")
"""Of those, what bounds an input or a call, or what other values may be meant of, up to a limit."""


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in ENCODER_SIZES.items() for key in keys])
def test_sizes_of_an_encoder_that_nothing_confirms(name: str, key: str, omni: Any, tmp_path: Path) -> None:
    """They are compared with the graph, or with what comes out of it, before memory is taken for them."""
    folder = shutil.copytree(omni.engine / "multimodal", tmp_path / "multimodal")
    path = folder / name / "config.json"
    good = json.loads(path.read_text())
    messages = MediaCase("heard" if name == "audio" else "seen", omni.model, tmp_path).messages
    for value in (1, 3, 10**4, 10**6, 2**31 - 1):
        config = json.loads(json.dumps(good))
        section = config[key.split(".")[0]] if "." in key else config
        if section[key.split(".")[-1]] == value:
            continue
        section[key.split(".")[-1]] = value
        path.write_text(json.dumps(config))
        encoders = replace(omni.model.encoders, folder=folder)
        model = Qwen3Omni(omni.model.thinker, omni.model.tokenizer, None, encoders)
        spoke = False
        with bounded(2**20, factor=60), refused():
            model.respond(messages, seed=1, max_generate_length=1)
            spoke = True
        assert not spoke or key.endswith(HARMLESS) or value < 10**4, value


@pytest.mark.parametrize("kind", ["audio", "image"])
def test_media_that_are_no_plain_files(kind: str, omni: Any, tmp_path: Path) -> None:
    """A pipe would keep the reader waiting, a device would never end."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero"), Path("/proc/self/mem"), tmp_path / ("x" * 500)):
        with pytest.raises(ConfigError, match=r"messages\[0\]\.content\[0\]: .*(no such file|cannot be read)"):
            omni.model.prepare(make_chat([{"role": "user", "content": [{kind: str(path)}]}], {}))


# ---- memory that Python does not count ------------------------------------------------------------------------------

CHILD = """
import json, resource, sys
from pathlib import Path
from trt_cpspec.errors import CpSpecError
from trt_cpspec.builder.rebuild import RebuildOptions, build_component
from trt_cpspec.pipeline import Qwen3TTS
engine, component, changes = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
used = 4096 * int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (used + 2**30,) * 2)
path = engine / component / "config.json"
good = path.read_text()
for change in changes:
    config = json.loads(good)
    *parents, key = change[0].split(".")
    section = config
    for parent in parents:
        section = section[parent]
    section[key] = change[1]
    path.write_text(json.dumps(config))
    try:
        if component != "code2wav":
            build_component(engine / component, engine / component, None, RebuildOptions(dry_run=True))
    except CpSpecError as error:
        print("build:", error)
    try:
        Qwen3TTS.from_engine_dir(engine, threads=1).synthesize("Hi.", seed=1, max_audio_length=2)
        print("spoke:", change)
    except CpSpecError as error:
        print("refused:", error)
"""
HUGE = 2**31 - 1
ABSURD = {
    "code_predictor": [
        *((key, value) for key in ("vocab_size", "hidden_size", "num_key_value_heads", "head_dim", "num_hidden_layers",
                                   "num_code_groups", "talker_hidden_size") for value in (1000, 10**6, HUGE, 2**62)),
        ("builder_config.max_batch_size", HUGE), ("builder_config.max_kv_cache_capacity", HUGE),
    ],
    "talker": [
        *((key, value) for key in ("vocab_size", "hidden_size", "num_key_value_heads", "head_dim", "num_hidden_layers",
                                   "text_hidden_size", "text_vocab_size") for value in (10**6, HUGE, 2**62)),
        ("builder_config.max_kv_cache_capacity", HUGE), ("builder_config.max_input_len", HUGE),
    ],
    "code2wav": [(f"code2wav_config.{key}", value) for key in ("codebook_size", "num_quantizers")
                 for value in (10**6, HUGE, 2**62)] + [("sample_rate", HUGE), ("samples_per_frame", HUGE)],
}  # fmt: skip


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the address space is measured by /proc")
@pytest.mark.parametrize("component", list(ABSURD))
def test_sizes_that_nothing_confirms_take_no_memory(component: str, variants: dict[str, Any], tmp_path: Path) -> None:
    """In a child that may take 1 GiB: nothing is allocated on the word of config.json alone."""
    engine = shutil.copytree(variants["tts_a"].engine, tmp_path / "engine")
    command = [sys.executable, "-c", CHILD, str(engine), component, json.dumps(ABSURD[component])]
    child = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert child.returncode == 0, child.stderr
    lines = [line for line in child.stdout.splitlines() if line.startswith(("refused", "spoke"))]
    assert len(lines) == len(ABSURD[component])
    spoke = [line for line in lines if line.startswith("spoke")]
    # Limits bound what a request may ask for, and take nothing by themselves; a larger codebook is one of the codec's.
    allowed = ("builder_config", "codebook_size")
    assert all(any(word in line for word in allowed) for line in spoke), spoke
    assert "Unable to allocate" not in child.stdout


def test_the_child_would_fail_if_it_took_too_much() -> None:
    code = "import resource, numpy; resource.setrlimit(resource.RLIMIT_AS, (2**30,) * 2); numpy.ones(2**31)"
    assert resource.RLIMIT_AS >= 0
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode != 0


def test_an_answer_s_names_write_nothing_outside(omni: Any, tmp_path: Path) -> None:
    document = {"requests": [{"messages": [{"role": "user", "content": "../../x"}], "speaker": "../../x"}]}
    (tmp_path / "input.json").write_text(json.dumps(document))
    args = ["--engineDir", omni.engine / "thinker", "--enableAudioOutput", "--talkerEngineDir", omni.engine / "talker"]
    args += ["--inputFile", tmp_path / "input.json", "--outputFile", tmp_path / "o.json"]
    args += ["--outputAudioDir", tmp_path / "audio"]
    result = CliRunner().invoke(llm, list(map(str, args)))
    assert (result.exit_code, "unknown speaker '../../x'" in result.output) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["input.json"]
