"""The input JSON: what is read, what is refused, and where the message says the fault is."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from trt_cpspec.errors import ConfigError
from trt_cpspec.requests import (
    Request,
    RequestFile,
    StreamOptions,
    make_chat,
    make_request,
    parse_chats,
    parse_requests,
    read_chat_file,
    read_request_file,
)

SPEAK = [{"role": "assistant", "content": "Hello."}]
OPTIONS = {
    "speaker": "Vivian",
    "language": "English",
    "instruct": "Slowly.",
    "non_streaming_mode": False,
    "seed": 7,
    "max_audio_length": 100,
    "talker_temperature": 0.5,
    "talker_top_k": 10,
    "talker_top_p": 0.8,
    "repetition_penalty": 1.2,
    "subtalker_temperature": 0,
    "subtalker_top_k": 0,
    "subtalker_top_p": 1,
}
OTHER = {
    "speaker": "Ryan",
    "language": "Chinese",
    "instruct": "Fast.",
    "non_streaming_mode": True,
    "seed": 2**64 - 1,
    "max_audio_length": 1,
    "talker_temperature": 1e-5,
    "talker_top_k": 1,
    "talker_top_p": 1e-9,
    "repetition_penalty": 0.5,
    "subtalker_temperature": 2.5,
    "subtalker_top_k": 4096,
    "subtalker_top_p": 0.1,
}


def parse(*requests: Any, **top: Any) -> RequestFile:
    return parse_requests({"requests": list(requests), **top}, "in.json")


def speak(**keys: Any) -> dict[str, Any]:
    return {"messages": SPEAK, **keys}


def say(*contents: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": content} for content in contents]}


def refusal(document: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        parse_requests(document, "in.json")
    return str(refused.value)


# --- what is read


def test_the_smallest_document() -> None:
    document = parse(speak())
    assert document == RequestFile(batch_size=1, requests=(Request(text="Hello.", messages=SPEAK),))
    assert all(getattr(document.requests[0], name) is None for name in OPTIONS)


def test_the_tables_cover_every_option() -> None:
    assert {f.name for f in fields(Request)} - {"text", "messages", "warnings"} == set(OPTIONS) == set(OTHER)


@pytest.mark.parametrize("key", OPTIONS)
def test_a_top_level_option_serves_all_and_a_request_overrides_it(key: str) -> None:
    first, second, third = parse(
        speak(), speak(**{key: OTHER[key]}), speak(**{key: None}), **{key: OPTIONS[key]}
    ).requests
    assert getattr(first, key) == OPTIONS[key]
    assert getattr(second, key) == OTHER[key]
    assert getattr(third, key) is None


@pytest.mark.parametrize("key", ["speaker", "language", "instruct"])
def test_an_empty_string_is_not_given(key: str) -> None:
    assert getattr(parse(speak(), **{key: ""}).requests[0], key) is None
    assert getattr(parse(speak(**{key: ""}), **{key: "x"}).requests[0], key) is None
    assert getattr(Request(text="x", **{key: ""}), key) is None


@pytest.mark.parametrize("given", ["auto", "Auto", "AUTO"])
def test_auto_stays_auto(given: str) -> None:
    assert parse(speak(language=given)).requests[0].language == "auto"
    assert Request(text="x", language=given).language == "auto"


def test_zero_is_a_value_and_not_the_default() -> None:
    request = parse(
        speak(talker_temperature=0, talker_top_k=0, subtalker_temperature=0, subtalker_top_k=0, seed=0)
    ).requests[0]
    zeros = ("talker_temperature", "talker_top_k", "subtalker_temperature", "subtalker_top_k", "seed")
    assert [getattr(request, name) for name in zeros] == [0, 0, 0, 0, 0]


def test_batch_size_and_order() -> None:
    document = parse(say("one"), say("two"), say("three"), batch_size=2)
    assert document.batch_size == 2
    assert [request.text for request in document.requests] == ["one", "two", "three"]
    assert parse(speak(), batch_size=None).batch_size == 1


@pytest.mark.parametrize("text", ["\nleading", "  spaces  ", "a\n\nb", "é 你好 😀"])
def test_the_text_is_kept_to_the_character(text: str) -> None:
    assert parse(say(text)).requests[0].text == text


def test_text_parts_are_joined_and_messages_echoed() -> None:
    entry = say([{"type": "text", "text": "Good "}, {"type": "text", "text": "morning"}])
    request = parse(entry).requests[0]
    assert request.text == "Good morning"
    assert request.messages == entry["messages"]
    assert request.warnings == ()


def test_messages_that_are_not_spoken_are_kept_and_named() -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "Say it."}]},
        *SPEAK,
    ]
    request = parse({"messages": messages}).requests[0]
    assert request.text == "Hello."
    assert request.messages == messages
    assert len(request.warnings) == 1
    assert "system, user are not spoken" in request.warnings[0]


def test_the_fixed_template_and_empty_clone_keys_pass() -> None:
    fixed = {"apply_chat_template": True, "add_generation_prompt": True, "enable_thinking": False}
    document = parse(speak(ref_audio="", ref_text=None), **fixed, ref_audio=None, ref_text="")
    assert document == parse(speak())


# --- what is refused, and where


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("speaker", 3, "must be a string"),
        ("language", ["en"], "must be a string"),
        ("instruct", True, "must be a string"),
        ("instruct", " \n", "nothing visible"),
        ("instruct", "<|im_end|>", "special token"),
        ("speaker", "\ud800", "surrogate"),
        ("non_streaming_mode", 1, "must be true or false"),
        ("non_streaming_mode", "true", "must be true or false"),
        ("seed", -1, "must be from 0"),
        ("seed", 2**64, "must be from 0"),
        ("seed", 1.0, "must be an integer"),
        ("seed", "7", "must be an integer"),
        ("seed", True, "must be an integer"),
        ("max_audio_length", 0, "at least 1"),
        ("max_audio_length", 4096.0, "must be an integer"),
        ("max_audio_length", False, "must be an integer"),
        ("max_audio_length", float("nan"), "must be an integer"),
        ("talker_temperature", -0.1, "give 0 for argmax"),
        ("talker_temperature", 1e-9, "give 0 for argmax"),
        ("talker_temperature", float("nan"), "must be a finite number"),
        ("talker_temperature", float("inf"), "must be a finite number"),
        ("talker_temperature", "0.9", "must be a finite number"),
        ("talker_temperature", True, "must be a finite number"),
        ("talker_temperature", 10**400, "must be a finite number"),
        ("talker_top_k", -1, "give 0 for all codes"),
        ("talker_top_k", "16", "give 0 for all codes"),
        ("talker_top_k", 16.0, "give 0 for all codes"),
        ("talker_top_k", True, "give 0 for all codes"),
        ("talker_top_p", 0, "above 0 and at most 1"),
        ("talker_top_p", 1.5, "above 0 and at most 1"),
        ("talker_top_p", float("nan"), "must be a finite number"),
        ("repetition_penalty", 0, "must be positive"),
        ("repetition_penalty", [1.05], "must be a finite number"),
        ("subtalker_temperature", -1, "give 0 for argmax"),
        ("subtalker_top_k", float("nan"), "give 0 for all codes"),
        ("subtalker_top_p", -1, "above 0 and at most 1"),
    ],
)
def test_a_bad_option_is_named_with_its_place(key: str, value: Any, words: str) -> None:
    in_request = refusal({"requests": [speak(), speak(**{key: value})]})
    assert in_request.startswith(f"in.json: requests[1].{key} ")
    assert words in in_request
    at_top = refusal({"requests": [speak()], key: value})
    assert at_top.startswith(f"in.json: {key} ")
    with pytest.raises(ConfigError, match=f"^{key} "):
        Request(text="x", **{key: value})


@pytest.mark.parametrize("value", [0, -1, "2", 1.0, True, []])
def test_a_bad_batch_size_is_refused(value: Any) -> None:
    assert refusal({"requests": [speak()], "batch_size": value}).startswith("in.json: batch_size ")
    with pytest.raises(ConfigError, match="batch_size"):
        RequestFile(batch_size=value, requests=(Request(text="x"),))


@pytest.mark.parametrize(
    ("document", "start", "words"),
    [
        ([], "in.json: the top level must be a JSON object", ""),
        ({}, "in.json: requests must be a list", "missing"),
        ({"requests": {}}, "in.json: requests must be a list", ""),
        ({"requests": []}, "in.json: requests is empty", ""),
        ({"requests": ["Hello"]}, "in.json: requests[0] must be a JSON object", "Hello"),
        ({"requests": [speak(), {}]}, "in.json: requests[1].messages must be a list", "missing"),
        ({"requests": [{"messages": "Hello"}]}, "in.json: requests[0].messages must be a list", ""),
        ({"requests": [{"messages": []}]}, "in.json: requests[0].messages is empty", ""),
        ({"requests": [{"messages": [None]}]}, "in.json: requests[0].messages[0] must be a JSON object", ""),
        ({"requests": [say(None)]}, "in.json: requests[0].messages[0].content must be a string or a list", "missing"),
        ({"requests": [say(5)]}, "in.json: requests[0].messages[0].content must be a string or a list", "5"),
        ({"requests": [say(["Hi"])]}, "in.json: requests[0].messages[0].content[0] must be a JSON object", ""),
        (
            {"requests": [say([{"type": "text"}])]},
            "in.json: requests[0].messages[0].content[0].text must be",
            "missing",
        ),
        ({"requests": [say([{"text": "x"}])]}, "in.json: requests[0].messages[0].content[0].type must be", "missing"),
        (
            {"requests": [say([{"type": "text", "text": "x"}, {"type": "image", "image": "x.png"}])]},
            "in.json: requests[0].messages[0].content[1].type is 'image'",
            "only parts of type 'text'",
        ),
        ({"requests": [{"messages": [{"content": "x"}]}]}, "in.json: requests[0].messages[0].role must be", "missing"),
        (
            {"requests": [{"messages": [*SPEAK, {"role": "asistant", "content": "x"}]}]},
            "in.json: requests[0].messages[1].role is 'asistant'",
            "did you mean 'assistant'?",
        ),
        (
            {"requests": [{"messages": [{"role": "tool", "content": "x"}]}]},
            "in.json: requests[0].messages[0].role is 'tool'",
            "allowed: assistant, system, user",
        ),
        (
            {"requests": [{"messages": [{"role": "user", "content": "x"}]}]},
            "in.json: requests[0].messages holds no assistant message;",
            "exactly one",
        ),
        (
            {"requests": [speak(), say("a", "b")]},
            "in.json: requests[1].messages holds 2 assistant messages;",
            "exactly one",
        ),
    ],
)
def test_a_bad_structure_is_named_with_its_place(document: Any, start: str, words: str) -> None:
    message = refusal(document)
    assert message.startswith(start)
    assert words in message


@pytest.mark.parametrize(
    ("document", "start", "words"),
    [
        ({"requests": [speak()], "batchsize": 1}, "in.json: batchsize is no known key", "'batch_size'"),
        ({"requests": [speak()], "temperature": 1}, "in.json: temperature is no known key", "'talker_temperature'"),
        ({"requests": [speak()], "messages": SPEAK}, "in.json: messages is not possible here", "belongs to a request"),
        ({"requests": [speak(), speak(speeker="x")]}, "in.json: requests[1].speeker is no known key", "'speaker'"),
        ({"requests": [{"text": "Hi"}]}, "in.json: requests[0].text is no known key", "the content of a message"),
        ({"requests": [speak(batch_size=1)]}, "in.json: requests[0].batch_size is not possible here", "the top level"),
        (
            {"requests": [speak(enable_thinking=False)]},
            "in.json: requests[0].enable_thinking is not possible",
            "the top level",
        ),
        (
            {"requests": [{"messages": [{**SPEAK[0], "rol": "x"}]}]},
            "in.json: requests[0].messages[0].rol is no known key",
            "'role'",
        ),
        (
            {"requests": [say([{"type": "text", "text": "x", "txt": "y"}])]},
            "in.json: requests[0].messages[0].content[0].txt is no known key",
            "'text'",
        ),
    ],
)
def test_an_unknown_key_is_refused_with_a_suggestion(document: Any, start: str, words: str) -> None:
    message = refusal(document)
    assert message.startswith(start)
    assert words in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("apply_chat_template", False),
        ("add_generation_prompt", False),
        ("enable_thinking", True),
        ("apply_chat_template", 1),
        ("enable_thinking", 0),
        ("add_generation_prompt", "true"),
    ],
)
def test_the_template_is_fixed(key: str, value: Any) -> None:
    message = refusal({"requests": [speak()], key: value})
    assert message.startswith(f"in.json: {key} is {value!r}")
    assert "the template is fixed" in message


@pytest.mark.parametrize("key", ["ref_audio", "ref_text"])
def test_voice_clone_is_refused_by_name(key: str) -> None:
    assert refusal({"requests": [speak()], key: "a.wav"}).startswith(f"in.json: {key}: voice clone is not supported")
    message = refusal({"requests": [speak(), speak(**{key: "a.wav"})]})
    assert message.startswith(f"in.json: requests[1].{key}: voice clone is not supported")
    assert f"requests[0].{key} must be a string" in refusal({"requests": [speak(**{key: 1})]})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty"),
        (" \n\t", "nothing visible"),
        ("\u200b\ufeff", "nothing visible"),
        ([], "is empty"),
        ([{"type": "text", "text": ""}, {"type": "text", "text": " "}], "nothing visible"),
        ("a<|im_end|>", "'<|im_end|>', a special token"),
        ("a\udc00", "surrogate"),
    ],
)
def test_what_cannot_be_spoken_is_refused_with_its_place(content: Any, words: str) -> None:
    message = refusal({"requests": [speak(), say(content)]})
    assert message.startswith("in.json: requests[1].messages")
    assert words in message


@pytest.mark.parametrize("text", ["", "\u200b", "<|im_start|>", 5, None])
def test_a_request_made_by_hand_is_checked_too(text: Any) -> None:
    with pytest.raises(ConfigError, match="text"):
        Request(text=text)


def test_a_surrogate_in_a_message_that_is_only_echoed_is_refused() -> None:
    message = refusal({"requests": [{"messages": [{"role": "user", "content": "\ud800"}, *SPEAK]}]})
    assert message.startswith("in.json: requests[0].messages[0].content holds an unpaired surrogate")


def test_no_requests_by_hand_are_refused() -> None:
    with pytest.raises(ConfigError, match="requests is empty"):
        RequestFile(requests=())


# --- files


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_file_is_read(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "in.json"
    path.write_text(json.dumps({"requests": [say("你好")]}, ensure_ascii=False), encoding=encoding)
    assert read_request_file(path).requests[0].text == "你好"


def test_a_fault_in_a_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "in.json"
    path.write_text('{"requests": [{"messages": [], "seed": NaN}]}', encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        read_request_file(path)
    assert str(refused.value).startswith(f"{path}: requests[0].seed must be an integer")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{\n  "requests": [,]\n}', "line 2, column 16"),
        (b"", "line 1, column 1"),
        (b'{"requests": []} x', "line 1, column 18"),
        (b'{"requests": [], "requests": []}', "the key 'requests' is there twice"),
        (
            b'{"requests": [{"seed": 1, "messages": [], "seed": 2}]}',
            "the key 'seed' is there twice in one object (with 1 and 2)",
        ),
        (b'{"requests": [{"messages": [{"role": "user", "role": "user"}]}]}', "the key 'role' is there twice"),
        (b'{"a": "\xff"}', "is not UTF-8"),
        (b"[" * 100_000, "recursion"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "digits"),
        (b"[]", "the top level must be a JSON object"),
    ],
)
def test_a_file_that_is_no_good_json_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "in.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        read_request_file(path)
    assert str(refused.value).startswith(str(path))
    assert words in str(refused.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        read_request_file(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_request_file(tmp_path)


# --- conversations


def chats(document: dict[str, Any]) -> Any:
    return parse_chats(document, "in.json")


def ask(**options: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}], **options}


def test_every_key_of_a_conversation() -> None:
    options = {
        "temperature": 0.5, "top_k": 3, "top_p": 0.7, "max_generate_length": 9, "speaker": "ethan", "seed": 4,
        "max_audio_length": 8, "talker_temperature": 0.1, "talker_top_k": 5, "talker_top_p": 0.2,
        "repetition_penalty": 1.1, "subtalker_temperature": 0.3, "subtalker_top_k": 6, "subtalker_top_p": 0.4,
    }  # fmt: skip
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": " there"}]},
        {"role": "assistant", "content": ""},
    ]
    top = {"batch_size": 3, "streaming": {"enable": False, "codec_chunk_frames": 10, "talker_prefill_threshold": 4}}
    own = chats({**top, "requests": [{"messages": messages, **options}]})
    shared = chats({**top, **options, "requests": [{"messages": messages}]})
    assert own == shared
    assert own.batch_size == 3
    (chat,) = own.requests
    assert chat.messages == messages
    assert {name: getattr(chat, name) for name in options} == options
    changed = chats({**options, "requests": [ask(top_k=8, seed=None, speaker="")]}).requests[0]
    assert (changed.top_k, changed.seed, changed.speaker, changed.temperature) == (8, None, None, 0.5)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"requests": [ask(language="english")]}, "requests[0].language is no known key"),
        ({"requests": [ask()], "temprature": 1}, "temprature is no known key; did you mean 'subtalker_temperature' or"),
        ({"requests": [ask(streaming={})]}, "requests[0].streaming is not possible here, it belongs to the top level"),
        ({"requests": [ask()], "streaming": {"codec_chunk_frames": 0}}, "streaming.codec_chunk_frames is 0"),
        ({"requests": [ask()], "streaming": {"talker_prefill_threshold": 1.5}}, "threshold must be an integer"),
        ({"requests": [ask()], "streaming": {"chunk": 3}}, "streaming.chunk is no known key"),
        ({"requests": [ask()], "streaming": 3}, "streaming must be a JSON object"),
        ({"requests": [ask()], "streaming": {"enable": 1}}, "streaming.enable must be true or false"),
        ({"requests": [ask(temperature=-1)]}, "requests[0].temperature is -1"),
        ({"requests": [ask(top_p=0)]}, "requests[0].top_p is 0"),
        ({"requests": [ask(max_generate_length=0)]}, "requests[0].max_generate_length is 0, it must be at least 1"),
        ({"requests": [ask()], "enable_thinking": True}, "enable_thinking is True"),
        ({"requests": [ask(messages=[])]}, "requests[0].messages is empty"),
        ({"requests": [ask(messages=[{"role": "user"}])]}, "messages[0].content must be a string or a list of text"),
        ({"requests": []}, "requests is empty"),
    ],
)
def test_a_conversation_that_cannot_be_used(document: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        chats(document)
    assert str(refused.value).startswith("in.json: ")
    assert words in str(refused.value)


@pytest.mark.parametrize("typed", [True, False])
def test_video_is_refused_by_name(typed: bool) -> None:
    part = {"video": "file"} | ({"type": "video"} if typed else {})
    message = {"role": "user", "content": [{"type": "text", "text": "Look: "}, part]}
    with pytest.raises(ConfigError) as refused:
        chats({"requests": [ask(), ask(messages=[message])]})
    assert str(refused.value) == (
        "in.json: requests[1].messages[0].content[1].type is 'video'; video input is not supported, parts are of type "
        "'text', 'audio' or 'image'"
    )


@pytest.mark.parametrize("part", [{"audio": "a.wav"}, {"type": "image", "image": "b.png", "max_pixels": 4096}])
def test_a_user_may_give_files(part: dict[str, Any]) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "Look: "}, part]}
    (request,) = chats({"requests": [ask(messages=[message])]}).requests
    assert request.messages == [message]


@pytest.mark.parametrize(
    ("role", "part", "fault"),
    [
        ("system", {"type": "audio", "audio": "a"}, ": audio in a message of role 'system'; only a user's message can"),
        ("assistant", {"image": "a"}, ": image in a message of role 'assistant'; only a user's message can hold it"),
        ("user", {"type": "audio"}, ".audio must be a string, the path of a file, it is missing"),
        ("user", {"type": "image", "image": ["a"]}, r".image must be a string, the path of a file, it is \['a'\]"),
        ("user", {"type": "image", "image": ""}, ".image is empty; give the path of a file"),
        ("user", {"type": "image", "image": "a", "max_pixels": 0}, ".max_pixels is 0, it must be at least 1"),
        ("user", {"type": "image", "image": "a", "maxpixels": 1}, ".maxpixels is no known key; did you mean 'max_pix"),
        ("user", {"type": "audio", "audio": "a", "max_pixels": 9}, ".max_pixels is no known key"),
        ("user", {"type": "picture", "picture": "a"}, ".type is 'picture'; .* parts are of type 'text', 'audio' or"),
    ],
)
def test_parts_that_are_none(role: str, part: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=rf"in.json: requests\[0\].messages\[0\].content\[0\]{fault}"):
        chats({"requests": [ask(messages=[{"role": role, "content": [part]}])]})


def test_texts_that_are_spoken_hold_no_media() -> None:
    message = {"role": "assistant", "content": [{"type": "audio", "audio": "a.wav"}]}
    with pytest.raises(ConfigError, match="type is 'audio'; only parts of type 'text' can be spoken"):
        parse({"messages": [message]})


def test_options_by_keyword() -> None:
    assert make_request("Hi", {"seed": 3}).seed == 3
    assert make_chat(ask()["messages"], {"top_k": 3}).top_k == 3
    with pytest.raises(ConfigError, match="unknown option 'spaker'; did you mean 'speaker'"):
        make_request("Hi", {"spaker": "x"})
    with pytest.raises(ConfigError, match=r"messages\[0\].role is 'users'; did you mean 'user'"):
        make_chat([{"role": "users", "content": "x"}], {})


def test_a_file_of_conversations_is_read(tmp_path: Path) -> None:
    path = tmp_path / "in.json"
    path.write_text(json.dumps({"requests": [ask()]}), encoding="utf-8")
    assert read_chat_file(path).requests[0].messages == ask()["messages"]
    with pytest.raises(ConfigError, match="there is no such file"):
        read_chat_file(tmp_path / "none.json")


def test_how_answers_are_streamed() -> None:
    for given, expected in (
        (None, StreamOptions(enable=False, codec_chunk_frames=10, talker_prefill_threshold=4)),
        ({"enable": True, "codec_chunk_frames": None}, StreamOptions(enable=True)),
        ({"enable": False, "codec_chunk_frames": 2, "talker_prefill_threshold": 1},
         StreamOptions(enable=False, codec_chunk_frames=2, talker_prefill_threshold=1)),
    ):  # fmt: skip
        assert parse_chats({"requests": [ask()], "streaming": given}, "input.json").streaming == expected
