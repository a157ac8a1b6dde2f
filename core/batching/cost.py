"""Cost curves: seconds per iteration against rows, measured at start-up and refined as work goes on.

Widths, estimates, admission by deadline and the simulator all read these curves.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Mapping


class CostCurve:
    """Seconds for a number of rows, piecewise linear between the numbers that were measured.

    Nothing measured yet: `guess_s` for a row, and little more for a wider forward, so that rows are put together until
    it is known better. Measured long ago: taken for cheaper than it was, by up to half after `_STALE` observations of
    other widths, so that a width which looked dear in one bad moment is tried again instead of never.

    What `measure` took, at a start, may have been measured under a load that has gone since. A width counts as
    confirmed once an iteration ran at it; the others follow the confirmed width next to them, by what that one's time
    became since the start, and within what any forward keeps to: more rows take no less time, and no more than the same
    rows in several forwards.
    """

    _FALL, _RISE = 0.5, 0.2  # weights of an observation below and above what was expected: noise only ever adds
    _LOW = 0.5  # of what was expected: two in a row below it replace it, since a load has gone
    _FIXED_ROWS = 8  # a forward's fixed cost before anything is known, in rows
    _STALE = 1000
    _SHOWN_S = 60.0  # for so long an iteration shows what its width takes at least

    def __init__(self, guess_s: float = 0.01, clock: Callable[[], float] = time.monotonic) -> None:
        self._guess_s = guess_s
        self._clock = clock
        self._rows: list[int] = []
        self._seconds: dict[int, float] = {}
        self._first: dict[int, float] = {}  # what `measure` took
        self._confirmed: list[int] = []
        self._ran_at: dict[int, float] = {}  # when an iteration ran last, by confirmed width
        self._low: dict[int, float] = {}  # the last observation, where it was below `_LOW`
        self._seen: dict[int, int] = {}
        self._observations = 0

    @property
    def measured(self) -> Mapping[int, float]:
        return dict(self._seconds)

    @property
    def unconfirmed(self) -> list[int]:
        """The widths that were measured, and at which no iteration ran since."""
        return [rows for rows in [*self._rows] if rows not in self._ran_at]

    def measure(self, rows: int, seconds: float) -> None:
        """Take in a measurement that was made for this curve, at a start: the least of several counts."""
        if rows in self._ran_at or not self._takes(rows, seconds):
            return
        self._first[rows] = min(seconds, 4 * self._expected(rows), self._first.get(rows, math.inf))
        self._record(rows, self._first[rows])

    def observe(self, rows: int, seconds: float) -> None:
        """Take in what an iteration took. A single outlier counts as no more than four times what was expected.

        What cannot be a duration (zero, negative, infinite, NaN) is ignored: no curve would recover from it.
        """
        if not self._takes(rows, seconds):
            return
        previous = self._seconds.get(rows)
        seconds = min(seconds, 4 * max(previous or 0.0, self._expected(rows)))
        if previous is None or (rows not in self._ran_at and seconds < previous):
            self._record(rows, seconds)
        else:
            low = seconds < self._LOW * previous
            if low and rows in self._low:
                self._record(rows, max(seconds, self._low[rows]))
            else:
                weight = self._FALL if seconds < previous else self._RISE
                self._record(rows, previous + weight * (seconds - previous))
            if low:
                self._low[rows] = seconds
            else:
                self._low.pop(rows, None)
        first, self._ran_at[rows] = rows not in self._ran_at, self._clock()
        if first:  # last: what reads these beside it looks up each confirmed width
            insort(self._confirmed, rows)

    def _takes(self, rows: int, seconds: float) -> bool:
        return rows >= 1 and 0 < seconds < math.inf

    def _expected(self, rows: int) -> float:
        return self(rows) if self._rows else math.inf

    def _record(self, rows: int, seconds: float) -> None:
        self._seconds[rows] = seconds
        self._observations += 1
        self._seen[rows] = self._observations
        if rows not in self._rows:
            insort(self._rows, rows)

    def forget(self) -> None:
        """Start anew, because what is executed has changed (compiled code took over)."""
        for kept in (self._rows, self._confirmed, self._seconds, self._first, self._low, self._seen, self._ran_at):
            kept.clear()

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

    def least(self, rows: int) -> float:
        """Return seconds that so many rows take at least, by what iterations took lately; 0 if none did.

        A width that ran under a load bounds no other by more than that one's own iterations took: never above a wider
        width, nor above a narrower one's as many forwards as hold the rows. What ran long ago only lowers the result:
        where it refuses work, nothing would run that corrects it.
        """
        now, confirmed = self._clock(), [*self._confirmed]
        shown = [width for width in confirmed if now - self._ran_at[width] <= self._SHOWN_S]
        lower_s = max((self._seconds[width] * min(1.0, rows / width) for width in shown), default=0.0)
        return min([lower_s, *(self._seconds[width] * -(-rows // width) for width in confirmed)])

    def _recalled(self, rows: int) -> float:
        age = self._observations - self._seen[rows]
        return self._corrected(rows) * (1 - min(0.5, max(0.0, age / self._STALE - 0.5)))

    def _corrected(self, rows: int) -> float:
        """Return a width's seconds; those of an unconfirmed one follow the confirmed width next to it."""
        confirmed, seconds = self._confirmed, self._seconds[rows]
        at = bisect_left(confirmed, rows)
        if not confirmed or (at < len(confirmed) and confirmed[at] == rows):
            return seconds
        if timed_twice := [width for width in confirmed if width in self._first]:
            nearest = min(timed_twice, key=lambda width: abs(math.log(width / rows)))
            seconds *= min(1.0, self._seconds[nearest] / self._first[nearest])
        if at < len(confirmed):
            above, above_s = confirmed[at], self._seconds[confirmed[at]]
            seconds = min(max(seconds, above_s * rows / above), above_s)
        if at:
            below, below_s = confirmed[at - 1], self._seconds[confirmed[at - 1]]
            seconds = max(min(seconds, below_s * -(-rows // below)), below_s)
        return seconds


class CostTable:
    """A curve per group, made on first use."""

    def __init__(self, guess_s: float = 0.01, clock: Callable[[], float] = time.monotonic) -> None:
        self._guess_s = guess_s
        self._clock = clock
        self._curves: dict[Hashable, CostCurve] = {}

    def __getitem__(self, group: Hashable) -> CostCurve:
        curve = self._curves.get(group)
        if curve is None:
            curve = self._curves[group] = CostCurve(self._guess_s, self._clock)
        return curve

    def measured(self) -> dict[Hashable, Mapping[int, float]]:
        return {group: curve.measured for group, curve in self._curves.items() if curve.measured}
