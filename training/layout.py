"""Places squares on a canvas: one thing, several alike, two in a relation, a row."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

MOST = 6  # squares in one scene
_SIDES = {"tiny": (0.24, 0.29), "small": (0.34, 0.42), "big": (0.80, 0.95), None: (0.50, 0.90)}
_GRIDS = {
    2: ((2, 1), (1, 2), (2, 2)), 3: ((3, 1), (1, 3), (2, 2)), 4: ((2, 2), (3, 2), (2, 3)), 5: ((3, 2), (2, 3)),
    6: ((3, 2), (2, 3)),
}  # fmt: skip

_OPEN = {"and": ("left of", "right of", "above", "below"), "beside": ("left of", "right of")}


class Square(NamedTuple):
    """Centre and side in pixels."""

    x: float
    y: float
    side: float


class Region(NamedTuple):
    """A rectangle of the canvas, in pixels."""

    x: float
    y: float
    width: float
    height: float

    @property
    def short(self) -> float:
        """The shorter side."""
        return min(self.width, self.height)


def group(draw: random.Random, region: Region, count: int, size: str | None, unit: float) -> list[Square]:
    """`count` equal squares without overlap in the region; `unit` is what sizes are shares of."""
    if count == 1:
        low, high = _SIDES[size]
        side = min(draw.uniform(low, high) * unit, region.short * draw.uniform(0.90, 0.98))
        return [_within(draw, region, side, 1.0)]
    cells = [grid for grid in _GRIDS[count] if grid[0] * grid[1] >= count]
    # Of the grids those whose cells come out largest: a column does not fit into a flat region.
    room = {grid: min(region.width / grid[0], region.height / grid[1]) for grid in cells}
    most = max(room.values())
    columns, rows = draw.choice([grid for grid in cells if room[grid] > 0.72 * most])
    cell = min(region.width / columns, region.height / rows)
    side = cell * draw.uniform(0.80, 0.96) * {"tiny": 0.62, "small": 0.78}.get(size or "", 1.0)
    places = draw.sample([(c, r) for c in range(columns) for r in range(rows)], count)
    wide, tall = region.width / columns, region.height / rows
    found = []
    for column, row in places:
        one = side * draw.uniform(0.95, 1.0)
        found.append(_within(draw, Region(region.x + column * wide, region.y + row * tall, wide, tall), one, 0.9))
    return found


def pair(
    draw: random.Random, width: float, height: float, relation: str, things: list[tuple[int, str | None]]
) -> list[list[Square]]:
    """Squares of two things, (count, size) each, so that the first stands in `relation` to the second."""
    unit = min(width, height)
    if relation in ("behind", "in front of"):
        return _overlapping(draw, width, height, relation, [size for _, size in things])
    relation = draw.choice(_OPEN.get(relation, (relation,)))
    flat = relation in ("left of", "right of")
    # The larger group takes the larger part.
    counts = [count for count, _ in things]
    share = draw.uniform(0.46, 0.54) + 0.05 * (min(counts[0], 4) - min(counts[1], 4))
    first = relation in ("left of", "above")
    cut = (share if first else 1 - share) * (width if flat else height)
    breadth = height if flat else width
    # Where things stand singly, their centres must differ mainly along the relation's axis.
    band = breadth * (0.72 if max(counts) == 1 else 1.0)
    lead = (breadth - band) / 2 * (1 + draw.uniform(-1, 1))
    if flat:
        regions = [Region(0, lead, cut, band), Region(cut, lead, width - cut, band)]
    else:
        regions = [Region(lead, 0, band, cut), Region(lead, cut, band, height - cut)]
    if not first:
        regions.reverse()
    return [
        group(draw, region, count, size, unit * (0.62 if size in (None, "big") else 1.0))
        for region, (count, size) in zip(regions, things, strict=True)
    ]


def row(draw: random.Random, width: float, height: float, count: int) -> list[list[Square]]:
    """One square for each of `count` things, from left to right."""
    step = width / count
    side = min(step, height) * draw.uniform(0.86, 0.97)
    middle = draw.uniform(0.38, 0.62) * height
    middle = min(max(middle, side / 2), height - side / 2)
    sway = 0.06 * height
    found = []
    for place in range(count):
        y = middle + draw.uniform(-sway, sway)
        found.append([Square((place + 0.5) * step, min(max(y, side / 2), height - side / 2), side)])
    return found


def _within(draw: random.Random, region: Region, side: float, freedom: float) -> Square:
    """A square of this side anywhere in the region, or in its middle where it does not fit."""
    found = []
    for start, length in ((region.x, region.width), (region.y, region.height)):
        room = max(0.0, length - side) / 2
        found.append(start + length / 2 + draw.uniform(-room, room) * freedom)
    return Square(found[0], found[1], side)


def _overlapping(
    draw: random.Random, width: float, height: float, relation: str, sizes: list[str | None]
) -> list[list[Square]]:
    """The thing behind stands higher and is covered by less than half."""
    unit = min(width, height)
    spans: dict[str | None, tuple[float, float]] = {"tiny": (0.34, 0.38), "small": (0.40, 0.46), "big": (0.62, 0.68)}
    front_size, back_size = sizes if relation == "in front of" else sizes[::-1]
    front = unit * draw.uniform(*spans.get(front_size, (0.46, 0.56)))
    back = unit * draw.uniform(*spans.get(back_size, (0.50, 0.62)))
    angle = math.radians(draw.choice((draw.uniform(20, 70), draw.uniform(110, 160), draw.uniform(70, 110))))
    apart = (front + back) / 2 * draw.uniform(0.46, 0.58)
    dx, dy = apart * math.cos(angle), -apart * math.sin(angle)
    # Boxes of the two, moved as one to where both fit.
    left, right = min(-front, 2 * dx - back) / 2, max(front, 2 * dx + back) / 2
    top, bottom = min(-front, 2 * dy - back) / 2, max(front, 2 * dy + back) / 2
    x = _fit(draw, width, left, right)
    y = _fit(draw, height, top, bottom)
    ahead, aback = [Square(x, y, front)], [Square(x + dx, y + dy, back)]
    return [ahead, aback] if relation == "in front of" else [aback, ahead]


def _fit(draw: random.Random, length: float, low: float, high: float) -> float:
    room = length - (high - low)
    return -low + (draw.uniform(0, room) if room > 0 else room / 2)
