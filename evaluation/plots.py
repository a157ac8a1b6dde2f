"""Plots as inline SVG, coloured by the page's own variables so that they follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

_W, _H = 640, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 16, 44


class Point(NamedTuple):
    """A point with its vertical interval; `series` picks the colour."""

    label: str
    x: float
    y: float
    low: float
    high: float
    series: int


class Bar(NamedTuple):
    """A ratio, its interval, and the band that it must lie in, in per cent from the base."""

    label: str
    value: float
    low: float
    high: float
    least: float | None
    most: float | None
    verdict: str  # "" without a gate
    series: int


def scatter(dots: Sequence[Point], across: str, up: str) -> str:
    """Points with whiskers, labelled beside themselves."""
    x0, x1 = _padded([dot.x for dot in dots], from_zero=True)
    y0, y1 = _padded([value for dot in dots for value in (dot.low, dot.high, dot.y)])

    def px(x: float) -> float:
        return _LEFT + (x - x0) / (x1 - x0) * (_W - _LEFT - _RIGHT)

    def py(y: float) -> float:
        return _H - _BOTTOM - (y - y0) / (y1 - y0) * (_H - _TOP - _BOTTOM)

    parts = [_axes(x0, x1, y0, y1, across, up, px, py)]
    taken: list[tuple[float, float]] = []
    for dot in sorted(dots, key=lambda one: one.y):
        x, y = px(dot.x), py(dot.y)
        left = x > 0.72 * _W
        label_y = y + 4
        while any(abs(label_y - other_y) < 15 and abs(x - other_x) < 150 for other_x, other_y in taken):
            label_y -= 15
        taken.append((x, label_y))
        parts.append(
            f'<g class="s{dot.series}"><line x1="{x:.1f}" x2="{x:.1f}" y1="{py(dot.low):.1f}" y2="{py(dot.high):.1f}"/>'
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5.5"><title>{escape(dot.label)}: {dot.x:.3g}, {dot.y:.4g} '
            f"({dot.low:.4g} to {dot.high:.4g})</title></circle>"
            f'<text class="name" x="{x - 10 if left else x + 10:.1f}" y="{label_y:.1f}" '
            f'text-anchor="{"end" if left else "start"}">{escape(dot.label)}</text></g>'
        )
    return _svg(_W, _H, parts)


def whiskers(bars: Sequence[Bar], unit: str) -> str:
    """A line for each ratio, over its shaded gate."""
    ends = [end for bar in bars for end in (bar.low, bar.high, bar.least, bar.most, 0.0) if end is not None]
    x0, x1 = _padded(ends)
    row, top, left = 40, 12, 168
    height = top + row * len(bars) + 40

    def px(x: float) -> float:
        return left + (x - x0) / (x1 - x0) * (_W - left - 90)

    parts = []
    for tick in _ticks(x0, x1):
        parts.append(
            f'<line class="grid" x1="{px(tick):.1f}" x2="{px(tick):.1f}" y1="{top}" y2="{height - 34}"/>'
            f'<text class="tick" x="{px(tick):.1f}" y="{height - 18}" text-anchor="middle">{_sign(tick)}</text>'
        )
    middle = (left + _W - 90) / 2
    parts.append(f'<text class="axis" x="{middle:.0f}" y="{height - 2}" text-anchor="middle">{unit}</text>')
    for number, bar in enumerate(bars):
        y = top + row * number + row / 2
        if bar.most is not None:
            start = px(x0 if bar.least is None else bar.least)
            parts.append(
                f'<rect class="band" x="{start:.1f}" y="{y - 13:.1f}" width="{px(bar.most) - start:.1f}" height="26"/>'
            )
        parts.append(
            f'<text class="name" x="{left - 12}" y="{y + 4:.1f}" text-anchor="end">{escape(_short(bar.label))}</text>'
            f'<g class="s{bar.series}"><line x1="{px(bar.low):.1f}" x2="{px(bar.high):.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<circle cx="{px(bar.value):.1f}" cy="{y:.1f}" r="5.5"><title>{escape(bar.label)}: {bar.value:+.3f}% '
            f"({bar.low:+.3f} to {bar.high:+.3f})</title></circle></g>"
            f'<text class="name {bar.verdict}" x="{_W - 78}" y="{y + 4:.1f}">{bar.verdict}</text>'
        )
    parts.append(f'<line class="zero" x1="{px(0):.1f}" x2="{px(0):.1f}" y1="{top}" y2="{height - 34}"/>')
    return _svg(_W, height, parts)


def histogram(values: Sequence[float], across: str, series: int, *, bins: int = 24) -> str:
    """How many values fall where."""
    low, high = min(values), max(values)
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    counts = [0] * bins
    for value in values:
        counts[min(bins - 1, int((value - low) / (high - low) * bins))] += 1
    width, height, bottom = 420, 170, 40
    step = (width - 20) / bins
    most = max(counts)
    parts = []
    for number, count in enumerate(counts):
        tall = (height - bottom - 10) * count / most
        start = low + (high - low) * number / bins
        parts.append(
            f'<rect class="b{series}" x="{10 + number * step + 0.75:.1f}" y="{height - bottom - tall:.1f}" '
            f'width="{step - 1.5:.1f}" height="{tall:.1f}" rx="1.5"><title>{start:.1f} to '
            f"{start + (high - low) / bins:.1f}: {count}</title></rect>"
        )
    parts.append(f'<line class="grid" x1="10" x2="{width - 10}" y1="{height - bottom}" y2="{height - bottom}"/>')
    for tick in _ticks(low, high):
        x = 10 + (tick - low) / (high - low) * (width - 20)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{height - 24}" text-anchor="middle">{tick:g}</text>')
    middle = width / 2
    parts.append(f'<text class="axis" x="{middle:.0f}" y="{height - 6}" text-anchor="middle">{escape(across)}</text>')
    return _svg(width, height, parts)


# -- parts -------------------------------------------------------------------------------------------------------------


def _axes(x0: float, x1: float, y0: float, y1: float, across: str, up: str, px: object, py: object) -> str:
    assert callable(px) and callable(py)
    parts = []
    for tick in _ticks(y0, y1):
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_W - _RIGHT}" y1="{py(tick):.1f}" y2="{py(tick):.1f}"/>'
            f'<text class="tick" x="{_LEFT - 8}" y="{py(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>'
        )
    for tick in _ticks(x0, x1):
        parts.append(f'<text class="tick" x="{px(tick):.1f}" y="{_H - 26}" text-anchor="middle">{tick:g}</text>')
    middle, turned = (_LEFT + _W - _RIGHT) / 2, f"translate(14 {_H / 2 - 12:.0f}) rotate(-90)"
    parts.append(
        f'<text class="axis" x="{middle:.0f}" y="{_H - 6}" text-anchor="middle">{escape(across)}</text>'
        f'<text class="axis" transform="{turned}" text-anchor="middle">{escape(up)}</text>'
    )
    return "".join(parts)


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img">{"".join(parts)}</svg>'


def _padded(values: Sequence[float], *, from_zero: bool = False) -> tuple[float, float]:
    low, high = min(values), max(values)
    if from_zero:
        return 0.0, high * 1.12 or 1.0
    room = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
    return low - room, high + room


def _ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers within the range."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough)
    first = math.ceil(low / step - 1e-9)
    return [round(step * k, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def _sign(value: float) -> str:
    return "0" if value == 0 else f"{value:+g}"


def _short(label: str) -> str:
    return label if len(label) <= 22 else label[:21] + "…"
