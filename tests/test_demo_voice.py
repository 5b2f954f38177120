"""The scripts of the demo voice, as far as they need neither torch nor espeak-ng nor a recogniser."""

from __future__ import annotations

import json
import random
import sys
import zlib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from trt_cpspec.builder.build import BuildOptions
from trt_cpspec.builder.synthetic import SyntheticSpec, write_checkpoint
from trt_cpspec.builder.tts import TtsBuild

from trt_cpspec import Qwen3TTS
from trt_cpspec.contexts import spoken_contexts
from trt_cpspec.predictor import PredictorTables
from trt_cpspec.text import TextTokenizer

sys.path.append(str(Path(__file__).parents[1] / "examples" / "demo_voice"))

import acceptance
import chart
import corpus
import forced
import listen
import speech

TEXTS = ["Hello there.", "This is a test.", "Good day."]
VOCABULARY = 64


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("voice")
    write_checkpoint(folder / "checkpoint", SyntheticSpec.tiny(codebook_size=VOCABULARY, agreement=0.75))
    with TtsBuild(folder / "checkpoint", folder / "engines", BuildOptions()) as build:
        for _, _, write in build.components:
            write(lambda: None)
        build.commit()
    return folder / "engines"


@pytest.fixture(scope="module")
def model(engines: Path) -> Qwen3TTS:
    return Qwen3TTS.from_engine_dir(engines, threads=1)


@pytest.fixture(scope="module")
def work(model: Qwen3TTS, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts and codes that the model itself spoke, as the stages leave them: 2 to train on, 3 held out."""
    folder = tmp_path_factory.mktemp("work")
    texts = ["One.", "Two.", *TEXTS]
    codes = [model.synthesize(text, seed=number, max_audio_length=12).codes for number, text in enumerate(texts)]
    np.save(folder / "codes.npy", np.concatenate(codes).astype(np.uint8))
    np.save(folder / "frames.npy", np.array([len(part) for part in codes], np.int32))
    (folder / "corpus.json").write_text(json.dumps({"train": texts[:2], "dev": TEXTS, "test": []}))
    return folder


def test_forced_states_are_those_of_speaking(model: Qwen3TTS) -> None:
    trial = model.saying(TEXTS[0])
    contexts = spoken_contexts(model, trial, count=6, seed=3)
    codes = model.synthesize(TEXTS[0], seed=3, max_audio_length=6).codes
    found = forced.forced_states(model, TEXTS[0], codes)
    np.testing.assert_allclose(found.talker_hidden, contexts.talker_hidden[: len(codes)], atol=1e-5)
    first = model.predictor.prefill(found.talker_hidden[2:3], codes[2:3, 0])
    np.testing.assert_allclose(found.predictor_hidden[2, 0], first[0], atol=1e-5)
    # One wide pass gives what passes of one code gave.
    rows = model.predictor.forward(codes[2:3, 1:8], np.array([1]), np.array([7]))[0]
    np.testing.assert_allclose(found.predictor_hidden[2, 1:8], rows, atol=1e-5)


@pytest.fixture(scope="module")
def measured(model: Qwen3TTS, engines: Path, work: Path) -> dict[str, Any]:
    heads = PredictorTables.from_dir(engines / "code_predictor", model.predictor.spec).heads
    frames = int(np.load(work / "frames.npy")[2:].sum())
    return acceptance.measure(model, heads, work, frames=frames, sizes=[2, 4], batch=4, report=lambda line: None)


def test_the_exact_chance_is_what_the_loop_accepts(measured: dict[str, Any]) -> None:
    for part in measured["chances"]:
        exact = part["by_offset"][0]["chance"]
        (row,) = (
            row
            for row in measured["windows"]
            if (row["temperature"], row["mode"], row["verify_size"]) == (part["temperature"], "rejection", 2)
        )
        spread = (exact * (1 - exact) / row["tested_by_offset"][0]) ** 0.5
        assert abs(row["acceptance_by_offset"][0] - exact) < 4 * spread
        low, high = part["by_offset"][0]["interval"]
        assert low <= exact <= high
        drafted = {row["depth"]: row["chances"] for row in part["by_depth_and_offset"]}
        assert [sum(x is not None for x in drafted[depth]) for depth in (2, 5, 8, 14)] == [1, 4, 7, 7]


def test_rounds_and_passes_agree(measured: dict[str, Any]) -> None:
    for row in measured["windows"]:
        # 14 codes of a frame are made in rounds, and every round is a pass behind the prefill.
        assert row["codes_per_round"] * (row["passes_per_frame"] - 1) == pytest.approx(14)
        for name in ("codes_per_round", "passes_per_frame"):
            low, high = row[f"{name}_interval"]
            assert low <= row[name] <= high
    coupled, rejection = (
        np.mean([row["codes_per_round"] for row in measured["windows"] if row["mode"] == mode])
        for mode in ("coupled", "rejection")
    )
    assert 1 < coupled < rejection


def test_the_report_has_every_figure(measured: dict[str, Any]) -> None:
    text = acceptance.markdown(measured)
    assert text.count("| rejection |") == text.count("| coupled |") == 4
    assert "| 15 |" in text
    ElementTree.fromstring(acceptance.picture(measured))


def test_entropies_of_codes_whose_law_is_known(model: Qwen3TTS) -> None:
    generator = np.random.default_rng(1)
    first = generator.integers(0, 16, 40_000)
    codes = np.zeros((40_000, 16), np.uint8)
    codes[:, 0] = first
    codes[:, 1] = first // 4  # told by code 0: 0 bits of 2
    codes[:, 2] = generator.integers(0, 8, 40_000)  # told by nothing: 3 bits
    held = codes[:400].astype(np.int32)
    data = acceptance.HeldOut(np.arange(400) // 20, held, np.zeros((400, 4)), np.zeros((400, 15, 4), np.float32))
    rows = acceptance.entropies(np.zeros((15, VOCABULARY, 4), np.float32), data, codes)
    assert [rows[0]["unigram"], rows[1]["unigram"]] == pytest.approx([2, 3], abs=0.05)
    assert [rows[0]["given_code_0"], rows[1]["given_code_0"]] == pytest.approx([0, 3], abs=0.05)
    assert rows[0]["code_predictor"] == pytest.approx(6)  # heads of zeros: all 64 codes alike
    low, high = rows[1]["unigram_interval"]
    assert low < rows[1]["unigram"] < high


def test_the_interval_is_that_of_a_mean() -> None:
    generator = np.random.default_rng(2)
    values = np.repeat(generator.standard_normal(400), 5)  # 400 utterances of 5 equal rows
    low, high = acceptance.interval(np.repeat(np.arange(400), 5), lambda w: np.average(values, weights=w))
    assert high - low == pytest.approx(2 * 1.96 / 20, rel=0.15)
    assert low < values.mean() < high


@pytest.mark.parametrize(
    ("said", "heard", "errors"),
    [
        ("The cat sat.", "the cat sat", 0),
        ("The cat sat.", "the bat sat", 1),
        ("The cat sat.", "cat sat down", 2),
        ("The cat sat.", "", 3),
        ("One two three four.", "two one three four", 2),
    ],
)
def test_word_errors(said: str, heard: str, errors: int) -> None:
    assert listen.word_errors(said, heard) == (errors, len(said.split()))


def test_a_score_compares_two_hearings_sentence_by_sentence() -> None:
    said = ["one two three four"] * 40
    heard = [*["one two three"] * 20, *["one"] * 20]  # 1 and 3 words of 4 are lost
    found = listen.score(said, heard, ["one two"] * 40)
    assert (found["word_error_rate"], found["more"], found["words"]) == (0.5, 0.0, 160)
    spread = 1.96 * 0.25 / 40**0.5
    for name, middle in (("interval", 0.5), ("more_interval", 0.0)):
        assert found[name] == pytest.approx([middle - spread, middle + spread], abs=0.02)
    alike = listen.score(said, heard, heard)
    assert (alike["more"], alike["more_interval"]) == (0.0, [0.0, 0.0])


def test_held_out_texts_have_no_digits_and_know_their_codes(model: Qwen3TTS, work: Path, tmp_path: Path) -> None:
    sets = {"train": ["a", "b"], "dev": ["Call 5.", "Good."], "test": ["c", "9", "d"]}
    (tmp_path / "corpus.json").write_text(json.dumps(sets))
    assert listen.held_out_texts(tmp_path, "dev", 5) == [(3, "Good.")]
    assert listen.held_out_texts(tmp_path, "test", 5) == [(4, "c"), (6, "d")]
    assert listen.held_out_texts(tmp_path, "test", 1) == [(4, "c")]
    (_, text, _) = listen.held_out_texts(work, "dev", 3)
    codes, lengths = np.load(work / "codes.npy"), np.load(work / "frames.npy")
    own = listen.real_codes(work, text)
    assert own.tolist() == codes[lengths[:3].sum() : lengths[:4].sum()].tolist()
    # Its own seed was its place, so what is drawn along its real codes is what was spoken.
    assert listen.completed(model, text, own, None).tolist() == own.tolist()


def test_a_spectrogram_shows_a_tone_where_it_is() -> None:
    tone = np.sin(2 * np.pi * 3000 * np.arange(24000) / 24000).astype(np.float32)
    picture = listen.spectrogram(tone)
    height = len(picture)
    assert np.argmin(picture[:, 50]) == pytest.approx(height - 1 - 3000 / 24000 * 1024, abs=1)
    png = listen.stacked([tone, tone[:9000]])
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, rows = int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")
    assert rows == 2 * (height + 6)
    content = png[41 : 41 + int.from_bytes(png[33:37], "big")]
    assert len(zlib.decompress(content)) == rows * (width + 1)


def test_a_chart_puts_points_where_they_belong() -> None:
    svg = chart.line_chart([("title", {"a": [(1, 0), (2, 50), (3, 100)]}, 100.0)])
    circles = [
        (float(node.attrib["cx"]), float(node.attrib["cy"]))
        for node in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}circle")
    ]
    (x1, y1), (x2, y2), (x3, y3) = circles
    assert (x2 - x1, y1 - y2) == (x3 - x2, y2 - y3)
    assert x2 > x1
    assert y2 < y1


def test_resampling_keeps_a_tone() -> None:
    wave = np.sin(2 * np.pi * 440 * np.arange(22050) / 22050)
    wanted = np.sin(2 * np.pi * 440 * np.arange(24000) / 24000)
    found = speech.resampled(wave, 22050, 24000)
    assert len(found) == 24000
    np.testing.assert_allclose(found[2000:-2000], wanted[2000:-2000], atol=5e-3)


def test_frames_know_their_letters() -> None:
    # "one" from 0 to 0.2 s, "three" from 0.2 to 0.6 s, silence to 0.8 s.
    places = speech._places([(0, 3, 0.0), (4, 5, 0.2)], 0.0, 0.6, 10)
    assert places[:, 0].tolist() == [0, 0, 4, 4, 4, 4, 4, -1, -1, -1]  # middles at 0.04, 0.12, 0.2, ...
    assert places[0].tolist() == [0, 3, 0]
    assert places[6].tolist() == [4, 9, 8]
    assert places[2, 2] == 4


def test_parts_of_frames_know_their_phonemes() -> None:
    # "t" from 0.025 s, "oU" with its stress from 0.085 s, a pause from 0.165 s, "n" from 0.205 s to the end at 0.245 s.
    heard = [(b"t", 0.005), (b"'oU", 0.065), (b"_:", 0.145), (b"n", 0.185)]
    phones = speech._phones(heard, 0.02, 0.245, 4)
    assert phones.tolist() == [
        [b"", b"t", b"t", b"t"],  # middles at 0.01, 0.03, 0.05, ...
        [b"oU", b"oU", b"oU", b"oU"],
        [b"", b"", b"n", b"n"],
        [b"", b"", b"", b""],
    ]
    assert speech._phones([], 0.0, 0.0, 1).tolist() == [[b""] * 4]


@pytest.fixture
def wordnet(tmp_path: Path) -> Path:
    folder = tmp_path / "wordnet"
    folder.mkdir()
    for part in ("verb", "adj", "adv", "noun"):
        examples = [f"the {part} number {number} is here" for number in range(40)]
        banned = corpus.TEST_SENTENCES[3].lower().rstrip(".")
        examples += [banned, "THE NATO troops left at once", "a colon; in here " * 8, "caf\xe9 life is good"]
        lines = "".join(f'00 | a gloss; "{example}"\n' for example in examples)
        (folder / f"data.{part}").write_text(lines, encoding="latin-1")
    return folder


def test_the_test_sentences_are_unseen(wordnet: Path) -> None:
    texts = corpus.gather(wordnet, 400, seed=1)
    assert len(texts) == len(set(texts)) == 400
    bare = {corpus._bare(text) for text in texts}
    assert bare.isdisjoint(corpus._bare(text) for text in corpus.TEST_SENTENCES)
    assert "The verb number 7 is here." in texts
    assert not any("NATO" in text or not text.isascii() for text in texts)
    assert texts == corpus.gather(wordnet, 400, seed=1)
    patterns = list(corpus.pattern_sentences(random.Random(0), 2000))
    assert not any("{" in text or " a a" in text or " a o" in text for text in patterns)
    assert all(map(corpus.usable, texts))
    assert len(set(corpus.TEST_SENTENCES)) == 50


def test_the_corpus_is_what_the_tokenizer_of_the_checkpoint_reads(wordnet: Path, tmp_path: Path) -> None:
    corpus.write_skeleton(tmp_path / "skeleton", corpus.voice_spec())
    texts = ["Ask the assistant.", *corpus.gather(wordnet, 30, seed=2)]
    corpus.write_corpus(tmp_path, texts, dev=5)
    sets = json.loads((tmp_path / "corpus.json").read_text())
    assert [len(sets[name]) for name in ("train", "dev", "test")] == [len(texts) - 5, 5, 50]
    stored = np.load(tmp_path / "corpus.npz")
    tokenizer = TextTokenizer.from_dir(tmp_path / "skeleton")
    assert stored["tokens"][: stored["lengths"][0]].tolist() == tokenizer.text_ids(texts[0])
    assert stored["lengths"][0] == len("Ask the ") + len(["assistant", "."])
    assert stored["starts"][: stored["lengths"][0]].tolist() == [*range(9), 17]
    upper, lower = (tokenizer.text_ids(letter)[0] for letter in "Qq")
    assert stored["fold"][[upper, lower]].tolist() == [lower, lower]
    config = json.loads((tmp_path / "skeleton" / "config.json").read_text())["talker_config"]
    assert list(config["spk_id"]) == [corpus.SPEAKER]
    assert stored["tokens"].max() < config["text_vocab_size"] == len(stored["fold"])
