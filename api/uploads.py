"""Checks uploaded images before decoding them, and resizes them to their job's size.

They are re-encoded as PNG here: no worker ever reads a client's file.
"""

from __future__ import annotations

import hashlib
import io
import re
from dataclasses import dataclass
from typing import NamedTuple

from PIL import Image, ImageOps

from api.errors import ApiError, invalid_field
from contract import image_prompt
from contract.image_fields import Margins

MAX_BYTES = 16 * 2**20  # per file
MAX_PIXELS = 4096 * 4096
MAX_SIDE = 8192  # resizing an image of one row costs more than its area suggests
MAX_SCANS = 100  # of a JPEG, each of which decodes all of it again; encoders make about ten
_FORMATS = ("PNG", "JPEG", "WEBP")
_MARKER = re.compile(rb"\xff[^\x00\xff]")
_SOS = 0xDA
_BARE = frozenset((0x01, *range(0xD0, 0xDA)))  # markers without a segment
_ORIENTATION = 0x0112  # of EXIF; from 5 on width and height are swapped
_OPAQUE = "has no transparent pixel: what is transparent in it is what is drawn anew"


@dataclass(frozen=True, slots=True)
class Upload:
    """An image, and a mask of the same size whose transparent pixels (alpha 0) are to be repainted."""

    image: bytes
    mask: bytes | None
    size: tuple[int, int]  # (width, height) after orientation, with margins
    named: str = "image"  # the field that the image came in
    margins: Margins | None = None

    @classmethod
    def of(
        cls, image: bytes, mask: bytes | None, named: str = "image", margins: Margins | None = None
    ) -> Upload:  # fmt: skip
        """Read the headers only. Raises `ApiError` (400, 413), naming the field."""
        size = _size(named, image)
        if mask is not None and _size("mask", mask) != size:
            raise invalid_field("mask", "must have the width and height of the image")
        if margins is not None:
            if margins == Margins():
                raise invalid_field("outpaint", "must have a side of more than 0 pixels")
            size = margins.around(size)
            if max(size) > MAX_SIDE or size[0] * size[1] > MAX_PIXELS:
                raise invalid_field("outpaint", f"makes more than {MAX_SIDE} pixels a side, or {MAX_PIXELS} in all")
        return cls(image, mask, size, named, margins)

    @property
    def masked(self) -> bool:
        """Whether a part of it is repainted, and all else kept."""
        return self.mask is not None or self.margins is not None

    @property
    def digest(self) -> str:
        """Identifies the upload's content."""
        return hashlib.sha256(
            b"".join(hashlib.sha256(part or b"").digest() for part in (self.image, self.mask))
        ).hexdigest()

    def fitted(self, size: tuple[int, int], *, soft: bool = False) -> tuple[bytes, bytes | None]:
        """The image in RGB, its transparent parts white, and the mask in L, 255 where it is repainted; both as PNG.

        Of a `soft` mask the values between 0 and 255 are kept: its transparency. Resized to (width, height) in pixels
        with the Lanczos filter. Raises `ApiError` (400), naming the field.
        """
        image = _decoded(self.named, self.image)
        white = Image.new("RGBA", image.size, "white")
        made = Image.alpha_composite(white, image).convert("RGB")
        hole = Image.new("L", image.size, 0)
        if self.mask is not None:
            alpha = _decoded("mask", self.mask).getchannel("A")
            if not any(alpha.histogram()[: 255 if soft else 1]):
                raise invalid_field("mask", _OPAQUE)
            hole = ImageOps.invert(alpha) if soft else alpha.point([255] + 255 * [0])
        if self.margins is not None:
            made, hole = _extended(made, self.margins), _placed(hole, self.margins, 255)
        made = made.resize(size, Image.Resampling.LANCZOS)
        if not self.masked:
            return _png(made), None
        hole = hole.resize(size, Image.Resampling.LANCZOS)
        return _png(made), _png(hole if soft else hole.point(128 * [0] + 128 * [255]))


class PictureUploads(NamedTuple):
    """The pictures of a request's controls and image prompts, in the order of each."""

    controls: tuple[Upload, ...] = ()
    image_prompts: tuple[Upload, ...] = ()

    @property
    def any(self) -> bool:
        return bool(self.controls or self.image_prompts)

    @property
    def digests(self) -> dict[str, list[str]]:
        """Identifies the content of all, by what they are."""
        return {name: [one.digest for one in own] for name, own in self._asdict().items() if own}


NO_PICTURES = PictureUploads()


class FittedInputs(NamedTuple):
    """A job's pictures as PNG: at its size, and those of image prompts at sizes of their own."""

    image: bytes | None
    mask: bytes | None
    controls: list[bytes]
    image_prompts: list[bytes]


def fitted(
    upload: Upload | None, pictures: PictureUploads, size: tuple[int, int], *, soft: bool = False
) -> FittedInputs:
    """The source of an edit, if any, and the pictures of controls and image prompts. Raises as `Upload.fitted`."""
    image, mask = (None, None) if upload is None else upload.fitted(size, soft=soft)
    controls = [one.fitted(size)[0] for one in pictures.controls]
    return FittedInputs(
        image, mask, controls, [one.fitted(image_prompt.fitted(*one.size))[0] for one in pictures.image_prompts]
    )


def media_type(field: str, data: bytes) -> str:
    """The image's media type by its header; checks its size too. Raises `ApiError` (400, 413), naming the field."""
    _size(field, data)
    return {"PNG": "image/png", "WEBP": "image/webp"}.get(_opened(data).format or "", "image/jpeg")


def _size(field: str, data: bytes) -> tuple[int, int]:
    """Width and height by the header, after orientation. Nothing is decoded."""
    if len(data) > MAX_BYTES:
        raise ApiError(413, f"{field}: is larger than {MAX_BYTES} bytes", param=field, code="body_too_large")
    if not data:
        raise invalid_field(field, "must not be empty")
    try:
        size = _webp_size(data) or _opened(data).size
        if max(size) > MAX_SIDE:
            raise invalid_field(field, f"is wider or higher than {MAX_SIDE} pixels")
        if size[0] * size[1] > MAX_PIXELS:
            raise Image.DecompressionBombError
        if data[:2] == b"\xff\xd8" and _scans(data) > MAX_SCANS:
            raise invalid_field(field, f"is a JPEG of more than {MAX_SCANS} scans")
        return size[::-1] if _orientation(_opened(data)) >= 5 else size
    except ApiError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise invalid_field(field, f"has more than {MAX_PIXELS} pixels") from None
    except Exception:  # of many parsers, all with the same meaning
        raise invalid_field(field, "must be a PNG, JPEG or WebP image") from None


def _decoded(field: str, data: bytes) -> Image.Image:
    """The image as RGBA, after orientation."""
    try:
        image = _opened(data)
        if _orientation(image) > 1:
            image = ImageOps.exif_transpose(image)
        return image.convert("RGBA")
    except Exception:  # as above
        raise invalid_field(field, "cannot be decoded") from None


def _placed(image: Image.Image, margins: Margins, colour: int) -> Image.Image:
    """The image on a canvas of this colour."""
    canvas = Image.new(image.mode, margins.around(image.size), colour)
    canvas.paste(image, (margins.left, margins.top))
    return canvas


def _extended(image: Image.Image, margins: Margins) -> Image.Image:
    """The image with its outermost pixels repeated: columns first, then rows of the whole width."""
    canvas = _placed(image, margins, 0)
    width, height = canvas.size
    top, bottom = margins.top, margins.top + image.height
    for source, start, end in (
        (margins.left, 0, margins.left),
        (margins.left + image.width - 1, margins.left + image.width, width),
    ):
        if end > start:
            column = canvas.crop((source, top, source + 1, bottom))
            canvas.paste(column.resize((end - start, image.height), Image.Resampling.NEAREST), (start, top))
    for source, start, end in ((top, 0, top), (bottom - 1, bottom, height)):
        if end > start:
            row = canvas.crop((0, source, width, source + 1))
            canvas.paste(row.resize((width, end - start), Image.Resampling.NEAREST), (0, start))
    return canvas


def _opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data), formats=_FORMATS)


def _orientation(image: Image.Image) -> int:
    """EXIF's orientation; a PNG may carry it behind its pixels, where it is not read."""
    return 1 if image.format == "PNG" else int(image.getexif().get(_ORIENTATION, 1))


def _scans(data: bytes) -> int:
    """How many scans a JPEG has (SOS markers), counted up to one more than allowed."""
    found, at = 0, 2
    while (marker := _MARKER.search(data, at)) is not None:
        at = marker.end()
        if marker[0][1] in _BARE:
            continue
        if marker[0][1] == _SOS:
            found += 1
            if found > MAX_SCANS:
                break
        at += int.from_bytes(data[at : at + 2], "big")  # resizing one row costs more than its area suggests
    return found


def _webp_size(data: bytes) -> tuple[int, int] | None:
    """By RFC 9649, since Pillow allocates all pixels of a WebP when it opens it. None: not a WebP."""
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        return None
    if data[12:16] == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if data[12:16] == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF


def _png(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG", compress_level=1)
    return stream.getvalue()
