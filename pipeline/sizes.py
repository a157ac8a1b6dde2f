"""The image sizes that a model offers: by its native size, and by the list of those that it was trained at."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path

from contract.card import SizeRange
from core.json_files import read_object
from pipeline.checkpoints.folder import ModelError

FILE = "sizes.json"
_VERSION = 1
_MOST_SIDE = 4096


def sizes(native: int, multiple: int) -> tuple[tuple[int, int], ...]:
    """Return the (width, height) pairs that a model of this native size is best at, in pixels.

    Squares at and at half the native size, and the rectangles of about the native area with sides up to 1:2, every side
    a multiple of `multiple`: SDXL's own training buckets lie on such a grid (Podell et al., 2023, appendix I).
    """
    step = multiple * max(1, native // (16 * multiple))  # SDXL: 64
    offered = {(native, native)}
    if native // 2 % multiple == 0:
        offered.add((native // 2, native // 2))
    for width in range(native + step, 2 * native, step):
        height = round(native * native / width / step) * step
        if width <= 2 * height:
            offered |= {(width, height), (height, width)}
    return tuple(sorted(offered))


def trained(folder: Path | None, multiple: int) -> tuple[tuple[int, int], ...]:
    """Return the sizes that `sizes.json` in a model's folder says it was trained at; none without folder or file.

    Raises `ModelError` for any other file, and for a side that is no multiple of `multiple`.
    """
    if folder is None:
        return ()
    path = folder / FILE
    if not path.exists():
        return ()
    document = read_object(path, ModelError)
    listed = document.get("trained") if document.get("version") == _VERSION else None
    if not isinstance(listed, list):
        raise ModelError(f"{path}: is no {FILE} of version {_VERSION}")
    matches = [re.fullmatch(r"(\d{1,4})x(\d{1,4})", text) if isinstance(text, str) else None for text in listed]
    pairs = [(int(match[1]), int(match[2])) for match in matches if match is not None]
    if len(pairs) < len(matches) or any(
        not 0 < side <= _MOST_SIDE or side % multiple for pair in pairs for side in pair
    ):
        raise ModelError(
            f'{path}: trained must list sizes such as "192x128", with sides that are multiples of {multiple} '
            f"up to {_MOST_SIDE}"
        )
    return tuple(pairs)


def write(folder: Path, trained_sizes: Iterable[tuple[int, int]]) -> None:
    """Write `sizes.json` into a model's folder."""
    document = {"version": _VERSION, "trained": [f"{width}x{height}" for width, height in sorted(trained_sizes)]}
    (folder / FILE).write_text(json.dumps(document) + "\n", "utf-8")


def size_range(native: int, multiple: int, max_pixels: int = 0) -> SizeRange:
    """Return the range of a model's sizes: sides of a quarter to twice the native, and up to 1.5 times its area.

    With `max_pixels`, up to that area, and where it is larger with sides up to 1:4.
    """
    longest = max(2 * native, 2 * math.isqrt(max_pixels) // multiple * multiple)
    return SizeRange(multiple, max(multiple, native // 4), longest, max_pixels or 3 * native * native // 2)
