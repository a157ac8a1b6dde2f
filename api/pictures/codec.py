"""Checks, decodes and resizes pictures of clients. Runs in child processes only: see decoder.py.

Imports Pillow and nothing else that is large. Its functions have the form that concurrency/process_pool.py calls;
invalid pictures raise `InvalidPicture`.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any

from PIL import Image, ImageFilter, ImageOps

from api.concurrency.process_pool import serve
from api.dialects.sdapi import infotext
from api.pictures.walk import InvalidPicture, check_size, header_of, walk
from core import pictures

_FORMATS = ("PNG", "JPEG", "WEBP")
_EXIF, _USER_COMMENT = 0x8769, 0x9286
_MEDIA_TYPES = {"PNG": "image/png", "WEBP": "image/webp"}
_NONE_REPAINTED = {
    "hole": "has no transparent pixel: what is transparent in it is what is drawn anew",
    "luminance": "has no white pixel: what is white in it is what is drawn anew",
    "a1111": "leaves nothing to draw: what is white in it is drawn anew",
    "a1111-inverted": "leaves nothing to draw: what is black in it is drawn anew",
}


def measure(arguments: None, blobs: list[bytes]) -> tuple[dict[str, Any], list[bytes]]:
    """The picture's width and height after orientation, its media type, and whether it may be transparent; nothing is
    decoded.
    """
    (data,) = blobs
    walk(data)
    try:
        image = pictures.opened(header_of(data), _FORMATS)
        alpha = pictures.may_be_transparent(image)
    except pictures.UnreadablePicture:
        raise InvalidPicture("must be a PNG, JPEG or WebP image, with no damaged chunk") from None
    check_size(image.size)
    width, height = image.size[::-1] if pictures.orientation(image) >= 5 else image.size
    media_type = _MEDIA_TYPES.get(image.format or "", "image/jpeg")
    return {"width": width, "height": height, "media_type": media_type, "alpha": alpha}, []


def png_info(arguments: None, blobs: list[bytes]) -> tuple[dict[str, Any], list[bytes]]:
    """What the texts of a file say, as `infotext.info_of` has it: of a PNG its chunks, else EXIF's comment."""
    (data,) = blobs
    items = infotext.texts(data)
    if not items and data.startswith((b"\xff\xd8", b"RIFF")):
        items = infotext.comment(_comment(data))
    return infotext.info_of(items), []


def _comment(data: bytes) -> bytes:
    """EXIF's UserComment of a JPEG or a WebP; empty where there is none, or none that can be read."""
    try:
        walk(data)
        value = pictures.opened(data, _FORMATS[1:]).getexif().get_ifd(_EXIF).get(_USER_COMMENT)
    except MemoryError:
        raise
    except Exception:  # damaged, as far as Pillow reads it
        return b""
    return value if isinstance(value, bytes) else str(value or "").encode()


def find_hole(arguments: dict[str, Any], blobs: list[bytes]) -> tuple[bool, list[bytes]]:
    """Whether the picture can be its own mask: it has a pixel that is transparent, of a `soft` mask at all."""
    return _has_hole(_decoded(blobs[0], pictures.alpha), soft=bool(arguments["soft"])), []


def fit_picture(arguments: dict[str, Any], blobs: list[bytes]) -> tuple[None, list[bytes]]:
    """The picture in RGB as PNG, its transparent parts white, with `margins` around it, brought to `size` by `fit`."""
    image = _decoded(blobs[0], pictures.on_white)
    if arguments["margins"] is not None:
        image = pictures.extended(image, tuple(arguments["margins"]))
    return None, [_png(pictures.fitted(image, tuple(arguments["size"]), arguments["fit"]))]


def fit_mask(arguments: dict[str, Any], blobs: list[bytes]) -> tuple[None, list[bytes]]:
    """The mask in L as PNG, 255 where it is repainted: where the picture is transparent, and in the margins.

    `mask_convention` says where else: see `MaskConvention`. Of a `soft` mask the values between 0 and 255 are kept: its
    transparency, or luminance. The edges of any other are blurred by a Gaussian filter of the standard deviations
    `blur`. Without a picture (`own_size` is given) only the margins are repainted. It is brought to `size` by `fit`,
    and kept in what that adds.
    """
    soft, margins, blur = bool(arguments["soft"]), arguments["margins"], tuple(arguments.get("blur", ()))
    if blobs:
        convention = arguments.get("mask_convention", "hole")
        mask = _repainted(blobs[0], convention, soft=soft)
        if not any(mask.histogram()[1 if soft else 128 :]):
            raise InvalidPicture(_NONE_REPAINTED[convention])
        if any(blur):
            mask, soft = pictures.hard(mask).filter(ImageFilter.GaussianBlur(blur)), True
    else:
        mask = Image.new("L", tuple(arguments["own_size"]), 0)
    sides = None if margins is None else tuple(margins)
    return None, [_png(pictures.fitted_mask(mask, sides, tuple(arguments["size"]), arguments["fit"], soft=soft))]


def _repainted(data: bytes, convention: str, *, soft: bool) -> Image.Image:
    """The mask in L, white where this convention repaints it."""
    if convention == "hole":
        return _decoded(data, partial(pictures.hole, soft=soft))
    if convention != "luminance":
        alpha = _decoded(data, pictures.alpha)
        if _has_hole(alpha, soft=True):
            return ImageOps.invert(alpha) if convention == "a1111-inverted" else alpha
    white = _decoded(data, pictures.luminance)
    return ImageOps.invert(white) if convention == "a1111-inverted" else white


def _has_hole(alpha: Image.Image, *, soft: bool) -> bool:
    return any(alpha.histogram()[: 255 if soft else 1])


def _decoded(data: bytes, convert: Callable[[Image.Image], Image.Image]) -> Image.Image:
    """The decoded picture, converted, once its structure is checked."""
    walk(data)
    try:
        return convert(pictures.decode(data, _FORMATS))
    except pictures.UnreadablePicture:
        raise InvalidPicture("cannot be decoded") from None


def _png(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG", compress_level=1)
    return stream.getvalue()


if __name__ == "__main__":
    serve(measure, find_hole, fit_picture, fit_mask, png_info)
