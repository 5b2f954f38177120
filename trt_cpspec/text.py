"""Text to token ids: the tokenizer of a Qwen3-TTS checkpoint, the two templates of speech, and what can be spoken."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Encoding, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from .config import Section
from .errors import ConfigError

TEXT_PREFIX = "<|im_start|>assistant\n"
TEXT_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"
INSTRUCT_PREFIX = "<|im_start|>user\n"
INSTRUCT_SUFFIX = "<|im_end|>\n"
TEMPLATE_TOKENS = ("<|im_start|>", "<|im_end|>")

ROLE_ROWS = 3
"""Ids of TEXT_PREFIX; they make the three role rows of the Talker's prefill."""

SUFFIX_IDS = 5
"""Ids of TEXT_SUFFIX; none of them is spoken."""

# The split pattern of every Qwen2 tokenizer that comes without tokenizer.json; no file of a checkpoint states it.
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MAX_GROWING, _MAX_CONTENT = 4, 8
"""Steps of a tokenizer that may make a text longer, and by how many characters each; a Qwen tokenizer has none."""

_TOKENIZER_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast")

# Space, line, paragraph separators; control and format characters (zero-width ones and the BOM among them).
_BLANK_CATEGORIES = frozenset({"Zs", "Zl", "Zp", "Cc", "Cf"})
# Invisible although their category is a letter's, a mark's or a symbol's: grapheme joiner, Hangul fillers, Khmer
# inherent vowels, Braille blank, variation selectors.
_BLANK_OTHERS = frozenset(
    map(
        chr,
        (
            0x034F,
            0x115F,
            0x1160,
            0x17B4,
            0x17B5,
            0x2800,
            0x3164,
            0xFFA0,
            *range(0xFE00, 0xFE10),
            *range(0xE0100, 0xE01F0),
        ),
    )
)


def check_text(text: str, what: str = "the text") -> None:
    """Refuse a text that no tokenizer could make speech of; TextTokenizer.check_text looks for its own tokens as well.

    Parameters
    ----------
    text : str
    what : str
        What the messages call it, for example ``requests[3]: the assistant message``.

    Raises
    ------
    ConfigError
        Nothing visible in it (empty, or only spaces, line ends, control, format and zero-width characters), half a
        UTF-16 pair, or a token of the chat template.
    """
    if all(_is_blank(character) for character in text):
        shown = f"holds nothing visible: {text!a:.80}" if text else "is empty"
        raise ConfigError(f"{what} {shown}; give at least one character that can be spoken")
    check_unicode(text, what)
    for token in TEMPLATE_TOKENS:
        if token in text:
            raise _special_token_error(what, token)


def check_unicode(text: str, what: str) -> None:
    r"""Refuse half a UTF-16 pair (JSON can write one: ``\ud83d``): it has no bytes to tokenize or to echo."""
    for index, character in enumerate(text):
        if unicodedata.category(character) == "Cs":
            raise ConfigError(
                f"{what} holds an unpaired surrogate {character!a} at character {index}; it is no valid text"
            )


def _is_blank(character: str) -> bool:
    return unicodedata.category(character) in _BLANK_CATEGORIES or character in _BLANK_OTHERS


def check_no_special(ids: Iterable[int], special: Mapping[int, str], what: str) -> None:
    """Refuse a text in whose ids a special token stands: it would break the template around it."""
    for token_id in ids:
        if token_id in special:
            raise _special_token_error(what, special[token_id])


def _special_token_error(what: str, token: str) -> ConfigError:
    return ConfigError(f"{what} contains {token!r}, a special token that would break the template; take it out")


class TextTokenizer:
    """The text tokenizer of one checkpoint, with the templates of speech.

    Parameters
    ----------
    tokenizer : tokenizers.Tokenizer
        Changed: truncation and padding that its file may state are switched off, as the reference does for one text.
    where : str
        What the messages call it, its folder as a rule.

    Raises
    ------
    ConfigError
        It has no token for some byte, or splits the template otherwise than into 3 role ids and 5 closing ids.
    """

    def __init__(self, tokenizer: Tokenizer, where: str) -> None:
        self._where = where
        self._tokenizer = checked_tokenizer(tokenizer, where)
        self._special = special_tokens(tokenizer)
        self._prefix = self._template_ids(TEXT_PREFIX, ROLE_ROWS, where)
        self._suffix = self._template_ids(TEXT_SUFFIX, SUFFIX_IDS, where)

    @classmethod
    def from_dir(cls, folder: Path) -> TextTokenizer:
        """Read ``tokenizer.json``, or else ``vocab.json``, ``merges.txt`` and ``tokenizer_config.json``.

        A ``tokenizer.json`` is taken as it states itself. The other three make what the reference makes of them:
        byte-level BPE behind NFC and Qwen2's split pattern, whatever the size of the vocabulary.

        Raises
        ------
        ConfigError
            A file is missing, damaged, or contradicts another; the message names it.
        """
        return cls(read_tokenizer(folder), str(folder))

    def assistant_ids(self, text: str) -> list[int]:
        """Return the ids of the whole assistant template around a text; nothing is checked.

        The first ROLE_ROWS of them are the role rows of the prefill. With a text that begins with a newline the third
        differs from the template's, here as in the reference; see ``text_ids``.
        """
        return self._encode(f"{TEXT_PREFIX}{text}{TEXT_SUFFIX}").ids

    def instruct_ids(self, instruct: str) -> list[int]:
        """Return the ids of the instruct template; every one makes a row. Nothing is checked."""
        return self._encode(f"{INSTRUCT_PREFIX}{instruct}{INSTRUCT_SUFFIX}").ids

    def text_ids(self, text: str) -> list[int]:
        r"""Return the ids that are spoken: those of the template less 3 in front and 5 behind.

        Newlines at the start of a text melt into the one that ends the role (``"\n" + "\nHi"`` gives the token
        ``"\n\n"``), so they go to the third role row and are not among these ids. The reference does the same, its ids
        are kept, and no word is lost: the split pattern never joins a line end to anything but white space. That is
        not taken on trust (a ``tokenizer.json`` may state another pattern): a text that loses more is refused.
        Stripping the text would give ids that differ from the reference's.

        Raises
        ------
        ConfigError
            ``check_text`` refuses the text, or it cannot be told from the template.
        """
        self.check_text(text)
        encoding = self._encode(f"{TEXT_PREFIX}{text}{TEXT_SUFFIX}")
        ids = encoding.ids
        role_end = encoding.offsets[ROLE_ROWS - 1][1]
        lost = text[: max(0, role_end - len(TEXT_PREFIX))].strip()
        framed = ids[: ROLE_ROWS - 1] == self._prefix[:-1] and ids[-SUFFIX_IDS:] == self._suffix
        spoken = ids[ROLE_ROWS:-SUFFIX_IDS]
        if lost or not framed or not spoken:
            raise ConfigError(
                f"the tokenizer cannot tell the text {text!r:.80} from the speech template; begin it with a word"
            )
        return spoken

    def check_text(self, text: str, what: str = "the text") -> None:
        """Refuse what cannot be spoken: blank, invalid, or with any special token of this tokenizer in it.

        It serves an instruct too. A special token is looked for in the ids, so what counts is what the tokenizer reads.
        """
        check_text(text, what)
        check_no_special(self._encode(text).ids, self._special, what)

    def _encode(self, text: str) -> Encoding:
        with refusing(f"{self._where}: the tokenizer cannot read the text"):
            return self._tokenizer.encode(text)

    def _template_ids(self, template: str, count: int, where: str) -> list[int]:
        ids = self._encode(template).ids
        marks = [self._special[i] for i in ids if i in self._special]
        if len(ids) != count or marks != re.findall(r"<\|im_\w+\|>", template):
            raise ConfigError(
                f"{where}: the tokenizer splits the template {template!r} into {len(ids)} ids with the special tokens "
                f"{marks}; a Qwen3-TTS tokenizer gives {count} ids and has <|im_start|> and <|im_end|>"
            )
        return ids


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn what the tokenizer's bindings raise (bare exceptions, and panics of their Rust side) into a ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ConfigError(f"{what}: {error!s:.300}") from error


def read_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer of a folder (see :meth:`TextTokenizer.from_dir`)."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; give the one with the tokenizer's files")
    whole = folder / "tokenizer.json"
    return _read_whole(whole) if whole.is_file() else _read_parts(folder)


def checked_tokenizer(tokenizer: Tokenizer, where: str) -> Tokenizer:
    """Switch off truncation and padding, and refuse a vocabulary without a token for every byte."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _check_bytes(tokenizer, where)
    return tokenizer


def special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Return id and content of the special tokens."""
    return {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}


def _read_whole(path: Path) -> Tokenizer:
    with refusing(f"{path} cannot be read as a tokenizer"):
        text = path.read_text(encoding="utf-8")
        _check_growth(json.loads(text), str(path))
        return Tokenizer.from_str(text)


def _check_growth(document: Any, where: str) -> None:
    """Refuse steps that make a text longer again and again: a few lines of them would fill any memory."""
    steps = [document] if isinstance(document, dict) else []
    found = []
    for step in steps:  # which grows
        children = [child for value in step.values() for child in (value if isinstance(value, list) else [value])]
        steps += [child for child in children if isinstance(child, dict)]
        if step.get("type") in ("Replace", "Prepend"):
            found.append(step.get("content", step.get("prepend")))
    if len(found) > _MAX_GROWING or any(len(str(content)) > _MAX_CONTENT for content in found):
        raise ConfigError(
            f"{where}: {len(found)} steps replace or prepend text; at most {_MAX_GROWING} of up to {_MAX_CONTENT} "
            f"characters are possible"
        )


def _read_parts(folder: Path) -> Tokenizer:
    config = Section.from_file(folder / "tokenizer_config.json")
    _check_config(config)
    vocab, merges = _read_vocab(folder / "vocab.json"), _read_merges(folder / "merges.txt")
    with refusing(f"{folder / 'merges.txt'} does not fit vocab.json"):  # a merge of tokens that the vocabulary lacks
        model = BPE(vocab=vocab, merges=merges)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, config)
    return tokenizer


def _check_config(config: Section) -> None:
    """Refuse settings under which the reference would give other ids than this reader."""
    name = config.text("tokenizer_class")
    if name not in _TOKENIZER_CLASSES:
        raise ConfigError(
            f"{config.where}: tokenizer_class is {name!r}; without a tokenizer.json only "
            f"{' and '.join(_TOKENIZER_CLASSES)} can be read"
        )
    for key in ("add_prefix_space", "split_special_tokens"):
        if config.has(key):
            config.require(key, False)


def _read_vocab(path: Path) -> dict[str, int]:
    section = Section.from_file(path)
    vocab = {token: section.integer(token, minimum=0) for token in section.values}
    if len(set(vocab.values())) != len(vocab):
        raise ConfigError(f"{path}: two tokens share one id")
    return vocab


def _read_merges(path: Path) -> list[tuple[str, str]]:
    if not path.is_file():
        raise ConfigError(f"{path} cannot be read: there is no such file")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    merges = []
    for number, line in enumerate(lines, start=1):
        parts = line.split()
        if not parts or (number == 1 and line.startswith("#version:")):
            continue
        if len(parts) != 2:
            raise ConfigError(f"{path}: line {number} is {line!r:.80}, a merge is two tokens with a space between")
        merges.append((parts[0], parts[1]))
    return merges


def _add_tokens(tokenizer: Tokenizer, config: Section) -> None:
    """Add the tokens of ``added_tokens_decoder`` in the order of their ids, and check that each got the stated one."""
    section = config.section("added_tokens_decoder")
    for key in sorted(section.values, key=lambda key: (len(key), key)):
        entry = section.section(key)
        token = entry.text("content")
        flags = {name: entry.boolean(name) for name in ("lstrip", "normalized", "rstrip", "single_word", "special")}
        with refusing(f"{section.where}: {token!r:.80} cannot be added"):
            tokenizer.add_tokens([AddedToken(token, **flags)])
        if str(tokenizer.token_to_id(token)) != key:
            raise ConfigError(
                f"{section.where}: {token!r} is stated to be {key}, but after vocab.json and the tokens before it "
                f"it is {tokenizer.token_to_id(token)}; one of the files is of another checkpoint"
            )
    _check_named_tokens(tokenizer, config)


def _check_named_tokens(tokenizer: Tokenizer, config: Section) -> None:
    """Refuse a token that is named special and has no id: the reference would number it behind the embedding table."""
    named = [config.values.get(key) for key in ("bos_token", "eos_token", "pad_token", "unk_token")]
    extra = config.values.get("additional_special_tokens") or []
    for token in (*named, *(extra if isinstance(extra, list) else [extra])):
        content = token.get("content") if isinstance(token, dict) else token
        if content is not None and (not isinstance(content, str) or tokenizer.token_to_id(content) is None):
            raise ConfigError(
                f"{config.where}: {json.dumps(content)} is named a special token and has no id in added_tokens_decoder"
            )


def _check_bytes(tokenizer: Tokenizer, where: str) -> None:
    """Refuse a vocabulary without a token for every byte: the missing ones would vanish from the text in silence."""
    missing = sorted(letter for letter in pre_tokenizers.ByteLevel.alphabet() if tokenizer.token_to_id(letter) is None)
    if missing:
        raise ConfigError(
            f"{where}: the vocabulary lacks the tokens of {len(missing)} byte(s), the first is {missing[0]!r}; "
            "vocab.json or tokenizer.json is damaged, or not of a byte-level tokenizer"
        )
