"""Say of an engine directory what each of its folders is, from its ``config.json`` and the names of its files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .config import CODE_PREDICTOR_SUFFIX, MAX_VERIFY_SIZE, Section, is_thinker, resolve_window
from .durable import check_finished, engine_root, unfinished
from .errors import ConfigError
from .tensorfile import TensorFile

_GRAPH = "model.onnx"
_PLANS = ("llm.engine", "code2wav.engine", "audio_encoder.engine", "visual.engine")
_HEADS = "lm_heads.safetensors"
_TTS = ("talker", "code_predictor", "code2wav")
_OMNI = ("thinker", "talker", "code_predictor", "multimodal/code2wav")
_LIMITS = (
    "max_input_len", "max_batch_size", "max_kv_cache_capacity", "min_code_len", "opt_code_len", "max_code_len",
    "max_windows", "max_patches",
)  # fmt: skip
_CHECKPOINT = "a checkpoint, no engine; build it with cpspec-build"
_KINDS = {"thinker": "thinker", "talker": "talker", "code2wav": "codec decoder"}
_PLACES = {"thinker": "thinker", "talker": "talker", "code2wav": "multimodal/code2wav"}
"""Where a component of a Qwen3-Omni lies in its engine folder."""


def describe_engine_dir(engine_dir: Path) -> list[dict[str, Any]]:
    """Describe a component folder, or every component folder below a directory.

    Raises
    ------
    ConfigError
        The directory does not exist, holds no component, or a file in it is damaged.
    """
    folders = component_folders(engine_dir)
    return [*(_describe(folder, engine_dir) for folder in folders), *_missing(folders, engine_dir)]


def component_folders(engine_dir: Path) -> list[Path]:
    """Return every folder at or below a directory that has a ``config.json``, sorted; a ConfigError says of none."""
    if not engine_dir.is_dir():
        raise ConfigError(f"the engine folder {engine_dir} does not exist")
    folders = [path.parent for path in sorted(engine_dir.rglob("config.json")) if not _is_hidden(path, engine_dir)]
    if not folders:
        raise ConfigError(f"{engine_dir} holds no config.json: it is no engine folder; build one with cpspec-build")
    return folders


def component_kind(section: Section) -> str:
    """Return what the component of a ``config.json`` is, in words: ``talker``, ``code predictor``, ..."""
    return _kind(section.values.get("model") or section.values.get("model_type"), section)


def _missing(folders: list[Path], root: Path) -> list[dict[str, Any]]:
    """Return an entry for each component that is not there beside one of those that speak."""
    beside = dict.fromkeys(engine_root(folder) for folder in folders if folder.name in _TTS and folder != root)
    within = [parent for parent in beside if parent == root or root in parent.parents]
    absent = [path for parent in within for path in _places(parent, folders) if path not in folders]
    return [
        {
            "folder": str(path.relative_to(root)),
            "model": None,
            "kind": "missing: speech needs it; build it with cpspec-build",
            "precision": None,
            "files": [],
            "limits": {},
        }
        for path in absent
    ]


def _places(root: Path, folders: list[Path]) -> list[Path]:
    """Return where the components of an engine folder lie: a Qwen3-Omni is known by what only it has."""
    is_omni = any(root / place in folders for place in _OMNI if place not in _TTS)
    return [root / place for place in (_OMNI if is_omni else _TTS)]


def check_component(folder: Path, name: str) -> None:
    """Refuse a folder that is not the engine folder of a component, and say which one may be meant.

    A folder that is missing or damaged otherwise is for its reader to complain of.

    Parameters
    ----------
    folder : Path
    name : {"thinker", "talker", "code2wav"}

    Raises
    ------
    ConfigError
        It holds a checkpoint, another component, or the components themselves.
    """
    check_finished(folder)
    kind = _folder_kind(folder)
    if kind == _KINDS[name]:
        return
    for root in (folder, folder.parent)[: 1 if kind else 2]:
        if _folder_kind(root) == _CHECKPOINT:
            raise ConfigError(
                f"{root} is a checkpoint, no engine folder: build it with cpspec-build --checkpointDir {root} "
                f"--engineDir ENG, and name ENG{f'/{_PLACES[name]}' if root == folder else ''}"
            )
    near = [root / place for root in (folder, folder.parent) for place in (name, _PLACES[name])]
    meant = next((path for path in near if path != folder and _folder_kind(path) == _KINDS[name]), None)
    if meant is not None:
        found = f"is the folder of a {kind}" if kind else f"is no {name} folder"
        raise ConfigError(f"{folder} {found}; did you mean {meant}?")


def _folder_kind(folder: Path) -> str | None:
    try:
        section = Section.from_file(folder / "config.json")
    except ConfigError:
        return None
    return component_kind(section)


def _is_hidden(path: Path, root: Path) -> bool:
    """Return whether a path belongs to a build that is not finished, or to a tool."""
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _describe(folder: Path, root: Path) -> dict[str, Any]:
    section = Section.from_file(folder / "config.json")
    model = section.values.get("model") or section.values.get("model_type")
    limits = _object(section, "builder_config")
    found = [name for name in (_GRAPH, *_PLANS) if (folder / name).is_file()]
    description = {
        "folder": root.resolve().name if folder == root else str(folder.relative_to(root)),
        "model": model,
        "kind": component_kind(section),
        "precision": section.values.get("precision"),
        "files": found,
        "limits": {key: limits[key] for key in _LIMITS if key in limits},
    }
    if unfinished(folder) is not None:
        description["unfinished"] = "its files, or those beside it, are of two builds: run the same cpspec-build again"
    if description["kind"] == "code predictor":
        description["verify"] = _verify(folder, limits, found)
    if description["kind"] == "codec decoder":
        description["streaming"] = section.values.get("carries_state") is True
    if description["kind"] == "talker":
        description["speakers"] = list(_object(section, "speaker_id"))
        description["languages"] = [name for name in _object(section, "codec_language_id") if "dialect" not in name]
    return description


def _object(section: Section, key: str) -> Mapping[str, Any]:
    value = section.values.get(key)
    return value if isinstance(value, Mapping) else {}


def _kind(model: Any, section: Section) -> str:
    if section.has("architectures"):
        return _CHECKPOINT
    if not isinstance(model, str):
        return "unknown: config.json has neither model nor model_type"
    if model.endswith(CODE_PREDICTOR_SUFFIX):
        return "code predictor"
    for word, kind in (("code2wav", "codec decoder"), ("talker", "talker"), ("encoder", "encoder")):
        if word in model:
            return kind
    return "thinker" if is_thinker(model) else "other"


def _verify(folder: Path, limits: Mapping[str, Any], found: list[str]) -> dict[str, Any]:
    """Return how many positions a pass may take, and why not more."""
    width = limits.get("max_verify_size")
    width = width if isinstance(width, int) else None
    depths = codebook = None
    reasons = []
    if not found or (_GRAPH not in found and "engine" not in limits):
        reasons.append(f"there is neither {_GRAPH} nor a plan that config.json describes (builder_config.engine)")
    if (folder / _HEADS).is_file():
        heads = TensorFile(folder / _HEADS)
        shapes = [heads.info(name).shape for name in heads.names()]
        depths, codebook = len(shapes), shapes[0][0] if shapes and shapes[0] else 0
    else:
        reasons.append(f"there is no {_HEADS}")
    if width is None:
        reasons.append("config.json does not say max_verify_size, so cpspec-build did not make this engine")
    elif depths is not None and codebook is not None:
        asked = min(max(width, 2), MAX_VERIFY_SIZE)
        window = resolve_window(asked, codebook_size=codebook, residual_depths=depths, max_verify_size=width)
        reasons += [window.reason] if window.reason else []
    return {
        "can_verify": not reasons,
        "max_verify_size": width,
        "codebook_size": codebook,
        "residual_depths": depths,
        "reason": "; ".join(reasons) or None,
    }


def format_description(description: list[dict[str, Any]]) -> str:
    """Return the descriptions as text, a paragraph a folder."""
    return "\n\n".join(_format_one(entry) for entry in description)


def _format_one(entry: dict[str, Any]) -> str:
    if entry["kind"].startswith("missing"):
        return f"{entry['folder']}: {entry['kind']}"
    facts = {
        "model": entry["model"] or "not stated",
        "precision": entry["precision"] or "not stated",
        "files": ", ".join(entry["files"]) or "no graph and no plan",
        "limits": ", ".join(f"{key} {value}" for key, value in entry["limits"].items()) or "not stated",
    }
    for key in ("unfinished", "speakers", "languages"):
        if entry.get(key):
            facts[key] = entry[key] if isinstance(entry[key], str) else ", ".join(entry[key])
    if "streaming" in entry:
        facts["streaming"] = "yes" if entry["streaming"] else "no: built before streaming, build it again to have it"
    verify = entry.get("verify")
    if verify is not None:
        if verify["codebook_size"] is not None:
            facts["codebook"] = f"{verify['codebook_size']} codes, {verify['residual_depths']} residual depths"
        width = f"yes, --cpSpecVerifySize 2 to {verify['max_verify_size']}"
        facts["verify"] = width if verify["can_verify"] else f"no: {verify['reason']}"
    lines = [f"  {key:<10} {value}" for key, value in facts.items()]
    return "\n".join([f"{entry['folder']}: {entry['kind']}", *lines])
