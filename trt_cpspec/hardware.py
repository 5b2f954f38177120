"""What a measurement ran on: published figures name it."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from . import __version__
from .predictor import CodePredictor

_PACKAGES = {False: ("numpy", "onnxruntime"), True: ("numpy", "cuda-core")}


def describe_machine(predictor: CodePredictor) -> dict[str, str]:
    """Return processor, device, and the versions of what computes."""
    device = predictor.device_facts()
    facts = {
        "device": "cpu",
        "processor": processor_name(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "trt_cpspec": __version__,
        "python": platform.python_version(),
    }
    for name in _PACKAGES[bool(device)]:
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            continue
    return facts | device


def processor_name() -> str:
    """Return the processor's own name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
