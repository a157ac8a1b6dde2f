"""Requests that grow: the least urgent wait again where there is too little for all, and everyone gets to the end."""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from core.batching.engine import Closed, Engine
from core.batching.request import Outcome, Request, State
from core.batching.runner import Lane, LaneTicket, NotYet, OutOfMemory
from core.batching.scheduler import Scheduler


@dataclass
class Progress:
    done: int = 0
    held: int = 0
    trace: list[str] = field(default_factory=list)


class Flat:
    """Requests that hold what they hold, in forwards whose cost hardly grows with their width."""

    modality = "image"
    patience_s = 20.0

    def check(self, request: Request) -> None:
        pass

    def resources(self, request: Request) -> frozenset[str]:
        return frozenset()

    def admit(self, request: Request) -> NotYet | None:
        return None

    def release(self, request: Request) -> None:
        pass

    def held(self) -> int:
        return 0

    def group(self, request: Request) -> Hashable:
        return "deep"

    def rows(self, request: Request) -> int:
        return 1

    def iterations(self, request: Request) -> int:
        return 20

    def left_s(self, request: Request, rows: int) -> float:
        return 20 * self.cost("deep", rows)

    def next_group(self, request: Request) -> Hashable:
        return "deep"

    def limit(self, group: Hashable) -> int:
        return 8

    def lane(self, group: Hashable) -> str:
        return "device"

    def cost(self, group: Hashable, rows: int) -> float:
        return 0.04 + 0.002 * rows

    def launch(self, requests: Sequence[Request]) -> LaneTicket:
        raise NotImplementedError


class Growing:
    """Each iteration makes a request one larger; the first one after it was admitted takes all that it had again."""

    modality = "text"
    patience_s = 1.0
    pace_s = math.inf
    overlaps = False

    def __init__(self, capacity: int, lane: Lane | None = None, limit: int = 8) -> None:
        self.capacity, self.taken, self.width, self._lane = capacity, 0, limit, lane
        self.preempted: list[str] = []

    def check(self, request: Request) -> None:
        pass

    def resources(self, request: Request) -> frozenset[str]:
        return frozenset()

    def admit(self, request: Request) -> NotYet | None:
        work = request.work or Progress()
        if self.capacity - self.taken < work.done + 1:
            return NotYet()
        request.work = work
        self._take(work, work.done + 1)
        return None

    def release(self, request: Request) -> None:
        self._take(request.work, -request.work.held)

    def preempt(self, request: Request) -> None:
        assert not request.in_flight
        self.preempted.append(request.id)
        self.release(request)

    def reserve(self, requests: Sequence[Request]) -> bool:
        for request in requests:
            if request.work.held == request.work.done + 1:
                continue
            if self.taken == self.capacity:
                return False
            self._take(request.work, 1)
        return True

    def _take(self, work: Progress, count: int) -> None:
        work.held += count
        self.taken += count
        assert 0 <= self.taken <= self.capacity

    def held(self) -> int:
        return self.taken

    def group(self, request: Request) -> Hashable:
        return "all"

    def rows(self, request: Request) -> int:
        return 1

    def iterations(self, request: Request) -> int:
        return int(request.parameters) - request.work.done

    def left_s(self, request: Request, rows: int) -> float:
        return float(self.iterations(request))

    def next_group(self, request: Request) -> None:
        pass

    def limit(self, group: Hashable) -> int:
        return self.width

    def lane(self, group: Hashable) -> str:
        return "text"

    def cost(self, group: Hashable, rows: int) -> float:
        return 0.01 * rows

    def commit(self, requests: Sequence[Request]) -> dict[str, Outcome]:
        outcomes = {}
        for request in requests:
            work = request.work
            assert work.held == work.done + 1, "an iteration ran without what it needs"
            work.done += 1
            finished = work.done == request.parameters
            outcomes[request.id] = Outcome(result=work.done if finished else None, finished=finished)
        return outcomes

    def launch(self, requests: Sequence[Request]) -> LaneTicket:
        assert self._lane is not None
        kept = list(requests)
        return self._lane.start(lambda: None, lambda _: self.commit(kept))


def tick(scheduler: Scheduler, runner: Growing, now: float) -> list[str]:
    """One iteration; returns who rode."""
    rode = []
    for batch in scheduler.schedule(now):
        rode += [request.id for request in batch.requests]
        assert batch.rows == len(batch.requests)
        scheduler.finish(batch, runner.commit(batch.requests), now)
    return rode


def drive(runner: Growing, requests: list[Request], most: int = 2000) -> list[str]:
    """Ids in the order in which they ended."""
    scheduler = Scheduler([runner])
    for request in requests:
        scheduler.add(request, 0.0)
    ended: list[str] = []
    for now in range(most):
        tick(scheduler, runner, float(now) / 100)
        ended += [request.id for request in scheduler.take_ended()]
        if scheduler.idle:
            scheduler.check_idle()
            return ended
    raise AssertionError(f"not done after {most} iterations: {scheduler.counts()}")


def test_the_least_urgent_waits_again_and_ends_last() -> None:
    runner = Growing(10)
    requests = [Request(name, "text", 6) for name in "abc"]
    assert drive(runner, requests) == ["a", "b", "c"]
    assert runner.preempted[0] == "c" and "a" not in runner.preempted
    assert all(request.state is State.DONE and request.result == 6 for request in requests)


def test_priority_decides_who_waits() -> None:
    runner = Growing(10)
    requests = [Request("patient", "text", 6, priority=5), Request("b", "text", 6), Request("c", "text", 6)]
    assert drive(runner, requests)[-1] == "patient"
    assert runner.preempted[0] == "patient"


def test_it_is_started_once_and_is_not_handed_back() -> None:
    """Draining finishes what was begun, also what has to wait again."""
    runner = Growing(6)
    scheduler = Scheduler([runner])
    for name in "abc":
        scheduler.add(Request(name, "text", 4), 0.0)
    now = 0.0
    while not runner.preempted and now < 100:
        now += 1
        tick(scheduler, runner, now)
    again = scheduler.live[runner.preempted[0]]
    assert again.state is State.WAITING and again.started == 1.0
    scheduler.add(Request("new", "text", 1), now)
    assert [request.id for request in scheduler.hand_back()] == ["new"]
    assert scheduler.counts() == {"text": (1, 2)}
    while not scheduler.idle:
        now += 1
        tick(scheduler, runner, now)
    assert {request.id: request.state for request in scheduler.take_ended()} == dict.fromkeys("abc", State.DONE)
    scheduler.check_idle()


@pytest.mark.parametrize(("pace_s", "width"), [(0.001, 8), (0.011, 1), (0.045, 4), (math.inf, 8)])
def test_a_batch_is_as_wide_as_its_pace_allows(pace_s: float, width: int) -> None:
    """Where cost is linear in rows, too: requests that stream go on together. What none can keep binds none."""
    runner = Growing(100)
    runner.pace_s = pace_s
    scheduler = Scheduler([runner])
    for number in range(10):
        scheduler.add(Request(f"{number}", "text", 3), 0.0)
    assert tick(scheduler, runner, 1.0) == [f"{number}" for number in range(width)]


@pytest.mark.parametrize(
    ("streaming", "pace_s", "width"), [(0, 0.0605, 8), (1, 0.0605, 5), (5, 0.0605, 1), (30, 0.0605, 1), (5, 0.005, 8)]
)
def test_others_leave_a_streams_pace_to_it(streaming: int, pace_s: float, width: int) -> None:
    """Pictures go in narrower batches while text is written, and one at a time where the pace allows none."""
    runner = Growing(1000, limit=64)
    runner.pace_s = pace_s
    scheduler = Scheduler([runner, Flat()])
    for number in range(streaming):
        scheduler.add(Request(f"t{number}", "text", 99), 0.0)
    for number in range(8):
        scheduler.add(Request(f"p{number}", "image", 99), 0.0)
    batches = {batch.runner.modality: len(batch.requests) for batch in scheduler.schedule(1.0)}
    assert batches["image"] == width


def test_a_stream_that_runs_beside_others_narrows_nobody() -> None:
    runner = Growing(1000, limit=64)
    runner.pace_s, runner.overlaps = 0.0605, True
    scheduler = Scheduler([runner, Flat()])
    scheduler.add(Request("t", "text", 99), 0.0)
    for number in range(8):
        scheduler.add(Request(f"p{number}", "image", 99), 0.0)
    batches = {batch.runner.modality: len(batch.requests) for batch in scheduler.schedule(1.0)}
    assert batches == {"text": 1, "image": 8}


def test_what_is_alone_and_still_too_large_fails() -> None:
    runner = Growing(4)
    request = Request("a", "text", 9)
    assert drive(runner, [request]) == ["a"]
    assert request.state is State.FAILED and isinstance(request.error, OutOfMemory)


def test_an_abort_while_it_waits_again() -> None:
    runner = Growing(6)
    scheduler = Scheduler([runner])
    for name in "ab":
        scheduler.add(Request(name, "text", 5), 0.0)
    while not runner.preempted:
        tick(scheduler, runner, 1.0)
    assert scheduler.abort("b", 2.0)
    while not scheduler.idle:
        tick(scheduler, runner, 3.0)
    assert [(r.id, r.state) for r in scheduler.take_ended()] == [("b", State.ABORTED), ("a", State.DONE)]
    scheduler.check_idle()


@pytest.mark.parametrize("seed", range(6))
def test_any_mix_ends_and_leaves_nothing(seed: int) -> None:
    draw = random.Random(seed)
    capacity = draw.randint(5, 20)
    runner = Growing(capacity, limit=draw.randint(1, 8))
    requests = [Request(f"r{i}", "text", draw.randint(1, capacity), priority=draw.choice((0, 5, 9))) for i in range(30)]
    scheduler = Scheduler([runner], starvation_s=draw.choice((0.5, 60.0)))
    now, left = 0.0, list(requests)
    while left or not scheduler.idle:
        now += 0.05
        assert now < 500
        while left and draw.random() < 0.4:
            scheduler.add(left.pop(), now)
        if scheduler.live and draw.random() < 0.05:
            scheduler.abort(draw.choice(list(scheduler.live)), now)
        tick(scheduler, runner, now)
    scheduler.check_idle()
    assert {request.state for request in requests} <= {State.DONE, State.ABORTED}
    assert runner.preempted


def test_the_engine_drains_what_had_to_wait_again() -> None:
    lane = Lane("growing")
    runner = Growing(12, lane)
    engine = Engine([runner])
    futures: Mapping[str, Any] = {name: engine.submit(Request(name, "text", 10)) for name in "abcd"}
    while not runner.preempted:
        pass
    unfinished = {request.id for request in engine.drain()}
    for name, future in futures.items():
        if name in unfinished:
            with pytest.raises(Closed):
                future.result()
        else:
            assert future.result() == 10
    assert runner.preempted[0] not in unfinished
    engine.close()
    lane.close()
