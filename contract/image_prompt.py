"""Image prompts of an image request: pictures that it is drawn like, and the IP-Adapters that read them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from contract.errors import Invalid
from contract.picture_input import PictureInput, check_all

FIELD = "image_prompts"
MAX_IMAGE_PROMPTS = 4  # per request
MAX_SIDE = 768  # pixels of a picture's shorter side: encoders read a square of 224 to 448
MAX_PIXELS = 8192 * MAX_SIDE
SHARE = 0.1  # of a deep row of the denoiser: what a row with image prompts costs more until one was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePromptChoice(PictureInput):
    """Which IP-Adapter reads a picture, and how strongly the image follows it."""

    FIELD: ClassVar[str] = FIELD
    MOST: ClassVar[int] = MAX_IMAGE_PROMPTS


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePrompt(ImagePromptChoice):
    """An image prompt. `image` [height, width, 3] is the picture in RGB, of a size of its own."""

    image: bytes = field(repr=False)
    width: int
    height: int

    @classmethod
    def of(cls, choice: ImagePromptChoice, image: bytes, size: tuple[int, int]) -> ImagePrompt:
        """`image` [height, width, 3] is of this (width, height)."""
        given = {one.name: getattr(choice, one.name) for one in fields(ImagePromptChoice)}
        return cls(**given, image=image, width=size[0], height=size[1])

    def check(self) -> None:
        PictureInput.check(self)
        whole = all(isinstance(side, int) and side > 0 for side in (self.width, self.height))
        if not whole or self.width * self.height > MAX_PIXELS:
            raise Invalid(f"{FIELD}.image", f"must have at most {MAX_PIXELS} pixels")
        if not isinstance(self.image, bytes) or len(self.image) != 3 * self.width * self.height:
            raise Invalid(f"{FIELD}.image", "must be of its width and height, in RGB")

    @property
    def digest(self) -> str:
        """SHA-256 of the picture's pixels and size."""
        return hashlib.sha256(f"{self.width}x{self.height}:".encode() + self.image).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePromptSource(ImagePromptChoice):
    """An image prompt in a job's record: its picture by its artifact key; None: not stored yet."""

    image: str | None = None


def fitted(width: int, height: int) -> tuple[int, int]:
    """The size at which a picture of this size is kept: its shorter side reduced to `MAX_SIDE`."""
    shorter = min(width, height)
    if shorter <= MAX_SIDE:
        return width, height
    return max(MAX_SIDE, width * MAX_SIDE // shorter), max(MAX_SIDE, height * MAX_SIDE // shorter)


def check(prompts: Sequence[ImagePromptChoice], offered: Collection[str] | None) -> None:
    """Raise `Invalid` for what no model takes, and for adapters that are not `offered`; None: not checked."""
    check_all(ImagePromptChoice, prompts, offered)


def deep_rows(prompts: Sequence[ImagePromptChoice], steps: Sequence[tuple[int, bool]], own: int) -> int:
    """Rows that read image prompts over all of these steps, of so many rows each, deep or not.

    The first `own` are the model's, and the rest a refiner's.
    """
    acting = [prompt.acts(len(steps), own) for prompt in prompts]
    return sum(rows for i, (rows, deep) in enumerate(steps) if deep and any(acts[i] for acts in acting))


def hashes(prompts: Sequence[ImagePrompt]) -> list[dict[str, Any]]:
    """Of an image's image prompts, as JSON; of each picture its digest."""
    return [{**prompt.to_dict(), "image": prompt.digest} for prompt in prompts]
