"""Chooses which graphs a forward runs and which widths are recorded, by costs of graphs and of launched kernels."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace
from typing import Any

from core.graphs import ExecutableKey
from pipeline.backends import graph_widths
from pipeline.backends.graph_widths import StepCosts, TrafficCounter, cheapest
from pipeline.backends.phases import STEPS
from pipeline.backends.timing import PhaseCosts
from pipeline.recording import GraphSet

NARROW = 4  # rows, up to which launching kernels may take longer than they do


def worth_recording(key: ExecutableKey, sizes: Collection[Hashable]) -> bool:
    """Return whether the first forward that lacks the graph has it recorded. Graphs keep their inputs, and push others
    out: of longer texts only narrow ones are worth it, and of sizes that anybody may ask for none, unless there is room
    and they pay.
    """
    return key.size in sizes and (key.chunks == 1 or key.rows <= NARROW)


class GraphChoice:
    """Chooses among recorded widths, and by the traffic what is recorded beside the usual ones."""

    def __init__(
        self, graphs: GraphSet, costs: PhaseCosts, widths: Sequence[int], sizes: Collection[tuple[int, int]]
    ) -> None:
        """`widths`: the usual ones, the widest first; `sizes`: those at which they are recorded, which may grow."""
        self._graphs, self._costs, self._widths, self._sizes = graphs, costs, widths, sizes
        self._traffic = TrafficCounter()

    def recorded(self, key: ExecutableKey, rows: int) -> int | None:
        """Return the recorded width, up to the key's, at which so many rows cost least; None: launching does."""
        widths = self._graphs.recorded(replace(key, rows=rows), key.rows)
        if len(widths) < 2 and key.rows in widths:  # launched, the same kernels take no less
            return key.rows
        size: Any = key.size
        direct = self._costs.curve(key.phase, size, False)
        is_measured = key.rows in direct.measured and key.rows not in widths
        launched_s = direct(key.rows) if is_measured else math.inf
        return cheapest(rows, widths, StepCosts(self._costs.curve(key.phase, size, True), lambda _: launched_s, 0.0))

    def count(self, key: ExecutableKey, rows: int) -> None:
        """Count a step of so many rows, and now and then record the widths that pay for those that differ in rows only,
        while there is room: they push no other graph out.
        """
        traffic = self._traffic.note(replace(key, rows=0), rows) if key.phase in STEPS else None
        if traffic is None:
            return
        size: Any = key.size
        graph, direct = self._costs.curve(key.phase, size, True), self._costs.curve(key.phase, size, False)
        usual_widths = (width for width in self._widths if worth_recording(replace(key, rows=width), self._sizes))
        widths = {*usual_widths, *self._graphs.recorded(replace(key, rows=0), self._widths[0])}

        def replayed(rows: int) -> float:
            return graph(rows) if graph.measured else direct(rows) - self._launching_s(key.phase, size, rows)

        def launched(rows: int) -> float:
            return direct(self._graphs.width(key.phase, rows)) if direct.measured else math.inf

        costs = StepCosts(replayed, launched, self._graphs.recording_s)
        for rows in graph_widths.worth_recording(traffic, widths, costs, self._graphs.room):
            self._graphs.choose(replace(key, rows=rows))

    def _launching_s(self, phase: str, size: tuple[int, int], rows: int) -> float:
        """Return the least that a graph saves of such a forward: by the next one at a usual size that has no fewer
        pixels, and so hides more of it behind the device's own time.
        """
        savings = []
        for width, height in self._sizes:
            graph, direct = (self._costs.curve(phase, (width, height), compiled) for compiled in (True, False))
            common = graph.measured.keys() & direct.measured.keys()
            savings += [(row_count * width * height, direct(row_count) - graph(row_count)) for row_count in common]
        candidates = [pair for pair in savings if pair[0] >= rows * size[0] * size[1]]
        return max(0.0, min(candidates, default=(0, 0.0))[1])
