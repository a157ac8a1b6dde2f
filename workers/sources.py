"""Reads a job's pictures from the artifact store into pixels: the source and mask of an edit, and those of controls.

Reads only the PNGs that the API writes. Imports no torch at module level, because the worker imports it before torch.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

from contract.control import CANNY, Control, ControlChoice, ControlSource
from contract.errors import Invalid
from contract.image import Edit, Source


def read(source: Source, fetch: Callable[[str], bytes]) -> Edit:
    """Read a job's source as an edit. Raises `Invalid`, naming the field, and `ArtifactError`."""
    if not isinstance(source.image, str):
        raise Invalid("image", "is missing")
    mask = None if source.mask is None else _pixels("mask", source.mask, "L", fetch)
    return Edit(_pixels("image", source.image, "RGB", fetch), mask, source.strength, bool(source.soft_mask))


def read_controls(
    controls: Sequence[ControlSource], size: tuple[int, int], fetch: Callable[[str], bytes]
) -> tuple[Control, ...]:
    """Read a job's controls, of pictures of this size, each prepared as it asks. Raises as `read`."""
    return tuple(Control.of(one, _prepared(one, size, fetch)) for one in controls)


def _prepared(source: ControlSource, size: tuple[int, int], fetch: Callable[[str], bytes]) -> bytes:
    if not isinstance(source.image, str):
        raise Invalid("control.image", "is missing")
    return prepare(source, _pixels("control.image", source.image, "RGB", fetch), size)


def prepare(choice: ControlChoice, pixels: bytes, size: tuple[int, int]) -> bytes:
    """What a control's network reads of a picture's pixels [height, width, 3]. Raises `Invalid` for another size."""
    width, height = size
    if len(pixels) != 3 * width * height:
        raise Invalid("control.image", "must have the image's size")
    if choice.preprocessor != CANNY:
        return pixels
    import numpy as np

    from pipeline import canny

    return canny.edges(np.frombuffer(pixels, np.uint8).reshape(height, width, 3)).tobytes()


def _pixels(field: str, key: str, mode: str, fetch: Callable[[str], bytes]) -> bytes:
    from PIL import Image

    from core.artifacts import NoArtifact  # which `prepare` does without: the base install has no obstore

    try:
        image = Image.open(io.BytesIO(fetch(key)), formats=("PNG",))
        if image.mode != mode:
            raise Invalid(field, f"is not in {mode}")
        return image.tobytes()
    except NoArtifact:
        raise Invalid(field, "is no longer there") from None
    except (OSError, SyntaxError, ValueError) as error:
        if isinstance(error, Invalid):
            raise
        raise Invalid(field, "cannot be decoded") from error
