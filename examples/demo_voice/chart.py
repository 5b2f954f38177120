"""Line charts side by side as one SVG, and grey pictures as PNG, with the standard library alone."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Line = Sequence[tuple[float, float]]
_WIDTH, _HEIGHT, _LEFT, _TOP, _PITCH = 350, 240, 60, 60, 460
_COLOURS = ("#08306b", "#2f7fbf", "#7fb4d8", "#e08214", "#b35806")


def line_chart(panels: Sequence[tuple[str, Mapping[str, Line], float]]) -> str:
    """Return an SVG of panels: a title, lines by name, and the highest value of the upright axis, which begins at 0."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_PITCH * len(panels)} 400" font-family="sans-serif" '
        f'font-size="11">\n<rect width="100%" height="100%" fill="white"/>'
    ]
    for number, (title, lines, highest) in enumerate(panels):
        parts += _panel(_LEFT + number * _PITCH, title, lines, highest)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(left: float, title: str, lines: Mapping[str, Line], highest: float) -> list[str]:
    places = sorted({across for line in lines.values() for across, _ in line})
    low, high = (places[0], places[-1]) if places else (0.0, 1.0)

    def point(across: float, up: float) -> tuple[float, float]:
        share = (across - low) / max(high - low, 1e-9)
        return left + _WIDTH * share, _TOP + _HEIGHT * (1 - up / highest)

    parts = [_text(left, _TOP - 20, title)]
    for step in range(5):
        x, y = point(low, highest * step / 4)
        parts.append(f'<line x1="{x:.1f}" x2="{x + _WIDTH:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(x - 8, y + 4, f"{highest * step / 4:.3g}", anchor="end"))
    parts += [_text(point(place, 0)[0], _TOP + _HEIGHT + 18, f"{place:g}", anchor="middle") for place in places]
    for number, (name, line) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        points = [point(*pair) for pair in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        y = _TOP + _HEIGHT + 42 + 16 * (number // 2)
        x = left + 180 * (number % 2)
        parts += [f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{colour}"/>', _text(x + 16, y, name)]
    return parts


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def grey_png(picture: NDArray[np.uint8]) -> bytes:
    """Return the PNG of a picture ``[height, width]``, 0 black."""
    height, width = picture.shape

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    rows = np.concatenate([np.zeros((height, 1), np.uint8), picture], axis=1).tobytes()
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
