"""Conversations that hold audio and images: their placeholders, their positions, and what stands in their rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .audio_input import log_mel, read_clip
from .config import MediaIds
from .encoders import AudioEncoder, Encoders, VisionEncoder
from .errors import ConfigError
from .image_input import Patches, read_image
from .sequences import RowExtras

Float32 = NDArray[np.float32]
Timed = Callable[[str, float], None]

AUDIO, IMAGE = "audio", "image"


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """What a conversation holds beside text, read and ready for the encoders.

    Attributes
    ----------
    features : tuple of ndarray, each of shape [bins, M], float32
        Of each clip, in the order of the conversation.
    images : tuple of Patches
    clip_rows : tuple of int
        Rows that each clip becomes.
    image_grids : tuple of (int, int)
        Rows and columns of the tokens of each image.
    """

    features: tuple[Float32, ...]
    images: tuple[Patches, ...]
    clip_rows: tuple[int, ...]
    image_grids: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """What stands in a prompt for its media.

    Attributes
    ----------
    places : ndarray, shape [M], int64
        The rows of audio and images in the prompt.
    embeds : ndarray, shape [M, H], float32
        Their embeddings.
    extras : RowExtras
        Positions of all rows, and the deepstack features.
    """

    places: NDArray[np.int64]
    embeds: Float32
    extras: RowExtras


def read_media(messages: Sequence[Mapping[str, Any]], encoders: Encoders | None) -> Media | None:
    """Read the audio and image files of a conversation; None where it is text alone.

    Parameters
    ----------
    messages : sequence of mapping
        Checked (see :class:`~trt_cpspec.requests.ChatRequest`).
    encoders : Encoders or None
        None is a model that was made without.

    Raises
    ------
    ConfigError
        An encoder that is not there, or a file that cannot be used; the message names the part.
    """
    clips: list[Float32] = []
    images: list[Patches] = []
    parts = [
        (f"messages[{index}].content[{number}]", part)
        for index, message in enumerate(messages)
        if isinstance(message["content"], list)
        for number, part in enumerate(message["content"])
        if part_kind(part) in (AUDIO, IMAGE)
    ]
    if not parts:
        return None
    if encoders is None:
        raise ConfigError(f"{parts[0][0]}: this model was made without encoders: give it some, or text alone")
    for place, part in parts:
        try:
            if part_kind(part) == AUDIO:
                clips.append(read_clip(Path(part[AUDIO]), encoders.audio().front))
            else:
                images.append(_read_image(part, encoders.vision()))
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from error
    features = log_mel(clips, encoders.audio().front) if clips else []
    merge = encoders.vision().front.merge_size if images else 1
    return Media(
        features=tuple(features),
        images=tuple(images),
        clip_rows=tuple(encoders.audio().rows_of(mel.shape[1]) for mel in features),
        image_grids=tuple((image.rows // merge, image.columns // merge) for image in images),
    )


def _read_image(part: Mapping[str, Any], encoder: VisionEncoder) -> Patches:
    return read_image(
        Path(part[IMAGE]), encoder.front, max_patches=encoder.max_patches, max_pixels=part.get("max_pixels")
    )


def part_kind(part: Mapping[str, Any]) -> str:
    """Return what a part of a content is: its ``type``, or the first of its keys that names one."""
    named = next((key for key in (AUDIO, IMAGE, "video") if key in part), "text")
    return str(part.get("type", named))


def expanded(prompt_ids: Sequence[int], media: Media, ids: MediaIds) -> list[int]:
    """Repeat each placeholder of a rendered prompt as often as its clip or image has rows.

    Raises
    ------
    ConfigError
        The template wrote more or fewer placeholders than the conversation has clips and images.
    """
    counts = {
        ids.audio_token_id: list(media.clip_rows),
        ids.image_token_id: [rows * columns for rows, columns in media.image_grids],
    }
    for token, name in ((ids.audio_token_id, "audio"), (ids.image_token_id, "image")):
        found = list(prompt_ids).count(token)
        if found != len(counts[token]):
            raise ConfigError(
                f"the chat template writes {found} {name} placeholder(s) for {len(counts[token])} {name} part(s)"
            )
    return [token for one in prompt_ids for token in [one] * (counts[one].pop(0) if one in counts else 1)]


def rotary_positions(ids: Sequence[int], image_token_id: int, grids: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """Return time, height and width of each row, ``[R, 3]``.

    All three count on, but within an image time stands still while height and width go over its grid; what follows it
    begins behind the largest of them.

    Parameters
    ----------
    ids : sequence of int
    image_token_id : int
    grids : sequence of (int, int)
        Rows and columns of the tokens of each image; its placeholders stand together.

    Notes
    -----
    Source: ``transformers`` 4.57.3, ``Qwen3OmniMoeForConditionalGeneration.get_rope_index``.
    """
    out = np.empty((len(ids), 3), np.int64)
    waiting, place, start = list(grids), 0, 0
    while place < len(ids):
        if ids[place] != image_token_id:
            out[place], place, start = start, place + 1, start + 1
            continue
        rows, columns = waiting.pop(0)
        count = rows * columns
        cells = np.arange(count)
        out[place : place + count] = start + np.stack([cells * 0, cells // columns, cells % columns], axis=1)
        place, start = place + count, start + max(rows, columns)
    return out


def encode_media(prompt_ids: Sequence[int], media: Media, ids: MediaIds, encoders: Encoders, timed: Timed) -> Encoded:
    """Run the encoders on what a conversation holds, and place what they give in its prompt.

    Parameters
    ----------
    prompt_ids : sequence of int
        Placeholders repeated.
    media : Media
    ids : MediaIds
    encoders : Encoders
    timed : callable
        Told of each encoder that has run, with the time at which it began.
    """
    own = np.asarray(prompt_ids)
    heard = np.flatnonzero(own == ids.audio_token_id) if media.features else np.zeros(0, np.int64)
    seen = np.flatnonzero(own == ids.image_token_id) if media.images else np.zeros(0, np.int64)
    places = np.concatenate([heard, seen])
    embeds = np.empty((len(places), encoders.hidden_size), np.float32)
    rotary = deepstack = None
    if media.features:
        embeds[: len(heard)] = np.concatenate(_listened(encoders.audio(), media, timed))
    if media.images:
        rotary = rotary_positions(prompt_ids, ids.image_token_id, media.image_grids)
        started = time.perf_counter()
        found = [encoders.vision().encode(image) for image in media.images]
        timed("vision_encoder", started)
        embeds[len(heard) :] = np.concatenate([one.embeds for one in found])
        features = np.concatenate([one.deepstack for one in found])
        if features.shape[1]:
            deepstack = np.zeros((len(prompt_ids), features.shape[1]), np.float32)
            deepstack[seen] = features
    order = np.argsort(places)
    extras = RowExtras(rotary=rotary, deepstack=deepstack)
    return Encoded(places=places[order], embeds=embeds[order], extras=extras)


def _listened(encoder: AudioEncoder, media: Media, timed: Timed) -> list[Float32]:
    started = time.perf_counter()
    rows = encoder.encode(media.features)
    timed("audio_encoder", started)
    return rows
