"""Draws line plots as SVG files with light and dark colour schemes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import NamedTuple

_W, _H = 720, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 72, 52
_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #555; }
.title { font-weight: 600; fill: #333; }
.grid { stroke: #8884; stroke-width: 1; }
.line { fill: none; stroke-width: 2.25; stroke-linejoin: round; }
.thin { stroke-width: 1.5; stroke-dasharray: 5 4; }
.s0 { stroke: #0a7d8c; } .s1 { stroke: #c2570c; } .s2 { stroke: #7a55c7; } .s3 { stroke: #4d7c0f; }
.d0 { fill: #0a7d8c; } .d1 { fill: #c2570c; } .d2 { fill: #7a55c7; } .d3 { fill: #4d7c0f; }
@media (prefers-color-scheme: dark) {
  text { fill: #aaa; } .title { fill: #ddd; }
  .s0 { stroke: #35b5c6; } .s1 { stroke: #f08a3c; } .s2 { stroke: #a98cf0; } .s3 { stroke: #8fc043; }
  .d0 { fill: #35b5c6; } .d1 { fill: #f08a3c; } .d2 { fill: #a98cf0; } .d3 { fill: #8fc043; }
}
"""
_SERIES = 4  # that the style has colours for


class Line(NamedTuple):
    """Points from left to right. `series` picks the colour; a line without a label is not in the legend."""

    label: str
    dots: Sequence[tuple[float, float]]
    series: int
    dashed: bool = False


def draw(lines: Sequence[Line], title: str, across: str, up: str, *, log_x: bool = False, log_y: bool = False) -> str:
    """Render the SVG. Logarithmic axes omit values that are not positive."""
    lines = [
        line._replace(dots=[(x, y) for x, y in line.dots if not (log_x and x <= 0) and not (log_y and y <= 0)])
        for line in lines
    ]
    px, x_ticks = _axis([x for line in lines for x, _ in line.dots], _LEFT, _W - _RIGHT, log_x)
    py, y_ticks = _axis([y for line in lines for _, y in line.dots], _H - _BOTTOM, _TOP, log_y)
    parts = [f'<text class="title" x="{_LEFT}" y="22">{escape(title)}</text>']
    for tick in y_ticks:
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_W - _RIGHT}" y1="{py(tick):.1f}" y2="{py(tick):.1f}"/>'
            f'<text x="{_LEFT - 8}" y="{py(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>'
        )
    for tick in x_ticks:
        parts.append(
            f'<line class="grid" x1="{px(tick):.1f}" x2="{px(tick):.1f}" y1="{_TOP}" y2="{_H - _BOTTOM}"/>'
            f'<text x="{px(tick):.1f}" y="{_H - _BOTTOM + 18}" text-anchor="middle">{tick:g}</text>'
        )
    middle_x, middle_y = (_LEFT + _W - _RIGHT) / 2, (_TOP + _H - _BOTTOM) / 2
    parts.append(f'<text x="{middle_x:.0f}" y="{_H - 12}" text-anchor="middle">{escape(across)}</text>')
    turned = f"translate(18 {middle_y:.0f}) rotate(-90)"
    parts.append(f'<text transform="{turned}" text-anchor="middle">{escape(up)}</text>')
    body = "\n".join([*parts, *_series(lines, px, py)])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_W} {_H}" role="img" aria-label="{escape(title)}">\n'
        f"<style>{_STYLE}</style>\n{body}\n</svg>\n"
    )


def _series(lines: Sequence[Line], px: Callable[[float], float], py: Callable[[float], float]) -> Iterator[str]:
    """Each line with its dots and its entry in the legend."""
    legend_x = float(_LEFT)
    for line in lines:
        points = [(px(x), py(y)) for x, y in line.dots]
        series, thin = line.series % _SERIES, " thin" if line.dashed else ""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield f'<polyline class="line s{series}{thin}" points="{path}"/>'
        if not line.dashed:
            yield from (f'<circle class="d{series}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in points)
        if line.label:
            yield (
                f'<line class="line s{series}{thin}" x1="{legend_x:.0f}" x2="{legend_x + 22:.0f}" y1="46" y2="46"/>'
                f'<text x="{legend_x + 28:.0f}" y="50">{escape(line.label)}</text>'
            )
            legend_x += 52 + 6.6 * len(line.label)


def _axis(values: Sequence[float], start: float, end: float, log: bool) -> tuple[Callable[[float], float], list[float]]:
    """A function from values to coordinates, and the tick values."""
    low, high = min(values, default=1.0), max(values, default=1.0)
    if log:
        ticks = _decades(low, high)
        low, high = min(low, ticks[0]), max(high, ticks[-1])
        scale: Callable[[float], float] = math.log
    else:
        ticks = _round(low, high)
        low, high = min(low, ticks[0]), max(high, ticks[-1])
        scale = float
    span = scale(high) - scale(low) or 1.0

    def place(value: float) -> float:
        return start + (scale(value) - scale(low)) / span * (end - start)

    return place, ticks


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
