"""Opens, decodes and resizes pictures of clients. Runs in child processes only: see picture_decoder.py.

Imports Pillow and nothing else that is large. Its functions have the form that process_pool.py calls; invalid pictures
raise `InvalidPicture`.
"""

from __future__ import annotations

import io
from typing import Any

from PIL import Image, ImageOps

from api.picture_walk import InvalidPicture, check_size, walk
from api.process_pool import serve

_FORMATS = ("PNG", "JPEG", "WEBP")
_MEDIA_TYPES = {"PNG": "image/png", "WEBP": "image/webp"}
_ORIENTATION = 0x0112  # of EXIF; from 5 on width and height are swapped
_NO_HOLE = "has no transparent pixel: what is transparent in it is what is drawn anew"
_ALL_DARK = "has no white pixel: what is white in it is what is drawn anew"
_OPAQUE = ("1", "L", "RGB", "CMYK")  # modes without transparency, unless the file says which value is transparent
_BAND = 2**20  # pixels that are composited at once

Margins = tuple[int, int, int, int]  # left, top, right, bottom


def measure(arguments: None, blobs: list[bytes]) -> tuple[dict[str, Any], list[bytes]]:
    """The picture's width and height after orientation, and its media type; nothing is decoded."""
    (data,) = blobs
    walk(data)
    try:
        image = _opened(data)
        check_size(image.size)
        turned = _orientation(image) >= 5
    except InvalidPicture:
        raise
    except MemoryError:
        raise
    except Exception:  # of many parsers, all with the same meaning
        raise InvalidPicture("must be a PNG, JPEG or WebP image") from None
    width, height = image.size[::-1] if turned else image.size
    media_type = _MEDIA_TYPES.get(image.format or "", "image/jpeg")
    return {"width": width, "height": height, "media_type": media_type}, []


def fit_picture(arguments: dict[str, Any], blobs: list[bytes]) -> tuple[None, list[bytes]]:
    """The picture in RGB as PNG, its transparent parts white, with `margins` around it, resized to `size`."""
    image = _on_white(_decoded(blobs[0]))
    if arguments["margins"] is not None:
        image = _extended(image, tuple(arguments["margins"]))
    return None, [_png(_resized(image, arguments["size"]))]


def fit_mask(arguments: dict[str, Any], blobs: list[bytes]) -> tuple[None, list[bytes]]:
    """The mask in L as PNG, 255 where it is repainted: where the picture is transparent, and in the margins.

    With `luminance` it is repainted where the picture is white instead. Of a `soft` mask the values between 0 and 255
    are kept: its transparency, or luminance. Without a picture (`own_size` is given)
    only the margins are repainted.
    """
    soft, luminance, margins = bool(arguments["soft"]), bool(arguments.get("luminance")), arguments["margins"]
    if blobs:
        picture = _decoded(blobs[0])
        if luminance:
            hole = _on_white(picture).convert("L")
        else:
            alpha = _alpha(picture)
            hole = ImageOps.invert(alpha) if soft else alpha.point([255] + 255 * [0])
        if not any(hole.histogram()[1 if soft else 128 :]):
            raise InvalidPicture(_ALL_DARK if luminance else _NO_HOLE)
    else:
        hole = Image.new("L", tuple(arguments["own_size"]), 0)
    if margins is not None:
        hole = _placed(hole, tuple(margins), 255)
    hole = _resized(hole, arguments["size"])
    return None, [_png(hole if soft else hole.point(128 * [0] + 128 * [255]))]


def _opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data), formats=_FORMATS)


def _orientation(image: Image.Image) -> int:
    """EXIF's orientation; a PNG may carry it behind its pixels, where it is not read."""
    return 1 if image.format == "PNG" else int(image.getexif().get(_ORIENTATION, 1))


def _decoded(data: bytes) -> Image.Image:
    """The image after orientation, in a mode of its own."""
    walk(data)
    try:
        image = _opened(data)
        image.load()
        return ImageOps.exif_transpose(image) if _orientation(image) > 1 else image
    except MemoryError:
        raise
    except Exception:  # of many parsers, all with the same meaning
        raise InvalidPicture("cannot be decoded") from None


def _on_white(image: Image.Image) -> Image.Image:
    """The image in RGB, composited on white in bands: three whole images in RGBA would take 200 MB."""
    if image.mode in _OPAQUE and "transparency" not in image.info:
        return image if image.mode == "RGB" else image.convert("RGB")
    canvas = Image.new("RGB", image.size)
    rows = max(1, _BAND // image.width)
    for top in range(0, image.height, rows):
        band = _rgba(image.crop((0, top, image.width, min(top + rows, image.height))))
        canvas.paste(Image.alpha_composite(Image.new("RGBA", band.size, "white"), band).convert("RGB"), (0, top))
    return canvas


def _alpha(image: Image.Image) -> Image.Image:
    """Return the image's alpha in L, in bands likewise."""
    canvas = Image.new("L", image.size)
    rows = max(1, _BAND // image.width)
    for top in range(0, image.height, rows):
        band = image.crop((0, top, image.width, min(top + rows, image.height)))
        canvas.paste(_rgba(band).getchannel("A"), (0, top))
    return canvas


def _rgba(band: Image.Image) -> Image.Image:
    try:
        return band.convert("RGBA")
    except MemoryError:
        raise
    except Exception:
        raise InvalidPicture("cannot be decoded") from None


def _resized(image: Image.Image, size: list[int]) -> Image.Image:
    return image.resize((size[0], size[1]), Image.Resampling.LANCZOS)


def _placed(image: Image.Image, margins: Margins, colour: int) -> Image.Image:
    """The image on a canvas of this colour."""
    left, top, right, bottom = margins
    canvas = Image.new(image.mode, (image.width + left + right, image.height + top + bottom), colour)
    canvas.paste(image, (left, top))
    return canvas


def _extended(image: Image.Image, margins: Margins) -> Image.Image:
    """The image with its outermost pixels repeated: columns first, then rows of the whole width."""
    canvas = _placed(image, margins, 0)
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


def _png(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG", compress_level=1)
    return stream.getvalue()


if __name__ == "__main__":
    serve(measure, fit_picture, fit_mask)
