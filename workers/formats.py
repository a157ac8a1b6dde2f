"""Encodes a finished image as PNG, WebP or JPEG, with its parameters and fingerprint embedded.

Imports no torch at module level, because the worker imports it before torch.
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
class ImageFormat:
    """An output format. `compression` 0 to 100 applies to the lossy ones; WebP at 100 is lossless."""

    name: str = "png"
    compression: int | None = None

    @property
    def quality(self) -> int:
        return _BEST if self.compression is None else self.compression

    @property
    def media_type(self) -> str:
        return MEDIA_TYPES[self.name]


def encode(picture: Picture, wanted: ImageFormat) -> bytes:
    """Encode the image file. Requested previews do not change a bit of it."""
    picture = dataclasses.replace(picture, parameters=dataclasses.replace(picture.parameters, preview_every=0))
    if wanted.name == "png":
        return picture.png()
    from PIL.Image import Exif

    # EXIF's UserComment holds what a PNG holds in text chunks.
    told = {"parameters": picture.parameters.to_dict(), "fingerprint": picture.fingerprint}
    exif = Exif()
    exif.get_ifd(_EXIF)[_USER_COMMENT] = b"UNICODE\0" + json.dumps(
        told, ensure_ascii=False, sort_keys=True, allow_nan=False
    ).encode("utf-16-be")
    stream = io.BytesIO()
    if wanted.name == "webp":
        lossless = wanted.quality == _BEST
        picture.image.save(stream, format="WEBP", lossless=lossless, quality=wanted.quality, exif=exif)
    else:
        # No chroma subsampling: these images are small, and full of edges between colours.
        picture.image.save(stream, format="JPEG", quality=max(1, wanted.quality), subsampling=0, exif=exif)
    return stream.getvalue()


def preview(pixels: NDArray[np.uint8]) -> str:
    """Encode a preview, uint8 [h, w, 3], as PNG in base64."""
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, format="PNG")
    return base64.b64encode(stream.getvalue()).decode("ascii")
