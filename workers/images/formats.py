"""Encodes a finished image as PNG, WebP or JPEG, with its parameters and fingerprint embedded.

Imports no torch at module level, because the worker imports it before torch.
"""

from __future__ import annotations

import base64
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from contract.image import MEDIA_TYPES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pipeline.pixels.picture import Picture

_BEST = 100
_JPEG_EXIF = 65_533  # bytes of a segment
_USER_COMMENT, _MAKER_NOTE, _EXIF = 0x9286, 0x927C, 0x8769


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


def encode(picture: Picture, image_format: ImageFormat, *, metadata: bool = True) -> bytes:
    """Encode the image file. Requested previews do not change a bit of it.

    `metadata`: with what a PNG holds in text chunks. In WebP and JPEG EXIF's UserComment is the infotext, as
    AUTOMATIC1111's web UI has it, and MakerNote has `parameters` and `fingerprint` as JSON in UTF-8; of long prompts
    a JPEG holds as much of the two as fits. The picture's `provenance` marks it, whatever `metadata` says.
    """
    picture = dataclasses.replace(picture, parameters=dataclasses.replace(picture.parameters, preview_every=0))
    if image_format.name == "png":
        return picture.png(metadata=metadata)
    from pipeline.pixels.files import encoded
    from pipeline.pixels.provenance import xmp

    limit = _JPEG_EXIF if image_format.name == "jpeg" else None
    image, options = picture.image, {"exif": _exif(picture, limit) if metadata else b""}
    provenance = picture.provenance
    if provenance is not None:
        image, options["xmp"] = provenance.watermarked(image), xmp(picture.source_type).encode()
    if image_format.name == "webp":
        lossless = image_format.quality == _BEST
        data = encoded(image, "WEBP", lossless=lossless, quality=image_format.quality, **options)
    else:
        # No chroma subsampling: these images are small, and full of edges between colours.
        data = encoded(image, "JPEG", quality=max(1, image_format.quality), subsampling=0, **options)
    return data if provenance is None else provenance.signed(data, image_format.media_type, picture.source_type)


def _exif(picture: Picture, limit: int | None) -> bytes:
    """Both fields, the first alone or none, whichever is within the limit, in bytes."""
    from PIL.Image import Exif

    from pipeline.pixels.picture import to_json

    metadata = {"parameters": picture.parameters.to_dict(), "fingerprint": picture.fingerprint}
    fields = {
        _USER_COMMENT: b"UNICODE\0" + picture.infotext.encode("utf-16-be"),
        _MAKER_NOTE: to_json(metadata).encode(),
    }
    while fields:
        exif = Exif()
        exif.get_ifd(_EXIF).update(fields)
        data = exif.tobytes()
        if limit is None or len(data) <= limit:
            return data
        fields.popitem()
    return b""


def preview(pixels: NDArray[np.uint8]) -> str:
    """Encode a preview, uint8 [h, w, 3], as PNG in base64."""
    from PIL.Image import fromarray

    from pipeline.pixels import files

    return base64.b64encode(files.png(fromarray(pixels))).decode("ascii")
