"""Between ComfyUI's tensors and the service's files.

An IMAGE is [batch, height, width, channels] and a MASK [batch, height, width], both of floats from 0 to 1. In a MASK 1
is drawn anew; in the service's masks what is transparent is.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image

from .service import DiptychError

MAX_PIXELS = 2**27  # of one picture of the service's
_FORMATS = ("PNG", "JPEG", "WEBP")


def as_png(field: str, image: torch.Tensor) -> bytes:
    """The only picture of an IMAGE, in RGB. Raises `DiptychError` with the field's name if it is not one."""
    return _png(_only(field, image, 4)[..., :3])


def mask_as_png(field: str, mask: torch.Tensor, image: torch.Tensor, *, soft: bool) -> bytes:
    """The only mask of a MASK, at the size of an IMAGE, with an alpha of 0 where it is 1.

    Without `soft` alpha is 255 where it is less than 0.5. Raises `DiptychError` with the field's name if it is not one,
    or if nothing would be drawn anew.
    """
    one, size = _only(field, mask, 3).float().clamp(0, 1), image.shape[-3:-1]
    if one.shape != size:
        one = torch.nn.functional.interpolate(one[None, None], tuple(size), mode="bilinear")[0, 0]
    if not soft:
        one = (one >= 0.5).float()
    if not one.any():
        raise DiptychError(f"{field}: is empty, so nothing would be drawn anew")
    alpha = (1 - one)[..., None]
    return _png(torch.cat([torch.zeros_like(alpha), alpha], -1))


def as_image(files: Sequence[bytes]) -> torch.Tensor:
    """Pictures of one size as an IMAGE."""
    arrays = [np.asarray(read(file)) for file in files]
    return torch.from_numpy(np.stack(arrays).astype(np.float32) / 255.0)


def read(file: bytes) -> Image.Image:
    """The picture of a file of the service's, in RGB. Raises `DiptychError` for one that is none, or too large."""
    try:
        with Image.open(io.BytesIO(file), formats=_FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"it has more than {MAX_PIXELS} pixels")
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # the second of a broken PNG
        raise DiptychError(f"The service answers a picture that cannot be read: {error}") from None


def _only(field: str, batch: torch.Tensor, dimensions: int) -> torch.Tensor:
    if batch.ndim == dimensions - 1:  # some nodes leave a single mask's batch out
        return batch
    if batch.ndim != dimensions or len(batch) != 1:
        raise DiptychError(
            f"{field}: must be one picture, not a batch of {len(batch)}; behind the node Rebatch Images, of "
            "batch_size 1, each is a job of its own, and all are drawn together"
        )
    return batch[0]


def _png(picture: torch.Tensor) -> bytes:
    """Floats [height, width, channels] of 1 (grey), 2 (grey, alpha) or 3 channels."""
    # Rounded: floats that were read from 8 bits come back as they were.
    array = picture.float().clamp(0, 1).mul(255).round().to(torch.uint8).cpu().numpy()
    stream = io.BytesIO()
    Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array).save(stream, "PNG", compress_level=1)
    return stream.getvalue()
