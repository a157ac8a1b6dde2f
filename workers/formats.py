"""A finished picture as bytes: PNG, WebP or JPEG, each with its parameters and fingerprint inside.

Knows picture files; knows nothing of where they are kept. Light to import: it is there before torch is.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from contract.image import MEDIA_TYPES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pipeline.picture import Picture

_BEST = 100
_USER_COMMENT, _EXIF = 0x9286, 0x8769


@dataclass(frozen=True, slots=True)
class Format:
    """How a picture is written. `compression` 0 to 100 is for those that lose something; WebP at 100 loses nothing."""

    name: str = "png"
    compression: int | None = None

    @property
    def quality(self) -> int:
        return _BEST if self.compression is None else self.compression

    @property
    def media_type(self) -> str:
        return MEDIA_TYPES[self.name]


def encode(picture: Picture, wanted: Format) -> bytes:
    """The picture's file. What was asked to be shown on the way changes no bit of it."""
    picture = dataclasses.replace(picture, parameters=dataclasses.replace(picture.parameters, preview_every=0))
    if wanted.name == "png":
        return picture.png()
    from PIL.Image import Exif

    # EXIF's UserComment holds for these what the text chunks of a PNG hold.
    told = {"parameters": picture.parameters.told(), "fingerprint": picture.fingerprint}
    exif = Exif()
    exif.get_ifd(_EXIF)[_USER_COMMENT] = b"UNICODE\0" + json.dumps(
        told, ensure_ascii=False, sort_keys=True, allow_nan=False
    ).encode("utf-16-be")
    stream = io.BytesIO()
    if wanted.name == "webp":
        lossless = wanted.quality == _BEST
        picture.image.save(stream, format="WEBP", lossless=lossless, quality=wanted.quality, exif=exif)
    else:
        # Without subsampling: these pictures are small, and full of edges between colours.
        picture.image.save(stream, format="JPEG", quality=max(1, wanted.quality), subsampling=0, exif=exif)
    return stream.getvalue()


def preview(pixels: NDArray[np.uint8]) -> str:
    """A look at a picture in the making, uint8 [h, w, 3], as PNG in base64."""
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, format="PNG")
    return base64.b64encode(stream.getvalue()).decode("ascii")
