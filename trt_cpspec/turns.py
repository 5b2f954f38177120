"""One thread at a time: how a model is shared."""

from __future__ import annotations

import threading

from .errors import ConfigError


class Turn:
    """Admits one thread at a time, and refuses a call that is made from within a call.

    A model's caches, device buffers and stream serve one batch. Threads therefore wait for each other; a callback of a
    call that is still going on (``progress``) would wait for itself, and is told so instead. Use it as a context
    manager.

    Parameters
    ----------
    lock : RLock
        Shared by all that run on the same sessions and the same stream: inner calls of the same thread pass.

    Raises
    ------
    ConfigError
        The thread is inside already.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._inside = False

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._inside:
            self._lock.release()
            raise ConfigError("the model was called from a callback of its own call: call it when that has returned")
        self._inside = True

    def __exit__(self, *_: object) -> None:
        self._inside = False
        self._lock.release()
