"""Reads pictures as people have them into the pixels that models read: the one reader of HTTP, commands and evaluation.

The rules, whatever the format:

- The first frame or page counts, turned as its EXIF or XMP says (JPEG, PNG's eXIf, WebP, TIFF, AVIF).
- 16 bits a sample become 8 by their high byte (`x >> 8`); so do Pillow's 32-bit integers, cut off at 65535.
- Floats go from 0 (black) to 1 (white), or from 0 to 255 where one is larger than 1; what is beyond is cut off.
- CMYK is converted without a profile. A JPEG with Adobe's marker has it inverted, one without has it as written.
- Transparency is what the format has: an alpha channel (premultiplied or not), a palette's, or a transparent colour.
  In RGB it is composited on white.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from PIL import Image, ImageChops

if TYPE_CHECKING:
    from contract.picture_input import Fit

Sides = tuple[int, int, int, int]  # left, top, right, bottom

_ORIENTATION = 0x0112  # of EXIF
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # fmt: skip
_SAMPLE_FACTORS = {"L;2": 85, "L;4": 17}  # by which a PNG's grey samples of fewer bits are multiplied
_BAND = 2**20  # pixels that are composited at once


class UnreadablePicture(ValueError):
    """A file that is no whole picture. The message says why, without its name."""


def opened(file: Path | IO[bytes] | bytes, formats: tuple[str, ...] | None = None) -> Image.Image:
    """Read the header of a picture, of Pillow's `formats` or of any. Raises `UnreadablePicture`."""
    with _reading():
        return Image.open(io.BytesIO(file) if isinstance(file, bytes) else file, formats=formats)


def orientation(image: Image.Image) -> int:
    """Return EXIF's orientation, 1 to 8, as the header has it; 1 where it has none that can be read.

    From 5 on width and height are swapped.
    """
    try:
        turn = Image.Image.getexif(image).get(_ORIENTATION, 1)  # PNG's own would decode the picture first
    except MemoryError:
        raise
    except Exception:  # damaged EXIF: the picture is read as it lies
        return 1
    return turn if turn in _TURNS else 1


def may_be_transparent(image: Image.Image) -> bool:
    """Return whether the image's format has an alpha channel or names what is transparent. Raises
    `UnreadablePicture`.
    """
    with _reading():
        return image.has_transparency_data


def decode(file: Path | IO[bytes] | bytes, formats: tuple[str, ...] | None = None) -> Image.Image:
    """Decode a picture: its first frame, turned, with 8 bits a sample, in a mode of its own. Raises
    `UnreadablePicture`.
    """
    with opened(file, formats) as image, _reading():
        transparency = _transparency(image)
        image.load()
        if transparency is not None:
            image.info["transparency"] = transparency
        turn = _TURNS.get(orientation(image))
        if image.format == "JPEG" and image.mode == "CMYK" and "adobe" not in image.info:
            image = ImageChops.invert(image)  # Pillow takes each for Adobe's
        return _reduced(image if turn is None else image.transpose(turn))


def read(file: Path | IO[bytes] | bytes) -> Image.Image:
    """Decode a picture in RGB, its transparent parts white. Raises `UnreadablePicture`."""
    return on_white(decode(file))


def on_white(image: Image.Image) -> Image.Image:
    """The image in RGB, composited on white in bands: three whole images in RGBA would take 200 MB.

    Raises `UnreadablePicture` where its palette or its transparency is none.
    """
    with _reading():
        if not image.has_transparency_data:
            return image if image.mode == "RGB" else image.convert("RGB")
        canvas = Image.new("RGB", image.size)
        for top, band in _bands(image):
            canvas.paste(Image.alpha_composite(Image.new("RGBA", band.size, "white"), band).convert("RGB"), (0, top))
        return canvas


def luminance(image: Image.Image) -> Image.Image:
    """The luminance of a picture of any mode, its transparent parts white."""
    return on_white(image).convert("L")


def alpha(image: Image.Image) -> Image.Image:
    """Return the image's alpha in L, 255 where it is opaque. Raises as `on_white`."""
    with _reading():
        if not image.has_transparency_data:
            return Image.new("L", image.size, 255)
        canvas = Image.new("L", image.size)
        for top, band in _bands(image):
            canvas.paste(band.getchannel("A"), (0, top))
        return canvas


def hole(image: Image.Image, *, soft: bool) -> Image.Image:
    """The mask in L of a picture that is repainted where it is transparent: 255 where it is wholly so, else 0; with
    `soft` its transparency. Raises as `on_white`.
    """
    opacity = alpha(image)
    return ImageChops.invert(opacity) if soft else opacity.point([255] + 255 * [0])


def fitted_mask(
    mask: Image.Image, margins: Sides | None, size: tuple[int, int], fit: Fit, *, soft: bool
) -> Image.Image:
    """The mask of a picture with these margins that is brought to `size` by `fit`: 255 in the margins, 0 in what the
    fit adds, and nothing between unless it is `soft`.
    """
    if margins is not None:
        mask = placed(mask, margins, 255)
    mask = fitted(mask, size, fit, surround=0)
    return mask if soft else hard(mask)


def hard(mask: Image.Image) -> Image.Image:
    """The mask with 255 from one half on, and else 0."""
    return mask.point(128 * [0] + 128 * [255])


def rgba(image: Image.Image) -> Image.Image:
    """The image in RGBA, its colours not multiplied by its alpha."""
    return (image.convert("LA") if image.mode == "La" else image).convert("RGBA")


def fitted(image: Image.Image, size: tuple[int, int], fit: Fit, surround: int | None = None) -> Image.Image:
    """The image at this size, by the Lanczos filter. `surround` is the value around a contained one, in place of its
    outermost pixels.
    """
    (width, height), (w, h) = image.size, size
    if fit == "contain":
        inner = _most_within(width / height, size)
        sides = (w - inner[0]) // 2, (h - inner[1]) // 2
        margins = (*sides, w - inner[0] - sides[0], h - inner[1] - sides[1])
        image = _resized(image, inner, (0, 0, width, height))
        return extended(image, margins) if surround is None else placed(image, margins, surround)
    box: tuple[float, float, float, float] = 0, 0, width, height
    if fit == "crop" and width * h != height * w:
        inside = min(width, height * w / h), min(height, width * h / w)
        left, top = (width - inside[0]) / 2, (height - inside[1]) / 2
        box = left, top, left + inside[0], top + inside[1]
    return _resized(image, size, box)


def placed(image: Image.Image, margins: Sides, value: int) -> Image.Image:
    """The image on a canvas of this value."""
    left, top, right, bottom = margins
    canvas = Image.new(image.mode, (image.width + left + right, image.height + top + bottom), value)
    canvas.paste(image, (left, top))
    return canvas


def extended(image: Image.Image, margins: Sides) -> Image.Image:
    """The image with its outermost pixels repeated: columns first, then rows of the whole width."""
    canvas = placed(image, margins, 0)
    width, height = canvas.size
    left, top = margins[:2]
    right, bottom = left + image.width, top + image.height
    for source, start, end in ((left, 0, left), (right - 1, right, width)):
        if end > start:
            column = canvas.crop((source, top, source + 1, bottom))
            canvas.paste(column.resize((end - start, image.height), Image.Resampling.NEAREST), (start, top))
    for source, start, end in ((top, 0, top), (bottom - 1, bottom, height)):
        if end > start:
            row = canvas.crop((0, source, width, source + 1))
            canvas.paste(row.resize((width, end - start), Image.Resampling.NEAREST), (0, start))
    return canvas


@contextmanager
def _reading() -> Iterator[None]:
    """Turn any error of Pillow's many parsers into `UnreadablePicture`: all have the same meaning."""
    try:
        yield
    except (MemoryError, UnreadablePicture):
        raise
    except Exception as error:
        raise UnreadablePicture(str(getattr(error, "strerror", None) or error)) from None


def _transparency(image: Image.Image) -> int | tuple[int, ...] | None:
    """The transparent colour of a PNG that is not decoded yet, in the values that its pixels will have; None where
    Pillow's is right.
    """
    colour = image.info.get("transparency")
    tile = getattr(image, "tile", None) if image.format == "PNG" else None
    rawmode = tile[0].args if tile else None
    if isinstance(colour, tuple) and rawmode == "RGB;16B":
        return tuple(value >> 8 for value in colour)
    if isinstance(colour, int) and rawmode in _SAMPLE_FACTORS:
        return colour * _SAMPLE_FACTORS[rawmode]
    return None


def _reduced(image: Image.Image) -> Image.Image:
    """The image with 8 bits a sample."""
    if image.mode == "F":
        factor = 255 if image.getextrema()[1] <= 1 else 1  # type: ignore[operator]  # a pair, of one band
        return image.point(lambda value: value * factor + 0.5).convert("L")
    if not image.mode.startswith("I"):
        return image
    deep = image if image.mode == "I" else image.convert("I")
    grey = deep.point([value >> 8 for value in range(2**16)], "L")
    colour = image.info.get("transparency")
    if colour is None:
        return grey
    return Image.merge("LA", (grey, deep.point([0 if value == colour else 255 for value in range(2**16)], "L")))


def _bands(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """Yield the image in bands of RGBA, each with its top."""
    rows = max(1, _BAND // image.width)
    for top in range(0, image.height, rows):
        yield top, rgba(image.crop((0, top, image.width, min(top + rows, image.height))))


def _resized(image: Image.Image, size: tuple[int, int], box: tuple[float, float, float, float]) -> Image.Image:
    return image.resize(size, Image.Resampling.LANCZOS, box)


def _most_within(ratio: float, size: tuple[int, int]) -> tuple[int, int]:
    """The largest size of this ratio of width to height within another."""
    width, height = size
    return min(width, max(1, round(height * ratio))), min(height, max(1, round(width / ratio)))
