"""What the benchmarks make of what they measured."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def frame(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return importlib.import_module("frame")


def test_what_lies_between_passes_is_told_from_stamps(frame: Any) -> None:
    """Three blocks, of which the last has no rows and picks; two passes of a frame that may have five."""
    start, ended, rows, scored, picked = 1_784_000_000_000_000_000, 90_000, 0, 1, 2
    stamps = np.full((3, 6, 3), frame.NO_TIME)
    stamps[:, 0, 0] = [0, 10, 20]
    stamps[:2, 0, 1] = [ended, ended - 300]
    stamps[:2, 1, rows] = [1_000, 1_100]
    stamps[:2, 1, scored] = [4_500, 4_600]
    stamps[1:, 1, picked] = [5_200, 5_000]
    stamps[:2, 2, rows] = [7_000, 7_200]
    stamps[:2, 2, scored] = [12_500, 12_400]
    stamps[2, 2, picked] = 12_000
    stamps[stamps != frame.NO_TIME] += np.uint64(start)
    times = frame.microseconds(stamps)
    assert times[:, 0, 1].max() == 90
    since_targets, since_first = frame.between_passes(times)
    np.testing.assert_allclose(since_targets, [7.2 - 4.6, 90 - 12.5])
    np.testing.assert_allclose(since_first, [7.2 - 5.0, 90 - 12.0])


def test_the_table_says_what_the_compiler_reports_and_what_picks_take(frame: Any) -> None:
    picks = {"verify_size": 3, "share": 0.133, "share_since_first": 0.138, "us_per_pass": 8.5, "us_per_frame": 511.1}
    compiler = {"registers": {"fused_pass": 158, "fused_frame": 168}, "spilled": {"fused_frame": 0, "fused_pass": 0}}
    report = {"machine": {}, "options": {"batch": "1"}, "pass_us": {}, "rows": [], "picks": [picks]}
    assert "compiler" not in frame.table(report)
    text = frame.table(report | {"compiler": compiler})
    assert "168 registers in fused_frame; bytes spilled: none" in text
    assert "N = 3: 13.3 % of a frame, 8.5 us a pass (13.8 % since the first target's logits)" in text
    compiler["spilled"]["fused_frame"] = 8
    assert "bytes spilled: 8 in fused_frame" in frame.table(report | {"compiler": compiler})
