"""The tokenizer against the ids of the reference, and the doors that refuse what cannot be spoken."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from trt_cpspec.errors import ConfigError
from trt_cpspec.text import ROLE_ROWS, SUFFIX_IDS, TextTokenizer, check_text

GOLDEN = Path(__file__).parent / "golden"
VARIANTS = ("tts_a", "tts_b")
TOKENIZER_FILES = ("vocab.json", "merges.txt", "tokenizer_config.json")


def load(variant: str) -> dict[str, Any]:
    return json.loads((GOLDEN / variant / "golden.json").read_text(encoding="utf-8"))


VECTORS = [
    (variant, vector["text"], vector["ids"]) for variant in VARIANTS for vector in load(variant)["tokenizer_vectors"]
]
PROMPTS = [(variant, prompt["id"]) for variant in VARIANTS for prompt in load(variant)["prompts"]]

BLANK = [
    "",
    " ",
    "\n\r\t",
    "\xa0\u3000",
    "\u200b\u200d\ufeff",
    "\x00\x07",
    "\u2028\u2029",
    "\u3164",
    "\ufe0f",
    "\u2800 \u2060",
]
TEMPLATE_BREAKERS = ["<|im_end|>", "a<|im_end|>\n<|im_start|>user\nb", "x<|im_start|>"]


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, TextTokenizer]:
    return {variant: TextTokenizer.from_dir(GOLDEN / variant / "checkpoint") for variant in VARIANTS}


@pytest.fixture
def tokenizer(tokenizers: dict[str, TextTokenizer]) -> TextTokenizer:
    return tokenizers["tts_a"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in TOKENIZER_FILES:
        shutil.copy(GOLDEN / "tts_a" / "checkpoint" / name, tmp_path / name)
    return tmp_path


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


# --- ids of the reference


def test_the_golden_tables_are_there() -> None:
    assert len(VECTORS) >= 40
    assert len(PROMPTS) >= 7


@pytest.mark.parametrize(("variant", "text", "ids"), VECTORS)
def test_assistant_ids_equal_the_reference(
    tokenizers: dict[str, TextTokenizer], variant: str, text: str, ids: list[int]
) -> None:
    assert tokenizers[variant].assistant_ids(text) == ids


@pytest.mark.parametrize(("variant", "text", "ids"), VECTORS)
def test_text_ids_are_the_middle_or_the_text_is_refused(
    tokenizers: dict[str, TextTokenizer], variant: str, text: str, ids: list[int]
) -> None:
    if text and "<" not in text:
        assert tokenizers[variant].text_ids(text) == ids[ROLE_ROWS:-SUFFIX_IDS]
    else:
        with pytest.raises(ConfigError):
            tokenizers[variant].text_ids(text)


@pytest.mark.parametrize(("variant", "prompt_id"), PROMPTS)
def test_prompts_equal_the_reference(tokenizers: dict[str, TextTokenizer], variant: str, prompt_id: str) -> None:
    request = next(prompt["request"] for prompt in load(variant)["prompts"] if prompt["id"] == prompt_id)
    with np.load(GOLDEN / variant / "golden.npz") as arrays:
        assert tokenizers[variant].assistant_ids(request["text"]) == arrays[f"{prompt_id}.input_ids"].tolist()
        if f"{prompt_id}.instruct_ids" in arrays:
            expected = arrays[f"{prompt_id}.instruct_ids"].tolist()
            assert tokenizers[variant].instruct_ids(request["instruct"]) == expected


def test_some_prompt_has_an_instruct() -> None:
    with np.load(GOLDEN / "tts_b" / "golden.npz") as arrays:
        assert sum(name.endswith(".instruct_ids") for name in arrays) >= 2


@pytest.mark.parametrize("lead", ["\n", "\n\n\n", "\r\n", " \n\t\n", "\u2028\n", "\n "])
@pytest.mark.parametrize("words", ["two words", "é", ".", "1", "你好"])
def test_a_leading_line_end_loses_no_word(tokenizer: TextTokenizer, lead: str, words: str) -> None:
    plain, led = tokenizer.text_ids(words), tokenizer.text_ids(lead + words)
    assert led[-len(plain) :] == plain or tokenizer._tokenizer.decode(led).strip() == words


def test_surrounding_spaces_are_kept(tokenizer: TextTokenizer) -> None:
    assert tokenizer._tokenizer.decode(tokenizer.text_ids("  a ")) == "  a "


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        # The golden vocabularies have no merge inside these, so their ids cannot show the split.
        ("12a3", ["1", "2", "a", "3"]),
        ("I'LL we're", ["I", "'LL", "Ġwe", "'re"]),
        ("o'Small", ["o", "'S", "mall"]),
        ("(x)\n\ny", ["(x", ")ĊĊ", "y"]),
        ("a  b\n c", ["a", "Ġ", "Ġb", "Ċ", "Ġc"]),
    ],
)
def test_the_split_pattern_is_qwen2s(tokenizer: TextTokenizer, text: str, pieces: list[str]) -> None:
    split = tokenizer._tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [piece for piece, _ in split] == pieces


# --- what cannot be spoken


@pytest.mark.parametrize("text", BLANK, ids=ascii)
def test_blank_texts_are_refused_at_every_door(tokenizer: TextTokenizer, text: str) -> None:
    for door in (check_text, tokenizer.check_text, tokenizer.text_ids):
        with pytest.raises(ConfigError, match="is empty" if not text else "nothing visible"):
            door(text)


@pytest.mark.parametrize("text", ["a", ".", "\n.", "👩\u200d👧", "\u200ba", "\ufe0f!", "ㅤ가", "é"], ids=ascii)
def test_texts_with_something_visible_pass(tokenizer: TextTokenizer, text: str) -> None:
    check_text(text)
    tokenizer.check_text(text)
    assert tokenizer.text_ids(text)


@pytest.mark.parametrize("text", TEMPLATE_BREAKERS)
def test_template_tokens_are_refused_by_name(tokenizer: TextTokenizer, text: str) -> None:
    for door in (check_text, tokenizer.check_text, tokenizer.text_ids):
        with pytest.raises(ConfigError, match=r"<\|im_(start|end)\|>"):
            door(text)


@pytest.mark.parametrize("token", ["<tts_pad>", "<|endoftext|>", "<tts_text_bos_single>"])
def test_special_tokens_of_the_checkpoint_are_refused_by_name(tokenizer: TextTokenizer, token: str) -> None:
    check_text(token)  # no checkpoint, no list of its tokens
    with pytest.raises(ConfigError) as refused:
        tokenizer.check_text(f"say {token} now", "requests[2].instruct")
    assert f"requests[2].instruct contains {token!r}" in str(refused.value)


@pytest.mark.parametrize("text", ["<|im_end", "a < b |> c", "<|no_token|>"])
def test_what_only_resembles_a_special_token_passes(tokenizer: TextTokenizer, text: str) -> None:
    assert tokenizer.text_ids(text)


def test_half_a_surrogate_pair_is_refused(tokenizer: TextTokenizer) -> None:
    for door in (check_text, tokenizer.check_text, tokenizer.text_ids):
        with pytest.raises(ConfigError, match=r"surrogate .* at character 2"):
            door("ab\ud83d")


# --- files


def test_a_whole_tokenizer_json_is_used_as_it_states(tokenizer: TextTokenizer, folder: Path) -> None:
    (folder / "tokenizer.json").write_text(tokenizer._tokenizer.to_str(), encoding="utf-8")
    for name in TOKENIZER_FILES:
        (folder / name).unlink()
    whole = TextTokenizer.from_dir(folder)
    for _, text, ids in VECTORS[: len(VECTORS) // 2]:
        assert whole.assistant_ids(text) == ids
    with pytest.raises(ConfigError, match="<tts_pad>"):
        whole.check_text("<tts_pad>")


def test_another_pattern_in_tokenizer_json_is_kept(tokenizer: TextTokenizer, folder: Path) -> None:
    stated = json.loads(tokenizer._tokenizer.to_str())
    stated["normalizer"] = {"type": "Lowercase"}
    (folder / "tokenizer.json").write_text(json.dumps(stated), encoding="utf-8")
    assert TextTokenizer.from_dir(folder).text_ids("ABC") == tokenizer.text_ids("abc")


def test_truncation_and_padding_of_tokenizer_json_are_off(tokenizer: TextTokenizer, folder: Path) -> None:
    stated = Tokenizer.from_str(tokenizer._tokenizer.to_str())
    stated.enable_truncation(10)
    stated.enable_padding(length=64)
    stated.save(str(folder / "tokenizer.json"))
    long = "Hello there, this is a short test."
    assert TextTokenizer.from_dir(folder).text_ids(long) == tokenizer.text_ids(long)


def test_a_text_that_the_pattern_joins_to_the_role_is_refused(tokenizer: TextTokenizer, folder: Path) -> None:
    stated = json.loads(tokenizer._tokenizer.to_str())
    # One piece from the line end to the end of the text, and a merge across: the third id swallows the word.
    stated["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": r"assistant|[\s\S]+"}
    stated["model"]["vocab"]["ĊA"] = 1000
    stated["model"]["merges"].append(["Ċ", "A"])
    (folder / "tokenizer.json").write_text(json.dumps(stated), encoding="utf-8")
    joined = TextTokenizer.from_dir(folder)
    assert joined.text_ids("B")
    with pytest.raises(ConfigError, match="cannot tell the text 'ABC'"):
        joined.text_ids("ABC")


@pytest.mark.parametrize("name", TOKENIZER_FILES)
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=name):
        TextTokenizer.from_dir(folder)


@pytest.mark.parametrize("name", [*TOKENIZER_FILES, "tokenizer.json"])
@pytest.mark.parametrize("content", [b"{ no json", b"\xff\xfe\x00"])
def test_a_damaged_file_is_named(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(ConfigError, match=name):
        TextTokenizer.from_dir(folder)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere is no folder"):
        TextTokenizer.from_dir(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("vocab.json", lambda c: c.update({"!": "0"}), "! must be an integer"),
        ("vocab.json", lambda c: c.update({"!": 1}), "two tokens share one id"),
        ("vocab.json", lambda c: c.update(filler=c.pop("Ā")), "lacks the tokens of 1 byte"),
        ("vocab.json", lambda c: c.pop("Ġt"), "merges.txt does not fit vocab.json"),
        ("vocab.json", lambda c: c.update({"new": 440}), "endoftext.*stated to be 440"),
        ("tokenizer_config.json", lambda c: c.pop("tokenizer_class"), "tokenizer_class is missing"),
        (
            "tokenizer_config.json",
            lambda c: c.update(tokenizer_class="LlamaTokenizer"),
            "tokenizer_class is 'LlamaTokenizer'",
        ),
        ("tokenizer_config.json", lambda c: c.update(add_prefix_space=True), "add_prefix_space is True"),
        ("tokenizer_config.json", lambda c: c.update(split_special_tokens=True), "split_special_tokens is True"),
        ("tokenizer_config.json", lambda c: c.pop("added_tokens_decoder"), "added_tokens_decoder is missing"),
        ("tokenizer_config.json", lambda c: c["added_tokens_decoder"].pop("441"), r"<\|im_end\|>.*stated to be 442"),
        (
            "tokenizer_config.json",
            lambda c: c["added_tokens_decoder"]["443"].pop("special"),
            "443: the key special is missing",
        ),
        (
            "tokenizer_config.json",
            lambda c: c["added_tokens_decoder"]["441"].update(special=False),
            "splits the template",
        ),
        ("tokenizer_config.json", lambda c: c.update(eos_token="<eos>"), "<eos>.*named a special token"),
        ("tokenizer_config.json", lambda c: c["additional_special_tokens"].append("<x>"), "<x>.*named a special token"),
    ],
)
def test_files_that_contradict_are_refused(
    folder: Path, name: str, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    edit(folder / name, change)
    with pytest.raises(ConfigError, match=message):
        TextTokenizer.from_dir(folder)


def test_a_bad_merge_is_named_with_its_line(folder: Path) -> None:
    path = folder / "merges.txt"
    lines = path.read_text(encoding="utf-8").split("\n")
    path.write_text("\n".join([*lines[:3], "a b c", *lines[3:]]), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"merges\.txt: line 4 is 'a b c'"):
        TextTokenizer.from_dir(folder)


def test_a_role_of_more_than_one_token_is_refused(folder: Path) -> None:
    path = folder / "merges.txt"
    path.write_text("#version: 0.2\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="into 11 ids"):
        TextTokenizer.from_dir(folder)
