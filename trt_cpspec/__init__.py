"""Exact speculative decoding of the CodePredictor in Qwen3-TTS and Qwen3-Omni.

Importing the package imports nothing else; each name below loads its module when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import SamplingParams, Window
    from .errors import ConfigError, CpSpecError, EngineError, NumericsError
    from .frame import CpSpecStats, FrameResult
    from .omni import Qwen3Omni, Reply
    from .pipeline import Qwen3TTS, Speech
    from .predictor import CodePredictor
    from .streaming import AudioStream

__version__ = "0.1.0"
__all__ = [
    "AudioStream",
    "CodePredictor",
    "ConfigError",
    "CpSpecError",
    "CpSpecStats",
    "EngineError",
    "FrameResult",
    "NumericsError",
    "Qwen3Omni",
    "Qwen3TTS",
    "Reply",
    "SamplingParams",
    "Speech",
    "SpeechError",
    "Window",
]

_MODULES = {
    "config": ("SamplingParams", "Window"),
    "errors": ("ConfigError", "CpSpecError", "EngineError", "NumericsError", "SpeechError"),
    "frame": ("CpSpecStats", "FrameResult"),
    "omni": ("Qwen3Omni", "Reply"),
    "pipeline": ("Qwen3TTS", "Speech"),
    "predictor": ("CodePredictor",),
    "streaming": ("AudioStream",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Load a public name (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
