"""One thread at a time: how a model is shared.

A model's caches, device buffers and stream serve one call at a time: a batch, or a stream of sound. A call has the
model's turn from its beginning to its end, and threads that come meanwhile wait. A stream is a call of its own thread:
it begins with the first chunk that is asked for, does not wait for its consumer, and ends with its last chunk or where
it is closed. Closing never waits for a turn: a stream that waits for one looks every 50 ms whether it was closed, and
one that has it looks behind each frame.

Who is within a call, in a callback of it (``progress``), would wait for itself with another call, or with a stream that
waits for the turn. Both are refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .errors import ConfigError

_PATIENCE_SECONDS = 0.05


class ModelLock:
    """A re-entrant lock that can say whether the calling thread holds it. Use it as a context manager."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._holder: int | None = None
        self._depth = 0

    def acquire(self, timeout: float = -1) -> bool:
        """Wait for the lock, so many seconds at most (-1 is for ever); return whether it was had."""
        if not self._lock.acquire(timeout=timeout):
            return False
        self._holder, self._depth = threading.get_ident(), self._depth + 1
        return True

    def release(self) -> None:
        """Give it back; a RuntimeError where the calling thread does not hold it."""
        if not self.is_held_here:
            raise RuntimeError("the lock is held by another thread, or by none")
        self._depth -= 1
        if not self._depth:
            self._holder = None
        self._lock.release()

    @property
    def is_held_here(self) -> bool:
        """Whether the calling thread holds it."""
        return self._holder == threading.get_ident()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Turn:
    """Admits one thread at a time, and refuses a call that is made from within a call. Use it as a context manager.

    Parameters
    ----------
    lock : ModelLock
        Shared by all that run on the same sessions and the same stream: inner calls of the same thread pass.

    Raises
    ------
    ConfigError
        The thread is inside already, or waits for its turn already.
    """

    def __init__(self, lock: ModelLock) -> None:
        self._lock = lock
        self._calls: set[int] = set()
        """The threads that have the turn, or wait for it."""

    def __enter__(self) -> None:
        self._begin()
        try:
            self._lock.acquire()
        except BaseException:
            self._calls.discard(threading.get_ident())
            raise

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        self._calls.discard(threading.get_ident())

    @contextmanager
    def waiting(self, look: Callable[[], None]) -> Iterator[None]:
        """Have the turn; ``look`` is called until it comes, and when it does, and ends the wait by raising."""
        self._begin()
        try:
            while not self._lock.acquire(_PATIENCE_SECONDS):
                look()
            try:
                look()
                yield
            finally:
                self._lock.release()
        finally:
            self._calls.discard(threading.get_ident())

    def check_outside(self) -> None:
        """Refuse a thread that would wait for another thread's call, and that one for this thread's.

        Raises
        ------
        ConfigError
            The thread is within a call, or holds the lock.
        """
        self._check_calls()
        if self._lock.is_held_here:
            raise ConfigError("a stream waits for its model, whose lock this thread holds: release it first")

    def _begin(self) -> None:
        self._check_calls()
        self._calls.add(threading.get_ident())

    def _check_calls(self) -> None:
        if threading.get_ident() in self._calls:
            raise ConfigError("the model was called from a callback of its own call: call it when that has returned")
