"""Reads a job's pictures from the artifact store into pixels: of an edit, and those that extensions read.

Reads only the PNGs that the API writes. Imports no torch at module level, because the worker imports it before torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from contract.control import DEPTH, Control, not_offered
from contract.errors import Invalid
from contract.image import PICTURES, ImageParameters
from contract.picture_input import PictureInput

if TYPE_CHECKING:
    from pipeline.extensions.depth import DepthEstimator


Fetch = Callable[[str], bytes]
"""Reads a stored picture by its key. May raise `ArtifactError`."""


def read(picture: ImageParameters, fetch: Fetch, depth: DepthEstimator | None = None) -> ImageParameters:
    """Read the pictures that a record has by their keys; a control's is prepared as it asks, by `depth` if need be.

    Raises `Invalid`, naming the field, and `ArtifactError`.
    """
    edit = picture.edit
    if edit is not None:
        image, _ = _pixels("image", edit.image, "RGB", fetch)
        mask = None if edit.mask is None else _pixels("mask", edit.mask, "L", fetch)[0]
        edit = replace(edit, image=image, mask=mask)
    inputs: dict[str, list[PictureInput]] = {field: [] for field in PICTURES}
    for item in picture.pictures:
        pixels, size = _pixels(f"{item.FIELD}.image", item.image, "RGB", fetch)
        if isinstance(item, Control):
            pixels = prepare(item, pixels, picture.size, depth)
        inputs[item.FIELD].append(item.with_pixels(pixels, size))
    pictures: dict[str, Any] = {field: tuple(values) for field, values in inputs.items()}
    return replace(picture, edit=edit, **pictures)


def prepare(
    choice: Control, pixels: bytes, size: tuple[int, int], depth: DepthEstimator | None = None
) -> bytes:  # fmt: skip
    """Return what a control's network reads of a picture's pixels [height, width, 3].

    Raises `Invalid` for another size, and where it needs `depth` and there is none.
    """
    width, height = size
    if len(pixels) != 3 * width * height:
        raise Invalid("control.image", "must have the image's size")
    if not choice.preprocessor:
        return pixels
    import numpy as np

    from pipeline.extensions import canny

    picture = np.frombuffer(pixels, np.uint8).reshape(height, width, 3)
    if choice.preprocessor != DEPTH:
        return canny.edges(picture, choice.low_threshold, choice.high_threshold).tobytes()
    if depth is None:
        raise not_offered(DEPTH)
    return depth(picture).tobytes()


def _pixels(field: str, key: object, mode: str, fetch: Fetch) -> tuple[bytes, tuple[int, int]]:
    """A stored picture's pixels, and its width and height. Raises `Invalid`, naming the field."""
    if not isinstance(key, str):
        raise Invalid(field, "is missing")
    from core import pictures
    from core.artifacts import NoArtifact  # which `prepare` does without: the base install has no obstore

    try:
        image = pictures.opened(fetch(key), ("PNG",))
        if image.mode != mode:
            raise Invalid(field, f"is not in {mode}")
        return image.tobytes(), image.size
    except NoArtifact:
        raise Invalid(field, "is no longer there") from None
    except (OSError, SyntaxError, ValueError) as error:
        if isinstance(error, Invalid):
            raise
        raise Invalid(field, "cannot be decoded") from error
