"""The image sizes that a model offers."""

from __future__ import annotations

import math

from contract.card import SizeRange


def sizes(native: int, multiple: int) -> tuple[tuple[int, int], ...]:
    """The (width, height) pairs that a model of this native size is best at, in pixels.

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


def size_range(native: int, multiple: int, max_pixels: int = 0) -> SizeRange:
    """All sizes of a model of this native size: sides of a quarter to twice of it, and up to 1.5 times its area.

    With `max_pixels`, up to that area, and where it is larger with sides up to 1:4.
    """
    longest = max(2 * native, 2 * math.isqrt(max_pixels) // multiple * multiple)
    return SizeRange(multiple, max(multiple, native // 4), longest, max_pixels or 3 * native * native // 2)
