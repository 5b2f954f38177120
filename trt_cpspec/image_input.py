"""Image files to patches, as the reference's image processor makes them.

Source: ``transformers`` 4.57, ``Qwen2VLImageProcessor``: an image is resized (bicubic) so that both sides are multiples
of a square of patches and its area is within limits, scaled to the encoder's range and cut into patches, of which the
four of a square stand together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from .config import Section, is_plain_file
from .errors import ConfigError

FORMATS = ("PNG", "JPEG")
MAX_DECODED_PIXELS = 89_478_485
"""Pixels of a file that is opened at all: Pillow's own limit against files that swell."""

MAX_PATCHES = 8192
"""Patches that an encoder is built for at most: about 1920 x 1088 pixels. Attention's scores grow with their square,
and take 4 GiB there."""

MAX_ASPECT = 200
"""Long side over short side at most (the reference's)."""

_MIN_STD, _MAX_MEAN = 1e-3, 1e3

Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFront:
    """What stands before the vision encoder; the field names are keys of the official ``preprocessor_config.json``.

    Attributes
    ----------
    image_mean, image_std : tuple of float
        Of each channel, of values from 0 to 1.
    min_pixels, max_pixels : int
        An image outside is scaled to them.
    patch_size : int
        Pixels along a patch.
    merge_size : int
        Patches along the square that becomes one row.
    temporal_patch_size : int
        How often an image stands in its patches, as if it were a film that stands still.
    """

    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]
    min_pixels: int
    max_pixels: int
    patch_size: int
    merge_size: int
    temporal_patch_size: int

    @classmethod
    def from_section(cls, section: Section) -> ImageFront:
        """Read it; a key that is missing is a ConfigError that names it."""
        names = ("min_pixels", "max_pixels", "patch_size", "merge_size", "temporal_patch_size")
        sizes = {name: section.integer(name, minimum=1) for name in names}
        mean, std = _three(section, "image_mean"), _three(section, "image_std")
        if min(std) < _MIN_STD or max(map(abs, mean)) > _MAX_MEAN:
            raise ConfigError(
                f"{section.where}: image_std must be at least {_MIN_STD}, image_mean at most {_MAX_MEAN} (0 and 1 are "
                f"black and white)"
            )
        return cls(image_mean=mean, image_std=std, **sizes)

    @property
    def patch_values(self) -> int:
        """Values of a patch."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    @property
    def square(self) -> int:
        """Pixels along the square that becomes one row."""
        return self.patch_size * self.merge_size


def _three(section: Section, key: str) -> tuple[float, ...]:
    values = section.list(key)
    if len(values) != 3 or not all(isinstance(value, (int, float)) and math.isfinite(value) for value in values):
        raise ConfigError(f"{section.where}: {key} must hold three numbers, it is {values!r:.80}")
    return tuple(map(float, values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Patches:
    """An image, cut into patches.

    Attributes
    ----------
    values : ndarray, shape [P, channels * temporal * patch * patch], float32
        Square by square, row by row, and within a square too.
    rows, columns : int
        Patches along each side.
    """

    values: Float32
    rows: int
    columns: int


def read_image(path: Path, front: ImageFront, *, max_patches: int, max_pixels: int | None = None) -> Patches:
    """Read an image file and cut it into patches.

    Parameters
    ----------
    path : Path
        A png or jpeg. Its orientation tag is heeded; what is transparent is put on white.
    front : ImageFront
    max_patches : int
        That the encoder takes.
    max_pixels : int or None
        Scale a larger image down to these, in place of ``front.max_pixels``.

    Raises
    ------
    ConfigError
        No such file, no image of these kinds, damaged, too large or too narrow.
    """
    if not is_plain_file(path):
        raise ConfigError(f"{path}: there is no such file")
    try:
        with Image.open(path, formats=FORMATS) as image:
            _check_size(path, image, front, max_patches, max_pixels)
            pixels = _rgb(ImageOps.exif_transpose(image))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _swelling(path) from error
    except ConfigError:
        raise
    except Exception as error:  # Pillow's readers raise what they like on a damaged file
        raise ConfigError(f"{path} cannot be read as an image (png and jpeg can): {error}") from error
    height, width = resized_size(pixels.height, pixels.width, front, max_pixels)
    if pixels.size != (width, height):
        pixels = pixels.resize((width, height), Image.Resampling.BICUBIC)
    return cut(np.asarray(pixels), front)


def _check_size(path: Path, image: Image.Image, front: ImageFront, limit: int, max_pixels: int | None) -> None:
    """Refuse an image of which the encoder cannot take the patches, before its pixels are decoded."""
    # Not by a filter that turns Pillow's warning into an error: filters are the process's, and threads read images.
    if image.width * image.height > MAX_DECODED_PIXELS:
        raise _swelling(path)
    try:
        count = math.prod(resized_size(image.height, image.width, front, max_pixels)) // front.patch_size**2
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if count > limit:
        most = limit * front.patch_size**2
        hint = ", or build with a larger --maxInputLen" if limit < MAX_PATCHES else ""
        raise ConfigError(
            f"{path} is too large: {image.width} x {image.height} pixels take {count} patches of "
            f"{front.patch_size} x {front.patch_size}, the vision encoder takes {limit}; give the part "
            f'"max_pixels": {most} to have it scaled down{hint}'
        )


def _swelling(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} is too large: an image may have {MAX_DECODED_PIXELS:,} pixels before it is scaled; scale it down"
    )


def _rgb(image: Image.Image) -> Image.Image:
    """Return an image of three channels of 8 bits; what is transparent lies on white."""
    if image.mode.startswith("I"):  # 16 bits of grey, which Pillow would cut off at 255
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        above = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", above.size, "white"), above).convert("RGB")
    return image.convert("RGB")


def resized_size(height: int, width: int, front: ImageFront, max_pixels: int | None = None) -> tuple[int, int]:
    """Return height and width to which an image is resized.

    Both are multiples of ``front.square``, near the given ratio, and their product lies within the limits.

    Raises
    ------
    ConfigError
        One side is over 200 times as long as the other.
    """
    most, factor = min(max_pixels or front.max_pixels, front.max_pixels), front.square
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise ConfigError(f"{width} x {height} pixels: one side may be {MAX_ASPECT} times as long as the other at most")
    sides = [round(side / factor) * factor for side in (height, width)]
    if math.prod(sides) > most:
        shrink = math.sqrt(height * width / most)
        sides = [max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width)]
    elif math.prod(sides) < front.min_pixels:
        grow = math.sqrt(front.min_pixels / (height * width))
        sides = [math.ceil(side * grow / factor) * factor for side in (height, width)]
    return sides[0], sides[1]


def cut(pixels: NDArray[np.uint8], front: ImageFront) -> Patches:
    """Cut ``[height, width, 3]``, whose sides are multiples of ``front.square``, into patches."""
    scale = np.float32(255)
    mean, std = (np.array(values, np.float32) * scale for values in (front.image_mean, front.image_std))
    scaled = (pixels.astype(np.float32) - mean) / std
    rows, columns = (side // front.patch_size for side in pixels.shape[:2])
    merge, size = front.merge_size, front.patch_size
    split = scaled.reshape(rows // merge, merge, size, columns // merge, merge, size, 3)
    ordered = split.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, 3, 1, size * size)
    film = np.broadcast_to(ordered, (rows * columns, 3, front.temporal_patch_size, size * size))
    return Patches(values=film.reshape(rows * columns, -1), rows=rows, columns=columns)
