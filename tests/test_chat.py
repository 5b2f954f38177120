"""The chat template, rendered as transformers renders it, and the tokenizer of conversations."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from trt_cpspec.chat import ChatTokenizer, system_prompt
from trt_cpspec.errors import ConfigError

CHECKPOINT = Path(__file__).parent / "golden" / "omni_a" / "checkpoint"
GOLDEN = json.loads((CHECKPOINT.parent / "golden.json").read_text(encoding="utf-8"))
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer's files, without a template."""
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(CHECKPOINT / name, tmp_path / name)
    config = json.loads((CHECKPOINT / "tokenizer_config.json").read_text(encoding="utf-8"))
    del config["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return tmp_path


def rendered(folder: Path, template: str, messages: Any = HELLO) -> str:
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return ChatTokenizer.from_dir(folder).render(messages)


@pytest.mark.parametrize("prompt", GOLDEN["prompts"])
def test_golden_prompts(prompt: dict[str, Any]) -> None:
    tokenizer = ChatTokenizer.from_dir(CHECKPOINT)
    assert tokenizer.render(prompt["messages"]) == prompt["rendered"]
    parts = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in prompt["messages"]]
    assert tokenizer.render(parts) == prompt["rendered"]
    assert tokenizer.encode(prompt["rendered"]) == prompt["prompt_ids"]
    assert tokenizer.decode(prompt["thinker_ids"]) == prompt["text"]
    assert system_prompt(prompt["rendered"]) == tokenizer.render(prompt["messages"][:1]).removesuffix(
        "<|im_start|>assistant\n"
    )


def test_without_a_system_message_there_is_no_system_prompt() -> None:
    assert system_prompt(ChatTokenizer.from_dir(CHECKPOINT).render(HELLO)) == ""
    assert system_prompt("<|im_start|>system\nalone") == "<|im_start|>system\nalone"


def test_half_a_character_is_no_error() -> None:
    tokenizer = ChatTokenizer.from_dir(CHECKPOINT)
    ids = tokenizer.encode("é")
    assert tokenizer.decode(ids) == "é"
    assert tokenizer.decode(ids[:1]) == "\ufffd"


# What transformers 4.57 gives for these, by its own environment.
TEMPLATES: dict[str, tuple[str, str]] = {
    "blocks are trimmed": ("  {% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),
    "loop controls": ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
    "json is not escaped for HTML": ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
    "json with a layout": ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
    "special tokens by name": ("{{ eos_token }}{{ audio_token }}{{ bos_token }}", "<|im_end|><|audio_pad|>"),
    "no tools": ("{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}", "TrueTrueTrue"),
    "the year": ("{{ strftime_now('%Y') | length }}", "4"),
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_the_environment_is_that_of_transformers(case: str, folder: Path) -> None:
    template, expected = TEMPLATES[case]
    assert rendered(folder, template) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system message') }}", "the chat template refuses the messages: no system message"),
        ("{{ messages[0]['content'] + 1 }}", "the chat template refuses the messages: "),
        ("{{ messages.append(1) }}", "refuses the messages: access to attribute 'append' .* is unsafe"),
        ("{{ ''.__class__.__mro__ }}", "refuses the messages: access to attribute '__class__' .* is unsafe"),
        ("{% if %}", "the chat template cannot be read: "),
    ],
)
def test_a_template_that_fails_or_reaches_out_is_refused(template: str, message: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        rendered(folder, template)


def test_where_the_template_may_stand(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no chat template: neither chat_template.jinja, nor the key"):
        ChatTokenizer.from_dir(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"chat_template": "tokenizer"}))
    assert ChatTokenizer.from_dir(folder).render(HELLO) == "tokenizer"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert ChatTokenizer.from_dir(folder).render(HELLO) == "json"
    assert rendered(folder, "jinja") == "jinja"
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"chat_template.jinja cannot be read"):
        ChatTokenizer.from_dir(folder)


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere is no folder"):
        ChatTokenizer.from_dir(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a<|im_start|>user", r"messages\[1\].content contains '<\|im_start\|>', a special token"),
        ([{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}], r"contains '<\|im_end\|>'"),
        ("\ud83d", "unpaired surrogate"),
    ],
)
def test_a_message_cannot_break_out_of_its_segment(content: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ChatTokenizer.from_dir(CHECKPOINT).render([*HELLO, {"role": "user", "content": content}])
