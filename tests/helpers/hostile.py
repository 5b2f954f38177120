"""What an enemy, or a bad disk, makes of good files: strategies for hypothesis, and how much of them is tried.

CI tries a fixed set. ``CPSPEC_FUZZ_EXAMPLES=20000 pytest tests/test_hostile.py`` tries that many of each kind, and
others in every run.
"""

from __future__ import annotations

import copy
import json
import os
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

LONG_RUN = os.environ.get("CPSPEC_FUZZ_EXAMPLES")

EDGES = [
    0,
    -1,
    1,
    2**15,
    2**31 - 1,
    2**31,
    2**32,
    2**53,
    2**63 - 1,
    2**63,
    2**64 - 1,
    2**64,
    -(2**63),
    10**30,
    10**4000,
]

INTEGERS = st.sampled_from(EDGES) | st.integers()
SCALARS = (
    st.none()
    | st.booleans()
    | INTEGERS
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["", "../../x", "/etc/passwd", "\ud83d", "a\0b", "<|im_end|>", "x" * 500, "cuda"])
)
JSON_VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def tried(examples: int) -> settings:
    """Return how often a test is tried: so often, and always the same, unless a long run is asked for."""
    return settings(
        max_examples=int(LONG_RUN or examples),
        derandomize=LONG_RUN is None,
        database=None,
        deadline=None,
        print_blob=LONG_RUN is not None,
        suppress_health_check=list(HealthCheck),
    )


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value in a JSON document, the document itself excepted."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, child in children for place in ((*path, key), *places(child, (*path, key)))]


@st.composite
def changed(draw: Any, document: Any) -> Any:
    """A JSON document with one to three of its values replaced, removed, or joined by others."""
    result = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        paths = places(result)
        if not paths:
            return draw(JSON_VALUES)
        *parents, key = draw(st.sampled_from(paths))
        parent = result
        for step in parents:
            parent = parent[step]
        action = draw(st.sampled_from(["replace", "replace", "replace", "remove", "add"]))
        if action == "replace":
            old = parent[key]
            near = st.sampled_from([old + 1, old - 1, -old, old * 1000]) if type(old) in (int, float) else st.nothing()
            parent[key] = draw(JSON_VALUES | INTEGERS | near)
        elif action == "remove":
            del parent[key]
        elif isinstance(parent, dict):
            parent[draw(st.text(max_size=8))] = draw(JSON_VALUES)
        else:
            parent.append(draw(JSON_VALUES))
    return result


@st.composite
def damaged(draw: Any, content: bytes) -> bytes:
    """The bytes of a file with a few of them changed, removed, repeated or cut off."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        action = draw(st.sampled_from(["flip", "cut", "drop", "repeat", "insert", "number"]))
        if action == "flip" and data:
            data[at] ^= draw(st.integers(1, 255))
        elif action == "cut":
            del data[at:]
        elif action == "drop":
            del data[at : at + draw(st.integers(1, 64))]
        elif action == "repeat":
            data[at:at] = data[at : at + draw(st.integers(1, 64))]
        elif action == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=16))
        else:
            data[at : at + 8] = draw(st.sampled_from(EDGES[:-3])).to_bytes(9, "little", signed=True)[:8]
    return bytes(data)


def dumped(value: Any) -> bytes:
    """Return JSON bytes, also of what JSON cannot really say (NaN, lone surrogates, endless numbers)."""
    return json.dumps(value).encode() if not _is_huge(value) else _dump_huge(value).encode()


def _is_huge(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_is_huge(child) for child in value.values())
    if isinstance(value, list):
        return any(_is_huge(child) for child in value)
    return isinstance(value, int) and abs(value) >= 10**4000


def _dump_huge(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {_dump_huge(child)}" for key, child in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_dump_huge, value)) + "]"
    return "1" + "0" * 5000 if _is_huge(value) else json.dumps(value)
