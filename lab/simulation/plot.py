"""Draws line plots as SVG files with light and dark colour schemes, by the template plot.svg.jinja beside this file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jinja2

_TEMPLATE = Path(__file__).with_name("plot.svg.jinja")


class Line(NamedTuple):
    """Points from left to right. `series` picks the colour; a line without a label is not in the legend."""

    label: str
    dots: Sequence[tuple[float, float]]
    series: int
    dashed: bool = False


class Axis(NamedTuple):
    """The ticks, from the first to the last of which the axis goes, and the coordinates of both ends."""

    ticks: list[float]
    start: float
    end: float
    log: bool

    def __call__(self, value: float) -> float:
        """The coordinate of a value."""
        low, high, at = (math.log(x) if self.log else x for x in (self.ticks[0], self.ticks[-1], value))
        return self.start + (at - low) / (high - low or 1.0) * (self.end - self.start)


def draw(lines: Sequence[Line], title: str, across: str, up: str, *, log_x: bool = False, log_y: bool = False) -> str:
    """Render the SVG. Logarithmic axes omit values that are not positive."""
    lines = [
        line._replace(dots=[(x, y) for x, y in line.dots if not (log_x and x <= 0) and not (log_y and y <= 0)])
        for line in lines
    ]
    x = _axis([x for line in lines for x, _ in line.dots], 64, 696, log_x)
    y = _axis([y for line in lines for _, y in line.dots], 348, 72, log_y)
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, keep_trailing_newline=True)
    template = environment.from_string(_TEMPLATE.read_text("utf-8"))
    return template.render(lines=lines, title=title, across=across, up=up, x=x, y=y)


def _axis(values: Sequence[float], start: float, end: float, log: bool) -> Axis:
    low, high = min(values, default=1.0), max(values, default=1.0)
    return Axis(_decades(low, high) if log else _round(low, high), start, end, log)


def _decades(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, … around the values; fewer where they span many decades."""
    steps = (1, 2, 5) if math.log10(high / low) < 3 else (1,)
    marks = [
        step * 10.0**power
        for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for step in steps
    ]
    first = max((mark for mark in marks if mark <= low * 1.001), default=marks[0])
    last = min((mark for mark in marks if mark >= high * 0.999), default=marks[-1])
    return [mark for mark in marks if first <= mark <= last]


def _round(low: float, high: float) -> list[float]:
    """About six round values around the given ones."""
    rough = (high - low) / 5 or abs(high) / 5 or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 10) for number in range(first, last + 1)]
