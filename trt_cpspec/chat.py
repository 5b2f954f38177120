"""Conversations to token ids and back: the chat template of a Qwen3-Omni checkpoint, and its tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer

from .config import Section
from .errors import ConfigError
from .sandbox import TemplateEnvironment, render
from .text import check_no_special, check_unicode, checked_tokenizer, read_tokenizer, refusing, special_tokens

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_CONFIGS = ("chat_template.json", "tokenizer_config.json")
"""Where else a template may stand, under the key ``chat_template``; the first that is there counts."""

SEGMENT_START = "<|im_start|>"
SYSTEM_START = f"{SEGMENT_START}system\n"

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTokenizer:
    """Renders conversations as ``transformers`` does, and turns text to ids and back.

    Parameters
    ----------
    tokenizer : tokenizers.Tokenizer
    template : str
        Jinja source.
    variables : dict of str to str
        Names that the template may use: the special tokens.
    where : str
        What the messages call it, its folder as a rule.

    Raises
    ------
    ConfigError
        The template is no Jinja, or the tokenizer has no token for some byte.
    """

    def __init__(self, tokenizer: Tokenizer, template: str, variables: dict[str, Any], where: str) -> None:
        self._tokenizer = checked_tokenizer(tokenizer, where)
        self._special = special_tokens(tokenizer)
        self._variables = variables
        self._where = where
        try:
            self._template = TemplateEnvironment().from_string(template)
        except (jinja2.TemplateError, RecursionError, MemoryError, SyntaxError, ValueError) as error:
            raise ConfigError(f"{where}: the chat template cannot be read: {error}") from error

    @classmethod
    def from_dir(cls, folder: Path) -> ChatTokenizer:
        """Read the tokenizer of a folder (see ``TextTokenizer.from_dir``) and its chat template.

        The template is ``chat_template.jinja``, or the key ``chat_template`` of ``chat_template.json`` or of
        ``tokenizer_config.json``.

        Raises
        ------
        ConfigError
            A file is missing or damaged; the message names it.
        """
        return cls(read_tokenizer(folder), _read_template(folder), _named_tokens(folder), str(folder))

    def render(self, messages: Sequence[Any]) -> str:
        """Return the prompt of a conversation, the header of the answer included.

        Raises
        ------
        ConfigError
            The template refuses the conversation, or a message holds a special token.
        """
        for index, message in enumerate(messages):
            self._check_content(message["content"], f"messages[{index}].content")
        try:
            return render(
                lambda: self._template.generate(
                    messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._variables
                )
            )
        except Exception as error:  # its own, and whatever Python's operators raise in it
            raise ConfigError(f"{self._where}: the chat template refuses the messages: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Return the ids of a rendered prompt, special tokens among them."""
        with refusing(f"{self._where}: the tokenizer cannot read the prompt"):
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of generated ids, without special tokens. Half a character at the end becomes U+FFFD."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def _check_content(self, content: Any, what: str) -> None:
        text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        check_unicode(text, what)
        check_no_special(self.encode(text), self._special, what)


def system_prompt(rendered: str) -> str:
    """Return the system segment that a rendered prompt begins with, or nothing."""
    if not rendered.startswith(SYSTEM_START):
        return ""
    content, _, _ = rendered[len(SYSTEM_START) :].partition(SEGMENT_START)
    return SYSTEM_START + content


def _read_template(folder: Path) -> str:
    path = folder / TEMPLATE_FILE
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
    for name in TEMPLATE_CONFIGS:
        if (folder / name).is_file() and (section := Section.from_file(folder / name)).has("chat_template"):
            return section.text("chat_template")
    raise ConfigError(
        f"{folder} has no chat template: neither {TEMPLATE_FILE}, nor the key chat_template in "
        f"{' or '.join(TEMPLATE_CONFIGS)}"
    )


def _named_tokens(folder: Path) -> dict[str, Any]:
    """Return the special tokens by name, as ``transformers`` hands them to a template."""
    path = folder / "tokenizer_config.json"
    values = Section.from_file(path).values if path.is_file() else {}
    named = {name: values.get(name) for name in _NAMED_TOKENS}
    extra = values.get("extra_special_tokens")
    named |= extra if isinstance(extra, dict) else {}
    contents = {name: token.get("content") if isinstance(token, dict) else token for name, token in named.items()}
    return {name: content for name, content in contents.items() if content is not None}
