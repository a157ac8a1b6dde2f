"""Simulates many engines on one queue under one virtual clock: step-level batching as deployed.

Jobs wait in a shared list by priority level, FIFO within it. A worker requests one whenever it has fewer than
`image_jobs` in flight, Redis serves the longest-waiting worker, and the worker's own Scheduler, the production
code, does the rest. Delivery takes no time, workers do not crash.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from core.batching.batcher import Batch
from core.batching.request import Request, State
from core.batching.scheduler import Scheduler
from core.jobs.broker import level
from lab.simulation.costs import STEPS, Costs
from lab.simulation.runner import Device, IterationSpan, SimulatedRunner, SimulatedTicket
from lab.simulation.traffic import SimulatedJob


@dataclass
class Served:
    """The jobs' results. By job: when it ended, and whether its deadline passed first."""

    ended: list[float]
    missed: list[bool]
    busy_s: float = 0.0  # of all devices together
    forwards: int = 0  # of denoising steps
    rows: int = 0  # of those forwards


@dataclass
class Clock:
    """A clock that advances only explicitly."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Backlog:
    """Jobs that no worker has taken: by priority level, then first in, first out."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, SimulatedJob]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, job: SimulatedJob) -> None:
        heapq.heappush(self._heap, (level(job.priority), job.index, job))

    def pop(self) -> SimulatedJob:
        return heapq.heappop(self._heap)[2]


@dataclass(eq=False)
class _Engine:
    number: int
    scheduler: Scheduler
    in_hand: int = 0
    flying: list[tuple[Batch, SimulatedTicket]] = field(default_factory=list)
    wakes: float = math.inf  # when it will look by itself, because a deadline passes


class StepLevel:
    """`gpus` workers, each with one engine. `on_launch` is called for every iteration, with its engine's index."""

    def __init__(
        self,
        costs: Costs,
        device: Device,
        *,
        gpus: int,
        image_jobs: int = 32,
        depth: int = 1,
        on_launch: Callable[[int, IterationSpan], None] = lambda engine, span: None,
    ) -> None:
        self.clock = Clock()
        self._depth = depth
        self._image_jobs = image_jobs
        self._on_launch = on_launch
        self._engines = []
        for number in range(gpus):
            runner = SimulatedRunner(costs, device, self.clock, self._count(number))
            scheduler = Scheduler([runner], depth=depth, starvation_s=device.starvation_s)
            self._engines.append(_Engine(number, scheduler))
        self._asking = deque(self._engines)  # those with room, who has asked for longest first
        self._backlog = Backlog()
        self._events: list[tuple[float, int, _Engine]] = []
        self._changed: dict[_Engine, None] = {}  # whose scheduler may decide otherwise than when it was last asked
        self._jobs: Sequence[SimulatedJob] = ()
        self._served = Served([], [])
        self._sequence = 0

    def run(self, jobs: Sequence[SimulatedJob]) -> Served:
        """Serve all jobs, given in the order of their arrival. Can be called once per instance."""
        self._jobs = jobs
        self._served = Served([math.nan] * len(jobs), [False] * len(jobs))
        following = 0
        while following < len(jobs) or self._events:
            arrives = jobs[following].arrival if following < len(jobs) else math.inf
            now = self.clock.now = min(arrives, self._events[0][0] if self._events else math.inf)
            while following < len(jobs) and jobs[following].arrival <= now:
                self._backlog.push(jobs[following])
                following += 1
            while self._events and self._events[0][0] <= now:
                self._land(heapq.heappop(self._events)[2])
            self._deliver()
            while self._changed:
                engine = next(iter(self._changed))
                del self._changed[engine]
                self._look(engine)
                self._deliver()
        for engine in self._engines:
            engine.scheduler.check_idle()
        return self._served

    def _deliver(self) -> None:
        now = self.clock.now
        while self._backlog and self._asking:
            job = self._backlog.pop()
            if job.deadline <= now:  # the sweep ended its record already
                self._end(job.index, job.deadline, missed=True)
                continue
            engine = self._asking.popleft()
            request = Request(str(job.index), "image", job.parameters, priority=job.priority, deadline=job.deadline)
            engine.scheduler.add(request, now)
            engine.in_hand += 1
            if engine.in_hand < self._image_jobs:
                self._asking.append(engine)
            self._changed[engine] = None

    def _land(self, engine: _Engine) -> None:
        """Process an engine's finished iterations, and let it schedule again."""
        now = self.clock.now
        for entry in [entry for entry in engine.flying if entry[1].ready()]:
            engine.flying.remove(entry)
            batch, ticket = entry
            engine.scheduler.finish(batch, ticket.outcome(), now)
        if engine.wakes <= now:
            engine.wakes = math.inf
        self._take_ended(engine)
        self._changed[engine] = None

    def _look(self, engine: _Engine) -> None:
        scheduler = engine.scheduler
        while batches := scheduler.schedule(self.clock.now):
            for batch in batches:
                ticket = batch.runner.launch(batch.requests)
                assert isinstance(ticket, SimulatedTicket)
                engine.flying.append((batch, ticket))
                self._call(engine, ticket.ends)
            if self._depth == 1:
                break
        self._take_ended(engine)
        deadline = scheduler.next_deadline()
        if deadline < engine.wakes:
            engine.wakes = deadline
            self._call(engine, deadline)

    def _take_ended(self, engine: _Engine) -> None:
        for request in engine.scheduler.take_ended():
            assert request.ended is not None
            if request.state not in (State.DONE, State.EXPIRED):
                raise RuntimeError(f"request {request.id} ended {request.state}") from request.error
            self._end(int(request.id), request.ended, missed=request.state is State.EXPIRED)
            if engine.in_hand == self._image_jobs:
                self._asking.append(engine)
            engine.in_hand -= 1

    def _end(self, index: int, when: float, *, missed: bool) -> None:
        if not math.isnan(self._served.ended[index]):
            raise RuntimeError(f"job {index} ended twice")
        self._served.ended[index] = when
        self._served.missed[index] = missed

    def _call(self, engine: _Engine, when: float) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (when, self._sequence, engine))

    def _count(self, engine: int) -> Callable[[IterationSpan], None]:
        def count(span: IterationSpan) -> None:
            served = self._served
            served.busy_s += span.ends - span.begins
            if span.phase in STEPS:
                served.forwards += 1
                served.rows += span.rows
            self._on_launch(engine, span)

        return count
