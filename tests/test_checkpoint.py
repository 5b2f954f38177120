"""Checkpoints, builds and tensor files: every key is read, checked and named; a failed build leaves nothing behind."""

from __future__ import annotations

import copy
import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from trt_cpspec.builder.checkpoint import Weights, read_checkpoint
from trt_cpspec.builder.tts import COMPONENTS, BuildOptions, TtsBuild

from trt_cpspec import tensorfile
from trt_cpspec.config import CodePredictorSpec, Section, TalkerSpec
from trt_cpspec.errors import ConfigError, EngineError
from trt_cpspec.pipeline import Qwen3TTS
from trt_cpspec.tensorfile import StreamedTensor, TensorFile, to_bfloat16_bits, write_tensors

GOLDEN = Path(__file__).parent / "golden"
CHECKPOINT = GOLDEN / "tts_a" / "checkpoint"
CONFIG = json.loads((CHECKPOINT / "config.json").read_text(encoding="utf-8"))
TALKER, PREDICTOR = "talker_config", "code_predictor_config"
Edit = Callable[[dict[str, Any]], None]
Key = tuple[str, ...]


def keys_read(read: Callable[[], object]) -> list[Key]:
    """Return the path of every key that ``read`` asks a Section for, in order. Names of a map's entries are none."""
    found: dict[Key, None] = {}
    original = Section._get

    def record(section: Section, key: str) -> Any:
        parents = section.where.split(": ")[1:]
        if not {"spk_id", "speaker_id", "codec_language_id", "generation_config"} & set(parents):
            found[(*parents, key)] = None
        return original(section, key)

    with mock.patch.object(Section, "_get", record):
        read()
    return list(found)


ROPE_TYPES = {(TALKER, "rope_scaling", name) for name in ("rope_type", "type")}
"""Either of them will do; they have tests of their own."""

CHECKPOINT_KEYS = [key for key in keys_read(lambda: read_checkpoint(CHECKPOINT)) if key not in ROPE_TYPES]


def holder(config: dict[str, Any], key: Key) -> dict[str, Any]:
    for name in key[:-1]:
        config = config[name]
    return config


def remove(key: Key) -> Edit:
    return lambda config: holder(config, key).__delitem__(key[-1])


def put(value: Any, *key: str) -> Edit:
    return lambda config: holder(config, key).__setitem__(key[-1], value)


@pytest.fixture
def edited_config(tmp_path: Path) -> Callable[[Edit], Path]:
    """``edited_config(edit)`` writes a folder with nothing but a config, and calls ``edit`` on it before."""

    def write(edit: Edit) -> Path:
        config = copy.deepcopy(CONFIG)
        edit(config)
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return tmp_path

    return write


# -- the config of a checkpoint ---------------------------------------------------------------------------------------


def test_the_reader_asks_for_what_it_must() -> None:
    decoder = {
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings", "rope_theta", "rms_norm_eps", "num_code_groups",
        "rope_scaling", "hidden_act", "attention_bias", "use_sliding_window",
    }  # fmt: skip
    keys = set(CHECKPOINT_KEYS)
    assert keys >= {(TALKER, name) for name in decoder}
    assert keys >= {(TALKER, PREDICTOR, name) for name in decoder}
    assert keys >= {("tts_model_type",), ("tts_model_size",), ("tokenizer_type",), ("tts_pad_token_id",)}
    assert keys >= {(TALKER, name) for name in ("spk_id", "spk_is_dialect", "codec_language_id")}


@pytest.mark.parametrize("key", CHECKPOINT_KEYS, ids=".".join)
def test_a_missing_key_is_named(edited_config: Callable[[Edit], Path], key: Key) -> None:
    with pytest.raises(ConfigError, match=rf"config.json: {': '.join([*key[:-1], ''])}the key {key[-1]} is missing"):
        read_checkpoint(edited_config(remove(key)))


def wrong_values(value: Any) -> list[Any]:
    """Return values of other types, and of none."""
    wrong: list[Any] = [str(value), [value], {"value": value}, None]
    if isinstance(value, bool):
        wrong += [int(value)]
    elif isinstance(value, int):
        wrong += [True, float("nan"), -1]
    elif isinstance(value, float):
        wrong += [True, float("inf"), -value]
    elif isinstance(value, str):
        wrong = [3, True, [value], None]
    elif isinstance(value, dict):
        wrong = [[value], "text", None]
    elif isinstance(value, list):
        wrong = [3, {"0": value}, [f"{item}?" for item in value], [True], None]
    else:
        wrong = [{"rope_type": "yarn"}, False]
    return wrong


@pytest.mark.parametrize("key", CHECKPOINT_KEYS, ids=".".join)
def test_a_wrong_type_is_named(edited_config: Callable[[Edit], Path], key: Key) -> None:
    for value in wrong_values(holder(CONFIG, key)[key[-1]]):
        with pytest.raises(ConfigError, match=key[-1]):
            read_checkpoint(edited_config(put(value, *key)))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (remove(("model_type",)), "model_type is None, only 'qwen3_tts'"),
        (put("qwen3", "model_type"), "model_type is 'qwen3'"),
        (put("base", "tts_model_type"), r"tts_model_type is 'base' \(voice clone\)"),
        (put("custom", "tts_model_type"), "unknown tts_model_type 'custom'; did you mean 'custom_voice'"),
        (put("qwen3_tts_tokenizer_25hz", "tokenizer_type"), "tokenizer_type is 'qwen3_tts_tokenizer_25hz'"),
        (put(15, TALKER, PREDICTOR, "num_code_groups"), "num_code_groups is 15, talker_config.num_code_groups is 16"),
        (put(1, TALKER, "num_code_groups"), "num_code_groups is 1, it must be at least 2"),
        (put([4, 2, 1], TALKER, "rope_scaling", "mrope_section"), r"mrope_section \[4, 2, 1\] does not sum to half"),
        (put({"mrope_section": [4, 2, 2]}, TALKER, "rope_scaling"), "the key rope_type is missing"),
        (put("yarn", TALKER, "rope_scaling", "rope_type"), "rope_type is 'yarn'"),
        (put("linear", TALKER, "rope_scaling", "type"), "type is 'linear'"),
        (put(3, TALKER, "num_key_value_heads"), "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        (put(3, TALKER, PREDICTOR, "num_key_value_heads"), f"{PREDICTOR}: num_attention_heads 4 is no multiple"),
        (put(15, TALKER, PREDICTOR, "head_dim"), "head_dim is 15, rotary embedding needs an even one"),
        (put(0, TALKER, "rope_theta"), "rope_theta 0.0 and rms_norm_eps 1e-06 must be positive"),
        (put(0, TALKER, "hidden_size"), "hidden_size is 0, it must be at least 1"),
        (put(["full_attention"], TALKER, PREDICTOR, "layer_types"), "layer_types must be 'full_attention' for each"),
        (
            put(["full_attention", "sliding_attention"], TALKER, PREDICTOR, "layer_types"),
            "layer_types must be 'full_attention' for each of the 2",
        ),
        (put("gelu", TALKER, "hidden_act"), "hidden_act is 'gelu', only 'silu'"),
        (put(True, TALKER, "attention_bias"), "attention_bias is True"),
        (put(True, TALKER, PREDICTOR, "use_sliding_window"), "use_sliding_window is True"),
        (put(3072, TALKER, "codec_bos_id"), "codec_bos_id is 3072, the vocabulary has 3072 ids"),
        (put(464, "tts_pad_token_id"), "tts_pad_token_id is 464, the vocabulary has 464 ids"),
        (put(3072, TALKER, "spk_id", "ryan"), "spk_id: ryan is 3072, the vocabulary has 3072"),
        (put("x", TALKER, "codec_language_id", "english"), "codec_language_id: english must be an integer"),
        (remove((TALKER, "spk_is_dialect", "ryan")), "spk_is_dialect: the speaker 'ryan' of spk_id is missing"),
        (put("klingon", TALKER, "spk_is_dialect", "ryan"), "ryan is 'klingon', no key of codec_language_id"),
        (put(["english"], TALKER, "spk_is_dialect", "ryan"), "ryan is .'english'., no key of codec_language_id"),
        (put(True, TALKER, "spk_is_dialect", "ryan"), "ryan is True, no key of codec_language_id"),
    ],
)
def test_a_contradiction_is_named(edited_config: Callable[[Edit], Path], edit: Edit, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_checkpoint(edited_config(edit))


def test_names_are_lower_case(edited_config: Callable[[Edit], Path]) -> None:
    def edit(config: dict[str, Any]) -> None:
        talker = config[TALKER]
        talker["spk_id"]["Ryan"] = talker["spk_id"].pop("ryan")
        talker["spk_is_dialect"]["RYAN"] = talker["spk_is_dialect"].pop("ryan")

    checkpoint = read_checkpoint(edited_config(edit))
    assert checkpoint.speakers["ryan"] == 3061
    assert checkpoint.dialects["ryan"] is False


def test_a_folder_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the checkpoint folder .*nowhere does not exist"):
        read_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"config.json (does not exist|cannot be read)"):
        read_checkpoint(tmp_path)
    for text in ("{", "[]", "[" * 10**5):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=r"config.json (cannot be read as JSON|must be a JSON object)"):
            read_checkpoint(tmp_path)


def test_a_clone_checkpoint_is_refused_by_name(synthetic: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tts_model_type is 'base' \(voice clone\); it needs the clone encoders"):
        TtsBuild(synthetic(tts_model_type="base"), tmp_path / "engine", BuildOptions())
    assert not (tmp_path / "engine").exists()


# -- what a build was asked for ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "int8"}, "unknown precision 'int8'; allowed: fp32, fp16"),
        ({"max_batch_size": 0}, "max_batch_size is 0, it must be at least 1"),
        ({"max_input_len": -1}, "max_input_len is -1"),
        ({"max_verify_size": 0}, "max_verify_size is 0"),
        ({"max_verify_size": 9}, "max_verify_size is 9, the widest window is 8"),
        ({"max_input_len": 64, "max_kv_cache_capacity": 64}, "must exceed max_input_len 64"),
    ],
)
def test_impossible_options_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        BuildOptions(**options)


def test_a_capacity_beyond_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="32769 exceeds the Talker's max_position_embeddings 32768"):
        TtsBuild(CHECKPOINT, tmp_path / "engine", BuildOptions(max_kv_cache_capacity=32769))


# -- contradictions between config and tensors ------------------------------------------------------------------------


def edit_tensors(folder: Path, edit: Callable[[dict[str, np.ndarray]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (
            put(32, TALKER, "hidden_size"),
            "no talker.code_predictor.small_to_mtp_projection, which is required as .* 32",
        ),
        (
            put(32, TALKER, PREDICTOR, "hidden_size"),
            r"small_to_mtp_projection, which is required as .* 16 is not .* 32",
        ),
        (put(49, TALKER, "text_hidden_size"), r"text_embedding.weight has shape \[464, 48\], .* asks for \[464, 49\]"),
        (put(64, TALKER, "intermediate_size"), r"talker.model.layers.0.mlp.gate_proj.weight has shape \[48, 16\]"),
        (put(464 + 1, TALKER, "text_vocab_size"), r"talker.model.text_embedding.weight has shape \[464, 48\]"),
        (put(64, TALKER, PREDICTOR, "intermediate_size"), "talker.code_predictor.model.layers.0.mlp.gate_proj.weight"),
        (put(32, TALKER, PREDICTOR, "head_dim"), "talker.code_predictor.model.layers.0.self_attn"),
        (put(4, TALKER, "num_hidden_layers"), r"the checkpoint has no tensor talker.model.layers.3\."),
        (put(4096, TALKER, "vocab_size"), "the Talker emits codes below 3072"),
        (
            put(2049, TALKER, PREDICTOR, "vocab_size"),
            r"CodePredictor below 2049 \(vocab_size\), .* codebook_size is 2048",
        ),
    ],
)
def test_a_config_that_contradicts_the_tensors_is_refused(
    edited_checkpoint: Callable[..., Path], build: Callable[..., Path], tmp_path: Path, edit: Edit, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        build(edited_checkpoint(edit), tmp_path / "engine")
    assert not (tmp_path / "engine").exists()


def test_fewer_groups_than_the_codec_has_are_refused(edited_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    def edit(config: dict[str, Any]) -> None:
        config[TALKER]["num_code_groups"] = config[TALKER][PREDICTOR]["num_code_groups"] = 15

    with pytest.raises(ConfigError, match=r"num_quantizers is 16, talker_config.num_code_groups is 15"):
        TtsBuild(edited_checkpoint(edit), tmp_path / "engine", BuildOptions())


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("tts_a", "talker.model.layers.1.mlp.up_proj.weight"),
        ("tts_a", "talker.model.norm.weight"),
        ("tts_a", "talker.codec_head.weight"),
        ("tts_a", "talker.text_projection.linear_fc1.bias"),
        ("tts_a", "talker.code_predictor.lm_head.14.weight"),
        ("tts_a", "talker.code_predictor.model.codec_embedding.3.weight"),
        ("tts_b", "talker.code_predictor.small_to_mtp_projection.weight"),
        ("tts_b", "talker.code_predictor.small_to_mtp_projection.bias"),
    ],
)
def test_a_missing_tensor_is_named(
    edited_checkpoint: Callable[..., Path], build: Callable[..., Path], tmp_path: Path, name: str, tensor: str
) -> None:
    checkpoint = edited_checkpoint(name=name)
    edit_tensors(checkpoint, lambda tensors: tensors.__delitem__(tensor))
    with pytest.raises(ConfigError, match=tensor.removesuffix(".weight")):
        build(checkpoint, tmp_path / "engine")
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize("share", [0, 0.5, 0.999])
def test_damaged_weights_are_refused(edited_checkpoint: Callable[..., Path], tmp_path: Path, share: float) -> None:
    checkpoint = edited_checkpoint()
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(ConfigError, match=r"model.safetensors cannot be read as a safetensors file"):
        TtsBuild(checkpoint, tmp_path / "engine", BuildOptions())


def test_missing_weights_are_named(edited_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    checkpoint = edited_checkpoint()
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"holds neither model.safetensors nor model.safetensors.index.json"):
        TtsBuild(checkpoint, tmp_path / "engine", BuildOptions())


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": ["model.safetensors"]}'])
def test_a_damaged_index_is_named(edited_checkpoint: Callable[..., Path], text: str) -> None:
    checkpoint = edited_checkpoint()
    (checkpoint / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ConfigError, match=r"model.safetensors.index.json"):
        Weights(checkpoint)


def test_a_missing_shard_is_named(edited_checkpoint: Callable[..., Path]) -> None:
    checkpoint = edited_checkpoint()
    index = {"weight_map": {"x": "model-00001-of-00002.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"model-00001-of-00002.safetensors cannot be read"):
        Weights(checkpoint)


# -- a build is all or nothing ----------------------------------------------------------------------------------------


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "tensor",
    [
        "talker.model.layers.2.mlp.down_proj.weight",
        "talker.model.layers.0.self_attn.q_proj.weight",
        "talker.code_predictor.lm_head.9.weight",
        "talker.text_projection.linear_fc2.bias",
    ],
)
def test_an_fp16_overflow_names_the_tensor_and_changes_nothing(
    edited_checkpoint: Callable[..., Path], build: Callable[..., Path], tmp_path: Path, tensor: str
) -> None:
    checkpoint, engine = edited_checkpoint(), build(CHECKPOINT, tmp_path / "engine")
    before = snapshot(engine)
    edit_tensors(checkpoint, lambda tensors: tensors[tensor].reshape(-1).__setitem__(5, 1e5))
    for target in (engine, tmp_path / "new"):
        with pytest.raises(ConfigError, match=rf"tensor '{tensor}.*' holds 100000, beyond FP16's 65504"):
            build(checkpoint, target, precision="fp16")
    assert snapshot(engine) == before
    assert not (tmp_path / "new").exists()
    build(checkpoint, engine, precision="fp32")
    assert snapshot(engine) != before


def test_a_weight_that_is_not_finite_is_named(
    edited_checkpoint: Callable[..., Path], overwrite: Callable[..., None], build: Callable[..., Path], tmp_path: Path
) -> None:
    checkpoint = edited_checkpoint()
    overwrite(checkpoint / "model.safetensors", "talker.code_predictor.lm_head.2.weight", np.nan, 7)
    with pytest.raises(ConfigError, match=r"lm_head.2.weight' holds a value that is not finite"):
        build(checkpoint, tmp_path / "engine")
    assert not (tmp_path / "engine").exists()


def test_leaving_without_commit_keeps_the_former_engine(build: Callable[..., Path], tmp_path: Path) -> None:
    engine = build(CHECKPOINT, tmp_path / "engine")
    before = snapshot(engine)
    with TtsBuild(CHECKPOINT, engine, BuildOptions(precision="fp16")) as unfinished:
        unfinished.build_talker()
        assert snapshot(engine) != before
    assert snapshot(engine) == before


def test_a_folder_that_is_no_engine_is_not_replaced(build: Callable[..., Path], tmp_path: Path) -> None:
    mine = tmp_path / "engine" / "talker"
    mine.mkdir(parents=True)
    (mine / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="talker exists and is no engine folder"):
        TtsBuild(CHECKPOINT, tmp_path / "engine", BuildOptions())  # before any work
    # A config.json of something else is no engine either.
    (mine / "config.json").write_text('{"model": "other"}')
    with pytest.raises(ConfigError, match="talker exists and is no engine folder"):
        build(CHECKPOINT, tmp_path / "engine")
    assert [path.name for path in (tmp_path / "engine").iterdir()] == ["talker"]
    assert (mine / "notes.txt").read_text() == "mine"


def test_a_folder_that_turns_up_during_a_build_is_not_replaced(build: Callable[..., Path], tmp_path: Path) -> None:
    engine = build(CHECKPOINT, tmp_path / "engine")
    with TtsBuild(CHECKPOINT, engine, BuildOptions(precision="fp16")) as late:
        for _, _, write in late.components:
            write()
        (engine / "code2wav" / "config.json").write_text("{}")
        with pytest.raises(ConfigError, match="code2wav exists and is no engine folder"):
            late.commit()
    assert (engine / "code2wav" / "config.json").read_text() == "{}"
    talker = json.loads((engine / "talker" / "config.json").read_text(encoding="utf-8"))
    assert talker["precision"] == "fp32"  # all or nothing


class Broken:
    """A ``rename`` that fails at some of its calls, and does nothing then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: Callable[[int], bool]) -> None:
        real, self.calls = Path.rename, 0

        def rename(path: Path, target: Path) -> Path:
            self.calls += 1
            if fails(self.calls - 1):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return real(path, target)

        monkeypatch.setattr(Path, "rename", rename)


def rebuild_and_fail(engine: Path, error: type[Exception] = PermissionError) -> None:
    with TtsBuild(CHECKPOINT, engine, BuildOptions(precision="fp16")) as late:
        for _, _, write in late.components:
            write()
        with pytest.raises(error, match="Permission denied"):
            late.commit()


@pytest.mark.parametrize("step", range(6))
def test_a_commit_that_fails_is_taken_back(
    step: int, build: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(CHECKPOINT, tmp_path / "engine")
    before = snapshot(engine)
    Broken(monkeypatch, lambda call: call == step)
    rebuild_and_fail(engine)
    assert snapshot(engine) == before


@pytest.mark.parametrize("step", range(3))
def test_a_first_commit_that_fails_leaves_nothing(step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Broken(monkeypatch, lambda call: call == step)
    rebuild_and_fail(tmp_path / "engine")
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize("step", range(1, 6))
def test_a_commit_that_cannot_be_taken_back_keeps_the_former_copies(
    step: int, build: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(CHECKPOINT, tmp_path / "engine")
    before = contents(engine)
    with monkeypatch.context() as broken:
        Broken(broken, lambda call: call >= step)
        rebuild_and_fail(engine, ConfigError)
    assert contents(engine) | contents(engine / ".partial" / "former") == before
    with TtsBuild(CHECKPOINT, engine, BuildOptions()):
        pass  # the next build puts back what is missing
    assert set(contents(engine)) == set(before)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of the three components."""
    parts = ("talker", "code_predictor", "code2wav")
    files = [path for part in parts for path in sorted((folder / part).rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_link_to_a_component_is_put_back(
    build: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set aside, a relative link leads nowhere."""
    engine = build(CHECKPOINT, tmp_path / "engine")
    (engine / "talker").rename(tmp_path / "elsewhere")
    (engine / "talker").symlink_to(Path("..") / "elsewhere")
    Broken(monkeypatch, lambda call: call == 1)
    rebuild_and_fail(engine)
    assert (engine / "talker").is_symlink()


def test_an_empty_folder_and_strangers_beside_it_are_kept(build: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "engine" / "code2wav").mkdir(parents=True)
    (tmp_path / "engine" / "notes.txt").write_text("mine")
    engine = build(CHECKPOINT, tmp_path / "engine")
    assert sorted(path.name for path in engine.iterdir()) == sorted([*COMPONENTS, "notes.txt"])


def test_an_engine_folder_that_is_a_file_is_refused(build: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "engine").write_text("mine")
    with pytest.raises(ConfigError, match="engine"):
        build(CHECKPOINT, tmp_path / "engine")
    assert (tmp_path / "engine").read_text() == "mine"


def test_progress_is_reported_as_announced(tmp_path: Path) -> None:
    with TtsBuild(CHECKPOINT, tmp_path / "engine", BuildOptions()) as steps:
        for name, count, write in steps.components:
            tick = mock.Mock()
            write(tick)
            assert tick.call_count == count, name
        assert tuple(name for name, _, _ in steps.components) == COMPONENTS


# -- what a build makes -----------------------------------------------------------------------------------------------


def test_an_fp16_engine_is_close_to_the_reference_and_speaks(
    variants: dict[str, Any], build: Callable[..., Path], close: Callable[..., None], tmp_path: Path
) -> None:
    engine = build(variants["tts_b"].checkpoint, tmp_path / "engine", precision="fp16")
    for side_file, key in (("code_predictor/lm_heads", "lm_head_0.weight"), ("talker/embedding", "embedding")):
        assert TensorFile(engine / f"{side_file}.safetensors").info(key).dtype == "F16"
    tts, arrays = Qwen3TTS.from_engine_dir(engine, threads=1), variants["tts_b"].arrays
    states = [tts.talker.prefill([arrays["p0.prefill_embeds"]])[0]]
    states += [tts.talker.step(embeds[None])[0] for embeds in arrays["p0.next_embeds"][:-1]]
    close(np.stack(states), arrays["p0.talker_hidden"], 5e-3)
    hidden = tts.predictor.prefill(arrays["p0.talker_hidden"][:3], arrays["p0.codes"][:3, 0])
    close(hidden, arrays["p0.cp_hidden"][:, 0], 5e-3)
    with pytest.raises(AssertionError):
        close(hidden, arrays["p0.cp_hidden"][:, 0], 1e-6)  # FP16 it is
    speech = tts.synthesize("Good morning!", seed=1, max_audio_length=3)
    assert len(speech.waveform) == 1920 * len(speech.codes) > 0
    coupled = tts.synthesize("Good morning!", seed=1, max_audio_length=3, verify_size=4, mode="coupled")
    np.testing.assert_array_equal(coupled.codes, speech.codes)


def test_a_sharded_bf16_checkpoint_builds(
    synthetic: Callable[..., Path], build: Callable[..., Path], tmp_path: Path
) -> None:
    checkpoint = synthetic(dtype="BF16", shard_bytes=200_000, codebook_size=64)
    assert len(list(checkpoint.glob("model-*.safetensors"))) > 2
    assert (
        TensorFile(sorted(checkpoint.glob("model-*.safetensors"))[0]).info("talker.codec_head.weight").dtype == "BF16"
    )
    engine = build(checkpoint, tmp_path / "engine")
    weights, prefix = Weights(checkpoint), "talker.code_predictor"
    tables = TensorFile(engine / "code_predictor" / "lm_heads.safetensors")
    for index in range(15):
        expected = weights.read(f"{prefix}.lm_head.{index}.weight")
        np.testing.assert_array_equal(tables.read(f"lm_head_{index}.weight"), expected)
    speech = Qwen3TTS.from_engine_dir(engine, threads=1).synthesize("Hello world", seed=1, max_audio_length=3)
    assert len(speech.codes) >= 1


def test_bf16_weights_speak_as_the_fp32_build_of_their_checkpoint(
    synthetic: Callable[..., Path], build: Callable[..., Path], tmp_path: Path
) -> None:
    """They are stored in half the bytes and widened at load: to the very numbers of an FP32 build."""
    checkpoint = synthetic(dtype="BF16", codebook_size=64, agreement=0.9)
    speech = {}
    for precision in ("fp32", "bf16"):
        engine = build(checkpoint, tmp_path / precision, precision=precision)
        assert json.loads((engine / "code_predictor" / "config.json").read_text())["precision"] == precision
        tts = Qwen3TTS.from_engine_dir(engine, threads=1)
        speech[precision] = tts.synthesize("Good morning!", seed=1, max_audio_length=6, verify_size=3)
    assert len(speech["bf16"].codes) > 1
    assert speech["bf16"].stats.accepted > 0
    np.testing.assert_array_equal(speech["bf16"].codes, speech["fp32"].codes)
    np.testing.assert_array_equal(speech["bf16"].waveform, speech["fp32"].waveform)
    sizes = [(tmp_path / p / "talker" / "model.onnx.data").stat().st_size for p in ("bf16", "fp32")]
    assert sizes[0] < 0.6 * sizes[1]


ENGINE_SPECS = {"talker": TalkerSpec, "code_predictor": CodePredictorSpec}


@pytest.mark.parametrize("component", ENGINE_SPECS)
def test_a_missing_key_of_an_engine_is_named(variants: dict[str, Any], component: str) -> None:
    spec, path = ENGINE_SPECS[component], variants["tts_a"].engine / component / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    keys = keys_read(lambda: spec.from_section(Section(config, "config.json")))
    assert len(keys) >= 18
    for key in keys:
        damaged = copy.deepcopy(config)
        remove(key)(damaged)
        with pytest.raises(ConfigError, match=rf"the key {key[-1]} is missing"):
            spec.from_section(Section(damaged, "config.json"))
        for value in wrong_values(holder(config, key)[key[-1]]):
            damaged = copy.deepcopy(config)
            put(value, *key)(damaged)
            with pytest.raises((ConfigError, EngineError), match=key[-1]):
                spec.from_section(Section(damaged, "config.json"))


# -- tensor files -----------------------------------------------------------------------------------------------------


def stream(array: np.ndarray, dtype: str = "F32") -> StreamedTensor:
    return StreamedTensor(dtype=dtype, shape=array.shape, blocks=lambda: iter([array]))


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (1.0, 0x3F80),
        (-2.0, 0xC000),
        (0.0, 0x0000),
        (-0.0, 0x8000),
        (1 + 2**-8, 0x3F80),  # halfway: to even, down
        (1 + 3 * 2**-8, 0x3F82),  # halfway: to even, up
        (1 + 2**-8 + 2**-20, 0x3F81),
        (1 + 2**-8 - 2**-20, 0x3F80),
        (2 - 2**-10, 0x4000),  # the carry reaches the exponent
        (float(np.finfo(np.float32).tiny), 0x0080),
    ],
)
def test_bf16_rounds_to_nearest_even(value: float, bits: int) -> None:
    assert to_bfloat16_bits(np.array([value], np.float32)).tolist() == [bits]


@pytest.mark.parametrize(("dtype", "step"), [("F32", 0), ("F16", 2**-11), ("BF16", 2**-8)])
def test_a_round_trip_loses_what_the_type_loses(tmp_path: Path, dtype: str, step: float) -> None:
    values = np.random.default_rng(0).standard_normal((7, 3, 2)).astype(np.float32)
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"a": stream(values, dtype), "scalar": stream(np.float32(2).reshape(()), dtype)})
    file = TensorFile(path)
    read = file.read("a")
    assert (file.info("a").dtype, read.dtype) == (dtype, np.float32)
    assert (np.abs(read - values) <= step * np.abs(values)).all()
    assert step == 0 or not np.array_equal(read, values)
    assert file.read("scalar") == 2
    write_tensors(path, {"a": stream(read, dtype)})
    np.testing.assert_array_equal(TensorFile(path).read("a"), read)
    assert [item.name for item in tmp_path.iterdir()] == ["x.safetensors"]


def test_the_safetensors_package_reads_what_is_written(tmp_path: Path) -> None:
    values = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.zeros((0, 4), np.float32)}
    write_tensors(tmp_path / "x.safetensors", {name: stream(array) for name, array in values.items()})
    loaded = load_file(tmp_path / "x.safetensors")
    assert sorted(loaded) == ["a", "b"]
    for name, array in values.items():
        np.testing.assert_array_equal(loaded[name], array)
        np.testing.assert_array_equal(TensorFile(tmp_path / "x.safetensors").read(name), array)
    assert TensorFile(tmp_path / "x.safetensors").names() == ["b", "a"]
    np.testing.assert_array_equal(TensorFile(tmp_path / "x.safetensors").rows("b")[[1, 0]], values["b"][[1, 0]])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_what_the_safetensors_package_writes_is_read(tmp_path: Path, dtype: type) -> None:
    values = np.random.default_rng(0).standard_normal((5, 4)).astype(dtype)
    save_file({"a": values}, tmp_path / "x.safetensors")
    np.testing.assert_array_equal(TensorFile(tmp_path / "x.safetensors").read("a"), values.astype(np.float32))


def test_chunks_are_whole_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(70, dtype=np.float32).reshape(7, 2, 5)
    write_tensors(tmp_path / "x.safetensors", {"first": stream(np.ones(3, np.float32)), "a": stream(values)})
    file = TensorFile(tmp_path / "x.safetensors")
    for chunk_bytes, rows in ((1, [1] * 7), (40, [1] * 7), (90, [2, 2, 2, 1]), (120, [3, 3, 1]), (10**6, [7])):
        monkeypatch.setattr(tensorfile, "CHUNK_BYTES", chunk_bytes)
        blocks = list(file.chunks("a"))
        assert [len(block) for block in blocks] == rows
        np.testing.assert_array_equal(np.concatenate(blocks), values)
    monkeypatch.setattr(tensorfile, "CHUNK_BYTES", 1)
    assert [block.shape for block in file.chunks("first")] == [(3,)]


def test_only_floating_types_are_weights(tmp_path: Path) -> None:
    save_file({"ids": np.arange(4), "flags": np.ones(3, bool)}, tmp_path / "x.safetensors")
    file = TensorFile(tmp_path / "x.safetensors")
    for name, dtype in (("ids", "I64"), ("flags", "BOOL")):
        with pytest.raises(ConfigError, match=f"tensor '{name}' is {dtype}, a floating-point type is needed"):
            file.read(name)


def test_absent_tensors_and_shapes_are_named(tmp_path: Path) -> None:
    write_tensors(tmp_path / "x.safetensors", {"a": stream(np.ones((2, 3), np.float32), "BF16")})
    file = TensorFile(tmp_path / "x.safetensors")
    assert "a" in file
    assert "b" not in file
    with pytest.raises(ConfigError, match="has no tensor 'b'; it holds a"):
        file.read("b")
    with pytest.raises(ConfigError, match=r"tensor a has shape \[2, 3\], its config asks for \[3, 2\]"):
        file.read_weight("a", (3, 2))


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_rows_are_looked_up_in_the_stored_type(tmp_path: Path, dtype: str) -> None:
    values = np.random.default_rng(0).standard_normal((6, 5)).astype(np.float32)
    path = tmp_path / "x.safetensors"
    if dtype == "F64":
        save_file({"a": values.astype(np.float64)}, path)
    else:
        write_tensors(path, {"first": stream(np.ones(3, np.float32)), "a": stream(values, dtype)})
    file = TensorFile(path)
    table, whole = file.rows("a"), file.read("a")
    assert (len(table), table.shape, table.dtype) == (6, (6, 5), dtype)
    assert table.stored.dtype.itemsize == {"F64": 8, "F32": 4}.get(dtype, 2)
    for rows in (3, -1, [1, 0, 1], np.array([[5, 2], [0, 0]])):
        found = table[rows]
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, whole[rows])
    with pytest.raises(ValueError, match="read-only"):
        table.stored[0] = 0
    with pytest.raises(IndexError):
        table[6]


def test_only_a_float_matrix_has_rows(tmp_path: Path) -> None:
    save_file({"ids": np.zeros((2, 2), np.int64), "vector": np.ones(3, np.float32)}, tmp_path / "x.safetensors")
    file = TensorFile(tmp_path / "x.safetensors")
    for name, found in (("ids", r"I64 \[2, 2\]"), ("vector", r"F32 \[3\]")):
        with pytest.raises(ConfigError, match=f"tensor {name} is {found}, a float matrix is needed"):
            file.rows(name)
    with pytest.raises(ConfigError, match="has no tensor 'b'"):
        file.rows("b")


def header(**entries: Any) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x10",
        (10**12).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little"),
        (4).to_bytes(8, "little") + b"{}xx",
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"\xff\xff\xff\xff",
        header(a=entry()) + bytes(7),
        header(a=entry(shape=[3])) + bytes(12),
        header(a=entry(dtype="F8_E4M3", shape=[8])) + bytes(8),
        header(a=entry(offsets=[8, 0])) + bytes(8),
        header(a=entry(offsets=[-8, 0])) + bytes(8),
        header(a=entry(offsets=[0])) + bytes(8),
        header(a=entry(offsets=[0.0, 8.0])) + bytes(8),
        header(a=entry(shape=[-1, -2])) + bytes(8),
        header(a=entry(shape=["x"])) + bytes(8),
        header(a=entry(shape=None)) + bytes(8),
        header(a=3) + bytes(8),
        header(a={"dtype": "F32", "shape": [2]}) + bytes(8),
        (10**5).to_bytes(8, "little") + b"[" * 10**5,
    ],
    ids=range(20),
)
def test_a_damaged_header_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"x.safetensors cannot be read as a safetensors file"):
        TensorFile(tmp_path / "x.safetensors")


def failing() -> Iterator[np.ndarray]:
    yield np.ones(2, np.float32)
    raise OSError("the disk is full")


@pytest.mark.parametrize(
    ("tensor", "error", "words"),
    [
        (stream(np.array([1, np.nan], np.float32)), ConfigError, "'a' holds a value that is not finite"),
        (stream(np.array([1, 1e5], np.float32), "F16"), ConfigError, "'a' holds 100000, beyond FP16's 65504"),
        (StreamedTensor(dtype="F32", shape=(4,), blocks=failing), OSError, "the disk is full"),
        (
            StreamedTensor(dtype="F32", shape=(4,), blocks=lambda: iter([np.ones(3, np.float32)])),
            ValueError,
            "gave 12 bytes, 16 were announced",
        ),
    ],
)
def test_a_failed_write_leaves_the_former_file(
    tmp_path: Path, tensor: StreamedTensor, error: type[Exception], words: str
) -> None:
    good = stream(np.ones(2, np.float32))
    with pytest.raises(error, match=words):
        write_tensors(tmp_path / "x.safetensors", {"first": good, "a": tensor})
    assert not list(tmp_path.iterdir())
    write_tensors(tmp_path / "x.safetensors", {"first": good})
    before = snapshot(tmp_path)
    with pytest.raises(error, match=words):
        write_tensors(tmp_path / "x.safetensors", {"first": good, "a": tensor})
    assert snapshot(tmp_path) == before
