"""One picture of a benchmark, as SVG: acceptance by draft offset, and the time of a frame by N."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

_WIDTH, _HEIGHT = 900, 380
_PANEL_WIDTH, _PANEL_HEIGHT, _TOP = 350, 240, 70
_LEFTS = (70, 520)
_INK, _FAINT, _BAR, _PLAIN = "#222222", "#dddddd", "#3b75af", "#999999"
# From pale to dark with N, one hue: the order can be seen.
_LINES = ("#a6cee3", "#7fb4d8", "#5b9bcb", "#3b82bd", "#2468a6", "#124f8a", "#08306b")


def bench_picture(report: dict[str, Any]) -> str:
    """Return the SVG of a report of :func:`~trt_cpspec.bench.bench`."""
    device = report["machine"]["device"]
    name = report["machine"]["processor"] if device == "cpu" else device
    body = [
        _text(_LEFTS[0], 28, f"CodePredictor on {name}, mode {report['mode']}, batch {report['batch']}", size=16),
        *_acceptance_panel(report["windows"], _LEFTS[0]),
        *_time_panel(report["windows"], _LEFTS[1]),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" font-family="sans-serif">\n<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _acceptance_panel(windows: Sequence[dict[str, Any]], left: int) -> Iterable[str]:
    drafting = [row for row in windows if row["verify_size"]]
    offsets = max((len(row["acceptance_by_offset"]) for row in drafting), default=1)
    yield _text(left, _TOP - 16, "accepted drafts by offset in the round", size=13)
    yield from _grid(left, [f"{share} %" for share in (0, 25, 50, 75, 100)])
    for place in range(offsets):
        yield _text(_across(left, place, offsets), _TOP + _PANEL_HEIGHT + 20, str(place + 1), anchor="middle")
    for row in drafting:
        colour = _LINES[row["verify_size"] - 2]
        points = [
            (_across(left, place, offsets), _TOP + _PANEL_HEIGHT * (1 - rate))
            for place, rate in enumerate(row["acceptance_by_offset"])
            if rate is not None
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in points)
    for place, row in enumerate(drafting):
        x, y = left + place * 50, _TOP + _PANEL_HEIGHT + 42
        yield f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{_LINES[row["verify_size"] - 2]}"/>'
        yield _text(x + 14, y, f"N={row['verify_size']}")


def _time_panel(windows: Sequence[dict[str, Any]], left: int) -> Iterable[str]:
    highest = 1.1 * max(row["frame_ms_quartiles"][1] for row in windows)
    yield _text(left, _TOP - 16, "milliseconds a frame by N (median, quartiles)", size=13)
    yield from _grid(left, [f"{highest * share:.3g}" for share in (0, 0.25, 0.5, 0.75, 1)])
    for place, row in enumerate(windows):
        x = _across(left, place, len(windows))
        top, low, high = (
            _TOP + _PANEL_HEIGHT * (1 - value / highest) for value in (row["frame_ms"], *row["frame_ms_quartiles"])
        )
        colour = _BAR if row["verify_size"] else _PLAIN
        yield (
            f'<rect x="{x - 14:.1f}" y="{top:.1f}" width="28" height="{_TOP + _PANEL_HEIGHT - top:.1f}" '
            f'fill="{colour}"/>'
        )
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="{_INK}"/>'
        yield _text(x, min(top, high) - 5, f"{row['frame_ms']:.3g}", anchor="middle", size=10)
        yield _text(x, _TOP + _PANEL_HEIGHT + 20, str(row["verify_size"]), anchor="middle")


def _across(left: int, place: int, count: int) -> float:
    return left + _PANEL_WIDTH * (place + 0.5) / count


def _grid(left: int, labels: Sequence[str]) -> Iterable[str]:
    for place, label in enumerate(labels):
        y = _TOP + _PANEL_HEIGHT * (1 - place / (len(labels) - 1))
        yield f'<line x1="{left}" x2="{left + _PANEL_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="{_FAINT}"/>'
        yield _text(left - 8, y + 4, label, anchor="end")


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 11) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{_INK}" text-anchor="{anchor}">'
        f"{escape(text, quote=False)}</text>"
    )
