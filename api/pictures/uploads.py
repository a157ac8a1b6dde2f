"""The pictures of a request before their bytes are loaded: where they come from, and what is known of them.

decoder.py loads, checks and decodes them, in the tenant's turn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal, NamedTuple, Self

from api.errors import ApiError, invalid_field
from api.pictures.walk import MAX_PIXELS, MAX_SIDE
from contract.card import Size
from contract.image_prompt import ImagePrompt
from contract.image_request import Margins
from contract.picture_input import Fit

MAX_BYTES = 16 * 2**20  # per file

MaskConvention = Literal["hole", "luminance", "a1111", "a1111-inverted"]
"""Where a mask is repainted: where it is transparent; white; or, of any size, as AUTOMATIC1111's API reads it: where it
is opaque if it has transparent pixels, else where it is white; or the other way round.
"""
_NO_PART = hashlib.sha256(b"").digest()


@dataclass(frozen=True, slots=True)
class PictureSource:
    """A picture that a client sends or names. `read` loads its bytes: it blocks, and may raise `ApiError` and
    `ArtifactError`. One with a `url` is to be fetched first: it has no bytes, and its digest is the URL's.

    `digest` (SHA-256 of the bytes), `size` (width, height after orientation) and `alpha` (whether its format lets it be
    transparent) are None while they are unknown.
    """

    field: str  # that it came in
    size_bytes: int
    read: Callable[[], bytes]
    digest: str | None = None
    size: Size | None = None
    alpha: bool | None = None
    url: str = ""

    @property
    def identity(self) -> str | int:
        """Equal for sources that are known to have the same content."""
        return self.digest or id(self.read)

    def check_bytes(self) -> None:
        """Raise `ApiError` (400, 413) for a file that is empty or too large."""
        if self.url:
            return
        if self.size_bytes > MAX_BYTES:
            message = f"{self.field}: is larger than {MAX_BYTES} bytes"
            raise ApiError(413, message, param=self.field, code="body_too_large")
        if not self.size_bytes:
            raise invalid_field(self.field, "must not be empty")


@dataclass(frozen=True, slots=True)
class Upload:
    """A picture, and a mask that says where it is to be repainted, of the same size but in AUTOMATIC1111's convention.

    `fit` says how it comes to the size at which it is read. `mask_blur` are the standard deviations, in the mask's own
    pixels from left to right and from top to bottom, of the Gaussian blur of its edges.
    """

    image: PictureSource
    mask: PictureSource | None = None
    margins: Margins | None = None
    fit: Fit = "stretch"
    mask_convention: MaskConvention = "hole"
    mask_blur: tuple[float, float] = (0.0, 0.0)

    def check(self) -> Self:
        """Check what is known of it. Raises `ApiError` (400, 413), naming the field."""
        for source in self.sources:
            source.check_bytes()
        size, mask = self.image.size, self.mask
        sized = mask is not None and mask.size is not None and not self.mask_convention.startswith("a1111")
        if size is not None and mask is not None and sized and mask.size != size:
            raise invalid_field("mask", "must have the width and height of the image")
        if self.margins is not None:
            if self.margins == Margins():
                raise invalid_field("outpaint", "must have a side of more than 0 pixels")
            width, height = self.margins.around(size or (1, 1))
            if max(width, height) > MAX_SIDE or width * height > MAX_PIXELS:
                raise invalid_field("outpaint", f"makes more than {MAX_SIDE} pixels a side, or {MAX_PIXELS} in all")
        return self

    @property
    def sources(self) -> tuple[PictureSource, ...]:
        return (self.image,) if self.mask is None else (self.image, self.mask)

    @property
    def size(self) -> Size | None:
        """(width, height) after orientation, with margins; None while it is unknown."""
        if self.image.size is None or self.margins is None:
            return self.image.size
        return self.margins.around(self.image.size)

    @property
    def masked(self) -> bool:
        """Whether a part of it is repainted, and all else kept; so may be one that is `undecided`."""
        return self.mask is not None or self.margins is not None or self.undecided

    @property
    def undecided(self) -> bool:
        """Whether it may have transparent pixels, which are its mask where there is none."""
        return self.mask is None and self.image.alpha is not False

    def check_fit(self, size: Size) -> None:
        """Raise `ApiError` (400) for an `exact` picture of another size."""
        if self.fit == "exact" and self.size is not None and self.size != size:
            words = "is {}x{}, and the picture {}x{}: give one of that size, or another fit"
            raise invalid_field(self.image.field, words.format(*self.size, *size), "mismatched_size")

    @property
    def digest(self) -> str:
        """Identifies the content, whose digests must be known."""
        parts = (self.image, self.mask)
        digests = (_NO_PART if source is None else bytes.fromhex(source.digest or "") for source in parts)
        return hashlib.sha256(b"".join(digests)).hexdigest()


class PictureUploads(NamedTuple):
    """A request's pictures: an edit's source, and by field those of its `PictureInput`s, in the order of each.

    `further` are an edit's images besides its source: image prompts, behind those that the request names.
    """

    source: Upload | None = None
    inputs: Mapping[str, tuple[Upload, ...]] = {}
    further: tuple[Upload, ...] = ()

    @property
    def all(self) -> Iterator[Upload]:
        """All of them, the source first."""
        if self.source is not None:
            yield self.source
        yield from chain(*self.inputs.values(), self.further)

    def of(self, field: str) -> tuple[Upload, ...]:
        """The pictures that a job has in a field."""
        return self.inputs.get(field, ()) + (self.further if field == ImagePrompt.FIELD else ())

    @property
    def sources(self) -> Iterator[PictureSource]:
        for upload in self.all:
            yield from upload.sources

    @property
    def unmeasured(self) -> list[PictureSource]:
        """The sources whose size is unknown, and an edit's if it has no mask and its alpha is unknown."""
        upload = self.source
        unknown = upload is not None and upload.mask is None and upload.image.alpha is None
        own = upload.image if upload is not None and unknown else None
        return [source for source in self.sources if source.size is None or source is own]

    def check(self) -> Self:
        """Check all of them as `Upload.check` does; return them."""
        for upload in self.all:
            upload.check()
        return self

    def map(self, function: Callable[[PictureSource], PictureSource]) -> PictureUploads:
        """Return these pictures with other sources."""

        def changed(upload: Upload) -> Upload:
            mask = None if upload.mask is None else function(upload.mask)
            return replace(upload, image=function(upload.image), mask=mask)

        source = None if self.source is None else changed(self.source)
        inputs = {name: tuple(map(changed, uploads)) for name, uploads in self.inputs.items()}
        return PictureUploads(source, inputs, tuple(map(changed, self.further)))


NO_PICTURES = PictureUploads()
