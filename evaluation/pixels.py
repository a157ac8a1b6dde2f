"""Reads images from files in batches, and rejects unreadable ones by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

Pixels = npt.NDArray[np.uint8]  # [H, W, 3]

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


class PictureError(ValueError):
    """A file that is not a complete image. The message names it."""


def read(path: Path) -> Pixels:
    """An image as uint8 [H, W, 3]; transparent ones are composed on white."""
    try:
        with Image.open(path) as image:
            image.load()
            if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
                rgba = image.convert("RGBA")
                ground = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
                return np.asarray(Image.alpha_composite(ground, rgba).convert("RGB"))
            return np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # SyntaxError: a broken PNG
        reason = getattr(error, "strerror", None) or error
        raise PictureError(f"{path}: is no whole picture ({reason})") from None


def listing(folder: Path) -> Sequence[Path]:
    """A folder's images by name, without hidden ones. Raises `PictureError` if there are none."""
    paths = sorted(
        path
        for path in folder.iterdir()
        if path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()
    )
    if not paths:
        raise PictureError(f"{folder}: holds no pictures ({', '.join(SUFFIXES)})")
    return paths
