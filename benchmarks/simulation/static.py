"""Simulates request-level batching, the baseline: many devices on one queue under a virtual clock.

A free device takes up to `batch` waiting images of one kind (size, steps, guidance, DeepCache), which begin and end
together; with a window, only once that many wait or the oldest has waited that long. The policy of
`benchmarks.harness.traces.RequestLevel`, whose draw_batch has the same costs, on one ideal queue for all devices.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence

from benchmarks.simulation.costs import STEPS, Costs
from benchmarks.simulation.fleet import Served
from benchmarks.simulation.runner import Device, limit, phases_of
from benchmarks.simulation.traffic import SimulatedJob
from contract.image import ImageParameters
from core.jobs.broker import level

Forwards = list[tuple[str, int, float]]
"""Phase, rows and seconds of each forward."""


def draw(costs: Costs, device: Device, parameters: ImageParameters, count: int) -> Forwards:
    """The forwards that generate that many images of a kind together; forwards that would be too wide are split."""
    forwards: Forwards = []
    for group, rows in phases_of(parameters):
        together = max(1, limit(costs, device, group) // rows)
        for start in range(0, count, together):
            width = rows * min(together, count - start)
            forwards.append((group.phase, width, costs(*group, width)))
    return forwards


class _Kind:
    """The waiting jobs of one kind: the most urgent first, and the oldest for the window."""

    def __init__(self) -> None:
        self.count = 0
        self._urgent: list[tuple[int, int, SimulatedJob]] = []
        self._oldest: deque[SimulatedJob] = deque()

    def push(self, job: SimulatedJob) -> None:
        self.count += 1
        heapq.heappush(self._urgent, (level(job.priority), job.index, job))
        self._oldest.append(job)

    def first(self, left: Sequence[bool]) -> tuple[int, int, SimulatedJob]:
        """The most urgent waiting job."""
        while left[self._urgent[0][1]]:
            heapq.heappop(self._urgent)
        return self._urgent[0]

    def oldest(self, left: Sequence[bool]) -> SimulatedJob:
        while left[self._oldest[0].index]:
            self._oldest.popleft()
        return self._oldest[0]


class SimulatedRequestLevel:
    """`on_batch` is called for every batch with its device, start, end and jobs."""

    def __init__(
        self,
        costs: Costs,
        device: Device,
        *,
        gpus: int,
        batch: int,
        window_s: float = 0.0,
        on_batch: Callable[[int, float, float, list[SimulatedJob]], None] = lambda gpu, begins, ends, jobs: None,
    ) -> None:
        self._costs = costs
        self._device = device
        self._batch = batch
        self._window_s = window_s
        self._on_batch = on_batch
        self._free = deque(range(gpus))  # who has been free for longest first
        self._kinds: dict[ImageParameters, _Kind] = {}
        self._left: list[bool] = []  # by job: whether it waits no more
        self._deadlines: list[tuple[float, int, SimulatedJob]] = []
        self._events: list[tuple[float, int]] = []  # when, and which device becomes free: -1 where a window ends
        self._wakes = math.inf  # the next of those windows
        self._known: dict[tuple[ImageParameters, int], tuple[float, int, int]] = {}
        self._served = Served([], [])

    def run(self, jobs: Sequence[SimulatedJob]) -> Served:
        """Serve all jobs, given in the order of their arrival. Can be called once per instance."""
        self._served = Served([math.nan] * len(jobs), [False] * len(jobs))
        self._left = [False] * len(jobs)
        following = 0
        while following < len(jobs) or self._events:
            arrives = jobs[following].arrival if following < len(jobs) else math.inf
            now = min(arrives, self._events[0][0] if self._events else math.inf)
            while following < len(jobs) and jobs[following].arrival <= now:
                self._arrive(jobs[following])
                following += 1
            self._end_batches(now)
            self._expire(now)
            while self._free and (kind := self._ripe(now)):
                self._launch(kind, now)
            until = min((self._until(kind) for kind in self._kinds.values() if kind.count), default=math.inf)
            if self._free and until < self._wakes:
                self._wakes = until
                heapq.heappush(self._events, (until, -1))
        return self._served

    def _arrive(self, job: SimulatedJob) -> None:
        self._kinds.setdefault(job.parameters, _Kind()).push(job)
        if job.deadline < math.inf:
            heapq.heappush(self._deadlines, (job.deadline, job.index, job))

    def _end_batches(self, now: float) -> None:
        """Free the devices whose batches have ended by now, and forget the windows that have."""
        while self._events and self._events[0][0] <= now:
            when, gpu = heapq.heappop(self._events)
            if gpu >= 0:
                self._free.append(gpu)
            elif when >= self._wakes:
                self._wakes = math.inf

    def _expire(self, now: float) -> None:
        """Expire waiting jobs whose deadlines have passed."""
        while self._deadlines and self._deadlines[0][0] <= now:
            job = heapq.heappop(self._deadlines)[2]
            if not self._left[job.index]:
                self._left[job.index] = True
                self._kinds[job.parameters].count -= 1
                self._served.ended[job.index] = job.deadline
                self._served.missed[job.index] = True

    def _ripe(self, now: float) -> ImageParameters | None:
        """The next kind: of those that may start, the one with the most urgent job."""
        ripe = (
            (kind.first(self._left)[:2], parameters)
            for parameters, kind in self._kinds.items()
            if kind.count and (kind.count >= self._batch or self._until(kind) <= now)
        )
        return min(ripe, key=lambda entry: entry[0], default=(None, None))[1]

    def _until(self, kind: _Kind) -> float:
        """The time at which the window of a kind's oldest job ends."""
        return kind.oldest(self._left).arrival + self._window_s

    def _launch(self, parameters: ImageParameters, now: float) -> None:
        kind = self._kinds[parameters]
        batch: list[SimulatedJob] = []
        while kind.count and len(batch) < self._batch:
            job = kind.first(self._left)[2]
            self._left[job.index] = True
            kind.count -= 1
            batch.append(job)
        gpu, (seconds, forwards, rows) = self._free.popleft(), self._cost(parameters, len(batch))
        ends = now + seconds
        heapq.heappush(self._events, (ends, gpu))
        served = self._served
        served.busy_s += seconds
        served.forwards += forwards
        served.rows += rows
        for job in batch:
            served.ended[job.index] = ends
            served.missed[job.index] = job.deadline <= ends
        self._on_batch(gpu, now, ends, batch)

    def _cost(self, parameters: ImageParameters, count: int) -> tuple[float, int, int]:
        """Seconds of a batch, and its denoising forwards with their rows."""
        cost = self._known.get((parameters, count))
        if cost is None:
            forwards = draw(self._costs, self._device, parameters, count)
            steps = [rows for phase, rows, _ in forwards if phase in STEPS]
            cost = self._known[parameters, count] = (sum(s for _, _, s in forwards), len(steps), sum(steps))
        return cost
