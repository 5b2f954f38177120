"""The exceptions of the library. A command line prints them without a traceback; any other exception is a bug."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class CpSpecError(Exception):
    """Base of every error this library raises on purpose."""


class ConfigError(CpSpecError):
    """The user gave something that cannot be used: an option, a request, a checkpoint, a file."""


class EngineError(CpSpecError):
    """An engine folder or a session cannot do what is asked of it."""


class NumericsError(CpSpecError):
    """A model produced logits that describe no law (NaN, or nothing finite).

    Attributes
    ----------
    row : int
        Row of the batch, so that the caller can fail that request and keep the others.
    """

    def __init__(self, message: str, *, row: int = 0) -> None:
        super().__init__(message)
        self.row = row


class SpeechError(EngineError):
    """An answer is there and its speech is not: what made the speech failed, and is the cause.

    Attributes
    ----------
    text : str
    token_ids : tuple of int
        As of :class:`~trt_cpspec.omni.Reply`.
    """

    def __init__(self, message: str, *, text: str, token_ids: tuple[int, ...]) -> None:
        super().__init__(message)
        self.text, self.token_ids = text, token_ids


def shown(value: object) -> str:
    """Return the start of what a value looks like, for a message: also of an integer that Python does not print."""
    try:
        return f"{value!r:.80}"
    except ValueError:  # thousands of digits, alone or in a list
        return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else "something with a huge integer"


def out_of_memory(error: MemoryError) -> EngineError:
    """Return the library's error for a machine whose memory is used up."""
    return EngineError(
        f"the memory of this machine is used up ({error or 'no more can be had'}): close other programs, or give a "
        f"smaller --batchSize; cpspec inspect --memory says what an engine takes"
    )


def as_engine_error(error: EngineError | MemoryError) -> EngineError:
    """Return what ended a computation as the error that its request is told of."""
    return error if isinstance(error, EngineError) else out_of_memory(error)


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """Return the tail of an error message: the closest allowed names, or all of them.

    Parameters
    ----------
    given : str
        What the user wrote.
    allowed : iterable of str
        What would have been understood.
    """
    names = sorted(allowed)
    close = difflib.get_close_matches(given.lower(), [name.lower() for name in names], n=3, cutoff=0.6)
    hints = [name for name in names if name.lower() in close]
    if hints:
        return f"did you mean {' or '.join(repr(name) for name in hints)}?"
    return f"allowed: {', '.join(names) if names else '(none)'}"
