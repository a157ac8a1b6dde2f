"""The scheduling policy: which group of requests runs next, whether its leader waits for others, and how wide a batch
is.

Rules of thumb from the cost curves alone, each with the reason for it; batcher.py says when they are asked.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate

from core.batching.limits import Limits
from core.batching.request import Request
from core.batching.runner import PreemptibleRunner, Runner
from core.batching.shares import Shares
from core.batching.waiting import Waiting

# At a load of 7/8: each request brings 1 + 7/8 + 49/64 + … while it and what it brings is served. Lower loads have
# little to choose from, and where the load is higher a batch too narrow costs everybody (docs/planning.md).
_SUCCESSORS = 8
_NARROW = 0.93  # of the rows a second of the best width; an SDXL step of 4 rows has 93% of those of 16 on an H200

Key = tuple[str, Hashable, str]
"""Whose requests may share a forward: modality, group, and the id of one that must run alone."""
Groups = Mapping[Key, list[Request]]
"""What is ready on one lane, the most urgent first."""


class SchedulingPolicy:
    """`waiting` holds what waits for admission, by modality, and `running` what was admitted.

    They are the admission's own books.
    """

    def __init__(
        self,
        runners: Mapping[str, Runner],
        limits: Limits,
        waiting: Mapping[str, Waiting],
        running: Mapping[str, Mapping[str, Request]],
        shares: Shares,
    ) -> None:
        self._runners = runners
        self._growing = {name: runner for name, runner in runners.items() if isinstance(runner, PreemptibleRunner)}
        self._limits = limits
        self._waiting = waiting
        self._running = running
        self._shares = shares

    def one_shot_before(self, led: Key, groups: Groups, now: float) -> Key | None:
        """A one-shot group that should run before the leader's, by Smith's rule, or None."""
        runner, leaders = self._runners[led[0]], groups[led]
        leader = leaders[0]
        if len(groups) == 1 or runner.iterations(leader) <= 1:
            return None
        delayed = self.widest(runner, led[1], leaders, bool(led[2]))
        left_s = runner.left_s(leader, sum(runner.rows(r) for r in delayed))
        spare_s = _spare_s(runner, delayed, now)
        best, best_gain = None, 0.0
        for key, requests in groups.items():
            other = self._runners[key[0]]
            peers = [r for r in requests if not self._shares.behind(r, leader)]
            if key == led or not peers or any(other.iterations(r) > 1 for r in requests):
                continue
            batch = self.widest(other, key[1], requests, bool(key[2]))
            cost_s = other.cost(key[1], sum(other.rows(r) for r in batch))
            if spare_s < cost_s:
                continue
            gain = min(len(peers), len(batch)) * left_s - len(delayed) * cost_s
            if gain >= best_gain:
                best, best_gain = key, gain
        return best

    def cohort_before(self, led: Key, groups: Groups, now: float) -> Key | None:
        """A group that should run before the leader's so that both go on together, or None.

        Either order ends with both groups having run once. What it saves is what the rows would have cost in one
        forward of all of them, less what they do cost: the first group runs by itself, the second with those of the
        first that came into it.
        """
        name, group, alone = led
        runner = self._runners[name]
        if alone or len(groups) == 1 or runner.iterations(groups[led][0]) <= 1:
            return None
        leading = self.widest(runner, group, groups[led], False)
        spare_s: float | None = None
        best, best_saved_s = None, 0.0
        for key, requests in groups.items():
            if key == led or key[0] != name or key[2] or runner.iterations(requests[0]) <= 1:
                continue
            rival = self.widest(runner, key[1], requests, False)
            if not _joins(runner, rival, group) or self._shares.behind(rival[0], leading[0]):
                continue
            saved_s = self._saved_s(runner, rival, leading) - self._saved_s(runner, leading, rival)
            if saved_s <= best_saved_s:
                continue
            spare_s = _spare_s(runner, leading, now) if spare_s is None else spare_s
            if spare_s >= runner.cost(key[1], sum(runner.rows(r) for r in rival)):
                best, best_saved_s = key, saved_s
        return best

    def _saved_s(self, runner: Runner, first: Sequence[Request], second: Sequence[Request]) -> float:
        """Seconds that are saved where `first` runs, and then `second` with those of the first that join it."""
        groups = runner.group(first[0]), runner.group(second[0])
        row_counts = [sum(runner.rows(r) for r in requests) for requests in (first, second)]
        # Those that join may have another number of rows by then. Estimating with that, in 5% of the estimates, changed
        # no simulated mean latency by more than 0.4%, mostly for the worse: mixed plans at loads of 0.6 to 2.
        joining = sum(runner.rows(r) for r in first if runner.next_group(r) == groups[1])
        ran = row_counts[0], min(row_counts[1] + joining, max(row_counts[1], self._limits.of(runner, groups[1])))
        return sum(
            rows * runner.cost(group, sum(row_counts)) / sum(row_counts) - runner.cost(group, rows)
            for group, rows in zip(groups, ran, strict=True)
        )

    def widest(self, runner: Runner, group: Hashable, requests: list[Request], alone: bool) -> list[Request]:
        """The most urgent requests whose number minimises the mean completion time of all that are queued.

        Of a runner that keeps a pace: as many as it has time for. Of any other: no more than leave that time to it, but
        always one, however long that takes.
        """
        if alone:
            return requests[:1]
        return self._shares.joining(runner, group, self._widest(runner, group, requests))

    def _widest(self, runner: Runner, group: Hashable, requests: list[Request]) -> list[Request]:
        limit = self._limits.of(runner, group)
        growing = self._growing.get(runner.modality)
        if growing is not None:
            return _paced(growing, group, requests, limit)
        room_s = self._room_s()
        queued = _SUCCESSORS * (len(requests) + self._waiting[runner.modality].count)
        best, best_s, rows = 1, math.inf, 0
        for k, request in enumerate(requests, 1):
            rows += runner.rows(request)
            if rows > limit and k > 1:
                break
            waves = -(-queued // k)
            # completions: k at the end of each wave but the last, the rest at the end of the last one
            cost_s = runner.cost(group, rows)
            if k > 1 and cost_s > room_s:
                break
            mean_s = cost_s * waves * (queued - k * (waves - 1) / 2) / queued
            if mean_s <= best_s:
                best, best_s = k, mean_s
        if best > 1 and self._shares.expects(runner.modality, requests[0].tenant):
            best = self._narrower(runner, group, requests, best)
        return requests[:best]

    def _narrower(self, runner: Runner, group: Hashable, requests: list[Request], most: int) -> int:
        """The fewest requests whose batch serves next to as many rows a second as the most urgent `most` do."""
        rows = list(accumulate(runner.rows(request) for request in requests[:most]))
        least = _NARROW * rows[-1] / runner.cost(group, rows[-1])
        return next(k for k, count in enumerate(rows, 1) if count / runner.cost(group, count) >= least)

    def _room_s(self) -> float:
        """The time that a batch may hold up streaming requests; infinite where none stream or none can keep pace."""
        left_s = math.inf
        for name, runner in self._growing.items():
            streaming = self._running[name]
            if streaming and not runner.overlaps:
                counts = Counter(map(runner.group, streaming.values()))
                if sum(runner.cost(group, 1) for group in counts) <= runner.pace_s:
                    round_s = sum(runner.cost(group, count) for group, count in counts.items())
                    left_s = min(left_s, runner.pace_s - round_s)
        return left_s


def _paced(runner: PreemptibleRunner, group: Hashable, requests: list[Request], limit: int) -> list[Request]:
    rows = row_count = 0
    # A pace that not even one can keep binds nobody: they would only wait for one another.
    bound_s = runner.pace_s if runner.cost(group, runner.rows(requests[0])) <= runner.pace_s else math.inf
    total = sum(map(runner.rows, requests))
    if total <= limit and runner.cost(group, total) <= bound_s:
        return requests
    for request in requests:
        rows += runner.rows(request)
        if row_count and (rows > limit or runner.cost(group, rows) > bound_s):
            break
        row_count += 1
    return requests[:row_count]


def _joins(runner: Runner, requests: Sequence[Request], group: Hashable) -> bool:
    """Return whether one iteration takes any of these requests into the group."""
    return any(runner.next_group(request) == group for request in requests)


def _spare_s(runner: Runner, delayed: Sequence[Request], now: float) -> float:
    """The time that they may be held: a deadline that someone set is not spent on others."""
    rows = sum(runner.rows(request) for request in delayed)
    return min(r.deadline - now - (runner.left_s(r, rows) if r.deadline < math.inf else 0.0) for r in delayed)
