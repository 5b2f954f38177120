"""Files that appear complete or not at all, also where a process is killed, the disk is full or the power fails.

A file is written under a temporary name beside its place, flushed to the disk, and renamed. The temporary name is new
each time and is never followed as a link, so two runs into one folder do not write into each other's files.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .errors import EngineError

PARTIAL_SUFFIX = ".partial"
"""Ends the name of a file that is not complete; it begins with a dot."""

_BLOCK_BYTES = 1024 * 1024


def new_partial(path: Path) -> Path:
    """Make an empty file beside ``path``, with the permissions of a new file (of the one it replaces, if there is one).

    Raises
    ------
    OSError
        The folder cannot be written.
    """
    partial = path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}{PARTIAL_SUFFIX}")
    with naming(path, partial):
        os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o666))
        with suppress(FileNotFoundError):
            partial.chmod(path.stat().st_mode & 0o777)
    return partial


def fill(partial: Path, content: Any, path: Path) -> None:
    """Write the bytes of a file under its temporary name and flush them to the disk; errors name ``path``."""
    with naming(path, partial), partial.open("wb") as file:
        file.write(content)
        sync(file)


def sync(file: Any) -> None:
    """Flush an open file to the disk."""
    file.flush()
    os.fsync(file.fileno())


def replace(partial: Path, path: Path) -> None:
    """Put a flushed file in the place of ``path``, and make that last."""
    with naming(path, partial):
        os.replace(partial, path)
    sync_folder(path.parent)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file that takes the place of ``path`` when the block ends well; :func:`fill` fills it."""
    partial = new_partial(path)
    try:
        with naming(path, partial):
            yield partial
        replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def copy_file(source: Path, partial: Path, path: Path) -> None:
    """Copy a file of any size under its temporary name and flush it to the disk; errors of writing name ``path``."""
    with source.open("rb") as given, naming(path, partial), partial.open("wb") as file:
        shutil.copyfileobj(given, file, _BLOCK_BYTES)
        sync(file)


def write_file(path: Path, content: Any) -> None:
    """Write a whole file: its old or its new content is there after a crash, and nothing between."""
    with replacing(path) as partial:
        fill(partial, content, path)


@contextmanager
def naming(path: Path, partial: Path | None = None) -> Iterator[None]:
    """Let a system error that names no file, or only a temporary one, name ``path``: a full disk says nothing."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and (error.filename is None or str(error.filename) == str(partial)):
            error.filename = str(path)
        raise


def sync_folder(folder: Path) -> None:
    """Make a rename last through a power cut, where the system lets a folder be synced."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


STAGING = ".partial"
"""Where the components of an engine folder are built, until all of them are complete."""

UNFINISHED = ".unfinished"
"""Lies in a folder whose files are being exchanged one by one: while it does, they are of two builds."""


def mark_unfinished(folder: Path, state: Any = None) -> None:
    """Say of a folder that its files are of two builds from now on; ``state`` is for whoever mends it."""
    write_file(folder / UNFINISHED, json.dumps(state).encode())


def clear_unfinished(folder: Path) -> None:
    """Say that the files of a folder belong together again."""
    (folder / UNFINISHED).unlink(missing_ok=True)
    sync_folder(folder)


def engine_root(component: Path) -> Path:
    """Return the engine folder of a component: the codec of a Qwen3-Omni lies one deeper than the others."""
    return component.parent.parent if component.parent.name == "multimodal" else component.parent


def unfinished(component: Path) -> Path | None:
    """Return the folder, of a component or of an engine around it, that a build left half exchanged; None is well."""
    return next((folder for folder in (component, engine_root(component)) if (folder / UNFINISHED).exists()), None)


def check_finished(component: Path) -> None:
    """Refuse a component that is of two builds, stands beside one of another build, or was never completed.

    Raises
    ------
    EngineError
        A build was stopped, in the middle of putting its files in place or before.
    """
    root, folder = engine_root(component), unfinished(component)
    if folder is None and not component.exists() and (root / STAGING).is_dir():
        raise EngineError(
            f"{component} does not exist: cpspec-build was stopped before {root} was complete (or is at work at this "
            f"moment); run the same cpspec-build again"
        )
    if folder is not None:
        raise EngineError(
            f"{folder} holds files of two builds: cpspec-build was stopped while it put them in place (or does so at "
            f"this moment); run the same cpspec-build again"
        )


def check_inside(path: Path, folder: Path) -> None:
    """Refuse a file that is a link out of its folder: what it leads to was not named.

    Raises
    ------
    EngineError
        With the place that it leads to.
    """
    real = path.resolve()
    if not real.is_relative_to(folder.resolve()):
        raise EngineError(
            f"{path} is a link to {real}, outside of {folder}: only what lies in the folder that was named is loaded; "
            f"put a copy in its place"
        )
