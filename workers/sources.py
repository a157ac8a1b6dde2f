"""Reads the source image and mask of an edit from the artifact store into pixels.

Reads only the PNGs that the API writes. Imports no torch at module level, because the worker imports it before torch.
"""

from __future__ import annotations

import io
from collections.abc import Callable

from contract.errors import Invalid
from contract.image import Edit, Source
from core.artifacts import NoArtifact


def read(source: Source, fetch: Callable[[str], bytes]) -> Edit:
    """Read a job's source as an edit. Raises `Invalid`, naming the field, and `ArtifactError`."""
    if not isinstance(source.image, str):
        raise Invalid("image", "is missing")
    mask = None if source.mask is None else _pixels("mask", source.mask, "L", fetch)
    return Edit(_pixels("image", source.image, "RGB", fetch), mask, source.strength, bool(source.soft_mask))


def _pixels(field: str, key: str, mode: str, fetch: Callable[[str], bytes]) -> bytes:
    from PIL import Image

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
