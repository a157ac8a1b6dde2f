"""Chooses the numbers of rows at which steps are recorded as graphs, by what lately ran and what steps cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import NamedTuple

Seconds = Callable[[int], float]
Traffic = Mapping[int, int]  # rows of a forward, without padding → how many there were

_EVERY = 64  # forwards of a kind between two choices
_LATELY = 1024  # forwards of a kind, after which each counts half
_KINDS = 64  # that are counted, those that ran last


class StepCosts(NamedTuple):
    """The seconds of a forward by its rows, replayed from a graph and launched by kernels, and of one recording."""

    graph: Seconds
    direct: Seconds
    record_s: float


def cheapest(rows: int, recorded: Collection[int], costs: StepCosts) -> int | None:
    """Return the recorded width that a forward is padded to; None: launching it, without padding, takes no longer."""
    candidates = [(costs.graph(width), width) for width in recorded if width >= rows]
    seconds, width = min(candidates, default=(math.inf, 0))
    return width if seconds < costs.direct(rows) else None


def expected_s(traffic: Traffic, recorded: Collection[int], costs: StepCosts) -> float:
    """Return the seconds of such traffic with these widths."""
    widths = {rows: cheapest(rows, recorded, costs) for rows in traffic}
    return sum(
        count * (costs.direct(rows) if (width := widths[rows]) is None else costs.graph(width))
        for rows, count in traffic.items()
    )


def worth_recording(traffic: Traffic, recorded: Collection[int], costs: StepCosts, room: int) -> list[int]:
    """Return the widths to record too, at most `room`, those first that save most: each saves more of such traffic's
    time than its recording takes.

    What a set of widths saves is submodular: where no single one pays any more, no set of them does.
    """
    selected: list[int] = []
    while len(selected) < room:
        widths = [*recorded, *selected]
        now_s = expected_s(traffic, widths, costs)
        gains = {rows: now_s - expected_s(traffic, [*widths, rows], costs) for rows in traffic if rows not in widths}
        best = max(gains, key=lambda rows: (gains[rows], -rows), default=None)
        if best is None or not gains[best] > costs.record_s:
            break
        selected.append(best)
    return selected


class TrafficCounter:
    """Counts forwards by kind, which is all that their graphs differ in but rows. Not thread-safe."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, Counter[int]] = {}

    def note(self, kind: Hashable, rows: int) -> Traffic | None:
        """Count a forward. Returns the kind's traffic when it is time to choose anew."""
        counts = self._kinds.pop(kind, Counter())
        self._kinds[kind] = counts
        if len(self._kinds) > _KINDS:
            del self._kinds[next(iter(self._kinds))]
        counts[rows] += 1
        total = counts.total()
        if total % _EVERY:
            return None
        traffic = dict(counts)
        if total >= _LATELY:
            self._kinds[kind] = Counter({rows: count // 2 for rows, count in counts.items() if count > 1})
        return traffic
