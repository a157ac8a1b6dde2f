"""Cost curves: seconds per iteration against rows, measured at start-up and refined as work goes on.

Knows numbers only. Widths, estimates, admission by deadline and the simulator all read these curves.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Hashable, Mapping


class CostCurve:
    """Seconds for a number of rows, piecewise linear between the numbers that were measured.

    Before anything is measured, a forward is taken to cost `guess_s` for its first row and as much again for
    every further row shared by two: cheap enough that rows are put together, dear enough that it is not the
    answer for ever.
    """

    _WEIGHT = 0.25  # of an observation against the running mean; noise on a shared machine is one-sided and large

    def __init__(self, guess_s: float = 0.01) -> None:
        self._guess_s = guess_s
        self._rows: list[int] = []
        self._seconds: dict[int, float] = {}

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
        known = self._seconds.get(rows)
        if known is None:
            insort(self._rows, rows)
            self._seconds[rows] = seconds
        else:
            self._seconds[rows] = known + self._WEIGHT * (seconds - known)

    def forget(self) -> None:
        """Start anew, because what is executed has changed (compiled code took over)."""
        self._rows.clear()
        self._seconds.clear()

    def __call__(self, rows: int) -> float:
        known, seconds = self._rows, self._seconds
        if rows in seconds:
            return seconds[rows]
        if not known:
            return self._guess_s * (1 + rows) / 2
        if len(known) == 1:
            (only,) = known
            return seconds[only] * (1 + rows) / (1 + only)
        right = min(max(bisect_left(known, rows), 1), len(known) - 1)
        low, high = known[right - 1], known[right]
        slope = max(0.0, (seconds[high] - seconds[low]) / (high - low))
        return max(seconds[low] + slope * (rows - low), min(seconds[low], seconds[high]) * 0.1)


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
