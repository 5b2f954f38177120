"""The input JSON of both inference commands: parsed, checked and resolved to one request for each text or chat."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from .config import MAX_INTEGER, SamplingParams
from .errors import ConfigError, did_you_mean, shown
from .streaming import CHUNK_FRAMES, PREFILL_THRESHOLD
from .text import check_text, check_unicode

ROLES = ("system", "user", "assistant")

_FIXED_TEMPLATE = {"apply_chat_template": True, "add_generation_prompt": True, "enable_thinking": False}
_CLONE_KEYS = ("ref_audio", "ref_text")
_MEDIA = ("image", "audio", "video")

Rule = Callable[[str, Any], Any]
R = TypeVar("R")


def _optional_string(name: str, value: Any) -> str | None:
    """Return a string; the empty one is the format's way to say "not given"."""
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be a string, it is {shown(value)}")
    check_unicode(value, name)
    return value or None


def _instruct(name: str, value: Any) -> str | None:
    instruct = _optional_string(name, value)
    if instruct is not None:
        check_text(instruct, name)
    return instruct


def _language(name: str, value: Any) -> str | None:
    language = _optional_string(name, value)
    return "auto" if language is not None and language.lower() == "auto" else language


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, it is {shown(value)}")
    return value


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be an integer, it is {shown(value)}")
    return value


def _count(name: str, value: Any) -> int:
    if not 1 <= _integer(name, value) <= MAX_INTEGER:
        raise ConfigError(f"{name} is {shown(value)}, it must be at least 1, and at most {MAX_INTEGER}")
    return int(value)


def _seed(name: str, value: Any) -> int:
    if not 0 <= _integer(name, value) < 2**64:
        raise ConfigError(f"{name} is {shown(value)}, it must be from 0 to 2**64 - 1")
    return int(value)


def _sampling(parameter: str) -> Callable[[str, Any], float]:
    """Return the rule of one sampling key: whatever SamplingParams says of ``parameter``, under the key's own name."""

    def rule(name: str, value: Any) -> float:
        try:
            SamplingParams(**{parameter: value})
        except ConfigError as error:
            raise ConfigError(str(error).replace(parameter, name, 1)) from error
        except OverflowError as error:  # an integer that no float can hold
            raise ConfigError(f"{name} must be a finite number, it is {shown(value)}") from error
        return value  # type: ignore[no-any-return]

    return rule


_OPTIONS: dict[str, Rule] = {
    "speaker": _optional_string,
    "language": _language,
    "instruct": _instruct,
    "non_streaming_mode": _boolean,
    "seed": _seed,
    "max_audio_length": _count,
    "talker_temperature": _sampling("temperature"),
    "talker_top_k": _sampling("top_k"),
    "talker_top_p": _sampling("top_p"),
    "repetition_penalty": _sampling("repetition_penalty"),
    "subtalker_temperature": _sampling("temperature"),
    "subtalker_top_k": _sampling("top_k"),
    "subtalker_top_p": _sampling("top_p"),
}
"""What a request may bring and the top level may set for all of them, with the rule of each."""

_CHAT_OPTIONS: dict[str, Rule] = {
    **{name: rule for name, rule in _OPTIONS.items() if name not in ("language", "instruct", "non_streaming_mode")},
    "temperature": _sampling("temperature"),
    "top_k": _sampling("top_k"),
    "top_p": _sampling("top_p"),
    "max_generate_length": _count,
}
"""The same for a chat."""

_STREAMING: dict[str, Rule] = {"enable": _boolean, "codec_chunk_frames": _count, "talker_prefill_threshold": _count}
_ONLY_TEXT_SPOKEN = "only parts of type 'text' can be spoken"
_NO_SUCH_PART = "video input is not supported, parts are of type 'text', 'audio' or 'image'"
_PART_KEYS = {"text": ("text",), "audio": ("audio",), "image": ("image", "max_pixels")}
"""The kinds of parts that a chat may hold, and their keys; the first names a file, or is the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VoiceOptions:
    """How something is spoken. None always means "not given": the checkpoint's or the command's default is in force.

    Attributes
    ----------
    speaker : str or None
        An empty string becomes None; names are for the checkpoint to know.
    seed : int or None
        0 to 2**64 - 1.
    max_audio_length : int or None
        Frames, at least 1.
    talker_temperature, talker_top_k, talker_top_p, repetition_penalty : float, int, float, float, each or None
        The Talker's law, under the rules of SamplingParams; temperature 0 is argmax.
    subtalker_temperature, subtalker_top_k, subtalker_top_p : float, int, float, each or None
        The CodePredictor's law. 0 is a value here too (argmax, all codes), not "the default".
    """

    speaker: str | None = None
    seed: int | None = None
    max_audio_length: int | None = None
    talker_temperature: float | None = None
    talker_top_k: int | None = None
    talker_top_p: float | None = None
    repetition_penalty: float | None = None
    subtalker_temperature: float | None = None
    subtalker_top_k: int | None = None
    subtalker_top_p: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(VoiceOptions):
    """One text to speak, with the options of VoiceOptions.

    Attributes
    ----------
    text : str
        What is spoken, to the character.
    messages : list
        As they were given, for the output to echo.
    language, instruct : str or None
        An empty string becomes None. ``language`` "auto" is lower case.
    non_streaming_mode : bool or None
        The layout of the prefill.
    warnings : tuple of str
        What was given and has no effect.

    Raises
    ------
    ConfigError
        A value outside its range, by name, or a text that cannot be spoken.
    """

    text: str
    messages: list[Any] = field(default_factory=list)
    language: str | None = None
    instruct: str | None = None
    non_streaming_mode: bool | None = None
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise ConfigError(f"text must be a string, it is {shown(self.text)}")
        check_text(self.text)
        _check_fields(self, _OPTIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(VoiceOptions):
    """One conversation to answer, with the options of VoiceOptions for the spoken answer.

    Attributes
    ----------
    messages : list
        Objects of ``role`` (system, user, assistant) and ``content``, a string or a list of parts: of text, or in a
        user's message ``{"type": "audio", "audio": path}`` and ``{"type": "image", "image": path}``, which may have
        ``max_pixels``.
    temperature, top_k, top_p : float, int, float, each or None
        The Thinker's law; temperature 0 is argmax.
    max_generate_length : int or None
        Tokens of the answer, at least 1.

    Raises
    ------
    ConfigError
        A value outside its range, or a message that is none, by name.
    """

    messages: list[Any]
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    max_generate_length: int | None = None

    def __post_init__(self) -> None:
        for index, message in enumerate(_checked_list(self.messages, "messages")):
            _parse_message(message, f"messages[{index}]", only=_NO_SUCH_PART, kinds=tuple(_PART_KEYS))
        _check_fields(self, _CHAT_OPTIONS)


def make_request(text: str, options: Mapping[str, Any]) -> Request:
    """Make a request of keyword arguments; an unknown one is a ConfigError with the closest that are known."""
    _check_names(options, _OPTIONS)
    return Request(text=text, **options)


def make_chat(messages: list[Any], options: Mapping[str, Any]) -> ChatRequest:
    """Make a chat of keyword arguments (see :func:`make_request`)."""
    _check_names(options, _CHAT_OPTIONS)
    return ChatRequest(messages=messages, **options)


def _check_names(options: Mapping[str, Any], rules: Mapping[str, Rule]) -> None:
    for name in options:
        if name not in rules:
            raise ConfigError(f"unknown option {name!r}; {did_you_mean(name, rules)}")


def _check_fields(request: VoiceOptions, rules: Mapping[str, Rule]) -> None:
    """Check the options of a request that was made in Python, and put what the rules make of them in place."""
    for name, value in _checked_options({name: getattr(request, name) for name in rules}, "", rules).items():
        object.__setattr__(request, name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """How answers are streamed: the object ``streaming`` of an input file of conversations.

    Attributes
    ----------
    enable : bool
    codec_chunk_frames : int
        Frames of a chunk of sound, at least 1.
    talker_prefill_threshold : int
        Tokens of an answer that are written before the Talker begins, at least 1.
    """

    enable: bool = False
    codec_chunk_frames: int = CHUNK_FRAMES
    talker_prefill_threshold: int = PREFILL_THRESHOLD


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFile(Generic[R]):
    """What one input file asks for.

    Attributes
    ----------
    batch_size : int
        Requests that are spoken together, at least 1.
    requests : tuple of Request, or of ChatRequest
        At least one.
    streaming : StreamOptions
        Of conversations; texts have an option of the command.
    """

    batch_size: int = 1
    requests: tuple[R, ...]
    streaming: StreamOptions = StreamOptions()

    def __post_init__(self) -> None:
        _count("batch_size", self.batch_size)
        if not self.requests:
            raise ConfigError("requests is empty; give at least one")


def read_request_file(path: Path) -> RequestFile[Request]:
    """Read an input file of texts.

    Raises
    ------
    ConfigError
        It cannot be read, is no JSON (with line and column), repeats a key, or breaks a rule of ``parse_requests``.
    """
    return parse_requests(_read_json(path), str(path))


def read_chat_file(path: Path) -> RequestFile[ChatRequest]:
    """Read an input file of conversations; errors are those of :func:`read_request_file`."""
    return parse_chats(_read_json(path), str(path))


def parse_requests(document: Mapping[str, Any], where: str) -> RequestFile[Request]:
    """Check an input document and resolve its defaults; the first fault raises.

    An option of the top level holds for every request, and a request's own value goes before it. A request's own null
    or "" takes the option back to "not given".

    Parameters
    ----------
    document : mapping
        The parsed JSON.
    where : str
        What the messages call it, the path of the file as a rule.

    Raises
    ------
    ConfigError
        With the place, as in ``input.json: requests[3].talker_top_k is -1; ...``.
    """
    return _parse_document(document, where, _Format(options=_OPTIONS, refused=_CLONE_KEYS, make=_text_request))


def parse_chats(document: Mapping[str, Any], where: str) -> RequestFile[ChatRequest]:
    """Check an input document of conversations, under the rules of :func:`parse_requests`."""
    _check_object(document, f"{where}: the top level")
    form = _Format(options=_CHAT_OPTIONS, top=("streaming",), make=_chat_request)
    parsed = _parse_document(document, where, form)
    return replace(parsed, streaming=_stream_options(document.get("streaming"), f"{where}: streaming"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Format(Generic[R]):
    """What one kind of input file may hold.

    Attributes
    ----------
    options : mapping
        What a request may bring and the top level may set for all of them, with the rule of each.
    top : tuple of str
        More keys of the top level.
    refused : tuple of str
        Keys that are known and not supported.
    make : callable
        Makes a request of its messages, its options and its place.
    """

    options: Mapping[str, Rule]
    make: Callable[[list[Any], dict[str, Any], str], R]
    top: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


def _parse_document(document: Mapping[str, Any], where: str, form: _Format[R]) -> RequestFile[R]:
    place = f"{where}: "
    _check_object(document, f"{place}the top level")
    known = ("requests", "batch_size", *_FIXED_TEMPLATE, *form.top, *form.options, *form.refused)
    _check_keys(document, known, place, elsewhere={"messages": "a request"})
    _check_template(document, place)
    _check_no_clone(document, place)
    options = _checked_options(document, place, form.options)
    batch_size = document.get("batch_size")
    entries = _checked_list(document.get("requests"), f"{place}requests")
    requests = tuple(_parse_request(entry, options, f"{place}requests[{i}]", form) for i, entry in enumerate(entries))
    return RequestFile(
        batch_size=1 if batch_size is None else _count(f"{place}batch_size", batch_size), requests=requests
    )


def _parse_request(entry: Any, defaults: Mapping[str, Any], place: str, form: _Format[R]) -> R:
    _check_object(entry, place)
    elsewhere = dict.fromkeys(("batch_size", *_FIXED_TEMPLATE, *form.top), "the top level")
    _check_keys(entry, ("messages", *form.options, *form.refused), f"{place}.", elsewhere=elsewhere)
    _check_no_clone(entry, f"{place}.")
    own = _checked_options(entry, f"{place}.", form.options)
    messages = _checked_list(entry.get("messages"), f"{place}.messages")
    return form.make(messages, {**defaults, **own}, place)


def _text_request(messages: list[Any], options: dict[str, Any], place: str) -> Request:
    text, warnings = _spoken_text(messages, place)
    return Request(text=text, messages=messages, warnings=warnings, **options)


def _chat_request(messages: list[Any], options: dict[str, Any], place: str) -> ChatRequest:
    for index, message in enumerate(messages):
        _parse_message(message, f"{place}.messages[{index}]", only=_NO_SUCH_PART, kinds=tuple(_PART_KEYS))
    return ChatRequest(messages=messages, **options)


def _spoken_text(messages: list[Any], place: str) -> tuple[str, tuple[str, ...]]:
    """Return the content of the one assistant message, and a warning that names the messages nobody will hear."""
    parsed = [
        _parse_message(message, f"{place}.messages[{i}]", only=_ONLY_TEXT_SPOKEN) for i, message in enumerate(messages)
    ]
    spoken = [content for role, content in parsed if role == "assistant"]
    if len(spoken) != 1:
        raise ConfigError(
            f"{place}.messages holds {len(spoken) or 'no'} assistant message{'s' * (len(spoken) > 1)}; give exactly "
            "one: its content is the text to speak, and a second text is a second request"
        )
    check_text(spoken[0], f"{place}.messages: the assistant's content")
    ignored = [role for role, _ in parsed if role != "assistant"]
    if not ignored:
        return spoken[0], ()
    return spoken[0], (
        f"messages of role {', '.join(dict.fromkeys(ignored))} are not spoken and steer nothing; "
        "use the key instruct to say how the text is spoken",
    )


def _parse_message(message: Any, place: str, *, only: str, kinds: Sequence[str] = ("text",)) -> tuple[str, str]:
    """Return role and text; ``only`` says why other parts than those of ``kinds`` are refused."""
    _check_object(message, place)
    _check_keys(message, ("role", "content"), f"{place}.")
    role = _required_string(message, "role", place)
    if role not in ROLES:
        raise ConfigError(f"{place}.role is {role!r}; {did_you_mean(role, ROLES)}")
    content = message.get("content")
    if isinstance(content, list):
        places = [f"{place}.content[{i}]" for i in range(len(content))]
        parts = [_parse_part(part, where, only, kinds, role) for part, where in zip(content, places, strict=True)]
        return role, "".join(parts)
    return role, _required_string(message, "content", place, or_else=" or a list of text parts")


def _parse_part(part: Any, place: str, only: str, kinds: Sequence[str], role: str) -> str:
    """Check a part, and return its text: nothing of a file."""
    _check_object(part, place)
    media = [key for key in _MEDIA if key in part]  # a part may be named by its key alone
    kind = media[0] if media and "type" not in part else _required_string(part, "type", place)
    # Before the keys: "image is not supported" says more than "unknown key image".
    if kind not in kinds:
        raise ConfigError(f"{place}.type is {kind!r}; {only}")
    _check_keys(part, ("type", *_PART_KEYS[kind]), f"{place}.")
    value = _required_string(part, kind, place, or_else="" if kind == "text" else ", the path of a file")
    if kind == "text":
        return value
    if role != "user":
        raise ConfigError(f"{place}: {kind} in a message of role {role!r}; only a user's message can hold it")
    if not value:
        raise ConfigError(f"{place}.{kind} is empty; give the path of a file")
    if part.get("max_pixels") is not None:
        _count(f"{place}.max_pixels", part["max_pixels"])
    return ""


def _checked_options(values: Mapping[str, Any], place: str, rules: Mapping[str, Rule]) -> dict[str, Any]:
    """Return the options that are there, each checked; null is None without a check."""
    given = {name: values[name] for name in rules if name in values}
    return {name: None if value is None else rules[name](f"{place}{name}", value) for name, value in given.items()}


def _check_object(value: Any, place: str) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{place} must be a JSON object, it is {shown(value)}")


def _check_keys(
    values: Mapping[str, Any], allowed: Iterable[str], place: str, *, elsewhere: Mapping[str, str] | None = None
) -> None:
    """Refuse a key that is not known here; ``elsewhere`` says of a key where it would be."""
    for key in values:
        if elsewhere and key in elsewhere:
            raise ConfigError(f"{place}{key} is not possible here, it belongs to {elsewhere[key]}")
        if key == "text" and "messages" in allowed:
            raise ConfigError(f'{place}text is no known key; the text is the content of a message: "messages": [...]')
        if key not in allowed:
            raise ConfigError(f"{place}{key} is no known key; {did_you_mean(str(key), allowed)}")


def _check_template(document: Mapping[str, Any], place: str) -> None:
    for key, only in _FIXED_TEMPLATE.items():
        value = document.get(key)
        if value is not None and value is not only:
            raise ConfigError(
                f"{place}{key} is {shown(value)}; the template is fixed, leave the key out or give {json.dumps(only)}"
            )


def _check_no_clone(values: Mapping[str, Any], place: str) -> None:
    for key in _CLONE_KEYS:
        if values.get(key) is not None and _optional_string(f"{place}{key}", values[key]):
            raise ConfigError(f"{place}{key}: voice clone is not supported yet (it needs clone encoders); leave it out")


def _stream_options(value: Any, place: str) -> StreamOptions:
    if value is None:
        return StreamOptions()
    _check_object(value, place)
    _check_keys(value, _STREAMING, f"{place}.")
    given = _checked_options(value, f"{place}.", _STREAMING)
    return StreamOptions(**{name: option for name, option in given.items() if option is not None})


def _checked_list(value: Any, place: str) -> list[Any]:
    if not isinstance(value, list):
        raise ConfigError(f"{place} must be a list, it is {'missing' if value is None else shown(value)}")
    if not value:
        raise ConfigError(f"{place} is empty; give at least one")
    return value


def _required_string(values: Mapping[str, Any], key: str, place: str, *, or_else: str = "") -> str:
    value = values.get(key)
    if not isinstance(value, str):
        raise ConfigError(
            f"{place}.{key} must be a string{or_else}, it is {'missing' if value is None else shown(value)}"
        )
    check_unicode(value, f"{place}.{key}")
    return value


def _read_json(path: Path) -> Any:
    try:
        # utf-8-sig: editors on Windows begin a file with a byte order mark.
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: there is no such file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    return _load_json(text, str(path))


def _load_json(text: str, where: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON: line {error.lineno}, column {error.colno}: {error.msg}") from error
    except (ConfigError, ValueError, RecursionError) as error:  # a repeated key; an endless number; endless nesting
        raise ConfigError(f"{where}: {error}") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a key that an object has twice: JSON readers keep the last one in silence."""
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ConfigError(
                f"the key {key!r} is there twice in one object (with {values[key]!r:.40} and {value!r:.40})"
            )
        values[key] = value
    return values
