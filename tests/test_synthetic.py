"""The synthetic checkpoints: official layout, honest sizes, a tokenizer that works, and a dial that turns."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
from trt_cpspec.builder.checkpoint import Weights
from trt_cpspec.builder.synthetic import CodecSize, DecoderSize, SyntheticSpec, write_checkpoint

from trt_cpspec.errors import ConfigError
from trt_cpspec.tensorfile import TensorFile

GOLDEN = Path(__file__).parent / "golden"
DIAL = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
F32 = NDArray[np.float32]


# ---- a decoder in numpy ---------------------------------------------------------------------------------------------


class Decoder:
    """Qwen3's decoder over whole sequences: RMSNorm, norms of queries and keys, rotary pairs, GQA, SwiGLU."""

    def __init__(self, weights: Weights, prefix: str, config: dict[str, Any]) -> None:
        self.read = lambda name: weights.read(f"{prefix}.{name}.weight")
        self.layers = config["num_hidden_layers"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim, self.theta, self.eps = config["head_dim"], config["rope_theta"], config["rms_norm_eps"]
        self.cache: dict[str, F32] = {}

    def weight(self, name: str) -> F32:
        if name not in self.cache:
            self.cache[name] = self.read(name)
        return self.cache[name]

    def norm(self, x: F32, name: str) -> F32:
        return self.weight(name) * x / np.sqrt(np.square(x).mean(-1, keepdims=True) + self.eps)

    def heads_of(self, x: F32, base: str, which: str, count: int) -> F32:
        return (x @ self.weight(f"{base}.{which}_proj").T).reshape(*x.shape[:2], count, self.head_dim)

    def rotate(self, x: F32) -> F32:
        half = self.head_dim // 2
        angle = np.arange(x.shape[1])[:, None, None] * self.theta ** (-np.arange(half) / half)
        cos, sin = np.cos(angle), np.sin(angle)
        low, high = x[..., :half], x[..., half:]
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)

    def attention(self, x: F32, base: str) -> F32:
        length, group = x.shape[1], self.heads // self.kv_heads
        queries = self.rotate(self.norm(self.heads_of(x, base, "q", self.heads), f"{base}.q_norm"))
        keys = self.rotate(self.norm(self.heads_of(x, base, "k", self.kv_heads), f"{base}.k_norm"))
        values = np.repeat(self.heads_of(x, base, "v", self.kv_heads), group, 2)
        scores = np.einsum("bthd,bshd->bhts", queries, np.repeat(keys, group, 2)) / np.sqrt(self.head_dim)
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("bhts,bshd->bthd", shares / shares.sum(-1, keepdims=True), values)
        return mixed.reshape(*x.shape[:2], -1) @ self.weight(f"{base}.o_proj").T

    def __call__(self, x: F32) -> F32:
        """Return the normed hidden states [B, T, H] of inputs [B, T, H]."""
        for layer in range(self.layers):
            base = f"layers.{layer}"
            x = x + self.attention(self.norm(x, f"{base}.input_layernorm"), f"{base}.self_attn")
            y = self.norm(x, f"{base}.post_attention_layernorm")
            gate = y @ self.weight(f"{base}.mlp.gate_proj").T
            inner = gate / (1 + np.exp(-gate)) * (y @ self.weight(f"{base}.mlp.up_proj").T)
            x = x + inner @ self.weight(f"{base}.mlp.down_proj").T
        return self.norm(x, "norm")


def law(logits: F32) -> F32:
    """Return the law over the last axis at temperature 0.9 and top-k 50."""
    scaled = logits / 0.9
    k = min(50, scaled.shape[-1])
    smallest = np.partition(scaled, -k, -1)[..., -k, None]
    mass = np.where(scaled >= smallest, np.exp(scaled - scaled.max(-1, keepdims=True)), 0)
    return mass / mass.sum(-1, keepdims=True)


def draw(probabilities: F32, random: np.random.Generator) -> NDArray[np.int64]:
    """Draw one code per row by the inverse of the distribution function."""
    sums = probabilities.cumsum(-1)
    return (sums <= random.random(sums.shape[:-1])[..., None] * sums[..., -1:]).sum(-1)


class Model:
    """The parts of a checkpoint that make one frame."""

    def __init__(self, folder: Path) -> None:
        weights = Weights(folder)
        self.config = json.loads((folder / "config.json").read_text())
        talker = self.config["talker_config"]
        self.groups, prefix = talker["num_code_groups"], "talker.code_predictor"
        self.talker = Decoder(weights, "talker.model", talker)
        self.predictor = Decoder(weights, f"{prefix}.model", talker["code_predictor_config"])
        depths = range(self.groups - 1)
        self.tables = [weights.read("talker.model.codec_embedding.weight")]
        self.tables += [weights.read(f"{prefix}.model.codec_embedding.{i}.weight") for i in depths]
        self.heads = [weights.read(f"{prefix}.lm_head.{i}.weight") for i in depths]
        self.codec_head = weights.read("talker.codec_head.weight")
        name = f"{prefix}.small_to_mtp_projection"
        self.projection = weights.read(f"{name}.weight") if f"{name}.weight" in weights else None
        self.bias = weights.read(f"{name}.bias") if f"{name}.weight" in weights else None

    def hidden(self, talker_hidden: F32, codes: list[NDArray[np.int64]]) -> F32:
        """Return the hidden states [B, 1 + len(codes), C]; row j >= 1 is the row of code j - 1."""
        rows = np.stack([talker_hidden, *(self.tables[j][code] for j, code in enumerate(codes))], 1)
        if self.projection is not None:
            rows = rows @ self.projection.T + self.bias
        return self.predictor(rows)

    def starts(self, frames: int, random: np.random.Generator) -> tuple[F32, NDArray[np.int64]]:
        """Return Talker hidden states [B, H] after a random frame each, and first codes [B]."""
        hidden = self.talker_states(frames, 1, random)[:, 0]
        return hidden, random.integers(0, self.heads[0].shape[0], frames)

    def talker_states(self, batch: int, steps: int, random: np.random.Generator) -> F32:
        """Return the Talker's hidden states [B, T, H] over frames of random codes."""
        rows = sum(t[random.integers(0, self.heads[0].shape[0], (batch, steps))] for t in self.tables)
        return self.talker(rows)

    def frame(self, hidden: F32, code0: NDArray[np.int64], random: np.random.Generator) -> F32:
        """Draw whole frames code by code and return their hidden states [B, G, C]."""
        codes = [code0]
        for depth in range(self.groups - 1):
            codes.append(draw(law(self.hidden(hidden, codes)[:, -1] @ self.heads[depth].T), random))
        return self.hidden(hidden, codes[:-1])


def acceptance(model: Model, states: F32) -> F32:
    """Return the mean of sum(min(target, draft)) by offset, 1 to 7 steps ahead: [7]."""
    targets = {row: law(states[:, row] @ model.heads[row - 1].T) for row in range(1, model.groups)}
    overlaps: list[list[float]] = [[] for _ in range(7)]
    for row in range(1, model.groups - 1):
        for offset in range(min(7, model.groups - 1 - row)):
            draft = law(states[:, row] @ model.heads[row + offset].T)
            overlaps[offset].append(float(np.minimum(targets[row + 1 + offset], draft).sum(-1).mean()))
    return np.array([np.mean(values) for values in overlaps])


def commit_lengths(model: Model, hidden: F32, code0: int, window: int, random: np.random.Generator) -> list[int]:
    """Decode one frame by rejection rounds and return the codes committed in every round of full width."""
    codes = [code0]
    state = model.hidden(hidden[None], [np.array([code0])])[0, -1]
    codes.append(int(draw(law(state @ model.heads[0].T), random)))
    lengths = []
    while len(codes) < model.groups:
        last = len(codes) - 1
        drafts = min(window - 1, model.groups - len(codes) - 1)
        laws = [law(state @ model.heads[last + i].T) for i in range(drafts)]
        proposed = [int(draw(probabilities, random)) for probabilities in laws]
        rows = model.hidden(hidden[None], [np.array([code]) for code in codes + proposed])[0, last + 1 :]
        accepted = 0
        for row, draft_law, code in zip(rows, laws, proposed, strict=False):
            target = law(row @ model.heads[last + accepted].T)
            if random.random() * draft_law[code] > target[code]:
                codes.append(int(draw(np.maximum(target - draft_law, 0), random)))
                break
            codes.append(code)
            accepted += 1
        else:
            codes.append(int(draw(law(rows[drafts] @ model.heads[last + drafts].T), random)))
        state = rows[accepted]
        if drafts == window - 1:
            lengths.append(accepted + 1)
    return lengths


@pytest.fixture(scope="module")
def dial(tmp_path_factory: pytest.TempPathFactory) -> dict[float, Model]:
    folder = tmp_path_factory.mktemp("dial")
    for agreement in DIAL:
        write_checkpoint(folder / str(agreement), SyntheticSpec.tiny(agreement=agreement))
    return {agreement: Model(folder / str(agreement)) for agreement in DIAL}


def golden_twin(name: str) -> SyntheticSpec:
    """Return the spec with the sizes of a golden checkpoint."""
    small = {"layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 16}
    voice = name == "tts_b"
    talker = DecoderSize(hidden=24 if voice else 16, intermediate=64 if voice else 48, **small)
    predictor = DecoderSize(hidden=16, intermediate=48, **{**small, "layers": 2})
    return SyntheticSpec(
        talker=talker, code_predictor=predictor, text_hidden=48, text_vocab=464, dtype="F32",
        tts_model_type="voice_design" if voice else "custom_voice", tts_model_size="1b7" if voice else "0b6",
        codec=CodecSize(latent_dim=24, codebook_dim=8, sliding_window=8 if voice else 72),
    )  # fmt: skip


# ---- format ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tts_a", "tts_b"])
def test_layout_is_the_official_one(tmp_path: Path, name: str) -> None:
    golden = GOLDEN / name / "checkpoint"
    write_checkpoint(tmp_path / "made", golden_twin(name))
    made = tmp_path / "made"
    relative = {p.relative_to(golden) for p in golden.rglob("*")}
    assert {p.relative_to(made) for p in made.rglob("*")} == relative
    for weights in ("model.safetensors", "speech_tokenizer/model.safetensors"):
        mine, theirs = TensorFile(made / weights), TensorFile(golden / weights)
        assert set(mine.names()) == set(theirs.names())
        for tensor in theirs.names():
            if "encoder_transformer" not in tensor:  # its MLP is narrower in the golden files
                assert mine.info(tensor).shape == theirs.info(tensor).shape, tensor


@pytest.mark.parametrize("name", ["tts_a", "tts_b"])
def test_configs_equal_the_golden_ones(tmp_path: Path, name: str) -> None:
    golden = GOLDEN / name / "checkpoint"
    write_checkpoint(tmp_path / "made", golden_twin(name))
    names = [path.relative_to(golden) for path in golden.rglob("*config*.json") if "tokenizer_config" not in path.name]
    assert len(names) == 6
    for file in names:
        mine, theirs = (json.loads((folder / file).read_text()) for folder in (tmp_path / "made", golden))
        assert set(mine) == set(theirs)
        for key in theirs:
            if key == "encoder_config":
                assert set(mine[key]) == set(theirs[key])
            elif not key.endswith("_token_id"):
                assert mine[key] == theirs[key], key


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_every_tensor_reads_back_finite_in_its_dtype(tmp_path: Path, dtype: str) -> None:
    write_checkpoint(tmp_path / "m", SyntheticSpec.tiny(dtype=dtype, tts_model_type="base", codebook_size=64))
    for path, stored in (("model.safetensors", dtype), ("speech_tokenizer/model.safetensors", "F32")):
        file = TensorFile(tmp_path / "m" / path)
        for name in file.names():
            assert file.info(name).dtype == stored
            assert np.isfinite(file.read(name)).all(), name
    assert "speaker_encoder.asp.tdnn.conv.weight" in TensorFile(tmp_path / "m" / "model.safetensors")


def test_shards_hold_the_same_tensors(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "whole", SyntheticSpec.tiny())
    write_checkpoint(tmp_path / "parts", SyntheticSpec.tiny(shard_bytes=1_000_000))
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == sorted(p.name for p in (tmp_path / "parts").glob("*.safetensors"))
    assert len(files) > 3
    assert all((tmp_path / "parts" / file).stat().st_size < 1_100_000 for file in files)
    whole, parts = TensorFile(tmp_path / "whole" / "model.safetensors"), Weights(tmp_path / "parts")
    assert set(index["weight_map"]) == set(whole.names())
    assert index["metadata"]["total_size"] == sum(whole.info(name).nbytes for name in whole.names())
    assert all(np.array_equal(whole.read(name), parts.read(name)) for name in whole.names())


def test_same_seed_same_bytes_other_seed_other_values(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        write_checkpoint(tmp_path / name, SyntheticSpec.tiny(seed=seed, codebook_size=64))
    files = [p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*") if p.is_file()]
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)
    a, c = (TensorFile(tmp_path / n / "model.safetensors") for n in "ac")
    assert not any(np.array_equal(a.read(n), c.read(n)) for n in a.names() if n.endswith("proj.weight"))
    assert not np.array_equal(
        a.read("talker.code_predictor.lm_head.0.weight"), a.read("talker.code_predictor.lm_head.1.weight")
    )


@pytest.mark.parametrize("vocab", [2, 64, 2048, 5000])
def test_special_codes_shift_with_the_codebook(tmp_path: Path, vocab: int) -> None:
    write_checkpoint(tmp_path / "m", SyntheticSpec.tiny(codebook_size=vocab, num_code_groups=3))
    talker = json.loads((tmp_path / "m" / "config.json").read_text())["talker_config"]
    assert talker["vocab_size"] == vocab + 1024
    assert talker["codec_eos_token_id"] == vocab + 102
    ids = [*talker["spk_id"].values(), *talker["codec_language_id"].values()]
    assert all(vocab <= code < vocab + 1024 for code in ids)


def test_memory_does_not_grow_with_a_tensor(tmp_path: Path) -> None:
    spec = SyntheticSpec.tiny(text_vocab=200_000, text_hidden=64, codebook_size=64)
    tracemalloc.start()
    write_checkpoint(tmp_path / "m", spec)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "m" / "model.safetensors").stat().st_size > 50_000_000
    assert peak < 25_000_000


def test_progress_reaches_the_end_of_each_file(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    write_checkpoint(tmp_path / "m", SyntheticSpec.tiny(codebook_size=64), progress=lambda *call: seen.append(call))
    assert sum(done == total for _, done, total in seen) == 2
    assert "talker.codec_head.weight" in [name for name, _, _ in seen]


# ---- tokenizer ------------------------------------------------------------------------------------------------------


def load_tokenizer(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    split = pre_tokenizers.Split(Regex(QWEN_PATTERN), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    added = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    tokenizer.add_special_tokens([AddedToken(entry["content"], special=True) for entry in added.values()])
    assert all(tokenizer.token_to_id(entry["content"]) == int(i) for i, entry in added.items())
    return tokenizer


def test_tokenizer_makes_the_templates_tokens(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", SyntheticSpec.tiny(codebook_size=64))
    config, tokenizer = json.loads((tmp_path / "m" / "config.json").read_text()), load_tokenizer(tmp_path / "m")
    role = tokenizer.encode("<|im_start|>assistant\n").ids
    assert role[:2] == [config["im_start_token_id"], config["assistant_token_id"]]
    assert len(role) == 3
    assert len(tokenizer.encode("<|im_start|>user\n").ids) == 3
    text = "Hello the world: Grüße, 你好 😀 123"
    ids = tokenizer.encode(f"<|im_start|>assistant\n{text}<|im_end|>\n<|im_start|>assistant\n").ids
    assert ids[:3] == role
    assert ids[-5] == config["im_end_token_id"]
    assert ids[-3:] == role
    assert max(ids) < config["talker_config"]["text_vocab_size"]
    letters = "".join(tokenizer.id_to_token(i) for i in ids[3:-5])
    assert letters == pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(text)[0][0]
    assert len(tokenizer.encode("Hello").ids) == len(tokenizer.encode(" the").ids) == 1
    for key, token in (("tts_pad", "<tts_pad>"), ("tts_bos", "<tts_text_bos>"), ("tts_eos", "<tts_text_eod>")):
        assert tokenizer.token_to_id(token) == config[f"{key}_token_id"]


# ---- behaviour ------------------------------------------------------------------------------------------------------


def test_acceptance_follows_the_dial(dial: dict[float, Model]) -> None:
    measured = []
    for model in dial.values():
        random = np.random.default_rng(1)
        measured.append(acceptance(model, model.frame(*model.starts(32, random), random)))
    table = np.stack(measured)
    assert (np.diff(table, axis=0) > 0).all()
    assert (table[0] < 0.1).all()
    assert (table[2] > 0.3).all()
    assert (table[3] > 0.6).all()
    assert (table[3] < 0.9).all()
    assert (table[-1] > 0.98).all()


def test_every_commit_length_occurs_at_the_default(dial: dict[float, Model]) -> None:
    random = np.random.default_rng(2)
    model = dial[SyntheticSpec.tiny().agreement]
    lengths: list[int] = []
    for hidden, code0 in zip(*model.starts(100, random), strict=True):
        lengths += commit_lengths(model, hidden, int(code0), 8, random)
    shares = np.bincount(lengths, minlength=9)[1:] / len(lengths)
    assert (shares > 0.02).all(), shares


@pytest.mark.parametrize("agreement", [0.0, 0.75, 1.0])
def test_laws_differ_by_frame_and_depth_and_are_peaked(dial: dict[float, Model], agreement: float) -> None:
    model, random = dial[agreement], np.random.default_rng(3)
    states = model.frame(*model.starts(8, random), random)
    laws = np.stack([law(states[:, row] @ model.heads[row - 1].T) for row in range(1, model.groups)], 1)
    entropy = -(laws * np.log2(np.maximum(laws, 1e-30))).sum(-1).mean()
    assert 2 < entropy < 5
    assert np.minimum(laws[1:], laws[:-1]).sum(-1).mean() < 0.5  # frame to frame
    assert np.minimum(laws[:, 0], laws[:, 1]).sum(-1).mean() < 0.2  # depth to depth


@pytest.mark.parametrize("agreement", [0.0, 0.75, 1.0])
def test_an_utterance_ends_after_some_frames(dial: dict[float, Model], agreement: float) -> None:
    model, talker = dial[agreement], dial[agreement].config["talker_config"]
    logits = model.talker_states(16, 30, np.random.default_rng(4)) @ model.codec_head.T
    end, vocab = talker["codec_eos_token_id"], talker["code_predictor_config"]["vocab_size"]
    allowed = np.concatenate([logits[..., :vocab], logits[..., end, None]], -1)
    assert 1 / 150 < law(allowed)[..., -1].mean() < 1 / 8


def test_projection_keeps_the_dial(tmp_path: Path) -> None:
    wide = DecoderSize(hidden=48, intermediate=64, layers=2, heads=4, kv_heads=2, head_dim=16)
    found = []
    for agreement in (0.0, 0.5, 1.0):
        folder, random = tmp_path / str(agreement), np.random.default_rng(5)
        write_checkpoint(folder, SyntheticSpec.tiny(talker=wide, agreement=agreement))
        model = Model(folder)
        assert model.projection is not None
        found.append(acceptance(model, model.frame(*model.starts(8, random), random)).mean())
    assert found[0] < 0.1
    assert found[0] + 0.1 < found[1] < found[2] - 0.1
    assert found[2] > 0.98


# ---- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"agreement": 1.5}, "agreement is 1.5"),
        ({"agreement": "high"}, "agreement is 'high'"),
        ({"agreement": float("nan")}, "agreement is nan"),
        ({"dtype": "F64"}, "dtype is 'F64'"),
        ({"tts_model_type": "custom"}, "did you mean 'custom_voice'"),
        ({"num_code_groups": 1}, "num_code_groups 1"),
        ({"codebook_size": 0}, "codebook_size is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"shard_bytes": True}, "shard_bytes is True"),
        ({"text_vocab": 100}, "the tokenizer needs at least"),
        ({"speaker_channels": 12}, "multiple of 8"),
        ({"agrement": 0.5}, "did you mean 'agreement'"),
    ],
)
def test_bad_values_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SyntheticSpec.tiny(**changes)


def test_bad_sizes_are_named() -> None:
    good = {"hidden": 32, "intermediate": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16}
    for changes, words in (
        ({"heads": 3}, "no multiple"),
        ({"head_dim": 6}, "head_dim 6"),
        ({"layers": 0}, "layers is 0"),
    ):
        with pytest.raises(ConfigError, match=words):
            DecoderSize(**{**good, **changes})
    with pytest.raises(ConfigError, match="decoder_dim 24"):
        CodecSize(decoder_dim=24)


def test_a_used_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keep.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not an empty folder"):
        write_checkpoint(tmp_path, SyntheticSpec.tiny())
    assert [p.name for p in tmp_path.iterdir()] == ["keep.txt"]
