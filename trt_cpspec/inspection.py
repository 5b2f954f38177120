"""Say of an engine directory what each of its folders is, from its ``config.json`` alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .config import CODE_PREDICTOR_SUFFIX, MAX_VERIFY_SIZE, Section
from .errors import ConfigError
from .tensorfile import TensorFile

_PLANS = ("llm.engine", "code2wav.engine")
_GRAPH = "model.onnx"
_LIMITS = ("max_input_len", "max_batch_size", "max_kv_cache_capacity", "min_code_len", "opt_code_len", "max_code_len")


def describe_engine_dir(engine_dir: Path) -> list[dict[str, Any]]:
    """Describe a component folder, or every component folder below a directory.

    Raises
    ------
    ConfigError
        The directory does not exist, or holds no component.
    """
    if not engine_dir.is_dir():
        raise ConfigError(f"the engine folder {engine_dir} does not exist")
    folders = [path.parent for path in sorted(engine_dir.rglob("config.json")) if ".partial" not in path.parts]
    if not folders:
        raise ConfigError(f"{engine_dir} holds no config.json: it is no engine folder; build one with cpspec-build")
    return [_describe(folder, engine_dir) for folder in folders]


def _describe(folder: Path, root: Path) -> dict[str, Any]:
    section = Section.from_file(folder / "config.json")
    model = section.values.get("model") or section.values.get("model_type")
    limits = section.values.get("builder_config")
    found = [name for name in (_GRAPH, *_PLANS) if (folder / name).is_file()]
    description = {
        "folder": str(folder.relative_to(root)),
        "model": model,
        "kind": _kind(model),
        "precision": section.values.get("precision", "unknown"),
        "files": found,
        "limits": {key: limits[key] for key in _LIMITS if isinstance(limits, dict) and key in limits},
    }
    if description["kind"] == "code predictor":
        description["verify"] = _verify(folder, section, found)
    return description


def _kind(model: Any) -> str:
    if not isinstance(model, str):
        return "unknown: config.json has neither model nor model_type"
    if model.endswith(CODE_PREDICTOR_SUFFIX):
        return "code predictor"
    for word, kind in (("code2wav", "codec decoder"), ("talker", "talker"), ("encoder", "encoder")):
        if word in model:
            return kind
    return "other"


def _verify(folder: Path, section: Section, found: list[str]) -> dict[str, Any]:
    """Return how many positions a pass may take, and why not more."""
    limits = section.values.get("builder_config")
    width = limits.get("max_verify_size") if isinstance(limits, dict) else None
    heads = folder / "lm_heads.safetensors"
    answer: dict[str, Any] = {"residual_depths": None, "codebook_size": None, "max_verify_size": width, "reason": None}
    if heads.is_file():
        file = TensorFile(heads)
        answer["residual_depths"] = len(file.names())
        answer["codebook_size"] = file.info(file.names()[0]).shape[0]
    if not found:
        answer["reason"] = f"there is neither {_GRAPH} nor a plan"
    elif width is None:
        answer["reason"] = "config.json does not say max_verify_size: not built by cpspec-build"
    elif width < 2:
        answer["reason"] = f"built for 1 position a pass; rebuild with cpspec-build --maxVerifySize {MAX_VERIFY_SIZE}"
    elif answer["residual_depths"] is not None and answer["residual_depths"] < 2:
        answer["reason"] = f"{answer['residual_depths']} residual depth(s) leave no draft slot"
    answer["can_verify"] = answer["reason"] is None
    return answer


def format_description(description: list[dict[str, Any]]) -> str:
    """Return the descriptions as text, a paragraph a folder."""
    return "\n\n".join(_format_one(entry) for entry in description)


def _format_one(entry: dict[str, Any]) -> str:
    lines = [
        f"{entry['folder']}: {entry['kind']}",
        f"  model      {entry['model']}",
        f"  precision  {entry['precision']}",
        f"  files      {', '.join(entry['files']) or 'no graph and no plan'}",
        f"  limits     {', '.join(f'{key} {value}' for key, value in entry['limits'].items()) or 'not stated'}",
    ]
    verify = entry.get("verify")
    if verify is not None:
        lines.append(f"  codebook   {verify['codebook_size']} codes, {verify['residual_depths']} residual depths")
        width = f"yes, --cpSpecVerifySize 2 to {verify['max_verify_size']}"
        lines.append(f"  verify     {width if verify['can_verify'] else 'no: ' + verify['reason']}")
    return "\n".join(lines)
