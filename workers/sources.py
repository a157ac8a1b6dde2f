"""What an edit begins with, from the store of artifacts to pixels.

Knows keys and the PNGs that the API made of what was handed in. Light to import: it is there before torch is.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

from core.artifacts import NoArtifact
from core.batching.runner import Refused
from pipeline.parameters import Edit


def read(parameters: Mapping[str, Any], fetch: Callable[[str], bytes]) -> Edit | None:
    """A job's edit; None where it is none. Raises `Refused`, naming the field, and `ArtifactError`."""
    given = parameters.get("edit")
    if given is None:
        return None
    if not isinstance(given, Mapping) or not isinstance(given.get("image"), str) or "strength" not in given:
        raise Refused("image: is missing")
    mask = given.get("mask")
    image = _pixels("image", given["image"], "RGB", fetch)
    return Edit(image, None if mask is None else _pixels("mask", mask, "L", fetch), given["strength"])


def _pixels(field: str, key: str, mode: str, fetch: Callable[[str], bytes]) -> bytes:
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(fetch(key)), formats=("PNG",))
        if image.mode != mode:
            raise Refused(f"{field}: is not in {mode}")
        return image.tobytes()
    except NoArtifact:
        raise Refused(f"{field}: is no longer there") from None
    except (OSError, SyntaxError, ValueError) as error:
        if isinstance(error, Refused):
            raise
        raise Refused(f"{field}: cannot be decoded") from error
