"""Requests that wait for admission come out in the order of their tenants' shares, whatever happens meanwhile."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from core.batching.admission import Admission
from core.batching.request import Request, State
from tests.core.batching.fake import Ask, Clock, FakeRunner
from tests.core.batching.test_scheduler import FIXED

steps = st.lists(
    st.tuples(st.sampled_from(["add", "add", "admit", "again", "end", "age"]), st.integers(0, 9), st.integers(0, 99)),
    max_size=60,
)


@FIXED
@given(steps=steps)
def test_the_first_is_that_of_the_lowest_order(steps: list[tuple[str, int, int]]) -> None:
    runner = FakeRunner(Clock())
    admission = Admission({"image": runner}, starvation_s=5.0)
    shares, waiting, aging = admission.shares, admission.waiting["image"], admission.aged
    asks = [Ask(files=tuple((name, 1) for name in names)) for names in ("", "x", "y", "xy")]
    live: list[Request] = []
    now = 0.0
    for number, (what, priority, pick) in enumerate(steps, 1):
        running = [r for r in live if r.state is State.RUNNING]
        if what == "add":
            request = Request(f"r{number}", "image", asks[pick % 4], priority, arrival=now, tenant="abc"[pick % 3])
            request.sequence, request.due = number, now
            live.append(request)
            admission.add(request)
        elif what == "age":
            now += priority
            aging.age(now)
        elif what == "admit" and (first := waiting.first(set())):
            waiting.count -= 1
            first.state = State.RUNNING
            shares.begin(first)
            shares.charge(runner, ("step", "s"), [first], 1)
        elif what == "again" and running:
            request = running[pick % len(running)]
            shares.stop(request)
            request.state = State.WAITING
            waiting.add(request)
        elif what == "end" and live:
            request = live.pop(pick % len(live))
            if request.state is State.RUNNING:
                shares.stop(request)
            else:
                waiting.count -= 1
            request.state = State.DONE
            shares.leave(request)
            aging.remove(request)
        waiting.sweep()
        left = [r for r in live if r.state is State.WAITING]
        assert waiting.count == len(left)
        for closed in (set(), {"x"}, {"x", "y"}):
            others = (r for r in left if runner.resources(r).isdisjoint(closed))
            assert waiting.first(closed) is min(others, key=shares.order, default=None)
        for tenant in "abc":
            own = [r for r in live if r.tenant == tenant]
            aged = {own[0].id} if own and now - own[0].arrival >= 5.0 else set()
            assert {r.id for r in own if r.aged} >= aged
            assert sum(r.aged for r in own) <= 1
