"""Requests that wait for resources of their own, such as files, delay only those that need these too, and in order."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.batching.request import Request, State
from core.batching.runner import NotYet
from core.batching.shares import Shares
from tests.core.batching.fake import Ask, Clock, Drive, FakeRunner, drive
from tests.core.batching.test_scheduler import FIXED

_ROOMS = {"x": 3, "y": 2}
_FILES = st.sampled_from([(), (("x", 1),), (("x", 3),), (("y", 2),), (("x", 2), ("y", 1))])
_STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "add", "add", "abort", "go"]), _FILES, st.integers(0, 9), st.integers(1, 4)),
    max_size=50,
)


def _watched(house: Drive, runner: FakeRunner, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Breaches of the order: those admitted before one that comes first and needs a resource that they need too."""
    breaches: list[str] = []
    admit, shares = runner.admit, house.scheduler._admission.shares

    def watched(request: Request) -> NotYet | None:
        order = shares.order(request)
        waiting = [r for r in house.scheduler.live.values() if r.state is State.WAITING and r is not request]
        refusal = admit(request)
        if refusal is None:
            breaches.extend(
                f"{request.id} before {other.id}"
                for other in waiting
                if not runner.resources(other).isdisjoint(runner.resources(request)) and shares.order(other) < order
            )
        return refusal

    monkeypatch.setattr(runner, "admit", watched)
    return breaches


@FIXED
@given(steps=_STEPS, slots=st.integers(1, 4), starvation_s=st.sampled_from([3.0, 1e9]))
def test_what_waits_for_a_resource_keeps_its_place_and_delays_no_other(
    steps: list[tuple[str, tuple[tuple[str, int], ...], int, int]], slots: int, starvation_s: float
) -> None:
    house, runner = drive(slots=slots, rooms=_ROOMS, starvation_s=starvation_s)
    with pytest.MonkeyPatch.context() as patch:
        breaches = _watched(house, runner, patch)
        for number, (what, files, pick, count) in enumerate(steps):
            if what == "add":
                house.add(f"r{number}", Ask(steps=count, files=files), priority=pick, tenant="ab"[pick % 2])
            elif what == "abort" and house.scheduler.live:
                house.abort([*house.scheduler.live][pick % len(house.scheduler.live)])
            house.fill()
            waiting = [r for r in house.scheduler.live.values() if r.state is State.WAITING]
            plain = [r for r in waiting if not r.parameters.files]
            assert not plain or not runner.slots.free, f"{plain[0].id} waits although there is a slot"
            for name, room in runner.rooms.items():
                needy = [r for r in waiting if name in runner.resources(r)]
                assert not needy or room.taken or not runner.slots.free or len(needy[0].parameters.files) > 1
            if what == "go":
                house.forward()
            house.verify()
        house.run()
        house.verify_idle()
    assert not breaches
    assert {r.state for r in house.ended} <= {State.DONE, State.ABORTED}, "each gets its room"
    assert all(room.taken == 0 for room in runner.rooms.values())


def test_who_is_passed_over_keeps_others_from_all_that_it_needs() -> None:
    """Every queue of three requests that need any of three resources, of which x is taken."""
    sets = [needed for count in range(4) for needed in itertools.combinations("xyz", count)]
    for queue in itertools.product(sets, repeat=3):
        house, runner = drive(slots=9, rooms=dict.fromkeys("xyz", 1))
        house.add("holds", Ask(files=(("x", 1),)))
        house.fill()
        taken, closed, expected = {"x"}, set[str](), ["holds"]
        for number, needed in enumerate(queue):
            house.add(f"r{number}", Ask(files=tuple((name, 1) for name in needed)))
            if taken.isdisjoint(needed) and closed.isdisjoint(needed):
                taken.update(needed)
                expected.append(f"r{number}")
            else:
                closed.update(needed)
        house.fill()
        assert runner.admitted == expected, queue


def test_a_long_queue_for_a_resource_costs_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for it is not looked at one by one each time that others are admitted."""
    house, runner = drive(slots=4, rooms={"x": 1})
    house.add("holds", Ask(steps=200, files=(("x", 1),)))
    house.fill()
    numbers = random.Random(1)
    for number in range(2000):
        house.add(f"waits{number}", Ask(files=(("x", 1),)), tenant=f"t{numbers.randrange(5)}")
    looked = 0
    order = Shares.order

    def counted(shares: Shares, request: Request) -> object:
        nonlocal looked
        looked += 1
        return order(shares, request)

    monkeypatch.setattr(Shares, "order", counted)
    for number in range(20):
        house.add(f"plain{number}", Ask(steps=1), tenant="p")
        house.fill()
        house.forward()
    asked = len(runner.refused)
    assert sum(id.startswith("plain") for id in runner.admitted) >= 10
    assert asked <= 4 * 20 * 2, "one of those that wait is asked each time, and not all"
    assert looked < 20 * 200


def test_what_needs_a_resource_beyond_all_there_is_fails_alone() -> None:
    house, runner = drive(slots=4, rooms={"x": 1})
    house.add("too large", Ask(files=(("x", 2),)))
    house.add("plain", Ask())
    house.run()
    assert {r.id: r.state for r in house.ended} == {"too large": State.FAILED, "plain": State.DONE}
    assert runner.admitted == ["plain"]


class _Preemptible(FakeRunner):
    """Requests may have to wait again; none of them ever needs more than it has."""

    pace_s = 1e9
    overlaps = False

    def reserve(self, requests: Sequence[Request]) -> bool:
        return True

    def preempt(self, request: Request) -> None:
        self.violations.append(f"{request.id} was preempted")
        self.release(request)


def test_nobody_is_preempted_for_what_waits_for_a_resource() -> None:
    """It would give back room that is not what the request lacks."""
    clock = Clock()
    runner = _Preemptible(clock, slots=9, limit=1, rooms={"x": 1})
    house = Drive([runner], clock)
    house.add("holds", Ask(files=(("x", 1),)), tenant="a")
    house.crowd("more", 3, tenant="a")
    house.fill()
    house.add("waits", Ask(files=(("x", 1),)), tenant="b")
    house.complete()
    assert len(house.ended) == 5
