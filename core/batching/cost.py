"""Cost curves: seconds per iteration against rows, measured at start-up and refined as work goes on.

Widths, estimates, admission by deadline and the simulator all read these curves.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Hashable, Mapping


class CostCurve:
    """Seconds for a number of rows, piecewise linear between the numbers that were measured.

    Nothing measured yet: `guess_s` for a row, and little more for a wider forward, so that rows are put together until
    it is known better. Measured long ago: taken for cheaper than it was, by up to half after `_STALE` observations of
    other widths, so that a width which looked dear in one bad moment is tried again instead of never.
    """

    _FALL, _RISE = 0.5, 0.2  # weights of an observation below and above what was expected: noise only ever adds
    _FIXED_ROWS = 8  # a forward's fixed cost before anything is known, in rows
    _STALE = 1000

    def __init__(self, guess_s: float = 0.01) -> None:
        self._guess_s = guess_s
        self._rows: list[int] = []
        self._seconds: dict[int, float] = {}
        self._seen: dict[int, int] = {}
        self._observations = 0

    @property
    def measured(self) -> Mapping[int, float]:
        return dict(self._seconds)

    def observe(self, rows: int, seconds: float) -> None:
        """Take in one measurement. A single outlier counts as no more than four times what was expected.

        What cannot be a duration (zero, negative, infinite, NaN) is ignored: no curve would recover from it.
        """
        if rows < 1 or not 0 < seconds < math.inf:
            return
        expected = self(rows) if self._rows else math.inf
        seconds = min(seconds, 4 * expected)
        previous = self._seconds.get(rows)
        if previous is None:
            insort(self._rows, rows)
            self._seconds[rows] = seconds
        else:
            weight = self._FALL if seconds < previous else self._RISE
            self._seconds[rows] = previous + weight * (seconds - previous)
        self._observations += 1
        self._seen[rows] = self._observations

    def forget(self) -> None:
        """Start anew, because what is executed has changed (compiled code took over)."""
        self._rows.clear()
        self._seconds.clear()
        self._seen.clear()

    def __call__(self, rows: int) -> float:
        measured, fixed = self._rows, self._FIXED_ROWS
        if rows in self._seconds:
            return self._recalled(rows)
        if not measured:
            return self._guess_s * (fixed + rows) / (fixed + 1)
        if len(measured) == 1:
            return self._recalled(measured[0]) * (fixed + rows) / (fixed + measured[0])
        right = min(max(bisect_left(measured, rows), 1), len(measured) - 1)
        low, high = measured[right - 1], measured[right]
        low_s, high_s = self._recalled(low), self._recalled(high)
        slope = max(0.0, (high_s - low_s) / (high - low))
        return max(low_s + slope * (rows - low), min(low_s, high_s) * 0.1)

    def _recalled(self, rows: int) -> float:
        age = self._observations - self._seen[rows]
        return self._seconds[rows] * (1 - min(0.5, max(0.0, age / self._STALE - 0.5)))


class CostTable:
    """A curve per group, made on first use."""

    def __init__(self, guess_s: float = 0.01) -> None:
        self._guess_s = guess_s
        self._curves: dict[Hashable, CostCurve] = {}

    def __getitem__(self, group: Hashable) -> CostCurve:
        curve = self._curves.get(group)
        if curve is None:
            curve = self._curves[group] = CostCurve(self._guess_s)
        return curve

    def measured(self) -> dict[Hashable, Mapping[int, float]]:
        return {group: curve.measured for group, curve in self._curves.items() if curve.measured}
