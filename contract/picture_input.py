"""The pictures that a request brings along: an edit's source, and those that a model of the worker's reads.

Each is one object from the request to the runner, whose picture is a reference in a body, a key in a record, and pixels
in the runner.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field

from contract.bodies import InBody, check_bounds
from contract.errors import Invalid
from contract.offered import check_offered
from contract.strict import MAX_NAME, StrictModel

MAX_STRENGTH = 10.0
_IMAGE = (
    "edges, a pose, … that it follows, of the shape of the picture that is drawn; or a picture of any shape that it is "
    "drawn like, whose middle square is read; in a form a file"
)
_MAX_ID = 64  # characters
_MAX_DATA_URL = 24_000_000  # 16 MiB in base64


class ImageReference(StrictModel):
    """An image, by one of the two."""

    model_config = ConfigDict(title="ImageReference")

    file_id: str | None = Field(default=None, max_length=_MAX_ID, description="of a file with the purpose vision")
    image_url: str | None = Field(
        default=None, max_length=_MAX_DATA_URL,
        description="https://…, which is fetched; or data:image/png;base64,… (or jpeg, webp), within the body's limit "
        "of 1 MiB",
    )  # fmt: skip


Fit = Literal["crop", "contain", "stretch", "exact"]
"""How a picture comes to a size: its middle is cut out, or it is shown whole with its outermost pixels repeated around
it, or each side is resized by itself, or it has that size.
"""
Pixels = bytes | str | None
"""A picture's pixels; or its artifact's key; or None while it is not stored."""


def digest(picture: Pixels) -> str | None:
    """The SHA-256 of pixels; a key as it is."""
    return hashlib.sha256(picture).hexdigest() if isinstance(picture, bytes) else picture


@dataclass(frozen=True, slots=True)
class Edit:
    """The source image of image-to-image generation, and with a mask of inpainting.

    Only the last `strength` (rounded down to whole steps) of the steps are run, as in diffusers. With a `mask`,
    unmasked pixels are kept exactly. With `soft_mask` its values are the share of steps that draw a pixel. As pixels
    both are of the request's size, [height, width, 3] in RGB and [height, width]: 255 where it is repainted, 0 where
    it is kept, and what is between them in a hard mask is its blurred edge.
    """

    image: Pixels = field(default=None, repr=False)
    mask: Pixels = field(default=None, repr=False)
    strength: Annotated[
        float, Field(ge=0, le=1), "how much of the way from noise is gone; 0.8 by default, with a mask 1"
    ] = 0.8
    soft_mask: Annotated[
        bool, "true: the mask's transparency is the share of the steps in which a pixel is drawn anew"
    ] = False

    def to_dict(self) -> dict[str, Any]:
        """The edit as JSON, with keys, or with digests of pixels."""
        values = {"image": digest(self.image), "mask": digest(self.mask), "soft_mask": self.soft_mask or None}
        return {"strength": self.strength} | {name: value for name, value in values.items() if value is not None}

    @classmethod
    def read(cls, record: object) -> Self:
        """Parse what `to_dict` wrote. Raises `Invalid`; values are not checked."""
        if not isinstance(record, Mapping) or "strength" not in record:
            raise Invalid("image", "is missing")
        return cls(record.get("image"), record.get("mask"), record["strength"], bool(record.get("soft_mask")))


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureInput:
    """A picture, the model that reads it, by its name in its folder, and how far it is followed.

    What it adds to the denoiser is multiplied by `strength`, in the steps from the share `start` of all steps to `end`,
    as diffusers has them (`acts`). `image` as pixels is RGB, [height, width, 3].
    """

    FIELD: ClassVar[str]  # the request's
    MOST: ClassVar[int]  # of them in a request
    FORM_FILE: ClassVar[str]  # a form's part with one
    OFFER: ClassVar[str]  # the offer's names of what reads them
    SHARE: ClassVar[float]  # of a deep row of the denoiser: what its rows cost until one was measured
    PAID: ClassVar[Callable[[Iterable[bool]], int]] = staticmethod(sum)  # how often, where these act in a step

    model: Annotated[str, Field(max_length=MAX_NAME)]
    image: Annotated[Pixels, InBody(ImageReference), _IMAGE] = field(default=None, repr=False)
    strength: Annotated[float, Field(ge=0, le=MAX_STRENGTH), "of what it adds; 1.0 by default"] = 1.0
    start: Annotated[float, Field(ge=0, le=1), "the share of the steps before it acts; 0 by default"] = 0.0
    end: Annotated[float, Field(ge=0, le=1), "the share after which it ends; 1.0 by default"] = 1.0

    @property
    def pixels(self) -> bytes:
        """The picture, once it is read."""
        assert isinstance(self.image, bytes)
        return self.image

    @property
    def digest(self) -> str:
        """The picture's SHA-256 once it is read, else its key; "" while it is not stored."""
        return digest(self.image) or ""

    def check_pixels(self, image_size: tuple[int, int]) -> None:
        """Raise `Invalid` for a picture that is not read, or of another size than it needs for images of this one."""
        if not isinstance(self.image, bytes) or len(self.image) != 3 * image_size[0] * image_size[1]:
            raise Invalid(f"{self.FIELD}.image", "must have the image's size")

    def with_pixels(self, pixels: bytes, size: tuple[int, int]) -> Self:
        """Return the same input with the picture as pixels, of this width and height."""
        return replace(self, image=pixels)

    def kept_size(self, native: tuple[int, int], image_size: tuple[int, int]) -> tuple[int, int]:
        """The size at which a picture of its `native` size is kept, for images of `image_size`."""
        return image_size

    def acts(self, steps: int, model_rows: int | None = None) -> tuple[bool, ...]:
        """Return for each step whether it acts; the first `model_rows` steps are the model's, the rest a refiner's."""
        within = steps if model_rows is None else model_rows
        return tuple(i < within and i / steps >= self.start and (i + 1) / steps <= self.end for i in range(steps))

    @classmethod
    def deep_rows(cls, inputs: Sequence[Self], steps: Sequence[tuple[int, bool]], model_steps: int) -> int:
        """Rows that these cost over all of these steps, of so many rows each, deep or not.

        The first `model_steps` are the model's, and the rest a refiner's.
        """
        acting = [item.acts(len(steps), model_steps) for item in inputs]
        return sum(rows * cls.PAID(acts[i] for acts in acting) for i, (rows, deep) in enumerate(steps) if deep)

    def check(self) -> None:
        """Raise `Invalid` for a value outside its bounds."""
        check_offered(f"{self.FIELD}.model", self.model, None)
        check_bounds(
            type(self), {item.name: getattr(self, item.name) for item in fields(self)}, prefix=f"{self.FIELD}."
        )
        if self.end <= self.start:
            raise Invalid(f"{self.FIELD}.end", "must be greater than start")

    def to_dict(self) -> dict[str, Any]:
        """The input as JSON, with the picture's key or digest; default values are left out."""
        values = {item.name: getattr(self, item.name) for item in fields(self)} | {"image": self.digest or None}
        return {
            item.name: values[item.name]
            for item in fields(self)
            if item.default is MISSING or values[item.name] != item.default
        }

    @classmethod
    def read(cls, record: object) -> Self:
        """Parse what `to_dict` wrote. Raises `Invalid`; `check` validates values."""
        if not isinstance(record, Mapping) or not {"model"} <= record.keys() <= {item.name for item in fields(cls)}:
            raise Invalid(cls.FIELD, "has another form")
        return cls(**record)


def check_all(
    kind: type[PictureInput],
    pictures: Sequence[PictureInput],
    offered: Collection[str] | None,
    reason: str | None = None,
) -> None:
    """Raise `Invalid` for what no model takes, and for names that are not `offered`; None: not checked. `reason`: as in
    `check_offered`.
    """
    if len(pictures) > kind.MOST:
        raise Invalid(kind.FIELD, f"must be at most {kind.MOST}, not {len(pictures)}")
    for picture in pictures:
        picture.check()
        check_offered(f"{kind.FIELD}.model", picture.model, offered, reason)
