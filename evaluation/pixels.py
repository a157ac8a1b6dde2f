"""Reads images from files in batches, and rejects unreadable ones by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from core import pictures

Pixels = npt.NDArray[np.uint8]  # [H, W, 3]

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


class PictureError(ValueError):
    """A file that is not a complete image. The message names it."""


def read(path: Path) -> Pixels:
    """An image as uint8 [H, W, 3], by the rules of `core.pictures`."""
    try:
        return np.asarray(pictures.read(path))
    except pictures.UnreadablePicture as error:
        raise PictureError(f"{path}: is no whole picture ({error})") from None


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
