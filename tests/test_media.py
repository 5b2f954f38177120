"""Audio and images in a conversation: parity with the reference, the laws before the encoders, bad files."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from click.testing import CliRunner
from media_case import GOLDEN, MediaCase, user
from numpy.typing import NDArray
from PIL import Image
from trt_cpspec.builder.build import BuildOptions
from trt_cpspec.builder.decoder import rotary_axes
from trt_cpspec.builder.omni import OmniBuild
from trt_cpspec.builder.synthetic import AudioSize, DecoderSize, OmniSpec, VisionSize, write_checkpoint

from trt_cpspec.audio_input import AudioFront, log_mel, read_clip, resampled
from trt_cpspec.cli import llm
from trt_cpspec.config import Section
from trt_cpspec.encoders import table_corners
from trt_cpspec.errors import ConfigError, EngineError
from trt_cpspec.image_input import MAX_PATCHES, ImageFront, cut, read_image, resized_size
from trt_cpspec.multimodal import rotary_positions
from trt_cpspec.omni import Qwen3Omni, Reply
from trt_cpspec.requests import make_chat
from trt_cpspec.session import DecoderSession, PassExtras
from trt_cpspec.tensorfile import TensorFile

TOLERANCE = 1e-4
"""Absolute; the reference's own arithmetic differs by about 4e-5 in the quietest mel bins."""

F32 = NDArray[np.float32]


def near(actual: Any, expected: Any, atol: float = TOLERANCE) -> None:
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=0, atol=atol)


@pytest.fixture(params=["heard", "seen"])
def case(request: pytest.FixtureRequest, omni: Any, tmp_path: Path) -> MediaCase:
    return MediaCase(request.param, omni.model, tmp_path)


@pytest.fixture
def heard(omni: Any, tmp_path: Path) -> MediaCase:
    return MediaCase("heard", omni.model, tmp_path)


@pytest.fixture
def seen(omni: Any, tmp_path: Path) -> MediaCase:
    return MediaCase("seen", omni.model, tmp_path)


# -- parity with the reference ----------------------------------------------------------------------------------------


def test_every_golden_array_is_held_against_ours() -> None:
    sources = (Path(__file__), Path(__file__).parent / "helpers" / "media_case.py")
    source = "".join(path.read_text(encoding="utf-8") for path in sources)
    names = {name.split("_", 1)[1] for name in np.load(GOLDEN / "media.npz")}
    assert not [name for name in names if f'["{name}"]' not in source and f'_{name}"]' not in source]


def test_what_is_heard(heard: MediaCase) -> None:
    encoder = heard.model.encoders.audio()
    (features,) = log_mel([read_clip(heard.clip, encoder.front)], encoder.front)
    near(features, heard["audio_features"])
    assert features.shape[1] == heard["audio_feature_mask"].sum() == len(heard["audio_feature_mask"])
    (rows,) = encoder.encode([heard["audio_features"]])
    near(rows, heard["audio_embeds"], 2e-5)


def test_what_is_seen(seen: MediaCase) -> None:
    encoder = seen.model.encoders.vision()
    patches = read_image(seen.picture, encoder.front, max_patches=encoder.max_patches)
    near(patches.values, seen["image_pixel_values"], 1e-6)
    assert [1, patches.rows, patches.columns] == seen["image_grid_thw"].tolist()
    found = encoder.encode(patches)
    near(found.embeds, seen["image_embeds"], 2e-5)
    near(found.deepstack, np.concatenate(list(seen["image_deepstack"]), axis=1), 2e-5)


def test_the_prompt(case: MediaCase) -> None:
    prepared = case.model.prepare(case.request())
    assert prepared.prompt == case.prompt["rendered"]
    assert list(prepared.prompt_ids) == case["prompt_ids"].tolist()
    grids = prepared.media.image_grids
    ids = case.model.thinker.spec.media
    found = rotary_positions(prepared.prompt_ids, ids.image_token_id, grids)
    np.testing.assert_array_equal(found.T, case["thinker_position_ids"])


class Spy:
    """What goes through a decoder's session."""

    def __init__(self, decoder: Any, patch: pytest.MonkeyPatch) -> None:
        self.embeds: list[F32] = []
        self.rotary: list[NDArray[np.int64]] = []
        self.accepted: list[F32] = []
        forward = decoder._session.forward

        def spied(embeds: F32, positions: NDArray[np.int64], *extras: PassExtras) -> F32:
            hidden: F32 = forward(embeds, positions, *extras)
            own = extras[0] if extras else PassExtras()
            self.embeds += list(embeds[0].copy())
            rotary = np.repeat(positions[..., None], 3, axis=2) if own.rotary is None else own.rotary
            self.rotary += list(rotary[0])
            if own.accepted is not None:
                self.accepted += list(own.accepted[0].copy())
            return hidden

        patch.setattr(decoder._session, "forward", spied)


def test_the_answer_and_its_speech(case: MediaCase, monkeypatch: pytest.MonkeyPatch) -> None:
    thinker, talker = case.model.thinker, case.model.voice.talker
    thought, said = Spy(thinker, monkeypatch), Spy(talker, monkeypatch)
    logits: dict[str, list[F32]] = {"thinker": [], "talker": []}
    states: list[F32] = []
    for name, decoder in (("thinker", thinker), ("talker", talker)):
        monkeypatch.setattr(
            decoder, "logits", recorded(decoder.logits, logits[name], states if name == "talker" else [])
        )
    reply = case.respond()
    assert list(reply.token_ids) == case["thinker_ids"].tolist()
    assert (reply.text, reply.finish_reason) == (case.prompt["text"], case.prompt["thinker_finish"])
    near(logits["thinker"][:3], case["thinker_logits"])
    near(thought.embeds, case["thinker_embeds"])
    length = len(case["prompt_ids"])
    near(thought.accepted, case["thinker_hidden"][:length])
    after = int(case["thinker_position_ids"].max()) + 1
    assert [row.tolist() for row in thought.rotary[length:]] == [
        [after + step] * 3 for step in range(len(thought.rotary) - length)
    ]
    speech = reply.speech
    assert speech is not None
    rows = len(case["talker_prefill_ids"])
    near(said.embeds[:rows], case["talker_prefill_embeds"])
    np.testing.assert_array_equal(np.transpose(said.rotary[:rows]), case["talker_position_ids"])
    near(said.embeds[rows:], case["next_embeds"])
    np.testing.assert_array_equal(said.rotary[rows:], case["next_position_ids"])
    near(states, case["talker_hidden"])
    near(logits["talker"], case["talker_logits"])
    np.testing.assert_array_equal(speech.codes, case["codes"])
    assert [*speech.codes[:, 0]] == case["talker_tokens"].tolist()[:-1]
    near(speech.waveform, case["waveform"])
    assert speech.finish_reason == case.prompt["talker_finish"]
    trailing = speech_trailing(case, reply)
    near(talker.embed_text(trailing), case["trailing_text"])
    near(talker.embed_text(np.array([talker.spec.ids.tts_pad_token_id]))[0], case["tts_pad_embed"])


def recorded(apply: Callable[[F32], F32], logits: list[F32], states: list[F32]) -> Callable[[F32], F32]:
    def spied(hidden: F32) -> F32:
        states.append(hidden.copy())
        logits.append(apply(hidden))
        return logits[-1]

    return spied


def speech_trailing(case: MediaCase, reply: Reply) -> NDArray[np.int64]:
    prompt = case.model._prompt(case.model.voice, case["prompt_ids"].tolist(), reply.token_ids[:-1], "ethan")
    rows: NDArray[np.int64] = prompt.trailing_text_ids
    return rows


@pytest.mark.parametrize(("verify_size", "mode"), [(3, "rejection"), (8, "coupled")])
def test_speculation_gives_the_references_codes(case: MediaCase, verify_size: int, mode: Any) -> None:
    reply = case.respond(verify_size=verify_size, mode=mode)
    assert reply.speech is not None
    np.testing.assert_array_equal(reply.speech.codes, case["codes"])
    assert reply.speech.stats.proposed > 0


def test_a_batch_of_text_audio_and_images_equals_each_alone(heard: MediaCase, seen: MediaCase) -> None:
    both = user({"audio": str(heard.clip)}, "And here?", {"image": str(seen.picture)}, {"image": str(seen.picture)})
    talks = [heard.messages, user("Hello there."), seen.messages, both]
    options = {"seed": 3, "max_generate_length": 6, "max_audio_length": 4, "verify_size": 3, "mode": "coupled"}
    for talk, reply in zip(talks, heard.model.respond_all(talks, **options), strict=True):
        alone = heard.model.respond(talk, **options)
        assert reply.token_ids == alone.token_ids
        np.testing.assert_array_equal(reply.speech.codes, alone.speech.codes)


def test_rows_that_end_leave_the_others_where_they_were(heard: MediaCase, seen: MediaCase) -> None:
    """A short text goes first, in text and in speech, and the row of the image moves up."""
    model, window = seen.model, seen.model.window(0)
    short = make_chat(user("Hi"), {"seed": 1, "max_generate_length": 2, "max_audio_length": 1})
    batch = [model.prepare(request) for request in (short, seen.request(), heard.request())]
    _, *replies = model.run_batch(batch, window=window, mode="rejection")
    for case, reply in zip((seen, heard), replies, strict=True):
        assert list(reply.token_ids) == case["thinker_ids"].tolist()
        np.testing.assert_array_equal(reply.speech.codes, case["codes"])


def test_the_talker_hears_of_each_row_what_the_thinker_made_of_it(
    heard: MediaCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image before a clip, so that the order of the encoders is not that of the rows."""
    model, ids = heard.model, heard.model.thinker.spec.media
    thought, said = Spy(model.thinker, monkeypatch), Spy(model.voice.talker, monkeypatch)
    talk = user({"image": str(heard.picture)}, "and", {"audio": str(heard.clip)})
    model.respond(talk, max_generate_length=3, max_audio_length=1, seed=1)
    prompt = np.array(model.prepare(make_chat(talk, {})).prompt_ids)
    rows = np.flatnonzero((prompt == ids.audio_token_id) | (prompt == ids.image_token_id))
    assert len(rows) == 6 + 17
    expected = model.voice.talker._tables.project_hidden(np.stack([thought.accepted[row] for row in rows]))
    near([said.embeds[row] for row in rows], expected, 1e-6)  # one user's message: the rows are those of the prompt
    own = model.voice.talker.embed_text(prompt[:3])
    near(said.embeds[:3], own, 1e-6)


def test_an_answer_may_hold_any_token(seen: MediaCase) -> None:
    """A placeholder that the Thinker itself writes stands for nothing."""
    model, ids = seen.model, seen.model.thinker.spec.media
    answer = [ids.image_token_id, ids.audio_token_id, 5]
    prepared = model.prepare(seen.request())
    prompt = model._prompt(model.voice, prepared.prompt_ids, answer, "ethan")
    placed = model._with_media(model.voice, prompt, prepared.media, np.zeros((6, 64), np.float32)).media
    assert placed.places.tolist() == np.flatnonzero(prompt.text_ids[:-9] == ids.image_token_id).tolist()
    np.testing.assert_array_equal(placed.rotary.T[:, :-9], seen["talker_position_ids"][:, :-9])


def test_without_speech_the_answer_is_the_same(case: MediaCase, omni: Any) -> None:
    model = Qwen3Omni.from_engine_dir(omni.engine, audio=False, threads=1)
    reply = model.respond(case.messages, temperature=0.0, max_generate_length=case.options["max_generate_length"])
    assert list(reply.token_ids) == case["thinker_ids"].tolist()


# -- text in a model that sees ----------------------------------------------------------------------------------------

BLIND = DecoderSize(hidden=32, intermediate=64, layers=3, heads=4, kv_heads=2, head_dim=16)


@pytest.fixture(scope="module")
def engines(build_omni: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One generated model with encoders and without them: the other tensors are the same."""
    made = {}
    for name, encoders in (("blind", {}), ("sees", {"audio": AudioSize(), "vision": VisionSize()})):
        folder = tmp_path_factory.mktemp(name)
        spec = OmniSpec.tiny(codebook_size=256, thinker=BLIND, accept_hidden_layer=2, **encoders)
        write_checkpoint(folder / "checkpoint", spec)
        made[name] = build_omni(folder / "checkpoint", folder / "engine")
    return made


def test_text_is_answered_and_spoken_bit_for_bit_as_without_encoders(engines: dict[str, Path]) -> None:
    options = {"seed": 5, "max_generate_length": 8, "max_audio_length": 6}
    blind, sees = (Qwen3Omni.from_engine_dir(engines[name], threads=1) for name in ("blind", "sees"))
    expected, found = blind.respond("Hello world", **options), sees.respond("Hello world", **options)
    assert expected.token_ids == found.token_ids
    np.testing.assert_array_equal(expected.speech.codes, found.speech.codes)
    np.testing.assert_array_equal(expected.speech.waveform, found.speech.waveform)
    assert (sees.encoders._audio, sees.encoders._vision) == (None, None)  # nothing is loaded for text


def test_a_model_without_encoders_says_what_to_build(engines: dict[str, Path], heard: MediaCase) -> None:
    model = Qwen3Omni.from_engine_dir(engines["blind"], threads=1)
    for part, name in (({"audio": str(heard.clip)}, "audio"), ({"image": str(heard.picture)}, "visual")):
        with pytest.raises(ConfigError) as refused:
            model.respond(user("Well?", part))
        kind = "image" if name == "visual" else "audio"
        assert str(refused.value).startswith(f"messages[0].content[1]: {kind} input needs the encoder ")
        assert f"multimodal/{name}, which is not there: build the engine folder from a checkpoint" in str(refused.value)


def test_a_model_made_by_hand_may_lack_encoders(heard: MediaCase) -> None:
    model = Qwen3Omni(heard.model.thinker, heard.model.tokenizer, None)
    assert model.respond("Hi", max_generate_length=1).token_ids
    with pytest.raises(ConfigError, match=r"^messages\[0\].content\[0\]: this model was made without encoders"):
        model.respond(heard.messages)


def test_an_encoder_of_another_checkpoint_is_refused(
    engines: dict[str, Path], omni: Any, heard: MediaCase, tmp_path: Path
) -> None:
    for name in ("audio", "visual"):
        model = Qwen3Omni.from_engine_dir(engines["blind"], multimodal_dir=omni.engine / "multimodal", threads=1)
        part = {"audio": str(heard.clip)} if name == "audio" else {"image": str(heard.picture)}
        with pytest.raises(ConfigError, match=f"{name} gives rows of 64, the Thinker's hidden_size is 32"):
            model.respond(user(part))
    shutil.copytree(engines["sees"] / "multimodal", tmp_path / "multimodal")
    model = Qwen3Omni.from_engine_dir(engines["blind"], multimodal_dir=tmp_path / "multimodal", threads=1)
    with pytest.raises(ConfigError, match=r"gives 2 deepstack feature\(s\), the Thinker takes no image at all"):
        model.respond(user({"image": str(heard.picture)}))
    # It can hear, and its template knows of nothing to hear.
    with pytest.raises(ConfigError, match=r"the chat template writes 0 audio placeholder\(s\) for 1 audio part"):
        model.respond(user({"audio": str(heard.clip)}))


def test_deepstack_features_are_added_behind_their_layers(engines: dict[str, Path]) -> None:
    """The accepted state lies behind layer 2: what is added behind layers 1 and 2 alone is seen there, as it is."""
    model = Qwen3Omni.from_engine_dir(engines["sees"], audio=False, threads=1)
    session: Any = model.thinker._session
    rng = np.random.default_rng(0)
    embeds, places = rng.standard_normal((1, 5, 32)).astype(np.float32), np.arange(5)[None]

    def accepted(stack: F32 | None) -> F32:
        out = np.empty((1, 5, 32), np.float32)
        session.start(1, 6)
        session.clear()
        session.forward(embeds, places, PassExtras(deepstack=stack, accepted=out))
        return out

    plain, added = accepted(None), rng.standard_normal((1, 5, 32)).astype(np.float32)
    second = accepted(np.concatenate([np.zeros_like(added), added], axis=2))
    near(second - plain, added, 1e-5)
    first = accepted(np.concatenate([added, np.zeros_like(added)], axis=2))
    assert np.abs(first - plain - added).max() > 1e-2  # layer 2 has seen it
    near(accepted(None), plain, 0)  # nothing of an image stays for the text behind it


def test_the_vision_encoder_gives_the_features_side_by_side(engines: dict[str, Path], seen: MediaCase) -> None:
    encoder = Qwen3Omni.from_engine_dir(engines["sees"], audio=False, threads=1).encoders.vision()
    found = encoder.encode(read_image(seen.picture, encoder.front, max_patches=encoder.max_patches))
    assert (found.embeds.shape, found.deepstack.shape) == ((6, 32), (6, 64))
    assert np.abs(found.deepstack[:, :32] - found.deepstack[:, 32:]).max() > 0.1


def test_a_decoder_without_three_axes_takes_none(engines: dict[str, Path]) -> None:
    model = Qwen3Omni.from_engine_dir(engines["blind"], audio=False, threads=1)
    session: Any = model.thinker._session
    assert isinstance(session, DecoderSession)
    session.start(1, 2)
    extras = PassExtras(rotary=np.zeros((1, 1, 3), np.int64), deepstack=np.zeros((1, 1, 32), np.float32))
    with pytest.raises(EngineError, match="has no rotary_positions, deepstack_embeds: it was built without the vision"):
        session.forward(np.zeros((1, 1, 32), np.float32), np.zeros((1, 1), np.int64), extras)


def test_long_prompts_with_images_are_fed_in_chunks(
    omni: Any, seen: MediaCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"seed": 2, "max_generate_length": 4, "max_audio_length": 3}
    whole = omni.model.respond(seen.messages, **options)
    monkeypatch.setattr("trt_cpspec.session.PREFILL_CHUNK", 16)
    parts = omni.model.respond(seen.messages, **options)
    assert parts.token_ids == whole.token_ids
    np.testing.assert_array_equal(parts.speech.codes, whole.speech.codes)


# -- three axes -------------------------------------------------------------------------------------------------------


def test_the_axes_take_turns() -> None:
    # transformers: freqs_t, then [1:60:3] of height and [2:60:3] of width.
    expected = [0] * 64
    expected[1:60:3], expected[2:60:3] = [1] * 20, [2] * 20
    assert rotary_axes([24, 20, 20]) == expected
    assert rotary_axes([4, 2, 2]) == [0, 1, 2, 0, 1, 2, 0, 0]


def test_positions_of_two_images() -> None:
    ids = [1, 9, 9, 9, 9, 9, 9, 2, 9, 9, 3]  # 2 x 3, then 1 x 2
    assert rotary_positions(ids, 9, [(2, 3), (1, 2)]).tolist() == [
        [0, 0, 0], [1, 1, 1], [1, 1, 2], [1, 1, 3], [1, 2, 1], [1, 2, 2], [1, 2, 3], [4, 4, 4], [5, 5, 5], [5, 5, 6],
        [7, 7, 7],
    ]  # fmt: skip


# -- audio ------------------------------------------------------------------------------------------------------------

FRONT = AudioFront(feature_size=128, sampling_rate=16000, hop_length=160, n_fft=400, chunk_length=300)


def tone(seconds: float, rate: int, hertz: float = 440.0) -> F32:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 96000])
def test_another_sample_rate_is_resampled(rate: int) -> None:
    made = resampled(tone(0.5, rate), rate, 16000)
    assert len(made) == math.ceil(int(0.5 * rate) * 16000 / rate)
    middle = slice(800, 7200)  # the ends ring
    near(made[middle], tone(0.5, 16000)[: len(made)][middle], 2e-4)
    assert len(resampled(tone(0.5, rate)[:1099], rate, 16000)) == math.ceil(1099 * 16000 / rate)


def test_what_is_above_half_the_rate_does_not_come_back_as_another_tone() -> None:
    assert np.abs(resampled(tone(0.5, 44100, 11000), 44100, 16000)[800:7200]).max() < 1e-5


@pytest.mark.parametrize(
    ("name", "how", "bound"),
    [
        ("a.wav", {"subtype": "PCM_16"}, 1e-4),
        ("a.wav", {"subtype": "PCM_24"}, 1e-6),
        ("a.flac", {"subtype": "PCM_16"}, 1e-4),
        ("a.mp3", {}, 0.02),
    ],
)
def test_kinds_of_files(name: str, how: dict[str, Any], bound: float, tmp_path: Path) -> None:
    path, sound = tmp_path / name, tone(0.5, 16000)
    stereo = np.stack([sound * 1.5, sound * 0.5], axis=1)  # the mean of the channels counts
    soundfile.write(path, stereo, 16000, **how)
    clip = read_clip(path, FRONT)
    assert abs(len(clip) - len(sound)) < 1200  # mp3 has frames of its own
    near(clip[2000:6000], sound[2000:6000], bound)


def test_clips_of_a_conversation_are_filled_up_to_the_longest() -> None:
    """As the reference's processor does: a frame that the shorter one only begins counts there."""
    short, long = tone(0.25, 16000)[:3990], tone(0.5, 16000)
    alone, together = log_mel([short], FRONT)[0], log_mel([long, short], FRONT)[1]
    assert (alone.shape[1], together.shape[1]) == (3990 // 160, math.ceil(3990 / 160))
    near(together[:, :20], alone[:, :20], 1e-6)
    padded = np.pad(short, (0, len(long) - len(short)))
    near(together, log_mel([padded], FRONT)[0][:, : together.shape[1]], 0)


def audio_oracle(checkpoint: Path, mel: F32, *, chunk: int) -> F32:
    """The audio encoder once more, in float64: chunks of ``chunk`` frames, windows of eight of them."""
    file, prefix = TensorFile(checkpoint / "model.safetensors"), "thinker.audio_tower."
    weight = lambda name: file.read(prefix + name).astype(np.float64)  # noqa: E731
    erf = np.vectorize(math.erf)
    gelu = lambda x: x * (1 + erf(x / math.sqrt(2))) / 2  # noqa: E731

    def conv(x: NDArray[Any], name: str) -> NDArray[Any]:
        kernel, padded = weight(f"{name}.weight"), np.pad(x, ((0, 0), (1, 1), (1, 1)))
        patches = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))[:, ::2, ::2]
        return gelu(np.einsum("cftxy,ocxy->oft", patches, kernel) + weight(f"{name}.bias")[:, None, None])

    def linear(x: NDArray[Any], name: str) -> NDArray[Any]:
        return x @ weight(f"{name}.weight").T + weight(f"{name}.bias")

    def norm(x: NDArray[Any], name: str) -> NDArray[Any]:
        centred = x - x.mean(-1, keepdims=True)
        scale = np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return centred / scale * weight(f"{name}.weight") + weight(f"{name}.bias")

    rows = []
    for start in range(0, mel.shape[1], chunk):
        part = mel[:, start : start + chunk].astype(np.float64)
        keep = math.ceil(part.shape[1] / 8)
        x = np.pad(part, ((0, 0), (0, chunk - part.shape[1])))[None]
        for name in ("conv2d1", "conv2d2", "conv2d3"):
            x = conv(x, name)
        flat = x.transpose(2, 0, 1).reshape(x.shape[2], -1) @ weight("conv_out.weight").T
        width = flat.shape[1]
        rates = np.exp(-np.log(10000) / (width // 2 - 1) * np.arange(width // 2))
        angles = np.arange(len(flat))[:, None] * rates
        rows.append((flat + np.concatenate([np.sin(angles), np.cos(angles)], axis=1))[:keep])
    hidden, span = np.concatenate(rows), 8 * 13
    for layer in range(2):
        base, normed = f"layers.{layer}", norm(hidden, f"layers.{layer}.self_attn_layer_norm")
        q, k, v = (linear(normed, f"{base}.self_attn.{part}_proj").reshape(len(hidden), 4, -1) for part in "qkv")
        mixed = []
        for start in range(0, len(hidden), span):
            own = slice(start, start + span)
            scores = np.einsum("thd,shd->hts", q[own], k[own]) / math.sqrt(q.shape[-1])
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            mixed.append(np.einsum("hts,shd->thd", shares / shares.sum(-1, keepdims=True), v[own]))
        hidden = hidden + linear(np.concatenate(mixed).reshape(len(hidden), -1), f"{base}.self_attn.out_proj")
        opened = gelu(linear(norm(hidden, f"{base}.final_layer_norm"), f"{base}.fc1"))
        hidden = hidden + linear(opened, f"{base}.fc2")
    out: F32 = linear(gelu(linear(norm(hidden, "ln_post"), "proj1")), "proj2").astype(np.float32)
    return out


@pytest.mark.parametrize("frames", [1, 37, 99, 100, 101, 800, 801, 1730])
def test_the_audio_encoder_at_every_kind_of_length(omni: Any, frames: int) -> None:
    """Less than a chunk, whole chunks, a window, more than one: against the arithmetic written down a second time."""
    mel = np.random.default_rng(frames).standard_normal((128, frames)).astype(np.float32)
    encoder = omni.model.encoders.audio()
    (rows,) = encoder.encode([mel])
    assert len(rows) == encoder.rows_of(frames)
    near(rows, audio_oracle(omni.checkpoint, mel, chunk=min(frames, 100)), 2e-5)


def test_windows_beyond_one_call(omni: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mel = np.random.default_rng(0).standard_normal((128, 2500)).astype(np.float32)
    encoder = omni.model.encoders.audio()
    (whole,) = encoder.encode([mel])
    monkeypatch.setattr(encoder, "_max_windows", 1)
    near(encoder.encode([mel])[0], whole, 1e-6)
    # A short clip beside a longer one is filled up to a whole chunk, as in the reference.
    short = encoder.encode([mel[:, :37], mel])[0]
    near(short, audio_oracle(omni.checkpoint, mel[:, :37], chunk=100), 2e-5)


def broken_wav(path: Path, value: float, rate: int) -> None:
    sound = tone(0.1, rate)
    sound[100] = value
    soundfile.write(path, sound, rate, subtype="FLOAT")


def long_wav(path: Path) -> None:
    soundfile.write(path, np.zeros(301 * 1000, np.int16), 1000)


BAD_AUDIO: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "missing": ("a.wav", lambda path: None, "a.wav: there is no such file"),
    "folder": ("a.wav", lambda path: path.mkdir(), "a.wav: there is no such file"),
    "empty": ("a.mp3", lambda path: path.touch(), r"a.mp3 cannot be read as audio \(wav, flac and mp3 can\)"),
    "text": ("a.wav", lambda path: path.write_text("Hello" * 99), "a.wav cannot be read as audio"),
    "no samples": ("a.wav", lambda path: soundfile.write(path, np.zeros(0), 16000), "a.wav is too short: it has 0 sam"),
    "short": ("a.wav", lambda path: soundfile.write(path, np.zeros(200), 16000), "has 200 .* at least 201 .12.6 ms"),
    "long": ("a.wav", long_wav, "a.wav is too long: it lasts more than 300 s, the long"),
    "nan": ("a.wav", lambda path: broken_wav(path, np.nan, 16000), "a.wav holds samples that are not finite"),
    # Resampled, it would become infinite.
    "loud": ("a.wav", lambda path: broken_wav(path, 3e38, 44100), "not finite, or beyond what 32 bits can be"),
    "kind": (
        "a.ogg",
        lambda path: soundfile.write(path, tone(0.1, 16000), 16000),
        "is audio of the kind OGG; give wav",
    ),
    "rate": ("a.wav", lambda path: soundfile.write(path, tone(1, 999), 999), "a sample rate of 999 Hz; give 1000 to"),
}


@pytest.mark.parametrize("name", BAD_AUDIO)
def test_audio_that_cannot_be_used(name: str, tmp_path: Path) -> None:
    file, make, message = BAD_AUDIO[name]
    make(tmp_path / file)
    with pytest.raises(ConfigError, match=message):
        read_clip(tmp_path / file, FRONT)


def test_a_file_that_is_cut_short_is_read_up_to_there_or_refused(tmp_path: Path) -> None:
    for name in ("a.wav", "a.flac", "a.mp3"):
        path = tmp_path / name
        soundfile.write(path, tone(1.0, 16000), 16000)
        for share in (0.5, 0.01):
            cut_file = tmp_path / f"{share}{name}"
            cut_file.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
            try:
                clip = read_clip(cut_file, FRONT)
            except ConfigError as error:
                assert str(cut_file) in str(error)  # noqa: PT017
            else:
                assert len(clip) < 12000
                assert np.isfinite(clip).all()


# -- images -----------------------------------------------------------------------------------------------------------

EYE = ImageFront(
    image_mean=(0.5,) * 3, image_std=(0.5,) * 3, min_pixels=3136, max_pixels=12845056, patch_size=16, merge_size=2,
    temporal_patch_size=2,
)  # fmt: skip


@pytest.mark.parametrize(
    ("height", "width", "limit", "expected"),
    [
        # Of smart_resize of transformers 4.57.3, with factor 32 and these limits.
        (64, 96, None, (64, 96)), (100, 100, None, (96, 96)), (111, 113, None, (96, 128)), (80, 80, None, (64, 64)),
        (10, 10, None, (64, 64)), (1, 200, None, (32, 800)), (20, 60, None, (64, 128)),
        (4000, 6000, None, (2912, 4384)), (16, 16, 1024, (64, 64)), (48, 48, None, (64, 64)),
        (1080, 1920, None, (1088, 1920)), (1080, 1920, 1048576, (768, 1344)), (3000, 4000, 1048576, (864, 1152)),
    ],
)  # fmt: skip
def test_sizes(height: int, width: int, limit: int | None, expected: tuple[int, int]) -> None:
    assert resized_size(height, width, EYE, limit) == expected


def test_an_image_is_resized_as_a_whole(tmp_path: Path) -> None:
    """A ramp stays one, but for its ends; and the patches put together again are the image."""
    ramp = np.tile(np.linspace(0, 255, 160).round().astype(np.uint8)[None, :, None], (120, 1, 3))
    Image.fromarray(ramp).save(tmp_path / "ramp.png")
    patches = read_image(tmp_path / "ramp.png", EYE, max_patches=4096)
    assert (patches.rows, patches.columns) == (8, 10)
    image = patches.values.reshape(4, 5, 2, 2, 3, 2, 16, 16)[..., 0, :, :]
    whole = image.transpose(0, 2, 5, 1, 3, 6, 4).reshape(128, 160, 3)
    near(whole, np.tile((np.linspace(0, 255, 160)[None, :, None] - 127.5) / 127.5, (128, 1, 3)), 0.02)
    np.testing.assert_array_equal(
        patches.values.reshape(80, 3, 2, 256)[:, :, 0], patches.values.reshape(80, 3, 2, 256)[:, :, 1]
    )


def test_corners_of_the_table_meet_those_of_the_image() -> None:
    corners, shares = table_corners(4, 6, 8, 2)
    # Patches 0 and 3 of the first square: the top left one, and the one below and beside it.
    assert (corners[0, 0], shares[0].tolist()) == (0, [1, 0, 0, 0])
    down, across = 7 / 3, 7 / 5
    expected = [(1 - down % 1) * (1 - across % 1), (1 - down % 1) * (across % 1), (down % 1) * (1 - across % 1)]
    near(shares[3, :3], expected, 1e-6)
    assert corners[3].tolist() == [2 * 8 + 1, 2 * 8 + 2, 3 * 8 + 1, 3 * 8 + 2]
    assert (corners[-1, 0], shares[-1].tolist()) == (63, [1, 0, 0, 0])
    near(shares.sum(axis=1), np.ones(24), 1e-6)


def colours(path: Path, **how: Any) -> list[list[float]]:
    """Return the mean colour of the four quarters of an image of 64 x 64 pixels: top left, top right, bottom ones."""
    patches = read_image(path, EYE, max_patches=64)
    pixels = patches.values.reshape(2, 2, 4, 3, -1).mean(axis=(2, 4)) * 127.5 + 127.5
    return pixels.reshape(4, 3).round().tolist()  # type: ignore[no-any-return]


RED, GREEN, BLUE, WHITE = [255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255]


def quarters() -> Image.Image:
    pixels = np.array([[RED, GREEN], [BLUE, WHITE]], np.uint8)
    return Image.fromarray(pixels.repeat(32, axis=0).repeat(32, axis=1))


def test_modes_of_images(tmp_path: Path) -> None:
    path, image = tmp_path / "a.png", quarters()
    image.save(path)
    assert colours(path) == [RED, GREEN, BLUE, WHITE]
    image.convert("P").save(path)
    assert colours(path) == [RED, GREEN, BLUE, WHITE]
    alpha = Image.new("L", (64, 64), 255)
    alpha.paste(0, (0, 0, 32, 32))
    image.putalpha(alpha)
    image.save(path)
    assert colours(path) == [WHITE, GREEN, BLUE, WHITE]  # what is transparent lies on white
    Image.fromarray(np.full((64, 64), 0x8000, np.uint16)).save(path)
    assert colours(path) == [[128] * 3] * 4
    Image.fromarray(np.full((64, 64), 7, np.uint8)).save(path)
    assert colours(path) == [[7] * 3] * 4


def test_the_orientation_tag_is_heeded(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees to the right when shown
    quarters().save(tmp_path / "a.jpg", exif=exif, quality=100, subsampling=0)
    shown = np.array(colours(tmp_path / "a.jpg"))
    assert np.abs(shown - np.array([BLUE, RED, WHITE, GREEN])).max() <= 2


def test_a_jpeg_of_four_inks_is_read(tmp_path: Path) -> None:
    Image.new("CMYK", (64, 64), (255, 0, 0, 0)).save(tmp_path / "a.jpg", quality=100)
    assert np.abs(np.array(colours(tmp_path / "a.jpg")) - np.array([0, 255, 255])).max() <= 3


def picture(size: tuple[int, int]) -> Callable[[Path], Any]:
    return lambda path: Image.new("1", size).save(path)


def cut_png(path: Path) -> None:
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:4000])


BAD_IMAGES: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "missing": ("a.png", lambda path: None, "a.png: there is no such file"),
    "empty": ("a.png", lambda path: path.touch(), r"a.png cannot be read as an image \(png and jpeg can\)"),
    "text": ("a.jpg", lambda path: path.write_text("Hello" * 99), "a.jpg cannot be read as an image"),
    "cut": ("a.png", cut_png, "a.png cannot be read as an image"),
    "kind": ("a.gif", lambda path: Image.new("L", (64, 64)).save(path), "a.gif cannot be read as an image"),
    "narrow": ("a.png", picture((2010, 10)), "a.png: 2010 x 10 pixels: one side may be 200 times as long as the other"),
    "large": (
        "a.png",
        picture((2000, 1000)),
        r'a.png is too large: 2000 x 1000 pixels take 7688 patches of 16 x 16, the vision encoder takes 64; give the '
        r'part "max_pixels": 16384 to have it scaled down, or build with a larger --maxInputLen',
    ),
    "swollen": ("a.png", picture((10000, 9000)), "a.png is too large: an image may have 89,478,485 pixels before"),
    "bomb": ("a.png", picture((20000, 10000)), "a.png is too large: an image may have 89,478,485 pixels before"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_IMAGES)
def test_images_that_cannot_be_used(name: str, tmp_path: Path) -> None:
    file, make, message = BAD_IMAGES[name]
    make(tmp_path / file)
    with pytest.raises(ConfigError, match=message):
        read_image(tmp_path / file, EYE, max_patches=64)


def test_the_hint_of_a_larger_build_ends_where_builds_do(tmp_path: Path) -> None:
    picture((4000, 3000))(tmp_path / "a.png")
    with pytest.raises(ConfigError, match=r'takes 8192; .* "max_pixels": 2097152 to have it scaled down$'):
        read_image(tmp_path / "a.png", EYE, max_patches=MAX_PATCHES)


@pytest.mark.parametrize(("max_input_len", "max_patches"), [(8, 32), (3000, 8192)])
def test_an_image_may_have_as_many_rows_as_a_prefill(
    max_input_len: int, max_patches: int, omni: Any, tmp_path: Path
) -> None:
    choices = BuildOptions(max_input_len=max_input_len)
    with OmniBuild(omni.checkpoint, tmp_path / "engine", choices) as build:
        build.build_vision_encoder()
        config = json.loads((tmp_path / "engine" / ".partial" / "multimodal" / "visual" / "config.json").read_text())
    assert config["builder_config"] == {"max_patches": max_patches}


def test_an_image_is_scaled_down_where_that_is_asked(tmp_path: Path) -> None:
    picture((2000, 1000))(tmp_path / "a.png")
    patches = read_image(tmp_path / "a.png", EYE, max_patches=64, max_pixels=16384)
    assert patches.rows * patches.columns <= 64
    assert len(patches.values) == patches.rows * patches.columns


def test_cutting_needs_no_copy_of_colours_it_lacks() -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (32, 32, 3), np.uint8)
    values = cut(pixels, EYE).values
    assert values.shape == (4, 1536)
    near(values[1].reshape(3, 2, 16, 16)[:, 1], (pixels[:16, 16:].transpose(2, 0, 1) - 127.5) / 127.5, 1e-6)


# -- requests and files -----------------------------------------------------------------------------------------------


def run(*args: str) -> Any:
    return CliRunner().invoke(llm, args)


def test_from_a_file_of_requests_to_files(case: MediaCase, omni: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for part in case.messages[-1]["content"]:  # paths are the working folder's
        part.update({key: Path(part[key]).name for key in ("audio", "image") if key in part})
    Path("in.json").write_text(json.dumps({"requests": [{"messages": case.messages, **case.options}]}))
    flags = ("--engineDir", str(omni.engine / "thinker"), "--multimodalEngineDir", str(omni.engine / "multimodal"))
    flags += ("--enableAudioOutput", "--talkerEngineDir", str(omni.engine / "talker"), "--dumpProfile")
    result = run(*flags, "--inputFile", "in.json", "--cpSpecVerifySize", "3")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    (response,) = document["responses"]
    assert response["output_text"] == case.prompt["text"]
    assert response["messages"] == case.messages
    assert response["formatted_complete_request"] == case.prompt["rendered"]
    assert response["audio_samples"] == case.prompt["samples"]
    codes = TensorFile(Path(response["rvq_file"]))
    assert codes.info("rvq_codes").shape == case["codes"].shape
    stages = {stage["stage_id"] for stage in document["profile"]["stages"]}
    assert ("audio_encoder" in stages, "vision_encoder" in stages) == (case.name == "heard", case.name == "seen")


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"audio": "no.wav"}, "no.wav: there is no such file"),
        ({"type": "image", "image": "no.png"}, "no.png: there is no such file"),
        ({"image": "in.json"}, "in.json cannot be read as an image"),
        ({"audio": "in.json"}, "in.json cannot be read as audio"),
    ],
)
def test_a_bad_file_names_its_request_and_part(
    part: dict[str, Any], message: str, omni: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    requests = [{"messages": user("Hi")}, {"messages": user("Hi", part)}]
    Path("in.json").write_text(json.dumps({"requests": requests}))
    result = run("--engineDir", str(omni.engine / "thinker"), "--inputFile", "in.json", "--outputFile", "out.json")
    assert result.exit_code == 2
    assert f"in.json: requests[1]: messages[0].content[1]: {message}" in result.stderr
    assert not Path("out.json").exists()


def test_media_that_do_not_fit_the_thinker_are_counted(omni: Any, tmp_path: Path, heard: MediaCase) -> None:
    soundfile.write(tmp_path / "long.wav", np.zeros(16000 * 90, np.float32), 16000)
    with pytest.raises(ConfigError, match=r"takes \d+ tokens \(audio 1170, images 6\), the Thinker's max_input_len is"):
        omni.model.respond(user({"audio": str(tmp_path / "long.wav")}, {"image": str(heard.picture)}))


def test_a_template_without_placeholders_is_refused(seen: MediaCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(seen.model.tokenizer), "render", lambda self, messages: "<|im_start|>assistant\n")
    with pytest.raises(ConfigError, match=r"the chat template writes 0 image placeholder\(s\) for 1 image part"):
        seen.respond()


def test_an_encoder_that_fails_fails_its_request_alone(seen: MediaCase, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise EngineError("out of memory")

    monkeypatch.setattr(seen.model.encoders.vision(), "encode", fail)
    model, window = seen.model, seen.model.window(0)
    talks = [seen.messages, user("Hi")]
    options = {"seed": 1, "max_generate_length": 2, "max_audio_length": 1}
    batch = [model.prepare(make_chat(talk, options)) for talk in talks]
    failed, answered = model.run_batch(batch, window=window, mode="rejection")
    assert isinstance(failed, EngineError)
    assert isinstance(answered, Reply)
    monkeypatch.setattr(model.thinker, "prefill", lambda *rows: pytest.fail("there is nothing to answer"))
    alone = model.run_batch(batch[:1], window=window, mode="rejection")
    assert [str(error) for error in alone] == ["out of memory"]


# -- configs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "path", "value", "words"),
    [
        ("config.json", "thinker_config.audio_config.n_window_infer", 801, "801 is no multiple of twice n_window 50"),
        ("config.json", "thinker_config.audio_config.activation_function", "relu", "activation_function is 'relu'"),
        ("config.json", "thinker_config.audio_config.output_dim", 63, "output_dim is 63, only 64 is supported"),
        ("config.json", "thinker_config.audio_config.encoder_attention_heads", 5, "a multiple of encoder_attention_h"),
        ("config.json", "thinker_config.vision_config.hidden_act", "gelu", "hidden_act is 'gelu', only 'gelu_pytorch"),
        ("config.json", "thinker_config.vision_config.num_position_embeddings", 63, "63 is no square number"),
        (
            "config.json",
            "thinker_config.vision_config.deepstack_visual_indexes",
            [2],
            "must rise and lie below depth 2",
        ),
        ("config.json", "thinker_config.vision_config.num_heads", 8, "num_heads 8 times a multiple of 4"),
        (
            "config.json",
            "thinker_config.text_config.rope_scaling.interleaved",
            False,
            "interleaved is False, only True",
        ),
        ("config.json", "talker_config.text_config.rope_scaling.mrope_section", [2, 3, 3], "every third pair"),
        ("preprocessor_config.json", "feature_size", 80, "feature_size is 80, num_mel_bins is 128"),
        ("preprocessor_config.json", "dither", 0.1, "dither is 0.1, only 0 is supported"),
        ("preprocessor_config.json", "patch_size", 14, "contradict vision_config"),
        ("preprocessor_config.json", "image_std", [0.5, 0.5], "image_std must hold three numbers"),
        ("preprocessor_config.json", "hop_length", None, "hop_length must be an integer"),
    ],
)
def test_encoders_that_cannot_be_built(
    file: str, path: str, value: Any, words: str, omni: Any, tmp_path: Path, build_omni: Callable[..., Path]
) -> None:
    checkpoint = shutil.copytree(omni.checkpoint, tmp_path / "checkpoint", copy_function=shutil.copyfile)
    config = json.loads((checkpoint / file).read_text())
    *parents, key = path.split(".")
    section = config
    for parent in parents:
        section = section[parent]
    section[key] = value
    (checkpoint / file).write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=words):
        build_omni(checkpoint, tmp_path / "engine")
    assert not (tmp_path / "engine").exists()


def test_an_encoders_config_must_be_its_own(omni_copy: Path, omni: Any) -> None:
    path = omni_copy / "multimodal" / "audio" / "config.json"
    path.write_text((omni_copy / "multimodal" / "visual" / "config.json").read_text())
    encoders = replace(omni.model.encoders, folder=omni_copy / "multimodal")
    with pytest.raises(EngineError, match="model_type is 'qwen3_omni_vision_encoder', not 'qwen3_omni_audio_encoder'"):
        encoders.audio()
    assert Section.from_file(path).text("model_type") == "qwen3_omni_vision_encoder"
