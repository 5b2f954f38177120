"""What an engine folder says about its plan, and how plan and sidecar are put in place.

``config.json``'s ``builder_config`` holds the limits under Edge-LLM's own keys, and under ``engine`` a record of the
plan: flavour and version of TensorRT, precision, compute capabilities, all numbers of all profiles, and SHA-256
hashes of the plan, the graph and the side files. A plan whose hash is not the recorded one does not belong to it.

A plan and its sidecar are two files, which no file system replaces together. :func:`install` therefore first writes
the new sidecar aside, as ``config.json.next``; a crash between the two renames is completed by :func:`recover`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trt_cpspec.durable import (
    PARTIAL_SUFFIX,
    UNFINISHED,
    check_inside,
    copy_file,
    fill,
    mark_unfinished,
    new_partial,
    replace,
    replacing,
    write_file,
)
from trt_cpspec.errors import ConfigError
from trt_cpspec.runtime import GRAPH_FILE, PLAN_FILES
from trt_cpspec.tensorfile import GRAPH_DATA_FILE

CONFIG_FILE = "config.json"
NEXT_FILE = "config.json.next"
"""The sidecar of a plan that is about to take its place."""

BACKUP_SUFFIX = ".bak"
RECORD = "engine"
"""Key of the plan's record in ``builder_config``."""

_BLOCK_BYTES = 8 * 1024 * 1024


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def graph_hashes(folder: Path) -> dict[str, str]:
    """Return the hashes of a folder's graph: ``model.onnx`` and every other ``*.data`` file of weights."""
    files = [folder / GRAPH_FILE, *sorted(folder.glob("*.data"))]
    return {path.name: sha256_of(path) for path in files}


def side_files(folder: Path) -> list[Path]:
    """Return the files that belong to a component but are neither its graph, its plan nor its config, sorted."""
    return [path for path in sorted(folder.iterdir()) if path.is_file() and _is_side_file(path.name)]


def _is_side_file(name: str) -> bool:
    own = {GRAPH_FILE, GRAPH_DATA_FILE, CONFIG_FILE, NEXT_FILE, UNFINISHED}
    own.update(plan + suffix for plan in PLAN_FILES for suffix in ("", BACKUP_SUFFIX))
    return name not in own and not name.endswith((PARTIAL_SUFFIX, ".data"))


def read_config(folder: Path) -> dict[str, Any]:
    """Read ``config.json``; a ConfigError says what is wrong with it."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(f"{path} cannot be read as JSON: there is no such file")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict) or not isinstance(value.get("builder_config", {}), dict):
        raise ConfigError(f"{path} must be a JSON object whose builder_config is one too")
    return value


def record_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plan's record of a config; empty where an older or another builder wrote it."""
    record = config.get("builder_config", {}).get(RECORD)
    return dict(record) if isinstance(record, dict) else {}


def with_record(config: Mapping[str, Any], limits: Mapping[str, int], record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with new limits and a new record; every other key stays."""
    return {**config, "builder_config": {**config.get("builder_config", {}), **limits, RECORD: dict(record)}}


def plan_fault(folder: Path, plan_name: str, config: Mapping[str, Any]) -> str | None:
    """Say why a plan is not the one that its sidecar describes; None when it is.

    Parameters
    ----------
    folder : Path
    plan_name : str
        One of :data:`~trt_cpspec.runtime.PLAN_FILES`.
    config : mapping
        The folder's ``config.json``.
    """
    path = folder / plan_name
    if not path.is_file():
        return f"{path} does not exist"
    plan = record_of(config).get("plan")
    if not isinstance(plan, dict) or plan.get("file") != plan_name:
        return f"{folder / CONFIG_FILE} has no record of {plan_name}: it was not built by cpspec-build"
    if path.stat().st_size != plan.get("bytes") or sha256_of(path) != plan.get("sha256"):
        return f"{path} is not the plan that {CONFIG_FILE} describes (its SHA-256 differs)"
    return None


def plan_record(name: str, plan: Any) -> dict[str, Any]:
    """Describe a plan in memory: file name, size and hash."""
    view = memoryview(plan)
    return {"file": name, "bytes": view.nbytes, "sha256": hashlib.sha256(view).hexdigest()}


def replace_files(sources: Iterable[Path], folder: Path) -> None:
    """Put copies of files into a folder that is marked as unfinished from the first of them on.

    All copies are complete before the first takes its place; files that are equal already are left alone, and where
    all of them are nothing is marked. :func:`~trt_cpspec.durable.clear_unfinished` is for the caller.
    """
    pairs: list[tuple[Path, Path]] = []
    try:
        for source in sources:
            check_inside(source, source.parent)
            target = folder / source.name
            if not _are_equal(source, target):
                pairs.append((new_partial(target), target))
                copy_file(source, *pairs[-1])
        if pairs:
            mark_unfinished(folder)
        for partial, target in pairs:
            replace(partial, target)
    finally:
        for partial, _ in pairs:
            partial.unlink(missing_ok=True)


def _are_equal(one: Path, other: Path) -> bool:
    if not other.is_file() or one.stat().st_size != other.stat().st_size:
        return False
    return sha256_of(one) == sha256_of(other)


def install(folder: Path, plan_name: str, plan: Any, config: Mapping[str, Any], *, backup: bool) -> None:
    """Put a plan and its sidecar in place.

    Parameters
    ----------
    folder : Path
    plan_name : str
    plan : bytes-like
    config : mapping
        The new ``config.json``; its record must hold the plan's hash.
    backup : bool
        Keep the previous plan as ``<plan_name>.bak``.
    """
    target = folder / plan_name
    with replacing(target) as partial:
        fill(partial, plan, target)
        write_file(folder / NEXT_FILE, json_bytes(config))
        if backup and target.is_file():
            _keep(target, target.with_name(target.name + BACKUP_SUFFIX))
    replace(folder / NEXT_FILE, folder / CONFIG_FILE)


def recover(folder: Path) -> None:
    """Finish or undo what a crash left behind, and remove files that were never completed.

    A ``config.json.next`` whose plan is in place becomes ``config.json``; any other belongs to a plan that was not
    installed and goes.
    """
    for path in folder.glob(f".*{PARTIAL_SUFFIX}"):
        path.unlink(missing_ok=True)
    pending = folder / NEXT_FILE
    if not pending.is_file():
        return
    with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        config = json.loads(pending.read_text(encoding="utf-8"))
        name = record_of(config)["plan"]["file"]
        if name in PLAN_FILES and plan_fault(folder, name, config) is None:
            replace(pending, folder / CONFIG_FILE)
    pending.unlink(missing_ok=True)


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """Return a config as it is written: indented, a shape or a range of shapes on one line."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    # Inside a JSON string no line ends, so what these patterns find are lists.
    text = re.sub(r"\[\n\s*(-?\d+(?:,\n\s*-?\d+)*)\n\s*\]", _one_line, text)
    text = re.sub(r"\[\n\s*(\[[-\d, ]*\](?:,\n\s*\[[-\d, ]*\])*)\n\s*\]", _one_line, text)
    return (text + "\n").encode()


def _one_line(match: re.Match[str]) -> str:
    return "[" + re.sub(r",\n\s*", ", ", match.group(1)) + "]"


def hashes_of(paths: Iterable[Path]) -> dict[str, str]:
    """Return the hash of each file by its name."""
    return {path.name: sha256_of(path) for path in paths}


def _keep(target: Path, backup: Path) -> None:
    """Make ``backup`` another name of ``target``: no moment is without either, and no byte is copied."""
    partial = target.with_name(f".{backup.name}{PARTIAL_SUFFIX}")
    partial.unlink(missing_ok=True)
    try:
        os.link(target, partial)
    except OSError:  # a file system without hard links
        with replacing(backup) as copy:
            copy_file(target, copy, backup)
        return
    os.replace(partial, backup)
    # Where backup already was this very file, the rename did nothing and the partial name is still there.
    partial.unlink(missing_ok=True)
