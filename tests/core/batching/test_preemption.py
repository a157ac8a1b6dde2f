"""Requests that grow: the least urgent wait again where there is too little for all, and everyone gets to the end."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from core.batching.engine import Closed, Engine
from core.batching.request import Outcome, Request, State
from core.batching.runner import Lane, NotYet, OutOfMemory
from core.batching.scheduler import Scheduler
from tests.core.batching.fake import Ask, Clock, FakeRunner, Work, affine, expected, linear


class Growing(FakeRunner):
    """Each iteration makes a request one larger; the first one after it was admitted takes all that it had again."""

    pace_s = math.inf
    overlaps = False

    def __init__(self, capacity: int, lane: Lane | None = None, limit: int = 8) -> None:
        super().__init__(
            Clock(),
            modality="text",
            slots=capacity,
            limit=limit,
            costs={"": linear(0.01)},
            lanes_of={"step": "text"},
            patience_s=1.0,
            threads=None if lane is None else {"text": lane},
        )
        self.preempted: list[str] = []

    def admit(self, request: Request) -> NotYet | None:
        work = request.work or Work([])
        slots = self.slots.take(work.step + 1)
        if slots is None:
            return NotYet()
        work.slots, request.work, request.phase = slots, work, "step"
        self.holding[request.id] = request
        self.committed.setdefault(request.id, [])
        return None

    def preempt(self, request: Request) -> None:
        assert not request.in_flight
        self.preempted.append(request.id)
        self.release(request)

    def reserve(self, requests: Sequence[Request]) -> bool:
        for request in requests:
            if len(request.work.slots) > request.work.step:
                continue
            more = self.slots.take(1)
            if more is None:
                return False
            request.work.slots += more
        return True

    def commit(self, request: Request) -> Outcome:
        assert len(request.work.slots) == request.work.step + 1, "an iteration ran without what it needs"
        return super().commit(request)


def text(id: str, steps: int, size: str = "s", **options: Any) -> Request:
    return Request(id, "text", Ask(steps=steps, size=size, encode=False, vae=False), **options)


def add_texts(scheduler: Scheduler, prefix: str, count: int, steps: int, **options: Any) -> None:
    """So many alike, with ids that begin so."""
    for number in range(count):
        scheduler.add(text(f"{prefix}{number}", steps, **options), 0.0)


def tick(scheduler: Scheduler, now: float) -> list[str]:
    """One iteration of all batches; the ids of their requests."""
    ids = []
    for batch in scheduler.schedule(now):
        ids += [request.id for request in batch.requests]
        assert batch.rows == len(batch.requests) and isinstance(batch.runner, FakeRunner)
        scheduler.finish(batch, {request.id: batch.runner.commit(request) for request in batch.requests}, now)
    return ids


def drive(runner: Growing, requests: list[Request], most: int = 2000) -> list[str]:
    """Ids in the order in which they ended."""
    scheduler = Scheduler([runner])
    for request in requests:
        scheduler.add(request, 0.0)
    ended: list[str] = []
    for now in range(most):
        tick(scheduler, float(now) / 100)
        ended += [request.id for request in scheduler.take_ended()]
        if scheduler.idle:
            scheduler.check_idle()
            return ended
    raise AssertionError(f"not done after {most} iterations: {scheduler.counts()}")


def test_a_batch_has_the_rows_of_those_that_are_left_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one of its own requests, of several rows, is preempted for the others."""
    monkeypatch.setattr(Growing, "rows", lambda self, request: 1 + len(request.id))
    runner = Growing(9, limit=64)
    scheduler = Scheduler([runner])
    for name in ("a", "bb", "ccc", "dddd"):
        scheduler.add(text(name, 6), 0.0)
    for now in range(100):
        for batch in scheduler.schedule(float(now)):
            assert batch.rows == sum(1 + len(request.id) for request in batch.requests)
            scheduler.finish(batch, {r.id: runner.commit(r) for r in batch.requests}, float(now))
    assert scheduler.idle and runner.preempted


def test_the_least_urgent_waits_again_and_ends_last() -> None:
    runner = Growing(10)
    requests = [text("patient", 6, priority=5), text("b", 6), text("c", 6)]
    assert drive(runner, requests) == ["b", "c", "patient"]
    assert runner.preempted[0] == "patient" and "b" not in runner.preempted
    assert all(request.state is State.DONE and request.result == expected(request) for request in requests)


@pytest.mark.parametrize("seed", range(5))
def test_who_waits_again_runs_on_no_other_lane(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of groups with lanes of their own, as a pipeline's, one takes what another one's requests held."""
    monkeypatch.setattr(Growing, "lane_of", lambda self, group: f"text {group[1]}")
    runner, random_ = Growing(8), random.Random(seed)
    requests = [text(str(n), random_.randint(1, 6), "sml"[n % 3], tenant="ab"[n % 2]) for n in range(9)]
    assert sorted(drive(runner, requests)) == [request.id for request in requests] and runner.preempted
    assert not runner.violations and all(request.state is State.DONE for request in requests)


def test_it_is_started_once_and_is_not_handed_back() -> None:
    """Draining finishes what was begun, also what has to wait again."""
    runner = Growing(6)
    scheduler = Scheduler([runner])
    for name in "abc":
        scheduler.add(text(name, 4), 0.0)
    now = 0.0
    while not runner.preempted and now < 100:
        now += 1
        tick(scheduler, now)
    again = scheduler.live[runner.preempted[0]]
    assert again.state is State.WAITING and again.started == 1.0
    scheduler.add(text("new", 1), now)
    assert [request.id for request in scheduler.hand_back()] == ["new"]
    assert scheduler.counts() == {"text": (1, 2)}
    while not scheduler.idle:
        now += 1
        tick(scheduler, now)
    assert {request.id: request.state for request in scheduler.take_ended()} == dict.fromkeys("abc", State.DONE)
    scheduler.check_idle()


@pytest.mark.parametrize(("pace_s", "width"), [(0.001, 8), (0.011, 1), (0.045, 4), (math.inf, 8)])
def test_a_batch_is_as_wide_as_its_pace_allows(pace_s: float, width: int) -> None:
    """Where cost is linear in rows, too: requests that stream go on together. What none can keep binds none."""
    runner = Growing(100)
    runner.pace_s = pace_s
    scheduler = Scheduler([runner])
    add_texts(scheduler, "", 10, 3)
    assert tick(scheduler, 1.0) == [f"{number}" for number in range(width)]


def widths_beside(scheduler: Scheduler) -> dict[str, int]:
    """How many requests of each modality go next where eight pictures come, too."""
    for number in range(8):
        scheduler.add(Request(f"p{number}", "image", Ask(steps=20, encode=False)), 0.0)
    return {batch.runner.modality: len(batch.requests) for batch in scheduler.schedule(1.0)}


@pytest.mark.parametrize(
    ("streaming", "pace_s", "overlaps", "width"),
    [
        (0, 0.0605, False, 8),
        (1, 0.0605, False, 5),
        (5, 0.0605, False, 1),
        (30, 0.0605, False, 1),
        (5, 0.005, False, 8),
        (1, 0.0605, True, 8),
    ],
)
def test_others_leave_a_streams_pace_to_it(streaming: int, pace_s: float, overlaps: bool, width: int) -> None:
    """Pictures go in narrower batches while text is written, one at a time where the pace allows none."""
    runner = Growing(1000, limit=64)
    runner.pace_s, runner.overlaps = pace_s, overlaps
    scheduler = Scheduler([runner, FakeRunner(Clock(), limit=8, costs={"": affine(0.04, 0.002)})])
    add_texts(scheduler, "t", streaming, 99)
    batches = widths_beside(scheduler)
    assert batches.pop("image") == width and batches == ({"text": min(streaming, 6)} if streaming else {})


@pytest.mark.parametrize(("sizes", "width"), [("aa", 7), ("ab", 5)])
def test_streams_of_several_groups_need_an_iteration_each(sizes: str, width: int) -> None:
    runner = Growing(1000)
    runner.pace_s, runner.costs = 0.0605, {"": affine(0.004, 0.0005)}
    scheduler = Scheduler([runner, FakeRunner(Clock(), limit=8, costs={"": affine(0.04, 0.002)})])
    for number, size in enumerate(sizes):
        scheduler.add(text(f"t{number}", 99, size), 0.0)
    assert widths_beside(scheduler)["image"] == width


def test_groups_of_a_stream_take_turns_and_those_of_pictures_do_not() -> None:
    """The one that ran longest ago; priorities go first."""
    scheduler = Scheduler([Growing(100)])
    for id, size in (("a", "a"), ("b", "b"), ("c", "c")):
        scheduler.add(text(id, 20, size, priority=5), 0.0)
    assert [tick(scheduler, 1.0)[0] for _ in range(9)] == [*"abcabcabc"]
    scheduler.add(text("d", 3, "d", priority=0), 1.0)
    assert [tick(scheduler, 1.0)[0] for _ in range(5)] == [*"dddab"]
    images = FakeRunner(Clock(), costs={"": linear(1.0)})
    scheduler = Scheduler([images])
    for id in "ab":
        scheduler.add(Request(id, "image", Ask(steps=3, size=id, encode=False, vae=False)), 0.0)
    assert [tick(scheduler, 1.0)[0] for _ in range(6)] == [*"aaabbb"]


def test_what_is_alone_and_still_too_large_fails() -> None:
    runner = Growing(4)
    request = text("a", 9)
    assert drive(runner, [request]) == ["a"]
    assert request.state is State.FAILED and isinstance(request.error, OutOfMemory)


@pytest.mark.parametrize("seed", range(6))
def test_any_mix_ends_and_leaves_nothing(seed: int) -> None:
    draw = random.Random(seed)
    capacity = draw.randint(5, 20)
    runner = Growing(capacity, limit=draw.randint(1, 8))
    requests = [text(f"r{i}", draw.randint(1, capacity), priority=draw.choice((0, 5, 9))) for i in range(30)]
    scheduler = Scheduler([runner], starvation_s=draw.choice((0.5, 60.0)))
    now, left = 0.0, list(requests)
    while left or not scheduler.idle:
        now += 0.05
        assert now < 500
        while left and draw.random() < 0.4:
            scheduler.add(left.pop(), now)
        if scheduler.live and draw.random() < 0.05:
            scheduler.abort(draw.choice(list(scheduler.live)), now)
        tick(scheduler, now)
    scheduler.check_idle()
    assert {request.state for request in requests} <= {State.DONE, State.ABORTED}
    assert runner.preempted


def test_the_engine_drains_what_had_to_wait_again() -> None:
    lane = Lane("growing")
    runner = Growing(12, lane)
    engine = Engine([runner])
    futures: Mapping[str, Any] = {name: engine.submit(text(name, 10)) for name in "abcd"}
    while not runner.preempted:
        pass
    unfinished = {request.id for request in engine.drain()}
    for name, future in futures.items():
        if name in unfinished:
            with pytest.raises(Closed):
                future.result()
        else:
            assert isinstance(future.result(), int)
    assert runner.preempted[0] not in unfinished
    engine.close()
    lane.close()
