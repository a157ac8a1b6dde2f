"""Image prompts of an image request: pictures that it is drawn like, and the IP-Adapters that read them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Self

from pydantic import Field

from contract.errors import Invalid
from contract.picture_input import PictureInput
from contract.strict import MAX_NAME

FIELD = "image_prompts"
MAX_IMAGE_PROMPTS = 4  # per request
MAX_SIDE = 768  # pixels of a picture's shorter side: encoders read a square of 224 to 448
MAX_PIXELS = 8192 * MAX_SIDE


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePrompt(PictureInput):
    """A picture that the image is drawn like, and the IP-Adapter that reads it.

    As pixels it has a size of its own.
    """

    FIELD: ClassVar[str] = FIELD
    MOST: ClassVar[int] = MAX_IMAGE_PROMPTS
    FORM_FILE: ClassVar[str] = "image_prompt"
    OFFER: ClassVar[str] = "image_prompts"
    SHARE: ClassVar[float] = 0.1
    PAID: ClassVar[Callable[[Iterable[bool]], int]] = staticmethod(any)

    model: Annotated[str, Field(max_length=MAX_NAME), "of the model's image_prompts: an IP-Adapter or IP-Adapter Plus"]
    width: int = 0  # of pixels
    height: int = 0

    def with_pixels(self, pixels: bytes, size: tuple[int, int]) -> Self:
        return replace(self, image=pixels, width=size[0], height=size[1])

    def kept_size(self, native: tuple[int, int], image_size: tuple[int, int]) -> tuple[int, int]:
        return fitted(*native)

    def check_pixels(self, image_size: tuple[int, int]) -> None:
        """Raise `Invalid` for a picture that is not read, too large, or not of its width and height."""
        valid = all(isinstance(side, int) and side > 0 for side in (self.width, self.height))
        if not valid or self.width * self.height > MAX_PIXELS:
            raise Invalid(f"{self.FIELD}.image", f"must have at most {MAX_PIXELS} pixels")
        if not isinstance(self.image, bytes) or len(self.image) != 3 * self.width * self.height:
            raise Invalid(f"{self.FIELD}.image", "must be of its width and height, in RGB")

    @property
    def digest(self) -> str:
        """The SHA-256 of the picture's pixels and size, or its key."""
        if not isinstance(self.image, bytes):
            return self.image or ""
        return hashlib.sha256(f"{self.width}x{self.height}:".encode() + self.image).hexdigest()


def fitted(width: int, height: int) -> tuple[int, int]:
    """The size at which a picture of this size is kept: its shorter side reduced to `MAX_SIDE`."""
    shorter = min(width, height)
    if shorter <= MAX_SIDE:
        return width, height
    return max(MAX_SIDE, width * MAX_SIDE // shorter), max(MAX_SIDE, height * MAX_SIDE // shorter)
