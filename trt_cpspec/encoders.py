"""The encoders that hear and see: features of a file to rows that stand in a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .audio_input import AudioFront
from .config import Section
from .durable import check_finished
from .errors import ConfigError, EngineError
from .image_input import MAX_PATCHES, ImageFront, Patches
from .runtime import AUDIO_PLAN, VISION_PLAN, Runtime, StaticGraph
from .session import Shapes
from .turns import ModelLock

AUDIO_TYPE, VISION_TYPE = "qwen3_omni_audio_encoder", "qwen3_omni_vision_encoder"
"""``model_type`` in the configs of their folders."""

AUDIO_FOLDER, VISION_FOLDER = "audio", "visual"
"""Their folders in that of the multimodal engines."""

_MAX_SIDE = 1 << 15
"""Of the square table of learned positions: its rows are numbered in 32 bits."""

_ROW_FRAMES = 8
"""Mel frames of a row: three convolutions halve them."""

Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the vision encoder makes of an image.

    Attributes
    ----------
    embeds : ndarray, shape [n, H], float32
        In place of the embeddings of its placeholder tokens.
    deepstack : ndarray, shape [n, D * H], float32
        What the Thinker adds behind each of its first D layers.
    """

    embeds: Float32
    deepstack: Float32


class AudioEncoder:
    """The audio encoder of an engine folder.

    Parameters
    ----------
    graph : StaticGraph
    section : Section
        Its ``config.json``.

    Attributes
    ----------
    front : AudioFront
    hidden_size : int
    """

    def __init__(self, graph: StaticGraph, section: Section) -> None:
        self._graph = graph
        self.front = AudioFront.from_section(section.section("preprocessor"))
        self.hidden_size = section.integer("hidden_size", minimum=1)
        self._chunks = section.integer("window_chunks", minimum=1)
        self._frames = section.integer("chunk_frames", minimum=1)
        self._rows = -(-self._frames // _ROW_FRAMES)
        section.require("chunk_rows", self._rows)
        self._max_windows = section.section("builder_config").integer("max_windows", minimum=1)

    @classmethod
    def from_engine_dir(cls, folder: Path, *, runtime: Runtime) -> AudioEncoder:
        """Open the encoder of a folder that ``cpspec-build`` wrote; errors are those of a codec's."""
        section = _config(folder, AUDIO_TYPE)
        # Sizes that only config.json says are compared with the graph's before memory is taken for them.
        bins = section.section("preprocessor").integer("feature_size", minimum=1)
        sizes = [section.integer(key, minimum=1) for key in ("window_chunks", "chunk_frames")]
        shapes: Shapes = {"mel": (None, sizes[0], bins, sizes[1]), "extents": (2,), "lengths": (None,), "embeds": None}
        return cls(runtime.graph(folder, AUDIO_PLAN, shapes), section)

    def rows_of(self, frames: int) -> int:
        """Return how many rows so many mel frames become: 13 for each whole chunk of 100."""
        whole, rest = divmod(frames, self._frames)
        return whole * self._rows + -(-rest // _ROW_FRAMES)

    def encode(self, features: Sequence[Float32]) -> list[Float32]:
        """Encode the clips of one conversation, each ``[bins, M]`` to ``[rows_of(M), H]``."""
        span = self._chunks * self._frames
        # Where no chunk is whole the reference fills none up to a whole one, and convolutions see where they end.
        extent = min(self._frames, max(mel.shape[1] for mel in features))
        extents = np.array([-(-extent // 2), -(-extent // 4)], np.int32)
        encoded = []
        for mel in features:
            count = -(-mel.shape[1] // span)
            padded = np.pad(mel, ((0, 0), (0, count * span - mel.shape[1])))
            windows = padded.reshape(len(mel), count, self._chunks, self._frames).transpose(1, 2, 0, 3)
            lengths = [self.rows_of(min(span, mel.shape[1] - start)) for start in range(0, count * span, span)]
            rows: list[Float32] = []
            for start in range(0, count, self._max_windows):
                part = slice(start, start + self._max_windows)
                feeds = {"mel": np.ascontiguousarray(windows[part]), "extents": extents}
                found = self._graph.run(feeds | {"lengths": np.array(lengths[part], np.int32)})["embeds"]
                _check_rows(found, (len(windows[part]), self._chunks * self._rows, self.hidden_size))
                rows += [window[:length] for window, length in zip(found, lengths[part], strict=True)]
            encoded.append(np.concatenate(rows))
        return encoded


class VisionEncoder:
    """The vision encoder of an engine folder.

    Parameters
    ----------
    graph : StaticGraph
    section : Section
        Its ``config.json``.

    Attributes
    ----------
    front : ImageFront
    hidden_size : int
    num_deepstack_features : int
        D.
    max_patches : int
        Of one image.
    """

    def __init__(self, graph: StaticGraph, section: Section) -> None:
        self._graph = graph
        self.front = ImageFront.from_section(section.section("preprocessor"))
        self.hidden_size = section.integer("hidden_size", minimum=1)
        self.num_deepstack_features = section.integer("num_deepstack_features", minimum=0)
        self.max_patches = section.section("builder_config").integer("max_patches", minimum=1, maximum=MAX_PATCHES)
        self._side = section.integer("positions_per_side", minimum=1, maximum=_MAX_SIDE)

    @classmethod
    def from_engine_dir(cls, folder: Path, *, runtime: Runtime) -> VisionEncoder:
        """Open the encoder of a folder that ``cpspec-build`` wrote; errors are those of a codec's."""
        section = _config(folder, VISION_TYPE)
        front = ImageFront.from_section(section.section("preprocessor"))
        shapes: dict[str, Sequence[int | None] | None] = {
            "patches": (None, front.patch_values),
            "places": (None, 2),
            "corners": (None, 4),
            "shares": (None, 4),
            "embeds": None,
        }
        if section.integer("num_deepstack_features", minimum=0):
            shapes["deepstack"] = None
        return cls(runtime.graph(folder, VISION_PLAN, shapes), section)

    def encode(self, image: Patches) -> Seen:
        """Encode one image."""
        places = patch_places(image.rows, image.columns, self.front.merge_size)
        corners, shares = table_corners(image.rows, image.columns, self._side, self.front.merge_size)
        feeds = {"patches": image.values, "places": places, "corners": corners, "shares": shares}
        found = self._graph.run(feeds)
        embeds = found["embeds"]
        deepstack = found.get("deepstack", np.zeros((len(embeds), 0), np.float32))
        rows = len(places) // self.front.merge_size**2
        _check_rows(embeds, (rows, self.hidden_size))
        _check_rows(deepstack, (rows, self.num_deepstack_features * self.hidden_size))
        return Seen(embeds=embeds, deepstack=deepstack)


@dataclass(slots=True, kw_only=True)
class Encoders:
    """The encoders beside a Thinker, each opened when it is first asked for, by whichever thread asks.

    To open one is work on the model's device: it waits until no other thread has the model's turn.

    Attributes
    ----------
    lock : ModelLock
        The model's.
    folder : Path
        Holds ``audio`` and ``visual``; either may be missing.
    runtime : Runtime
    hidden_size : int
        Of the Thinker.
    num_deepstack_features : int or None
        That the Thinker takes; None is one without three-axis positions, which cannot place an image.
    """

    lock: ModelLock
    folder: Path
    runtime: Runtime
    hidden_size: int
    num_deepstack_features: int | None
    _audio: AudioEncoder | None = field(default=None, init=False)
    _vision: VisionEncoder | None = field(default=None, init=False)

    def audio(self) -> AudioEncoder:
        """Return the audio encoder; a ConfigError says what to build where there is none."""
        if self._audio is not None:  # whoever has the turn
            return self._audio
        with self.lock:
            if self._audio is None:
                encoder = AudioEncoder.from_engine_dir(self._there(AUDIO_FOLDER, "audio"), runtime=self.runtime)
                self._check_width(AUDIO_FOLDER, encoder.hidden_size)
                self._audio = encoder
            return self._audio

    def vision(self) -> VisionEncoder:
        """Return the vision encoder; a ConfigError says what to build where there is none."""
        if self._vision is not None:
            return self._vision
        with self.lock:
            if self._vision is None:
                folder = self._there(VISION_FOLDER, "image")
                encoder = VisionEncoder.from_engine_dir(folder, runtime=self.runtime)
                self._check_width(VISION_FOLDER, encoder.hidden_size)
                if encoder.num_deepstack_features != self.num_deepstack_features:
                    raise ConfigError(
                        f"{folder} gives {encoder.num_deepstack_features} deepstack feature(s), the Thinker takes "
                        f"{self.num_deepstack_features or 'no image at all'}: build the whole engine folder from one "
                        f"checkpoint with cpspec-build"
                    )
                self._vision = encoder
            return self._vision

    def _there(self, name: str, kind: str) -> Path:
        folder = self.folder / name
        check_finished(folder)  # again: it may have been built anew since the model was opened
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"{kind} input needs the encoder {folder}, which is not there: build the engine folder from a "
                f"checkpoint that has it, with cpspec-build --checkpointDir CKPT --engineDir ENG, or name its place "
                f"with --multimodalEngineDir"
            )
        return folder

    def _check_width(self, name: str, width: int) -> None:
        if width != self.hidden_size:
            raise ConfigError(
                f"{self.folder / name} gives rows of {width}, the Thinker's hidden_size is {self.hidden_size}: they "
                f"come from different checkpoints"
            )


def _check_rows(found: Float32, expected: tuple[int, ...]) -> None:
    if found.shape != expected:
        raise EngineError(
            f"an encoder's graph gave rows of shape {list(found.shape)}, its config.json promises {list(expected)}: "
            f"build the engine folder again with cpspec-build"
        )


def _config(folder: Path, model_type: str) -> Section:
    section = Section.from_file(folder / "config.json")
    if section.values.get("model_type") != model_type:
        raise EngineError(f"{section.where}: model_type is {section.values.get('model_type')!r}, not {model_type!r}")
    return section


def patch_places(rows: int, columns: int, merge: int) -> NDArray[np.int32]:
    """Return row and column of each patch, ``[rows * columns, 2]``, in the order in which patches stand."""
    grid = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), axis=-1)
    return _squares(grid.astype(np.int32), merge)


def table_corners(rows: int, columns: int, side: int, merge: int) -> tuple[NDArray[np.int32], Float32]:
    """Return the four neighbours of each patch in the square table of learned positions, and their shares.

    The grid of patches is stretched over the table, corner on corner, and interpolated linearly.

    Returns
    -------
    ndarray, shape [rows * columns, 4], int32
        Rows of the table.
    ndarray, shape [rows * columns, 4], float32
    """
    lows, highs, parts = [], [], []
    for count in (rows, columns):
        place = np.linspace(0, side - 1, count, dtype=np.float32)
        low = place.astype(np.int32)
        lows.append(low)
        highs.append(np.minimum(low + 1, side - 1))
        parts.append(place - low)
    down, across = parts[0][:, None], parts[1][None]
    pairs = [(near, beside) for near in (lows[0], highs[0]) for beside in (lows[1], highs[1])]
    corners = [near[:, None] * side + beside[None] for near, beside in pairs]
    shares: list[Any] = [(1 - down) * (1 - across), (1 - down) * across, down * (1 - across), down * across]
    return (
        _squares(np.stack(corners, axis=-1).astype(np.int32), merge),
        _squares(np.stack(shares, axis=-1).astype(np.float32), merge),
    )


def _squares(grid: NDArray[Any], merge: int) -> NDArray[Any]:
    """Order ``[rows, columns, n]`` square by square, ``[rows * columns, n]``."""
    rows, columns, values = grid.shape
    split = grid.reshape(rows // merge, merge, columns // merge, merge, values)
    return np.ascontiguousarray(split.transpose(0, 2, 1, 3, 4).reshape(rows * columns, values))
