"""Plots as shapes of SVG, which the report's template draws in the page's own colours."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
    low_limit: float | None
    high_limit: float | None
    verdict: str  # "" without a gate
    series: int


class Plot:
    """Shapes in their order: a tag, its attributes, its text, and a title that shows on it."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.shapes: list[tuple[str, dict[str, Any], str, str]] = []

    def add(self, tag: str, style: str, text: str = "", title: str = "", **places: float) -> None:
        self.shapes.append((tag, {"class": style, **{key: f"{v:.1f}" for key, v in places.items()}}, text, title))

    def text(self, style: str, text: str, x: float, y: float, anchor: str = "middle", **more: str) -> None:
        place = {"class": style, "x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor}
        self.shapes.append(("text", place | more, text, ""))


def scatter(dots: Sequence[Point], across: str, up: str) -> Plot:
    """Points with whiskers, labelled beside themselves."""
    plot = Plot(_W, _H)
    x0, x1 = 0.0, max(dot.x for dot in dots) * 1.12 or 1.0
    y0, y1 = _padded([value for dot in dots for value in (dot.low, dot.high, dot.y)])
    px, py = _scale(x0, x1, _LEFT, _W - _RIGHT), _scale(y0, y1, _H - _BOTTOM, _TOP)
    for tick in _ticks(y0, y1):
        plot.add("line", "grid", x1=_LEFT, x2=_W - _RIGHT, y1=py(tick), y2=py(tick))
        plot.text("tick", f"{tick:g}", _LEFT - 8, py(tick) + 4, "end")
    for tick in _ticks(x0, x1):
        plot.text("tick", f"{tick:g}", px(tick), _H - 26)
    plot.text("axis", across, (_LEFT + _W - _RIGHT) / 2, _H - 6)
    plot.text("axis", up, 0, 0, transform=f"translate(14 {_H / 2 - 12:.0f}) rotate(-90)")
    placed: list[tuple[float, float]] = []
    for dot in sorted(dots, key=lambda point: point.y):
        x, y = px(dot.x), py(dot.y)
        label_y = y + 4
        while any(abs(label_y - other_y) < 15 and abs(x - other_x) < 150 for other_x, other_y in placed):
            label_y -= 15
        placed.append((x, label_y))
        title = f"{dot.label}: {dot.x:.3g}, {dot.y:.4g} ({dot.low:.4g} to {dot.high:.4g})"
        plot.add("line", f"mark s{dot.series}", x1=x, x2=x, y1=py(dot.low), y2=py(dot.high))
        plot.add("circle", f"s{dot.series}", title=title, cx=x, cy=y, r=5.5)
        left = x > 0.72 * _W
        plot.text("name", dot.label, x - 10 if left else x + 10, label_y, "end" if left else "start")
    return plot


def whiskers(bars: Sequence[Bar], unit: str) -> Plot:
    """A line for each ratio, over its shaded gate."""
    row, top, left, right = 40, 12, 168, _W - 90
    plot = Plot(_W, top + row * len(bars) + 40)
    ends = [end for bar in bars for end in (bar.low, bar.high, bar.low_limit, bar.high_limit, 0.0) if end is not None]
    x0, x1 = _padded(ends)
    px, floor = _scale(x0, x1, left, right), plot.height - 34
    for tick in _ticks(x0, x1):
        plot.add("line", "grid", x1=px(tick), x2=px(tick), y1=top, y2=floor)
        plot.text("tick", f"{tick:+g}" if tick else "0", px(tick), plot.height - 18)
    plot.text("axis", unit, (left + right) / 2, plot.height - 2)
    for number, bar in enumerate(bars):
        y = top + row * number + row / 2
        if bar.high_limit is not None:
            start = px(x0 if bar.low_limit is None else bar.low_limit)
            plot.add("rect", "band", x=start, y=y - 13, width=px(bar.high_limit) - start, height=26)
        title = f"{bar.label}: {bar.value:+.3f}% ({bar.low:+.3f} to {bar.high:+.3f})"
        plot.text("name", bar.label if len(bar.label) <= 22 else bar.label[:21] + "…", left - 12, y + 4, "end")
        plot.add("line", f"mark s{bar.series}", x1=px(bar.low), x2=px(bar.high), y1=y, y2=y)
        plot.add("circle", f"s{bar.series}", title=title, cx=px(bar.value), cy=y, r=5.5)
        plot.text(f"name {bar.verdict}", bar.verdict, _W - 78, y + 4, "start")
    plot.add("line", "zero", x1=px(0), x2=px(0), y1=top, y2=floor)
    return plot


def histogram(values: Sequence[float], across: str, series: int, *, bins: int = 24) -> Plot:
    """The number of values fall where."""
    plot, bottom = Plot(420, 170), 130
    low, high = min(values), max(values)
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    counts = [0] * bins
    for value in values:
        counts[min(bins - 1, int((value - low) / (high - low) * bins))] += 1
    step, width = (plot.width - 20) / bins, (high - low) / bins
    for number, count in enumerate(counts):
        height, start = (bottom - 10) * count / max(counts), low + width * number
        place: dict[str, Any] = {"x": 10 + number * step + 0.75, "y": bottom - height, "width": step - 1.5}
        place |= {"height": height, "rx": 1.5}
        plot.add("rect", f"b{series}", title=f"{start:.1f} to {start + width:.1f}: {count}", **place)
    plot.add("line", "grid", x1=10, x2=plot.width - 10, y1=bottom, y2=bottom)
    for tick in _ticks(low, high):
        plot.text("tick", f"{tick:g}", _scale(low, high, 10, plot.width - 10)(tick), plot.height - 24)
    plot.text("axis", across, plot.width / 2, plot.height - 6)
    return plot


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _padded(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
    return low - room, high + room


def _ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers within the range."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough)
    first = math.ceil(low / step - 1e-9)
    return [round(step * k, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]
