"""Reads a job's pictures from the artifact store into pixels: of an edit, of controls and of image prompts.

Reads only the PNGs that the API writes. Imports no torch at module level, because the worker imports it before torch.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from contract.control import DEPTH, Control, ControlChoice, ControlSource, not_offered
from contract.errors import Invalid
from contract.image import Edit, Source
from contract.image_prompt import ImagePrompt, ImagePromptSource

if TYPE_CHECKING:
    from pipeline.depth import DepthEstimator


def read(source: Source, fetch: Callable[[str], bytes]) -> Edit:
    """Read a job's source as an edit. Raises `Invalid`, naming the field, and `ArtifactError`."""
    if not isinstance(source.image, str):
        raise Invalid("image", "is missing")
    mask = None if source.mask is None else _pixels("mask", source.mask, "L", fetch)[0]
    return Edit(_pixels("image", source.image, "RGB", fetch)[0], mask, source.strength, bool(source.soft_mask))


def read_controls(
    controls: Sequence[ControlSource], size: tuple[int, int], fetch: Callable[[str], bytes],
    depth: DepthEstimator | None = None,
) -> tuple[Control, ...]:  # fmt: skip
    """Read a job's controls, of pictures of this size, each prepared as it asks. Raises as `read`."""
    return tuple(Control.of(one, _prepared(one, size, fetch, depth)) for one in controls)


def _prepared(
    source: ControlSource, size: tuple[int, int], fetch: Callable[[str], bytes], depth: DepthEstimator | None
) -> bytes:
    if not isinstance(source.image, str):
        raise Invalid("control.image", "is missing")
    return prepare(source, _pixels("control.image", source.image, "RGB", fetch)[0], size, depth)


def read_image_prompts(
    prompts: Sequence[ImagePromptSource], fetch: Callable[[str], bytes]
) -> tuple[ImagePrompt, ...]:  # fmt: skip
    """Read a job's image prompts. Raises as `read`."""
    found = []
    for one in prompts:
        if not isinstance(one.image, str):
            raise Invalid("image_prompts.image", "is missing")
        pixels, (width, height) = _pixels("image_prompts.image", one.image, "RGB", fetch)
        found.append(ImagePrompt.of(one, pixels, (width, height)))
    return tuple(found)


def prepare(
    choice: ControlChoice, pixels: bytes, size: tuple[int, int], depth: DepthEstimator | None = None
) -> bytes:  # fmt: skip
    """What a control's network reads of a picture's pixels [height, width, 3].

    Raises `Invalid` for another size, and where it needs `depth` and there is none.
    """
    width, height = size
    if len(pixels) != 3 * width * height:
        raise Invalid("control.image", "must have the image's size")
    if not choice.preprocessor:
        return pixels
    import numpy as np

    from pipeline import canny

    picture = np.frombuffer(pixels, np.uint8).reshape(height, width, 3)
    if choice.preprocessor != DEPTH:
        return canny.edges(picture).tobytes()
    if depth is None:
        raise not_offered(DEPTH)
    return depth(picture).tobytes()


def _pixels(field: str, key: str, mode: str, fetch: Callable[[str], bytes]) -> tuple[bytes, tuple[int, int]]:
    """A stored picture's pixels, and its width and height. Raises `Invalid`, naming the field."""
    from PIL import Image

    from core.artifacts import NoArtifact  # which `prepare` does without: the base install has no obstore

    try:
        image = Image.open(io.BytesIO(fetch(key)), formats=("PNG",))
        if image.mode != mode:
            raise Invalid(field, f"is not in {mode}")
        return image.tobytes(), image.size
    except NoArtifact:
        raise Invalid(field, "is no longer there") from None
    except (OSError, SyntaxError, ValueError) as error:
        if isinstance(error, Invalid):
            raise
        raise Invalid(field, "cannot be decoded") from error
