"""Runs a command again and again in children that are killed at a chosen moment: before their N-th change of a file.

``python crash.py`` reads lines of JSON, each with a command and what :meth:`Children.run` takes, forks for each, and
answers with one. Forking spares the seconds of importing. A moment is an opening for writing, a flush, a rename, a
link, a removal or a making of a folder, below ``watched``; -1 kills never. ``limit`` is the most bytes of a file.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.chmod", "open")


class Children:
    """The other end of ``python crash.py``; use it as a context manager."""

    def __enter__(self) -> Children:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)

    def run(
        self,
        command: str,
        *arguments: str | Path,
        watched: Path,
        moment: int = -1,
        limit: int | None = None,
        after_seconds: float | None = None,
    ) -> dict[str, Any]:
        """Run ``build`` or ``tts`` in a child that is killed at a moment, or after a time.

        Returns
        -------
        dict
            ``killed``; ``code`` of the exit; ``changes``, the kind of each change up to the end; ``error``, what was
            written on standard error.
        """
        order: dict[str, Any] = {"command": command, "arguments": list(map(str, arguments)), "watched": str(watched)}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order |= {"moment": moment, "limit": limit, "after_seconds": after_seconds}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


def _serve() -> None:
    from click.testing import CliRunner  # noqa: PLC0415  the other end needs none of these
    from trt_cpspec.builder.cli import build  # noqa: PLC0415

    from trt_cpspec import pipeline  # noqa: F401, PLC0415
    from trt_cpspec.cli import tts  # noqa: PLC0415

    for line in sys.stdin:
        order = json.loads(line)
        inward, outward = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(inward)
            _watch(order["watched"], order["moment"], outward)
            if order["after_seconds"] is not None:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends a process as SIGKILL does
                signal.setitimer(signal.ITIMER_REAL, max(order["after_seconds"], 1e-3))
            if order["limit"] is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (order["limit"],) * 2)
            command = {"build": build, "tts": tts}[order["command"]]
            result = CliRunner().invoke(command, order["arguments"])
            text = result.stderr
            if result.exception is not None and not isinstance(result.exception, SystemExit):
                text = f"{type(result.exception).__name__} came out: {result.exception}"
            os.write(outward, b"\n" + json.dumps({"code": result.exit_code, "error": text[-4000:]}).encode())
            os._exit(0)
        os.close(outward)
        with os.fdopen(inward, "rb") as pipe:
            said = pipe.read()
        _, status = os.waitpid(child, 0)
        changes, _, end = said.partition(b"\n")
        answer = {"killed": os.WIFSIGNALED(status), "changes": changes.decode().split(), "code": None, "error": ""}
        if not answer["killed"]:
            answer |= json.loads(end)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def killed_at(moment: int, work: Callable[[], Any], *, watched: Path) -> bool:
    """Do something in a forked child that is killed before its N-th change below a folder; return whether it was."""
    child = os.fork()
    if child == 0:
        try:
            _watch(str(watched), moment, os.open(os.devnull, os.O_WRONLY))
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status) and os.WEXITSTATUS(status) != 0:
        raise AssertionError("the child failed before the moment came")
    return os.WIFSIGNALED(status)


def _watch(watched: str, moment: int, report: int) -> None:
    """Count the changes of files below a folder, and kill the process before one of them."""
    seen = 0

    def change(kind: str) -> None:
        nonlocal seen
        if seen == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        seen += 1
        os.write(report, f"{kind} ".encode())

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in CHANGES or not isinstance(arguments[0], (str, os.PathLike)):
            return
        if os.fspath(arguments[0]).startswith(watched) and (
            event != "open" or arguments[2] & (os.O_WRONLY | os.O_RDWR)
        ):
            change(event)

    # A killed process loses nothing of what it wrote: its flushes are counted, and not waited for.
    os.fsync = lambda handle: change("fsync")
    sys.addaudithook(hook)


def assert_interrupted(command: Sequence[str], *, behind: bytes) -> None:
    """Run a command, interrupt it behind the first line of its standard error, and check how it ends."""

    def hear() -> None:  # a shell's background job ignores the signal, and so would its children
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=hear) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == behind
        process.send_signal(signal.SIGINT)
        started = time.monotonic()
        stdout, stderr = process.communicate(timeout=30)
    assert time.monotonic() - started < 10
    assert (process.returncode, stdout) == (130, b"")
    assert b"Traceback" not in stderr
    assert b"Interrupted" in stderr


if __name__ == "__main__":
    _serve()
