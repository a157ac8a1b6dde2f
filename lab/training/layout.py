"""Places squares on a canvas: one thing, several alike, two in a relation, a row."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import NamedTuple

from lab.scenes.subjects import COARSE, Subject

MOST = 6  # squares in one scene
_SIDES = {"tiny": (0.24, 0.29), "small": (0.34, 0.42), "big": (0.80, 0.95), None: (0.50, 0.90)}
_GRIDS = {
    2: ((2, 1), (1, 2), (2, 2)), 3: ((3, 1), (1, 3), (2, 2)), 4: ((2, 2), (3, 2), (2, 3)), 5: ((3, 2), (2, 3)),
    6: ((3, 2), (2, 3)),
}  # fmt: skip

_ORDER = {"tiny": 0, "small": 1, None: 2, "big": 3}  # a thing of a lower size is smaller than one of a higher
_TRIES = 24
_LEAST_HIDDEN, _MOST_HIDDEN = 0.08, 0.50  # shares of what stands behind that the thing in front hides

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
    widest = max(room.values())
    columns, rows = draw.choice([grid for grid in cells if room[grid] > 0.72 * widest])
    cell = min(region.width / columns, region.height / rows)
    side = cell * draw.uniform(0.80, 0.96) * {"tiny": 0.62, "small": 0.78}.get(size or "", 1.0)
    places = draw.sample([(c, r) for c in range(columns) for r in range(rows)], count)
    column_width, row_height = region.width / columns, region.height / rows
    layout = []
    for column, row in places:
        scaled = side * draw.uniform(0.95, 1.0)
        layout.append(
            _within(
                draw,
                Region(region.x + column * column_width, region.y + row * row_height, column_width, row_height),
                scaled,
                0.9,
            )
        )
    return layout


def pair(
    draw: random.Random,
    width: float,
    height: float,
    relation: str,
    items: list[tuple[int, str | None]],
    hidden: Callable[[Square, Square], float],
) -> list[list[Square]]:
    """Squares of two things, (count, size) each, so that the first stands in `relation` to the second.

    A thing of a smaller size is smaller than the other. `hidden` says of squares in front and behind which share of
    what stands behind is hidden.
    """
    sizes = [size for _, size in items]
    if relation in ("behind", "in front of"):
        return _overlapping(draw, width, height, relation, sizes, hidden)
    for _ in range(_TRIES):
        places = _apart(draw, width, height, relation, items)
        if _in_order(places, sizes):
            return places
    return _shrunk(places, sizes)


def _apart(
    draw: random.Random, width: float, height: float, relation: str, items: list[tuple[int, str | None]]
) -> list[list[Square]]:
    unit = min(width, height)
    relation = draw.choice(_OPEN.get(relation, (relation,)))
    flat = relation in ("left of", "right of")
    # The larger group takes the larger part.
    counts = [count for count, _ in items]
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
        for region, (count, size) in zip(regions, items, strict=True)
    ]


def row(draw: random.Random, width: float, height: float, count: int) -> list[list[Square]]:
    """One square for each of `count` things, from left to right."""
    step = width / count
    side = min(step, height) * draw.uniform(0.86, 0.97)
    middle = draw.uniform(0.38, 0.62) * height
    middle = min(max(middle, side / 2), height - side / 2)
    sway = 0.06 * height
    layout = []
    for place in range(count):
        y = middle + draw.uniform(-sway, sway)
        layout.append([Square((place + 0.5) * step, min(max(y, side / 2), height - side / 2), side)])
    return layout


def visible(square: Square, size: tuple[int, int]) -> float:
    """The share of a square that lies within a picture of `size` (width, height)."""
    shares = [
        max(0.0, min(middle + square.side / 2, length) - max(middle - square.side / 2, 0.0)) / square.side
        for middle, length in zip((square.x, square.y), size, strict=True)
    ]
    return shares[0] * shares[1]


def _within(draw: random.Random, region: Region, side: float, freedom: float) -> Square:
    """A square of this side anywhere in the region, or in its middle where it does not fit."""
    layout = []
    for start, length in ((region.x, region.width), (region.y, region.height)):
        room = max(0.0, length - side) / 2
        layout.append(start + length / 2 + draw.uniform(-room, room) * freedom)
    return Square(layout[0], layout[1], side)


def _in_order(places: list[list[Square]], sizes: list[str | None]) -> bool:
    lower, higher = sorted((0, 1), key=lambda place: _ORDER[sizes[place]])
    return sizes[0] == sizes[1] or _sides_of(places[lower])[1] < _sides_of(places[higher])[0]


def _sides_of(squares: list[Square]) -> tuple[float, float]:
    """The least and the largest side."""
    sides = [square.side for square in squares]
    return min(sides), max(sides)


def _shrunk(places: list[list[Square]], sizes: list[str | None]) -> list[list[Square]]:
    """The thing of the lower size is made smaller where it stands, until it is smaller than the other."""
    lower, higher = sorted((0, 1), key=lambda place: _ORDER[sizes[place]])
    ratio = 0.9 * _sides_of(places[higher])[0] / _sides_of(places[lower])[1]
    shrunk = list(places)
    shrunk[lower] = [square._replace(side=square.side * ratio) for square in places[lower]]
    return shrunk


def _overlapping(
    draw: random.Random,
    width: float,
    height: float,
    relation: str,
    sizes: list[str | None],
    hidden: Callable[[Square, Square], float],
) -> list[list[Square]]:
    """Neither hardly any nor most of what stands behind is hidden; where no try has that, as near to it as any."""
    front_size, back_size = sizes if relation == "in front of" else sizes[::-1]
    best, smallest = [], math.inf
    for _ in range(_TRIES):
        ahead, aback = _one_before_the_other(draw, width, height, front_size, back_size)
        share = hidden(ahead, aback)
        off = max(_LEAST_HIDDEN - share, share - _MOST_HIDDEN, 0.0)
        if off < smallest:
            best, smallest = [[ahead], [aback]], off
        if off == 0:
            break
    return best if relation == "in front of" else best[::-1]


def _one_before_the_other(
    draw: random.Random, width: float, height: float, front_size: str | None, back_size: str | None
) -> tuple[Square, Square]:
    """The thing behind stands higher."""
    unit = min(width, height)
    spans: dict[str | None, tuple[float, float]] = {"tiny": (0.34, 0.38), "small": (0.40, 0.46), "big": (0.62, 0.68)}
    front = unit * draw.uniform(*spans.get(front_size, (0.46, 0.56)))
    back = unit * draw.uniform(*spans.get(back_size, (0.50, 0.62)))
    angle = math.radians(draw.choice((draw.uniform(20, 70), draw.uniform(110, 160), draw.uniform(70, 110))))
    apart = (front + back) / 2 * draw.uniform(0.36, 0.58)
    dx, dy = apart * math.cos(angle), -apart * math.sin(angle)
    # Boxes of the two, moved as one to where both fit.
    left, right = min(-front, 2 * dx - back) / 2, max(front, 2 * dx + back) / 2
    top, bottom = min(-front, 2 * dy - back) / 2, max(front, 2 * dy + back) / 2
    x = _fit(draw, width, left, right)
    y = _fit(draw, height, top, bottom)
    return Square(x, y, front), Square(x + dx, y + dy, back)


def _fit(draw: random.Random, length: float, low: float, high: float) -> float:
    room = length - (high - low)
    return -low + (draw.uniform(0, room) if room > 0 else room / 2)


def hidden(front: Subject, back: Subject, ahead: Square, aback: Square) -> float:
    """The share of `back`, drawn in the square `aback`, that is hidden by `front` in the square `ahead`."""
    near, far = front.cover or ((1.0,),), back.cover or ((1.0,) * COARSE,) * COARSE
    step = aback.side / len(far)
    apart = (aback.side - ahead.side) / 2
    left, top = aback.x - ahead.x - apart, aback.y - ahead.y - apart
    scale = len(near) / ahead.side
    total = both = 0.0
    for number, line in enumerate(far):
        row = math.floor((top + (number + 0.5) * step) * scale)
        total += sum(line)
        if 0 <= row < len(near):
            for place, alpha in enumerate(line):
                column = math.floor((left + (place + 0.5) * step) * scale)
                if 0 <= column < len(near):
                    both += alpha * near[row][column]
    return both / max(total, 1e-6)
