"""A complete Runner that computes nothing: phases encode → step|shallow × n → vae under a virtual clock, with planted
failures.

It stands for any modality and keeps the books that a real one cannot: what each request committed, in which
order, and every breach of the contract by its caller. `Drive` does the engine's work on the virtual clock,
without threads. It deliberately knows nothing of how batches are chosen.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Event
from typing import Any

from contract.errors import Invalid
from core.batching.batcher import Batch
from core.batching.request import Outcome, Request, State
from core.batching.runner import DeviceLost, Lane, NotYet, OutOfMemory, Ticket
from core.batching.scheduler import Scheduler
from core.batching.shares import account
from core.batching.slots import Budget, Slots

Cost = Callable[[int], float]
Fault = Callable[[str, Sequence[Request], int], "BaseException | None"]


def flat(seconds: float = 1.0) -> Cost:
    return lambda rows: seconds


def linear(seconds: float = 1.0) -> Cost:
    return lambda rows: seconds * rows


def affine(fixed: float, each: float) -> Cost:
    return lambda rows: fixed + each * rows


def bucketed(cost: Cost, buckets: Sequence[int] = (1, 2, 4, 8, 16)) -> Cost:
    """Rows are padded to the next bucket, as compiled code does."""
    return lambda rows: cost(next((b for b in buckets if b >= rows), rows))


class Poisoned(RuntimeError):
    """What an iteration raises that holds a poisoned request."""


def memory_for(rows: int, phase: str | None = None) -> Fault:
    """Out of memory above so many rows."""

    def fault(at: str, requests: Sequence[Request], wide: int) -> BaseException | None:
        return OutOfMemory(f"{wide} rows do not fit") if wide > rows and phase in (None, at) else None

    return fault


def at_launches(*numbers: int, error: type[BaseException] = RuntimeError) -> Fault:
    """A passing trouble: the launches of these numbers fail (the first is 0), whatever is in them."""
    count = 0

    def fault(at: str, requests: Sequence[Request], rows: int) -> BaseException | None:
        nonlocal count
        count += 1
        return error(f"launch {count - 1} failed") if count - 1 in numbers else None

    return fault


@dataclass(frozen=True)
class Ask:
    """Parameters of a fake request. A `once` request is a single iteration; `slots` is what it holds while it
    lives. Of its steps every `interval`-th one is deep (phase "step"), all others are shallow.
    """

    steps: int = 3
    rows: int = 1
    size: str = "s"
    slots: int = 1
    encode: bool = True
    vae: bool = True
    once: bool = False
    interval: int = 1
    files: tuple[tuple[str, int], ...] = ()  # what it takes of the runner's `rooms`

    def phase(self, step: int) -> str:
        return "shallow" if step % self.interval else "step"

    @property
    def trace(self) -> list[str]:
        """The iterations that it must commit, in order, each once."""
        if self.once:
            return ["once"]
        encode, vae = (["encode"] if self.encode else []), (["vae"] if self.vae else [])
        return encode + [f"{self.phase(i)} {i}" for i in range(self.steps)] + vae


def only_steps(count: int, **more: Any) -> Ask:
    """Nothing is encoded before them, nor decoded after."""
    return Ask(count, encode=False, vae=False, **more)


@dataclass
class Work:
    slots: list[int]
    step: int = 0
    value: int = 0


def mixed(value: int, id: str, event: str) -> int:
    """One iteration's arithmetic: a step left out, doubled or taken in another order changes all that
    follows.
    """
    return (value * 1_000_003 + sum(f"{id}/{event}".encode())) % 2**61


def expected(request: Request) -> int:
    """The result of a request that was served as it should be."""
    value = 0
    for event in request.parameters.trace:
        value = mixed(value, request.id, event)
    return value


@dataclass
class Launch:
    """One line of the log: what was launched, when, and whether it failed."""

    at: float
    phase: str
    group: Hashable
    ids: list[str]
    rows: int
    failed: bool


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class FakeTicket:
    """Ends at a moment of the virtual clock, or, for a real engine, when its callable has run on a lane's
    thread.
    """

    runner: FakeRunner
    requests: list[Request]
    ends: float
    error: BaseException | None
    ready: Callable[[], bool]
    notify: Callable[[Callable[[], None]], None] = lambda wake: None
    asked: bool = False

    def outcome(self) -> Mapping[str, Outcome]:
        runner = self.runner
        runner.require(self.ready(), "an outcome was asked for before the ticket was ready")
        runner.require(not self.asked, "an outcome was asked for twice")
        self.asked = True
        for request in self.requests:
            runner.flying.discard(request.id)
        if self.error is not None:
            raise self.error
        return {request.id: runner.commit(request) for request in self.requests}


class FakeRunner:
    """`lanes_of` maps a phase to its lane; `costs` a phase to its curve ("" for all others).

    With `threads`, tickets run on real lanes (for an Engine) and wait for `gate`; otherwise they end when the
    virtual clock says so. Books: `log` (launches), `committed` (by request), `admitted` (in order),
    `violations`.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        modality: str = "image",
        slots: int = 16,
        rooms: Mapping[str, int] | None = None,
        limit: int = 16,
        costs: Mapping[str, Cost] | None = None,
        lanes_of: Mapping[str, str] | None = None,
        patience_s: float = 1000.0,
        faults: Sequence[Fault] = (),
        fail_at_launch: bool = False,
        threads: Mapping[str, Lane] | None = None,
    ) -> None:
        self.clock = clock
        self.modality = modality
        self.slots = Slots(slots)
        self.rooms = {name: Budget(capacity) for name, capacity in (rooms or {}).items()}
        self.limits: dict[str, int] = {"": limit}
        self.costs = dict(costs or {"": flat()})
        self.lanes_of = dict(lanes_of or {})
        self.patience_s = patience_s
        self.faults = list(faults)
        self.fail_at_launch = fail_at_launch
        self.threads = threads
        self.gate = Event()
        self.gate.set()
        self.leaks = 0  # slots that release forgets, on purpose
        self.release_error: BaseException | None = None
        self.admit_error: dict[str, BaseException] = {}
        self.log: list[Launch] = []
        self.committed: dict[str, list[str]] = {}
        self.admitted: list[str] = []
        self.refused: list[str] = []
        self.flying: set[str] = set()
        self.holding: dict[str, Request] = {}
        self.violations: list[str] = []
        self.calls = 0
        self._free_at: dict[str, float] = {}

    def require(self, condition: bool, breach: str) -> None:
        if not condition:
            self.violations.append(breach)

    # -- the Runner protocol --

    def check(self, request: Request) -> None:
        if request.parameters.steps < 1:
            raise Invalid("steps", "must be at least 1")

    def resources(self, request: Request) -> frozenset[str]:
        return frozenset(name for name, _ in request.parameters.files)

    def admit(self, request: Request) -> NotYet | None:
        self.calls += 1
        self.require(request.id not in self.holding, f"{request.id} was admitted twice")
        self.require(not request.state.final, f"{request.id} was admitted after its end")
        if request.id in self.admit_error:
            raise self.admit_error[request.id]
        ask: Ask = request.parameters
        for name, amount in ask.files:
            if self.rooms[name].taken + amount > self.rooms[name].capacity:
                self.refused.append(request.id)
                return NotYet(name)
        slots = self.slots.take(ask.slots)
        if slots is None:
            self.refused.append(request.id)
            return NotYet()
        for name, amount in ask.files:
            self.require(self.rooms[name].take(amount), f"{request.id} names {name} twice")
        request.work = Work(slots)
        request.phase = "once" if ask.once else "encode" if ask.encode else "step"
        self.holding[request.id] = request
        self.admitted.append(request.id)
        self.committed[request.id] = []
        return None

    def release(self, request: Request) -> None:
        self.calls += 1
        self.require(request.id in self.holding, f"{request.id} was released but not held")
        self.require(request.id not in self.flying, f"{request.id} was released while in flight")
        if self.release_error is not None:
            raise self.release_error
        self.holding.pop(request.id, None)
        kept = min(self.leaks, len(request.work.slots))
        self.leaks -= kept
        for name, amount in request.parameters.files:
            self.rooms[name].give(amount)
        self.slots.give(request.work.slots[kept:])
        request.work.slots = []

    def held(self) -> int:
        return self.slots.taken

    def group(self, request: Request) -> Hashable:
        self.calls += 1
        return (request.phase, request.parameters.size)

    def rows(self, request: Request) -> int:
        self.calls += 1
        rows: int = request.parameters.rows
        return rows

    def iterations(self, request: Request) -> int:
        self.calls += 1
        left: int = request.parameters.steps - request.work.step
        return left if request.phase in ("step", "shallow") else 1

    def left_s(self, request: Request, rows: int) -> float:
        ask: Ask = request.parameters
        if self.iterations(request) == 1:
            return self.cost(self.group(request), rows)
        return sum(self.cost((ask.phase(step), ask.size), rows) for step in range(request.work.step, ask.steps))

    def next_group(self, request: Request) -> Hashable:
        self.calls += 1
        ask: Ask = request.parameters
        following = request.work.step + (request.phase in ("step", "shallow"))
        if request.phase in ("vae", "once") or (following == ask.steps and not ask.vae):
            return None
        return ("vae" if following == ask.steps else ask.phase(following), ask.size)

    def limit(self, group: Hashable) -> int:
        return self.limits.get(phase_of(group), self.limits[""])

    def lane_of(self, group: Hashable) -> str:
        return self.lanes_of.get(phase_of(group), "main")

    def cost(self, group: Hashable, rows: int) -> float:
        self.calls += 1
        return self.costs.get(phase_of(group), self.costs.get("", flat()))(rows)

    def launch(self, requests: Sequence[Request]) -> Ticket:
        self.calls += 1
        group, rows = self.group(requests[0]), sum(self.rows(r) for r in requests)
        ids = [r.id for r in requests]
        self.require({self.group(r) for r in requests} == {group}, f"{ids} are not of one group")
        self.require(rows <= self.limit(group) or len(requests) == 1, f"{rows} rows are over the limit")
        self.require(len(set(ids)) == len(ids), f"{ids} holds a request twice")
        for request in requests:
            self.require(request.id in self.holding, f"{request.id} was launched but is not admitted")
            self.require(request.id not in self.flying, f"{request.id} was launched while in flight")
            self.require(request.state is State.RUNNING, f"{request.id} was launched while {request.state}")
        phase = phase_of(group)
        errors = (fault(phase, requests, rows) for fault in self.faults)
        error = next((e for e in errors if e is not None), None)
        self.log.append(Launch(self.clock(), phase, group, ids, rows, error is not None))
        if error is not None and self.fail_at_launch:
            raise error
        self.flying.update(ids)
        lane = self.lane_of(group)
        if self.threads is not None:
            run = self.threads[lane].start(lambda: self.gate.wait(), lambda _: {})
            return FakeTicket(self, list(requests), math.nan, error, run.ready, run.notify)
        ends = max(self.clock(), self._free_at.get(lane, 0.0)) + self.cost(group, rows)
        self._free_at[lane] = ends

        return FakeTicket(self, list(requests), ends, error, lambda: self.clock() >= ends)

    def commit(self, request: Request) -> Outcome:
        """Take one request one iteration further."""
        work, ask = request.work, request.parameters
        stepped = request.phase in ("step", "shallow")
        event = f"{request.phase} {work.step}" if stepped else request.phase
        self.committed[request.id].append(event)
        work.value = mixed(work.value, request.id, event)
        if stepped:
            work.step += 1
        total = 1 if ask.once else ask.encode + ask.steps + ask.vae
        progress = (len(self.committed[request.id]), total)
        if progress[0] == progress[1]:
            return Outcome(progress, result=work.value, finished=True)
        request.phase = "vae" if work.step == ask.steps else ask.phase(work.step)
        return Outcome(progress)


def phase_of(group: Hashable) -> str:
    assert isinstance(group, tuple)
    return str(group[0])


@dataclass
class Drive:
    """A scheduler, its runners and their virtual clock, driven as the engine drives them."""

    runners: Sequence[FakeRunner]
    clock: Clock
    depth: int = 1
    starvation_s: float = 1e9
    scheduler: Scheduler = field(init=False)
    flying: list[tuple[Batch, FakeTicket]] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)
    asked: dict[str, Request] = field(default_factory=dict)
    iterations: int = 0

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.runners, depth=self.depth, starvation_s=self.starvation_s)

    def add(self, id: str, ask: Ask = Ask(), *, modality: str = "image", **how: Any) -> Request:
        request = Request(id, modality, ask, **how)
        self.scheduler.add(request, self.clock.now)
        self.asked[id] = request
        return request

    def crowd(self, prefix: str, count: int, ask: Ask = Ask(), **how: Any) -> list[Request]:
        """Add so many alike, with ids that begin so."""
        return [self.add(f"{prefix}{number}", ask, **how) for number in range(count)]

    def abort(self, id: str) -> bool:
        live = self.scheduler.abort(id, self.clock.now)
        self._take_ended()
        return live

    def launch(self) -> list[Batch]:
        """One call of schedule, its batches launched. More than `depth` of them a lane are a breach."""
        batches = self.scheduler.schedule(self.clock.now)
        self.iterations += bool(batches)
        for batch in batches:
            assert isinstance(batch.runner, FakeRunner)
            try:
                ticket = batch.runner.launch(batch.requests)
            except Exception as error:
                assert not isinstance(error, DeviceLost)
                self.scheduler.fail(batch, error, self.clock.now)
            else:
                assert isinstance(ticket, FakeTicket)
                self.flying.append((batch, ticket))
        for lane in {b.lane for b, _ in self.flying}:
            assert sum(b.lane == lane for b, _ in self.flying) <= self.depth
        self._take_ended()
        return batches

    def fill(self) -> list[Batch]:
        """Launch until no lane takes another batch."""
        batches: list[Batch] = []
        while more := self.launch():
            batches += more
        return batches

    def land(self) -> bool:
        """Take in what is ready at this moment."""
        ready = [entry for entry in self.flying if entry[1].ready()]
        for entry in ready:
            batch, ticket = entry
            self.flying.remove(entry)
            try:
                outcomes = ticket.outcome()
            except Exception as error:
                self.scheduler.fail(batch, error, self.clock.now)
            else:
                self.scheduler.finish(batch, outcomes, self.clock.now)
        self._take_ended()
        return bool(ready)

    def forward(self, until: float = math.inf) -> bool:
        """Move time to the next end of a ticket or deadline, at most `until`; False if nothing is to come."""
        moments = [ticket.ends for _, ticket in self.flying]
        following = min([*moments, max(self.scheduler.next_deadline(), self.clock.now), until])
        if math.isinf(following):
            return False
        self.clock.now = max(self.clock.now, following)
        self.land()
        return bool(moments) or following < until

    def run(self, until: float = math.inf, most: int = 100_000) -> None:
        """To the end of all requests, or to a moment. Fails where nothing moves any more."""
        for _ in range(most):
            if self.clock.now >= until or (self.scheduler.idle and not self.flying):
                return
            self.fill()
            if self.scheduler.idle and not self.flying:
                return
            moved = self.forward(until)
            assert moved or self.clock.now >= until, f"stuck with {dict(self.scheduler.live)}"
        raise AssertionError("no end in sight")

    def finish(self, id: str) -> Request:
        """To the end of one request."""
        while (request := self.asked[id]).state is not State.DONE:
            self.fill()
            assert self.forward()
        return request

    def complete(self) -> None:
        """To the end of all requests, of which nothing is left."""
        self.run()
        self.verify_idle()

    def _take_ended(self) -> None:
        for request in self.scheduler.take_ended():
            assert request.state.final
            assert request.ended == self.clock.now
            assert all(request is not other for other in self.ended), f"{request.id} ended twice"
            self.ended.append(request)

    def verify(self) -> None:
        """All that must hold at any time."""
        for runner in self.runners:
            assert not runner.violations, runner.violations
            runner.slots.check()
            live = [r for r in self.scheduler.live.values() if r.modality == runner.modality]
            running = [r for r in live if r.state is State.RUNNING]
            assert {r.id for r in running} == set(runner.holding)
            assert runner.held() == sum(r.parameters.slots for r in running)
            assert self.scheduler.counts()[runner.modality] == (len(live) - len(running), len(running))
            devices = self.scheduler._admission.shares._devices
            device = devices[runner.modality]
            same = [r for r in self.scheduler.live.values() if devices[r.modality] is device]
            assert device.live == Counter(map(account, same))
            assert device.running == Counter(account(r) for r in same if r.state is State.RUNNING)
            for id, events in runner.committed.items():
                if id in self.asked:
                    trace = self.asked[id].parameters.trace
                    assert events == trace[: len(events)], f"{id} committed {events}"
        for request in self.ended:
            assert request.id not in self.scheduler.live or self.scheduler.live[request.id] is not request
            assert (request.state is State.DONE) == (request.result is not None)
            assert (request.state is State.FAILED) == (request.error is not None)
            assert request.ended is not None
            if request.state is State.DONE:
                assert request.result == expected(request) and request.ended < request.deadline
            if request.state is State.EXPIRED:
                assert request.ended >= request.deadline
        following = self.scheduler.next_deadline()
        to_come = (r.deadline for r in self.scheduler.live.values() if r.deadline > self.clock.now)
        assert following <= self.clock.now or following == min(to_come, default=math.inf)

    def verify_idle(self) -> None:
        self.verify()
        assert self.scheduler.idle
        self.scheduler.check_idle()
        for runner in self.runners:
            assert runner.slots.free == runner.slots.capacity


def drive(*, depth: int = 1, starvation_s: float = 1e9, **how: Any) -> tuple[Drive, FakeRunner]:
    """One fake runner and its drive."""
    clock = Clock()
    runner = FakeRunner(clock, **how)
    return Drive([runner], clock, depth, starvation_s), runner


def results(futures: Sequence[Future[Any]], timeout_s: float = 20.0) -> deque[Any]:
    """Results or exceptions of futures, each within a generous time: a hanging future fails the test."""
    found: deque[Any] = deque()
    for future in futures:
        error = future.exception(timeout_s)
        found.append(future.result() if error is None else error)
    return found
