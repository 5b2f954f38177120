"""Qwen3-Omni: what is built of a checkpoint, against the reference's arrays, and what is refused."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray
from onnx import TensorProto
from trt_cpspec.builder import engine as engine_module
from trt_cpspec.builder.build import ONNX_RUNTIME, BuildOptions
from trt_cpspec.builder.cli import build as cpspec_build
from trt_cpspec.builder.engine import Backend, EngineOptions, OnnxGraph, layer_types
from trt_cpspec.builder.graph import OPSET
from trt_cpspec.builder.omni import CODEC_FOLDER, ENCODER_FOLDERS, OMNI_COMPONENTS, OmniBuild
from trt_cpspec.builder.omni_checkpoint import read_omni_checkpoint
from trt_cpspec.builder.profile import Kind, Limits, profiles_for
from trt_cpspec.builder.rebuild import RebuildOptions, rebuild
from trt_cpspec.builder.sidecar import sha256_of
from trt_cpspec.builder.synthetic import CodecSize, DecoderSize, ExpertSize, OmniSpec, write_checkpoint

from trt_cpspec.errors import ConfigError
from trt_cpspec.omni import Qwen3Omni
from trt_cpspec.runtime import GRAPH_FILE
from trt_cpspec.session import GraphSession
from trt_cpspec.tensorfile import TensorFile

GOLDEN = Path(__file__).parent / "golden" / "omni_a"
CHECKPOINT = GOLDEN / "checkpoint"
SLOTS = 96
DECODERS = ("thinker", "talker")
PROMPTS = ("p0", "p1")
LOST = 555

F32 = NDArray[np.float32]


def build_omni(checkpoint: Path, engine: Path, backend: Backend = ONNX_RUNTIME, **options: Any) -> Path:
    with OmniBuild(checkpoint, engine, BuildOptions(**options), backend=backend) as build:
        for _, _, write in build.components:
            write(lambda: None)
        build.commit()
    return engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_omni(CHECKPOINT, tmp_path_factory.mktemp("omni") / "engine")


@pytest.fixture(scope="module")
def arrays() -> dict[str, NDArray[Any]]:
    return dict(np.load(GOLDEN / "golden.npz"))


class Model:
    """A decoder of an engine folder with its cache, and values inside it that a test asks for by name."""

    def __init__(self, folder: Path, work: Path, *inner: str) -> None:
        self.session = GraphSession(given_out(folder, work, inner) if inner else folder / GRAPH_FILE)
        graph = onnx.load(str(folder / GRAPH_FILE), load_external_data=False).graph
        shapes = {item.name: item.type.tensor_type.shape.dim for item in graph.input if item.name.startswith("past_")}
        self.cache = {n: np.zeros((1, d[1].dim_value, SLOTS, d[3].dim_value), np.float32) for n, d in shapes.items()}
        self.inputs = {item.name: item.type.tensor_type.shape.dim[-1].dim_value for item in graph.input}
        self.used = 0

    def __call__(self, embeds: F32) -> dict[str, NDArray[Any]]:
        """Run rows ``[T, H]`` behind those before and return every output, without its batch axis."""
        places = np.arange(self.used, self.used + len(embeds), dtype=np.int32)
        feeds = {"inputs_embeds": embeds[None], "positions": places[None], **self.cache}
        if "rotary_positions" in self.inputs:  # of text the three are equal
            feeds["rotary_positions"] = np.repeat(places[None, :, None], 3, axis=2)
        if "deepstack_embeds" in self.inputs:
            feeds["deepstack_embeds"] = np.zeros((1, len(embeds), self.inputs["deepstack_embeds"]), np.float32)
        found = self.session.run(feeds)
        self.used += len(embeds)
        self.cache = {name: found.pop(name.replace("past", "present")) for name in self.cache}
        return {name: value[0] if name.endswith("_states") else value for name, value in found.items()}


def given_out(folder: Path, work: Path, names: tuple[str, ...]) -> Path:
    """Copy a graph and make values inside it outputs: ``experts`` are int64, the others float32."""
    shutil.copytree(folder, work)
    model = onnx.load(str(work / GRAPH_FILE), load_external_data=False)
    for name in names:
        kind = TensorProto.INT64 if name.endswith(".experts") else TensorProto.FLOAT
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, kind, None))
    (work / GRAPH_FILE).write_bytes(model.SerializeToString())
    return work / GRAPH_FILE


def head(folder: Path, stem: str) -> F32:
    return TensorFile(folder / f"{stem}.safetensors").read(f"{stem}.weight")


# -- against the reference --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_thinker(engine: Path, arrays: dict[str, Any], tmp_path: Path, prompt: str) -> None:
    embeds, ids = arrays[f"{prompt}_thinker_embeds"], arrays[f"{prompt}_thinker_ids"]
    length = len(arrays[f"{prompt}_prompt_ids"])
    model = Model(engine / "thinker", tmp_path)
    passes = [model(embeds[:length]), *(model(row[None]) for row in embeds[length:])]
    accepted = np.concatenate([found["accept_hidden_states"] for found in passes])
    np.testing.assert_allclose(accepted, arrays[f"{prompt}_thinker_hidden"], rtol=0, atol=5e-5)
    logits = np.stack([head(engine / "thinker", "lm_head") @ found["hidden_states"][-1] for found in passes])
    np.testing.assert_allclose(logits[:3], arrays[f"{prompt}_thinker_logits"], rtol=0, atol=5e-5)
    assert logits.argmax(-1).tolist() == ids.tolist()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_thinkers_text_embedding(engine: Path, arrays: dict[str, Any], prompt: str) -> None:
    table = TensorFile(engine / "thinker" / "embedding.safetensors").rows("embedding")
    ids = np.concatenate([arrays[f"{prompt}_prompt_ids"], arrays[f"{prompt}_thinker_ids"][:-1]])
    np.testing.assert_array_equal(table[ids], arrays[f"{prompt}_thinker_embeds"])


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_talker(engine: Path, arrays: dict[str, Any], tmp_path: Path, prompt: str) -> None:
    model = Model(engine / "talker", tmp_path)
    passes = [model(arrays[f"{prompt}_talker_prefill_embeds"])]
    passes += [model(row[None]) for row in arrays[f"{prompt}_next_embeds"]]
    hidden = np.stack([found["hidden_states"][-1] for found in passes])
    np.testing.assert_allclose(hidden, arrays[f"{prompt}_talker_hidden"], rtol=0, atol=1e-5)
    logits = hidden @ head(engine / "talker", "codec_head").T
    np.testing.assert_allclose(logits, arrays[f"{prompt}_talker_logits"], rtol=0, atol=5e-5)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("component", DECODERS)
def test_the_routers(engine: Path, arrays: dict[str, Any], tmp_path: Path, component: str, prompt: str) -> None:
    """Layer 1, in the prefill and in the step behind it."""
    name = f"{component}.model.layers.1.mlp"
    model = Model(engine / component, tmp_path / "graph", f"{name}.router_logits", f"{name}.experts", f"{name}.scores")
    if component == "thinker":
        length = len(arrays[f"{prompt}_prompt_ids"])
        prefill, step = np.split(arrays[f"{prompt}_thinker_embeds"][: length + 1], [length])
    else:
        prefill, step = arrays[f"{prompt}_talker_prefill_embeds"], arrays[f"{prompt}_next_embeds"][:1]
    for call, rows in (("prefill", prefill), ("decode", step)):
        found, wanted = model(rows), f"{prompt}_{component}_router_{call}"
        assert found[f"{name}.experts"].tolist() == arrays[f"{wanted}_ids"].tolist()
        np.testing.assert_allclose(found[f"{name}.router_logits"], arrays[f"{wanted}_logits"], rtol=0, atol=5e-5)
        np.testing.assert_allclose(found[f"{name}.scores"], arrays[f"{wanted}_weights"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_code_predictor(engine: Path, arrays: dict[str, Any], tmp_path: Path, prompt: str) -> None:
    folder = engine / "code_predictor"
    heads, tables = (TensorFile(folder / f"{stem}.safetensors") for stem in ("lm_heads", "codec_embeddings"))
    for frame, inputs in enumerate(arrays[f"{prompt}_cp_inputs"]):
        model, codes = Model(folder, tmp_path), arrays[f"{prompt}_codes"][frame]
        for depth in range(15):
            rows = inputs if depth == 0 else tables.rows(f"embedding_{depth - 1}")[codes[depth : depth + 1]]
            hidden = model(rows)["hidden_states"][-1]
            np.testing.assert_allclose(hidden, arrays[f"{prompt}_cp_hidden"][frame, depth], rtol=0, atol=5e-5)
            logits = heads.read(f"lm_head_{depth}.weight") @ hidden
            np.testing.assert_allclose(logits, arrays[f"{prompt}_cp_logits"][frame, depth], rtol=0, atol=5e-5)
            assert logits.argmax() == codes[depth + 1]


def decoded(session: GraphSession, codes: NDArray[Any]) -> F32:
    wave = at_once(session, codes)["waveform"]
    assert wave.shape == (1, 1, 1920 * codes.shape[1])
    return np.clip(wave[0, 0, LOST:], -1, 1)


def at_once(session: GraphSession, codes: NDArray[Any]) -> dict[str, NDArray[Any]]:
    return session.begin().run({"codes": codes[None].astype(np.int32), "position": np.zeros(1, np.int32)})


def test_the_codec(engine: Path, arrays: dict[str, Any]) -> None:
    session = GraphSession(engine / CODEC_FOLDER / GRAPH_FILE)
    np.testing.assert_allclose(decoded(session, arrays["c2w_codes"]), arrays["c2w_wave"], rtol=0, atol=5e-5)
    for prompt in PROMPTS:
        wave = decoded(session, arrays[f"{prompt}_codes"].T)
        np.testing.assert_allclose(wave, arrays[f"{prompt}_waveform"], rtol=0, atol=5e-5)


def test_a_longer_decode_begins_with_the_shorter(engine: Path, arrays: dict[str, Any]) -> None:
    session, codes = GraphSession(engine / CODEC_FOLDER / GRAPH_FILE), arrays["c2w_codes"]
    whole = decoded(session, codes)
    for frames in (1, 2, 7):
        part = decoded(session, codes[:, :frames])
        np.testing.assert_allclose(part, whole[: len(part)], rtol=0, atol=1e-5)


def test_the_codecs_transformer_behind_its_window(engine: Path, arrays: dict[str, Any], tmp_path: Path) -> None:
    graph = onnx.load(str(engine / CODEC_FOLDER / GRAPH_FILE), load_external_data=False).graph
    mean = next(node.output[0] for node in graph.node if node.op_type == "ReduceMean")
    norm = next(node.output[0] for node in graph.node if "pre_transformer.norm.weight" in node.input)
    path = given_out(engine / CODEC_FOLDER, tmp_path / "graph", (mean, norm))
    found = at_once(GraphSession(path), arrays["c2w_long_codes"])
    np.testing.assert_allclose(found[mean][0], arrays["c2w_long_embeds"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(found[norm][0], arrays["c2w_long_hidden"], rtol=0, atol=5e-5)


# -- the folder -------------------------------------------------------------------------------------------------------

GRAPH = {"config.json", "model.onnx", "model.onnx.data"}


def test_the_files(engine: Path) -> None:
    tokenizer = {"vocab.json", "merges.txt", "tokenizer_config.json", "chat_template.jinja"}
    files = {
        "thinker": GRAPH | tokenizer | {"embedding.safetensors", "lm_head.safetensors", "heads.onnx"},
        "talker": GRAPH
        | {f"{stem}.safetensors" for stem in ("embedding", "codec_head", "text_projection", "hidden_projection")},
        "code_predictor": GRAPH
        | {"codec_embeddings.safetensors", "lm_heads.safetensors", "heads.onnx", "model.weights.json"},
        CODEC_FOLDER: GRAPH,
    }
    assert {name: {path.name for path in (engine / name).iterdir()} for name in OMNI_COMPONENTS} == files
    assert sorted(path.name for path in engine.iterdir()) == ["code_predictor", "multimodal", "talker", "thinker"]


def test_the_configs(engine: Path) -> None:
    thinker, talker, predictor, codec = (json.loads((engine / n / "config.json").read_text()) for n in OMNI_COMPONENTS)
    source = json.loads((CHECKPOINT / "config.json").read_text())
    assert [thinker["model"], talker["model"]] == ["qwen3_omni_moe_text", "qwen3_omni_moe_talker"]
    assert predictor["model"] == "qwen3_omni_moe_talker_code_predictor"
    assert thinker["eos_token_id"] == source["im_end_token_id"]
    assert thinker["audio_token_id"] == source["thinker_config"]["audio_token_id"]
    assert thinker["accept_hidden_layer"] == talker["accept_hidden_layer"] == 2
    assert thinker["rope_scaling"] == source["thinker_config"]["text_config"]["rope_scaling"]
    assert talker["assistant_role_id"] == source["assistant_token_id"]
    assert talker["speaker_id"] == {"chelsie": 2301, "ethan": 2302, "aiden": 2303}
    assert talker["thinker_hidden_size"] == 64
    assert talker["generation_config"] == json.loads((CHECKPOINT / "generation_config.json").read_text())
    assert codec["model_type"] == "qwen3_omni_code2wav"
    assert [codec["samples_per_frame"], codec["samples_trimmed"], codec["sample_rate"]] == [1920, LOST, 24000]
    template = json.loads((CHECKPOINT / "chat_template.json").read_text())["chat_template"]
    assert (engine / "thinker" / "chat_template.jinja").read_text() == template


def test_an_older_build_is_replaced_and_another_folder_is_not(engine: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(engine, tmp_path / "engine")
    (copy / CODEC_FOLDER / "config.json").write_text('{"model_type": "old"}')
    build_omni(CHECKPOINT, copy)
    assert json.loads((copy / CODEC_FOLDER / "config.json").read_text())["model_type"] == "qwen3_omni_code2wav"
    assert not (copy / ".partial").exists()
    (copy / "thinker" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="thinker exists and is no engine folder"):
        OmniBuild(CHECKPOINT, copy, BuildOptions())


def test_cpspec_build_tells_the_family(tmp_path: Path) -> None:
    target = tmp_path / "engine"
    options = ["--engineDir", str(target), "--backend", "onnxruntime", "--maxBatchSize", "2"]
    result = CliRunner().invoke(cpspec_build, ["--checkpointDir", str(CHECKPOINT), *options])
    assert result.exit_code == 0, result.output
    limits = [json.loads((target / n / "config.json").read_text())["builder_config"] for n in OMNI_COMPONENTS]
    assert [entry.get("max_batch_size") for entry in limits] == [2, 2, 2, None]
    checkpoint = copied(tmp_path)
    (checkpoint / "config.json").write_text('{"model_type": "qwen2"}')
    result = CliRunner().invoke(cpspec_build, ["--checkpointDir", str(checkpoint), *options])
    assert result.exit_code == 2
    assert "'qwen2'; what can be built is one of qwen3_tts, qwen3_omni, qwen3_omni_moe" in " ".join(
        result.output.split()
    )


# -- the graphs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("component", [*OMNI_COMPONENTS, *ENCODER_FOLDERS.values()])
def test_only_operators_of_opset_17_and_no_wide_integers_at_the_rim(engine: Path, component: str) -> None:
    path = engine / component / GRAPH_FILE
    onnx.checker.check_model(str(path), full_check=True)
    model = onnx.load(str(path), load_external_data=False)
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", OPSET)]
    for node in model.graph.node:
        assert node.op_type not in ("NonZero", "Clip", "If", "Loop", "Scan")
        assert not onnx.defs.get_schema(node.op_type, OPSET, "").deprecated
    kinds = {item.type.tensor_type.elem_type for item in (*model.graph.input, *model.graph.output)}
    assert kinds <= {TensorProto.FLOAT, TensorProto.INT32}
    mixtures = {"thinker": 3, "talker": 2}.get(component, 0)
    assert sum(node.op_type == "TopK" for node in model.graph.node) == mixtures


def test_a_narrow_graph_keeps_its_islands(tmp_path: Path) -> None:
    """Router, scores, ``silu(gate) * up``, the down product and every sum are FP32; gate and up products are FP16."""
    folder = build_omni(CHECKPOINT, tmp_path / "engine", Backend(name="tensorrt", binding=halves()), precision="fp16")
    graph = OnnxGraph(folder / "talker" / GRAPH_FILE)
    assert graph.precision == "fp16"
    types = graph.float_types()
    model = onnx.load(str(folder / "talker" / GRAPH_FILE), load_external_data=False)
    for node in model.graph.node:
        kinds = {types[name] for name in (*node.input, *node.output) if name in types}
        if node.op_type in ("Add", "Mul", "Sigmoid", "Softmax", "TopK", "ReduceSum", "Where", "Div"):
            assert kinds <= {"fp32"}
        if node.op_type == "MatMul":
            assert len(kinds) == 1
    stacks = {i.name: i.data_type for i in model.graph.initializer if ".experts." in i.name}
    assert set(stacks.values()) == {TensorProto.FLOAT16}
    routers = [
        i.data_type for i in model.graph.initializer if i.name.endswith((".mlp.gate.weight", "expert_gate.weight"))
    ]
    assert routers == [TensorProto.FLOAT] * 4
    products = [types[node.output[0]] for node in model.graph.node if node.op_type == "MatMul"]
    attention, expert = ["fp16", "fp32", "fp32", "fp16"], ["fp16", "fp16", "fp32"]
    router, opening, shared = ["fp32"], ["fp32"], ["fp16", "fp32"]
    assert products == (attention + router + 2 * expert + opening + shared) * 2


def halves() -> Any:
    """Return a binding that knows FP16 and BF16, for graphs that are not built."""

    class Binding:
        __name__ = "tensorrt"
        __version__ = "0"

        class DataType:
            __members__ = ("BF16",)

        class NetworkDefinitionCreationFlag:
            __members__ = ("STRONGLY_TYPED",)

        class BuilderFlag:
            __members__ = ("FP16",)

    return Binding()


@pytest.mark.parametrize("component", DECODERS)
def test_a_decoder_has_the_profiles_of_any_decoder(engine: Path, component: str) -> None:
    graph = OnnxGraph(engine / component / GRAPH_FILE)
    limits = Limits(max_input_len=64, max_kv_cache_capacity=128, max_batch_size=2, max_verify_size=8)
    profiles = profiles_for(Kind.DECODER, graph.inputs, limits).profiles
    width = 64 if component == "thinker" else 48
    assert [str(profiles[name]["inputs_embeds"]) for name in ("context", "generation")] == [
        f"1x1x{width} | 1x32x{width} | 2x64x{width}",
        f"1x1x{width} | 1x1x{width} | 2x1x{width}",
    ]
    assert ("accept_hidden_states" in graph.outputs) == (component == "thinker")


def test_bf16_answers_as_the_fp32_build_of_its_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint", OmniSpec.tiny(dtype="BF16", agreement=0.9))
    replies = []
    for precision in ("fp32", "bf16"):
        model = Qwen3Omni.from_engine_dir(
            build_omni(tmp_path / "checkpoint", tmp_path / precision, precision=precision), threads=1
        )
        replies.append(model.respond("Hi", seed=1, max_generate_length=4, max_audio_length=4, verify_size=3))
    assert replies[0].token_ids == replies[1].token_ids
    assert len(replies[0].speech.codes) > 0
    np.testing.assert_array_equal(replies[1].speech.codes, replies[0].speech.codes)
    np.testing.assert_array_equal(replies[1].speech.waveform, replies[0].speech.waveform)


# -- TensorRT-RTX -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_plans_of_every_component(rtx_binding: Any, tmp_path: Path, precision: str) -> None:
    backend = Backend(name="tensorrt_rtx", binding=rtx_binding)
    options = EngineOptions(compute_capabilities=("8.9",), optimization_level=0)
    choices = BuildOptions(precision=precision)
    with OmniBuild(CHECKPOINT, tmp_path / "engine", choices, backend=backend, engine_options=options) as build:
        for name, _, write in build.components:
            write(lambda: None)
            outcome = build.build_plan(name, lambda phase, done: None)
            assert outcome.action == "built"
        build.commit()
    kinds = []
    for name in OMNI_COMPONENTS:
        config = json.loads((tmp_path / "engine" / name / "config.json").read_text())
        record = config["builder_config"]["engine"]
        kinds.append(record["verify_size"])
        assert record["precision"] == ("fp32" if name == CODEC_FOLDER else precision)
        assert (tmp_path / "engine" / name / record["plan"]["file"]).stat().st_size == record["plan"]["bytes"]
    assert kinds == [None, None, 8, None]
    profiles = {}
    for name in ENCODER_FOLDERS.values():
        record = json.loads((tmp_path / "engine" / name / "config.json").read_text())["builder_config"]["engine"]
        assert record["precision"] == precision
        assert (tmp_path / "engine" / name / record["plan"]["file"]).stat().st_size == record["plan"]["bytes"]
        (profile,) = record["profiles"]
        profiles[record["plan"]["file"]] = profile["inputs"]
    assert profiles == {
        "audio_encoder.engine": {
            "mel": [[1, 8, 128, 100], [1, 8, 128, 100], [8, 8, 128, 100]],
            "extents": [[2], [2], [2]],
            "lengths": [[1], [1], [8]],
        },
        "visual.engine": {
            "patches": [[4, 1536], [1024, 1536], [4096, 1536]],
            "places": [[4, 2], [1024, 2], [4096, 2]],
            "corners": [[4, 4], [1024, 4], [4096, 4]],
            "shares": [[4, 4], [1024, 4], [4096, 4]],
        },
    }


def test_exported_graphs_go_where_their_like_lies(engine: Path, tmp_path: Path) -> None:
    """A dry run over a tree of graphs names the folders of the layout."""
    outcomes = rebuild(engine, tmp_path / "plans", None, RebuildOptions(dry_run=True))
    assert {str(outcome.folder.relative_to(tmp_path / "plans")): outcome.kind for outcome in outcomes} == {
        "thinker": "decoder",
        "talker": "decoder",
        "code_predictor": "code predictor",
        CODEC_FOLDER: "codec decoder",
        "multimodal/audio": "audio encoder",
        "multimodal/visual": "vision encoder",
    }


def test_many_layers_of_mixtures(rtx_binding: Any, tmp_path: Path) -> None:
    """Shapes must not hang on the layer before: TensorRT-RTX follows such a chain six layers far."""
    size = DecoderSize(hidden=32, intermediate=64, layers=8, heads=4, kv_heads=2, head_dim=16)
    write_checkpoint(tmp_path / "checkpoint", OmniSpec.tiny(thinker=size))
    folder = build_omni(tmp_path / "checkpoint", tmp_path / "engine")
    graph = OnnxGraph(folder / "thinker" / GRAPH_FILE)
    profiles = profiles_for(Kind.DECODER, graph.inputs, Limits()).profiles
    options = EngineOptions(compute_capabilities=("8.9",), optimization_level=0)
    assert engine_module.build_plan(rtx_binding, graph, profiles, options).profiles == profiles


def test_a_plan_holds_the_experts_once(rtx_binding: Any, tmp_path: Path) -> None:
    """Rows that gather and rows that pass all read one stack; TensorRT lays constants of a product out anew."""
    size = DecoderSize(hidden=256, intermediate=64, layers=2, heads=4, kv_heads=2, head_dim=16)
    spec = OmniSpec.tiny(thinker=size, thinker_experts=ExpertSize(experts=64, chosen=2, intermediate=256))
    write_checkpoint(tmp_path / "checkpoint", spec)
    backend, options = Backend(name="tensorrt_rtx", binding=rtx_binding), EngineOptions(compute_capabilities=("8.9",))
    choices = BuildOptions(precision="fp16")
    with OmniBuild(tmp_path / "checkpoint", tmp_path / "e", choices, backend=backend, engine_options=options) as build:
        build.build_thinker()
        build.build_plan("thinker", lambda phase, done: None)
        build.commit()
    weights = (tmp_path / "e" / "thinker" / "model.onnx.data").stat().st_size
    assert weights > 50_000_000
    assert (tmp_path / "e" / "thinker" / "llm.engine").stat().st_size < weights + 20_000_000


@pytest.mark.parametrize("component", [*DECODERS, *ENCODER_FOLDERS.values()])
def test_types_by_name_are_the_types_of_the_parsed_network(rtx_binding: Any, tmp_path: Path, component: str) -> None:
    """What TensorRT 8.6 is told of each layer, of mixtures too, is what a typed network says of it."""
    backend = Backend(name="tensorrt_rtx", binding=rtx_binding)
    folder = build_omni(CHECKPOINT, tmp_path / "engine", backend, precision="fp16")
    graph, log = OnnxGraph(folder / component / GRAPH_FILE), engine_module._log_of(rtx_binding)
    network, _parser = engine_module._parse(rtx_binding, rtx_binding.Builder(log), log, graph)
    names = {"FLOAT": "fp32", "HALF": "fp16"}
    for layer, outputs in layer_types(network, graph.float_types()):
        actual = [names.get(layer.get_output(i).dtype.name) for i in range(layer.num_outputs)]
        assert outputs == actual, layer.name


# -- generated checkpoints --------------------------------------------------------------------------------------------


def test_a_generated_checkpoint_has_the_names_and_shapes_of_a_released_one(tmp_path: Path) -> None:
    """Sizes as in the golden checkpoint; the encoders of sound and pictures are not generated."""

    def size(hidden: int, intermediate: int, layers: int) -> DecoderSize:
        return DecoderSize(hidden=hidden, intermediate=intermediate, layers=layers, heads=4, kv_heads=2, head_dim=16)

    golden = TensorFile(CHECKPOINT / "model.safetensors")
    spec = OmniSpec.tiny(
        thinker=size(64, 32, 3),
        thinker_experts=ExpertSize(experts=8, chosen=2, intermediate=32),
        talker=size(48, 64, 2),
        talker_experts=ExpertSize(experts=8, chosen=2, intermediate=16, shared=32),
        code_predictor=size(48, 96, 2),
        accept_hidden_layer=2,
        codec=CodecSize(decoder_dim=32, latent_dim=8, hidden=8, intermediate=24, layers=2, heads=2, head_dim=4),
        dtype="BF16",
    )
    write_checkpoint(tmp_path / "checkpoint", spec)
    made = TensorFile(tmp_path / "checkpoint" / "model.safetensors")
    encoders = ("thinker.audio_tower.", "thinker.visual.")
    wanted = {name: golden.info(name) for name in golden.names() if not name.startswith(encoders)}
    assert {n: (made.info(n).shape, made.info(n).dtype) for n in made.names()} == {
        name: (info.shape, info.dtype) for name, info in wanted.items()
    }
    ours, theirs = read_omni_checkpoint(tmp_path / "checkpoint"), read_omni_checkpoint(CHECKPOINT)
    for name in ("thinker", "thinker_moe", "talker", "talker_moe", "code_predictor", "speakers", "accept_hidden_layer"):
        assert getattr(ours, name) == getattr(theirs, name)


def test_shards_build_the_same_engine(tmp_path: Path) -> None:
    made = []
    for name, shard_bytes in (("whole", 10**9), ("shards", 10**6)):
        write_checkpoint(tmp_path / name, OmniSpec.tiny(shard_bytes=shard_bytes, dtype="BF16"))
        engine = build_omni(tmp_path / name, tmp_path / f"{name}_engine")
        made.append({path.relative_to(engine): sha256_of(path) for path in engine.rglob("*") if path.is_file()})
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 3
    assert made[0] == made[1]


def test_the_sizes_of_the_release() -> None:
    """Nearly all of the 30B of the Thinker and the 3B of the Talker are experts."""
    spec = OmniSpec.released_30b_a3b()
    counts = [
        size.layers * experts.experts * 3 * size.hidden * experts.intermediate
        for size, experts in ((spec.thinker, spec.thinker_experts), (spec.talker, spec.talker_experts))
        if experts is not None
    ]
    assert [round(count / 1e9, 1) for count in counts] == [29.0, 3.0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"thinker_experts": None}, "thinker_experts and talker_experts: give both, or none"),
        ({"accept_hidden_layer": 2}, "accept_hidden_layer 2 must be below the Thinker's 2 layers"),
        ({"codec": CodecSize()}, "latent_dim 32 must be hidden 16"),
        ({"text_vocab": 300}, "text_vocab is 300; the tokenizer needs at least"),
        ({"tts_model_type": "base"}, "'tts_model_type' is no field of OmniSpec"),
    ],
)
def test_sizes_that_cannot_be_generated(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        OmniSpec.tiny(**changes)


@pytest.mark.parametrize(("experts", "chosen", "intermediate"), [(2, 3, 8), (2, 0, 8), (2, 1, 0)])
def test_no_mixture(experts: int, chosen: int, intermediate: int) -> None:
    with pytest.raises(ConfigError, match="is no mixture"):
        ExpertSize(experts=experts, chosen=chosen, intermediate=intermediate)


def test_a_dense_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint", OmniSpec.tiny(thinker_experts=None, talker_experts=None))
    folder = build_omni(tmp_path / "checkpoint", tmp_path / "engine")
    config = json.loads((folder / "thinker" / "config.json").read_text())
    assert config["model"] == "qwen3_omni_text"
    found = Model(folder / "thinker", tmp_path)(np.ones((5, 32), np.float32))
    assert found["accept_hidden_states"].shape == found["hidden_states"].shape == (5, 32)
    nodes = onnx.load(str(folder / "talker" / GRAPH_FILE), load_external_data=False).graph.node
    assert not {node.op_type for node in nodes} & {"TopK", "ScatterND"}


def test_experts_are_never_stacked_in_memory(tmp_path: Path) -> None:
    size = DecoderSize(hidden=256, intermediate=64, layers=2, heads=4, kv_heads=2, head_dim=16)
    experts = ExpertSize(experts=64, chosen=2, intermediate=256)
    write_checkpoint(tmp_path / "checkpoint", OmniSpec.tiny(thinker=size, thinker_experts=experts))
    with OmniBuild(tmp_path / "checkpoint", tmp_path / "engine", BuildOptions()) as build:
        tracemalloc.start()
        build.build_thinker()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    stack = 64 * 256 * 256 * 4
    assert peak < stack / 2


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("model_type", "qwen3_vl", "model_type is 'qwen3_vl', one of qwen3_omni, qwen3_omni_moe is needed"),
        ("enable_audio_output", False, "enable_audio_output is False, only True"),
        ("im_end_token_id", 512, "im_end_token_id is 512, the vocabulary has 512 ids"),
        ("thinker_config.image_token_id", -1, "image_token_id is -1, it must be at least 0"),
        ("thinker_config.text_config.num_experts", None, "num_experts must be an integer"),
        ("thinker_config.text_config.tie_word_embeddings", True, "tie_word_embeddings is True, only False"),
        ("thinker_config.text_config.rope_scaling.mrope_section", [4, 4, 4], "does not sum to half of head_dim 16"),
        ("talker_config.accept_hidden_layer", 3, "accept_hidden_layer is 3, it must be below"),
        ("talker_config.accept_hidden_layer", 0, "accept_hidden_layer is 0, it must be at least 1"),
        ("talker_config.thinker_hidden_size", 32, "thinker_hidden_size is 32, only 64"),
        ("talker_config.num_code_groups", 15, "num_code_groups is 16, talker_config.num_code_groups is 15"),
        ("talker_config.text_config.decoder_sparse_step", 2, "decoder_sparse_step is 2"),
        ("talker_config.speaker_id", {"nobody": 3072}, "nobody is 3072, the vocabulary has 3072 ids"),
        ("code2wav_config.num_quantizers", 8, "num_quantizers is 8, talker_config.num_code_groups is 16"),
        ("code2wav_config.codebook_size", 1024, "the codec's codebook_size is 1024"),
        ("code2wav_config.hidden_act", "gelu", "hidden_act is 'gelu', only 'silu'"),
    ],
)
def test_a_config_that_cannot_be_built(tmp_path: Path, path: str, value: Any, words: str) -> None:
    checkpoint = copied(tmp_path)
    config = json.loads((checkpoint / "config.json").read_text())
    *parents, key = path.split(".")
    section = config
    for parent in parents:
        section = section[parent]
    section[key] = value
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=words):
        OmniBuild(checkpoint, tmp_path / "engine", BuildOptions())
    assert not (tmp_path / "engine").exists()


def copied(tmp_path: Path) -> Path:
    return shutil.copytree(CHECKPOINT, tmp_path / "checkpoint", copy_function=shutil.copyfile)


def no_template(folder: Path) -> None:
    (folder / "chat_template.json").unlink()
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "chat_template"}))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (no_template, "has no chat template"),
        (lambda folder: (folder / "merges.txt").unlink(), "has no tokenizer"),
        (lambda folder: (folder / "model.safetensors").unlink(), "holds neither model.safetensors nor"),
    ],
)
def test_a_file_that_is_missing(tmp_path: Path, edit: Callable[[Path], None], words: str) -> None:
    checkpoint = copied(tmp_path)
    edit(checkpoint)
    with pytest.raises(ConfigError, match=words):
        build_omni(checkpoint, tmp_path / "engine")
    assert not (tmp_path / "engine").exists()


def test_the_context_of_both_decoders_limits_the_cache(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exceeds the Talker's max_position_embeddings 65536"):
        OmniBuild(CHECKPOINT, tmp_path / "engine", BuildOptions(max_kv_cache_capacity=65537))


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    write_checkpoint(checkpoint, OmniSpec.tiny())
    config = json.loads((checkpoint / "config.json").read_text())
    config["thinker_config"]["text_config"]["num_experts"] = 9
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"tensor thinker\.model\.layers\.0\.mlp\.gate\.weight has shape \[8, 32\]"):
        build_omni(checkpoint, tmp_path / "engine")
