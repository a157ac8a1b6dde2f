"""The layout of the report's plots: axes and places, which its template draws as SVG in the page's own colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

_BINS = 24


class Point(NamedTuple):
    """A point with its vertical interval; `series` picks the colour."""

    label: str
    x: float
    y: float
    low: float
    high: float
    series: int


class IntervalRow(NamedTuple):
    """A ratio, its interval, and the band that it must lie in, in per cent from the base."""

    label: str
    value: float
    low: float
    high: float
    low_limit: float | None
    high_limit: float | None
    verdict: str  # "" without a gate
    series: int


class Axis(NamedTuple):
    """Values from `low` to `high`, and the coordinates of both ends."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """The coordinate of a value."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    @property
    def ticks(self) -> list[float]:
        """About five round numbers within the range."""
        rough = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(step * k, 12) for k in range(first, last + 1)]


def scatter(points: Sequence[Point]) -> dict[str, Any]:
    """Points from the lowest, each with the height of its label, which lies on no other."""
    x = Axis(0.0, max(point.x for point in points) * 1.12 or 1.0, 64, 616)
    y = _padded([value for point in points for value in (point.low, point.high, point.y)], 276, 16)
    placed: list[tuple[Point, float]] = []
    for point in sorted(points, key=lambda point: point.y):
        height = y(point.y) + 4
        while any(abs(height - other) < 15 and abs(x(point.x) - x(near.x)) < 150 for near, other in placed):
            height -= 15
        placed.append((point, height))
    return {"x": x, "y": y, "points": placed}


def whiskers(bars: Sequence[IntervalRow]) -> dict[str, Any]:
    """A line for each ratio, over its shaded gate."""
    ends = [end for bar in bars for end in (bar.low, bar.high, bar.low_limit, bar.high_limit, 0.0) if end is not None]
    return {"x": _padded(ends, 168, 550), "bars": bars}


def histogram(values: Sequence[float]) -> dict[str, Any]:
    """The number of values in each of 24 bins."""
    counts, edges = np.histogram(values, _BINS)
    return {"x": Axis(edges[0], edges[-1], 10, 410), "counts": counts.tolist(), "edges": edges.tolist()}


def _padded(values: Sequence[float], start: float, end: float) -> Axis:
    low, high = min(values), max(values)
    room = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
    return Axis(low - room, high + room, start, end)
