"""What the scheduler promises, on a virtual clock: ends, order, isolation, memory and widths.

Properties that hold for any sequence of events are a state machine; policies are checked against brute force.
"""

from __future__ import annotations

import gc
import itertools
import math
import random
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core.batching.request import Outcome, Request, State
from core.batching.runner import OutOfMemory
from core.batching.scheduler import Scheduler
from tests.core.batching.fake import (
    Ask,
    Clock,
    Cost,
    Drive,
    FakeRunner,
    Fault,
    Poisoned,
    affine,
    at_launches,
    bucketed,
    drive,
    flat,
    linear,
    memory_for,
    only_steps,
)

FIXED = settings(deadline=None, derandomize=True, database=None, max_examples=60)
STEPS = only_steps(4)
VAE_LANE = {"vae": "vae"}
CURVES: Mapping[str, Cost] = {
    "flat": flat(),
    "linear": linear(),
    "affine": affine(1.0, 0.25),
    "bucketed": bucketed(affine(1.0, 0.25)),
}

ask_strategy = st.builds(
    Ask,
    steps=st.integers(1, 5),
    rows=st.integers(1, 2),
    size=st.sampled_from("sl"),
    slots=st.integers(1, 3),
    encode=st.booleans(),
    vae=st.booleans(),
    once=st.booleans(),
    interval=st.integers(1, 3),
)


def poisoned(at: str, requests: Sequence[Request], rows: int) -> BaseException | None:
    """A fault that follows the request, in the phase that its id names."""
    hit = [r.id for r in requests if r.id.startswith(f"poison {at} ")]
    return Poisoned(f"poisoned: {hit}") if hit else None


def in_turn(error: type[BaseException], every: int) -> Fault:
    """A passing trouble that comes again and again, for wide batches only: alone everyone goes through."""
    count = itertools.count()

    def fault(at: str, requests: Sequence[Request], rows: int) -> BaseException | None:
        return error("passing") if len(requests) > 1 and next(count) % every == 0 else None

    return fault


class AnyHistory(RuleBasedStateMachine):
    """Arrivals, aborts, deadlines, failures and time in any order: nobody ends twice, or wrongly, or not at
    all.
    """

    @initialize(
        curve=st.sampled_from(sorted(CURVES)),
        other_lane=st.sampled_from([None, "main", "text"]),
        lanes=st.sampled_from([{}, VAE_LANE]),
        depth=st.integers(1, 2),
        starvation_s=st.sampled_from([0.0, 5.0, 1e9]),
        fault=st.sampled_from([
            lambda: (), lambda: [memory_for(2)], lambda: [in_turn(RuntimeError, 2)], lambda: [in_turn(OutOfMemory, 3)],
        ]),
        how=st.fixed_dictionaries(
            {"slots": st.integers(2, 8), "limit": st.integers(1, 6), "fail_at_launch": st.booleans()}
        ),
    )  # fmt: skip
    def start(
        self,
        curve: str,
        other_lane: str | None,
        lanes: Mapping[str, str],
        depth: int,
        starvation_s: float,
        fault: Callable[[], Sequence[Fault]],
        how: dict[str, Any],
    ) -> None:
        self.clock = Clock()
        how = {**how, "costs": {"": CURVES[curve]}, "faults": [poisoned, *fault()], "patience_s": 20.0}
        runners = [FakeRunner(self.clock, lanes_of=lanes, **how)]
        if other_lane:
            other = dict.fromkeys(("encode", "step", "vae", "once"), other_lane)
            runners.append(FakeRunner(self.clock, modality="text", lanes_of=other, **how))
        self.drive = Drive(runners, self.clock, depth, starvation_s)
        self.slots: int = how["slots"]
        self.count = 0
        self.stopping: set[str] = set()
        self.handed: set[str] = set()

    @rule(
        ask=ask_strategy,
        priority=st.sampled_from([0, 1, 2, 3, 9]),
        tenant=st.sampled_from(["", "", "a", "b"]),
        wait=st.sampled_from([math.inf, math.inf, 0.0, 3.0, 9.0, 40.0]),
        kind=st.sampled_from([*["r"] * 7, "poison encode", "poison step", "poison vae"]),
        which=st.integers(0, 1),
    )
    def submit(self, ask: Ask, priority: int, tenant: str, wait: float, kind: str, which: int) -> None:
        self.count += 1
        modality = self.drive.runners[which % len(self.drive.runners)].modality
        deadline = self.clock.now + wait
        self.drive.add(
            f"{kind} {self.count}", ask, modality=modality, priority=priority, tenant=tenant, deadline=deadline
        )

    @rule(pick=st.integers(0, 1000))
    def abort(self, pick: int) -> None:
        ids = [*self.drive.asked, "nobody"]
        id = ids[pick % len(ids)]
        live = id in self.drive.scheduler.live
        assert self.drive.abort(id) == live
        if live:
            self.stopping.add(id)
            request = self.drive.asked[id]
            assert request.state is State.ABORTED or request.in_flight

    @rule()
    def launch(self) -> None:
        now = self.clock.now
        overdue = [r for r in self.drive.scheduler.live.values() if r.deadline <= now]
        for batch in self.drive.launch():
            assert not {r.id for r in batch.requests} & self.stopping, "launched after an abort"
            assert all(r.deadline > now for r in batch.requests), "launched after its deadline"
        for request in overdue:
            assert request.state is State.EXPIRED or request.in_flight or request.id in self.stopping

    @rule()
    def forward(self) -> None:
        self.drive.forward()

    @rule(seconds=st.floats(0.1, 30))
    def let_pass(self, seconds: float) -> None:
        self.drive.forward(self.clock.now + seconds)

    @precondition(lambda self: self.count > 3)
    @rule()
    def hand_back(self) -> None:
        waiting = {r.id for r in self.drive.scheduler.live.values() if r.state is State.WAITING}
        handed = self.drive.scheduler.hand_back()
        assert {r.id for r in handed} == waiting and not any(r.sequence for r in handed)
        assert self.drive.scheduler.hand_back() == []
        assert [(r.priority, r.due) for r in handed] == sorted((r.priority, r.due) for r in handed)
        self.handed |= waiting

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "drive"):
            return
        self.drive.verify()
        for request in self.drive.asked.values():
            if request.id in self.stopping:
                assert request.state is State.ABORTED or request.in_flight or request.deadline <= self.clock.now

    def teardown(self) -> None:
        if not hasattr(self, "drive"):
            return
        self.drive.complete()
        ended = [r.id for r in self.drive.ended]
        assert len(ended) == len(set(ended))
        assert set(ended) | self.handed == set(self.drive.asked)
        assert not set(ended) & self.handed
        for request in self.drive.ended:
            phases = {event.partition(" ")[0] for event in request.parameters.trace}
            sick = any(request.id.startswith(f"poison {phase} ") for phase in phases)
            match request.state:
                case State.ABORTED:
                    assert request.id in self.stopping
                case State.EXPIRED:
                    assert request.deadline < math.inf
                case State.FAILED:
                    too_large = request.parameters.slots > self.slots
                    assert too_large or (sick and request.id in str(request.error))
                case _:
                    assert request.state is State.DONE
                    assert not sick
                    assert request.id not in self.stopping


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(FIXED, max_examples=120, stateful_step_count=40)


HOW_URGENT = st.tuples(st.integers(0, 2), st.sampled_from([math.inf, 1e6, 2e6, 2e6 + 1]), st.integers(0, 12))


@FIXED
@given(st.lists(HOW_URGENT, min_size=1, max_size=12), st.sampled_from([1, 3, 100]), st.sampled_from(["", "a"]))
def test_earliest_deadline_first_within_a_priority(
    urgencies: list[tuple[int, float, int]], slots: int, tenant: str
) -> None:
    """With a limit of one row every launch is the most urgent that holds a slot; so is every admission."""
    driven, runner = drive(slots=slots, limit=1, patience_s=1.5e6)
    arrivals = sorted(enumerate(urgencies), key=lambda item: item[1][2])
    while arrivals or not driven.scheduler.idle:
        while arrivals and arrivals[0][1][2] <= driven.clock.now:
            number, (priority, deadline, _) = arrivals.pop(0)
            driven.add(f"r{number}", STEPS, priority=priority, deadline=deadline, tenant=tenant)
        before = len(runner.admitted)
        waiting = {r.id for r in driven.scheduler.live.values() if r.state is State.WAITING}
        for batch in driven.launch():
            (chosen,) = batch.requests
            running = [r for r in driven.scheduler.live.values() if r.state is State.RUNNING]
            assert chosen is min(running, key=lambda r: r.urgency)
            deadline = chosen.deadline if chosen.deadline < math.inf else chosen.arrival + 1.5e6
            assert chosen.urgency == (chosen.priority, deadline, chosen.sequence)
        admitted = [driven.asked[id].urgency for id in runner.admitted[before:]]
        assert admitted == sorted(driven.asked[id].urgency for id in waiting)[: len(admitted)]
        driven.forward(driven.clock.now + 1)
    assert {r.state for r in driven.ended} == {State.DONE}


def besiege(driven: Drive, besieged: Request, by: Callable[[int], Request], until: float) -> None:
    """Keep four urgent requests live until the besieged one has ended; fails when `until` passes first."""
    count = itertools.count()
    others: list[Request] = []
    while not besieged.state.final:
        assert driven.clock.now < until, f"{besieged.id} starves"
        others = [r for r in others if not r.state.final]
        while len(others) < 4:
            others.append(by(next(count)))
        driven.fill()
        driven.forward(driven.clock.now + 1)
    assert besieged.state is State.DONE


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("slots", [2, 64])
@pytest.mark.parametrize("limit", [1, 4])
@pytest.mark.parametrize("curve", sorted(CURVES))
@pytest.mark.parametrize("least", [{"priority": 9}, {"deadline": 1e9}], ids=str)
def test_the_least_urgent_does_not_starve(depth: int, slots: int, limit: int, curve: str, least: Any) -> None:
    driven, _ = drive(
        depth=depth, slots=slots, limit=limit, starvation_s=30.0, costs={"": CURVES[curve]}, patience_s=20.0
    )
    low = driven.add("low", Ask(steps=3), **least)
    besiege(
        driven,
        low,
        lambda n: driven.add(f"u{n}", Ask(steps=3, size="sl"[n % 2]), deadline=driven.clock.now + 1e5),
        until=400.0,
    )


@pytest.mark.parametrize("depth", [1, 2])
def test_an_elder_of_one_modality_does_not_starve_behind_those_of_another(depth: int) -> None:
    """Under overload everything urgent is old as well: of two elders the older one goes first."""
    clock = Clock()
    image = FakeRunner(clock, limit=1)
    text = FakeRunner(clock, modality="text", limit=1)
    driven = Drive([image, text], clock, depth, starvation_s=5.0)
    low = driven.add("low", Ask(steps=3), modality="text", priority=9)
    besiege(driven, low, lambda n: driven.add(f"u{n}", Ask(steps=20)), until=200.0)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_stream_of_one_shots_does_not_starve_an_elder(depth: int) -> None:
    """Each of them would go before a long request by Smith's rule."""
    driven, _ = drive(depth=depth, limit=4, starvation_s=10.0)
    long = driven.add("long", Ask(steps=30))
    besiege(driven, long, lambda n: driven.add(f"u{n}", Ask(once=True, size="o")), until=200.0)


@given(
    arrived=st.integers(0, 100), starvation_s=st.integers(1, 1000), age=st.integers(0, 2000), depth=st.integers(1, 2)
)  # fmt: skip
def test_an_elder_goes_first_from_starvation_s_on_and_not_before(
    arrived: int, starvation_s: int, age: int, depth: int
) -> None:
    driven, _ = drive(limit=1, depth=depth, starvation_s=float(starvation_s))
    driven.clock.now = float(arrived)
    old = driven.add("old", STEPS, priority=9)
    driven.clock.now = float(arrived + age)
    new = driven.add("new", STEPS, priority=0)
    (batch,) = driven.launch()
    assert batch.requests == [old if age >= starvation_s else new]


def test_one_shots_still_go_between_the_steps_of_an_elder() -> None:
    """An overload where everyone is old must not keep newcomers from joining the cohort."""
    driven, runner = drive(starvation_s=0.0)
    driven.add("old", STEPS)
    driven.fill()
    driven.add("new", Ask(steps=4))
    driven.run()
    assert [launch.phase for launch in runner.log[:3]] == ["step", "encode", "step"]
    assert runner.log[2].ids == ["old", "new"]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("first", [State.ABORTED, State.EXPIRED])
@pytest.mark.parametrize("seen", [False, True])
def test_the_first_end_that_was_asked_for_stays(fails: bool, first: State, seen: bool) -> None:
    """Of an abort and a deadline in one iteration, whether or not the scheduler is asked for more in between."""
    driven, _ = drive(depth=2, faults=[at_launches(0)] if fails else [])
    request, other = driven.add("r", STEPS, deadline=0.5), driven.add("o", STEPS)
    driven.launch()
    if first is State.ABORTED:
        assert driven.abort("r")
    driven.clock.now = 0.6
    if seen or first is State.EXPIRED:
        assert driven.launch() == []
    assert driven.abort("r") and request.state is State.RUNNING
    driven.run()
    assert (request.state, other.state) == (first, State.DONE)
    assert request.ended == 1.0 and not driven.abort("r")


def test_what_ended_is_let_go() -> None:
    """A far deadline, or an older neighbour that still runs, must not keep results in memory."""
    driven, _ = drive(slots=2, limit=2)
    driven.add("old", Ask(steps=5000), priority=1, deadline=1e8)
    asks: list[weakref.ref[Ask]] = []
    for number in range(400):
        ask = Ask(once=True)
        asks.append(weakref.ref(ask))
        request = driven.add(f"r{number}", ask, deadline=1e9, priority=number % 2)
        if number % 3 == 0:
            driven.abort(request.id)
        while len(driven.scheduler.live) > 3:
            driven.fill()
            driven.forward()
        driven.ended.clear()
        driven.asked.clear()
    driven.fill()
    del ask, request
    gc.collect()
    assert "old" in driven.scheduler.live
    assert sum(ref() is not None for ref in asks) < 40


@pytest.mark.parametrize("starvation_s", [0.0, 1e9])
def test_a_failed_cohort_meets_again_whatever_the_priorities(starvation_s: float) -> None:
    driven, runner = drive(starvation_s=starvation_s, faults=[at_launches(1)])
    for number in range(4):
        driven.add(f"r{number}", only_steps(8), priority=number)
    driven.run()
    assert [len(launch.ids) for launch in runner.log] == [4, 4, 1, 1, 1, 1, *[4] * 6]


def test_an_error_of_one_outcome_fails_one_request() -> None:
    driven, _ = drive()
    requests = [driven.add(f"r{n}", STEPS) for n in range(3)]
    (batch,) = driven.launch()
    driven.flying.clear()
    outcomes = {"r0": Outcome((1, 4)), "r1": Outcome(error=ValueError("bad"))}
    driven.scheduler.finish(batch, outcomes, 1.0)
    assert [r.state for r in requests] == [State.RUNNING, State.FAILED, State.FAILED]
    assert isinstance(requests[1].error, ValueError)
    assert "no outcome for r2" in str(requests[2].error)


@pytest.mark.parametrize("at_launch", [False, True])
@FIXED
@given(
    fits=st.integers(1, 16),
    rows=st.lists(st.integers(1, 2), min_size=1, max_size=20),
    phase=st.sampled_from(["encode", "step", "vae", None]),
    depth=st.integers(1, 2),
)
def test_batches_are_halved_until_they_fit(
    at_launch: bool, fits: int, rows: list[int], phase: str | None, depth: int
) -> None:
    fits = max(fits, *rows)
    driven, runner = drive(
        depth=depth, slots=32, faults=[memory_for(fits, phase)], fail_at_launch=at_launch, lanes_of=VAE_LANE
    )
    for number, wide in enumerate(rows):
        driven.add(f"r{number}", Ask(rows=wide))
    driven.complete()
    assert {r.state for r in driven.ended} == {State.DONE}
    failed = {launch.group for launch in runner.log if launch.failed}
    caps = driven.scheduler.caps
    assert set(caps) == {("image", group) for group in failed}
    # of rows that come in twos, a limit of three takes two
    assert all(1 <= cap < fits + max(rows) for cap in caps.values())
    for group in failed:
        tries = [launch for launch in runner.log if launch.group == group]
        assert sum(launch.failed for launch in tries) <= 5 * depth  # 32 rows are halved to one in five
        assert fits == 1 or max(launch.rows for launch in tries if not launch.failed) > fits / 4


def test_a_request_that_does_not_fit_alone_fails_with_the_reason() -> None:
    driven, _ = drive(faults=[memory_for(1)])
    wide, narrow = driven.add("wide", Ask(rows=2)), driven.add("narrow", Ask(rows=1))
    driven.run()
    assert (wide.state, narrow.state) == (State.FAILED, State.DONE) and isinstance(wide.error, OutOfMemory)


def test_a_limit_lowered_by_one_bad_moment_recovers() -> None:
    driven, runner = drive(faults=[at_launches(0, 1, 2, 3, error=OutOfMemory)])
    driven.crowd("r", 16, only_steps(1))
    driven.fill()
    for _ in range(4):
        driven.forward()
        driven.fill()
    assert driven.scheduler.caps == {("image", ("step", "s")): 1}
    extra = itertools.count()
    while driven.scheduler.caps:
        assert len(runner.log) < 5000, "the limit never recovers"
        while len(driven.scheduler.live) < 16:
            driven.add(f"x{next(extra)}", only_steps(1))
        driven.fill()
        driven.forward()
    assert runner.log[-1].rows >= 8
    assert sum(launch.failed for launch in runner.log) == 4


@pytest.mark.parametrize("error", [RuntimeError("broken"), OutOfMemory("full")])
def test_a_failing_admission_fails_its_request_only(error: Exception) -> None:
    driven, runner = drive()
    runner.admit_error["bad"] = error
    bad, good = driven.add("bad", priority=0), driven.add("good", priority=1)
    driven.complete()
    assert (bad.state, good.state) == (State.FAILED, State.DONE)
    assert bad.error is error


def test_nobody_overtakes_whoever_needs_more_room() -> None:
    driven, runner = drive(slots=8)
    driven.add("first", Ask(steps=3, slots=4))
    driven.launch()
    driven.add("large", Ask(slots=8))
    driven.crowd("small", 5, Ask(slots=1))
    driven.run()
    assert runner.admitted[:2] == ["first", "large"]
    assert runner.refused[0] == "large"
    assert {r.state for r in driven.ended} == {State.DONE}


def test_what_never_fits_fails_with_a_clear_message_and_holds_nobody_up() -> None:
    driven, _ = drive(slots=8)
    driven.add("first", Ask(slots=4))
    driven.launch()
    huge = driven.add("huge", Ask(slots=9))
    after = driven.add("after", Ask(slots=8))
    driven.complete()
    assert (huge.state, after.state) == (State.FAILED, State.DONE)
    assert "huge" in str(huge.error) and "image" in str(huge.error)


def test_what_was_handed_back_may_come_again() -> None:
    """Here or elsewhere, and its old entries are gone; an id is in use while it lives."""
    driven, _ = drive(slots=2)
    driven.crowd("s", 2)
    driven.launch()
    late, urgent = driven.add("late", priority=2, deadline=50.0), driven.add("urgent", priority=1, deadline=90.0)
    assert driven.scheduler.hand_back() == [urgent, late]
    assert driven.scheduler.counts() == {"image": (0, 2)} and driven.scheduler.next_deadline() == math.inf
    driven.scheduler.add(late, 0.5)
    with pytest.raises(ValueError, match="'late' is already in use"):
        driven.add("late")
    driven.clock.now = 0.5
    driven.complete()
    assert (late.state, urgent.state) == (State.DONE, State.WAITING)


def test_runners_modalities_and_depth_are_checked() -> None:
    clock = Clock()
    with pytest.raises(ValueError, match="same modality"):
        Scheduler([FakeRunner(clock), FakeRunner(clock)])
    with pytest.raises(ValueError, match="depth"):
        Scheduler([FakeRunner(clock)], depth=0)
    with pytest.raises(ValueError, match=r"'sound' is not served here; served: image"):
        drive()[0].add("r", modality="sound")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("deadline", math.nan, "NaN"), ("arrival", math.nan, "NaN"), ("priority", -1, "between 0"), ("priority", 10, "0")],
)
def test_a_request_checks_its_fields(field: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Request("r", "image", None, **{field: value})  # type: ignore[arg-type]


def first_width(cost: Cost, queue: int, limit: int = 16, slots: int = 10_000) -> int:
    driven, _ = drive(slots=slots, limit=limit, costs={"": cost})
    driven.crowd("r", queue, STEPS)
    (batch,) = driven.launch()
    return len(batch.requests)


def mean_completion_s(cost: Cost, queue: int, width: int) -> float:
    """Serve `queue` requests, and seven more that each will bring, in waves of `width`; average their ends."""
    queue *= 8
    now, ends = 0.0, list[float]()
    for start in range(0, queue, width):
        now += cost(width)
        ends += [now] * min(width, queue - start)
    return sum(ends) / queue


@FIXED
@given(
    st.integers(1, 60),
    st.integers(1, 16),
    st.one_of(
        st.just(flat()),
        st.builds(linear, st.floats(1e-6, 1e3)),
        st.builds(affine, st.floats(0.01, 10), st.floats(0.01, 10)),
        st.builds(lambda a, b: bucketed(affine(a, b)), st.floats(0.01, 10), st.floats(0.01, 10)),
        st.lists(st.floats(0.001, 1), min_size=16, max_size=16).map(lambda steps: lambda rows: sum(steps[:rows])),
    ),
    st.sampled_from([16, 10_000]),
)
@example(5, 5, lambda rows: (0.4, 0.8, 1.0, 1.4, 1.59)[rows - 1], 16)  # the last wave, of one, decides against three
def test_width_minimises_the_mean_completion_time(queue: int, limit: int, cost: Cost, slots: int) -> None:
    """Also where most of the queue does not hold a slot yet."""
    width = first_width(cost, queue, limit, slots)
    best = min(mean_completion_s(cost, queue, k) for k in range(1, min(queue, limit) + 1))
    assert mean_completion_s(cost, queue, width) <= best * (1 + 1e-9)


@pytest.mark.parametrize("strange", [0.0, math.inf, math.nan])
def test_a_strange_cost_stops_nobody(strange: float) -> None:
    driven, runner = drive(slots=4)
    runner.cost = lambda group, rows: strange  # type: ignore[method-assign]
    request = driven.add("r", STEPS)
    other = driven.add("o", STEPS)
    for _ in range(20):
        for batch in driven.scheduler.schedule(driven.clock.now):
            driven.scheduler.finish(batch, {r.id: runner.commit(r) for r in batch.requests}, driven.clock.now)
    assert (request.state, other.state) == (State.DONE, State.DONE)


def one_shots_against_a_cohort(
    left: int, step_s: float, cohort: int, shot_s: float, shots: int, patience_s: float = 1000.0, **of_leader: Any
) -> str:
    """The phase that runs first: steps of a cohort that came first, or one-shots that came later."""
    driven, runner = drive(slots=64, costs={"step": flat(step_s), "once": flat(shot_s)}, patience_s=patience_s)
    for number in range(cohort):
        driven.add(f"c{number}", Ask(steps=left, encode=False), **(of_leader if number == cohort - 1 else {}))
    driven.crowd("o", shots, Ask(once=True, size="o"))
    driven.launch()
    return runner.log[0].phase


@FIXED
@given(st.integers(2, 20), st.floats(0.1, 9), st.integers(1, 12), st.floats(0.1, 90), st.integers(1, 12))
def test_one_shots_go_first_where_that_lowers_the_sum_of_waiting_times(
    left: int, step_s: float, cohort: int, shot_s: float, shots: int
) -> None:
    gain = shots * left * step_s - cohort * shot_s
    before = one_shots_against_a_cohort(left, step_s, cohort, shot_s, shots) == "once"
    assert abs(gain) < 1e-6 or before == (gain > 0)


@pytest.mark.parametrize(("cohort", "patience_s"), [(1, 1000.0), (3, 1000.0), (3, 5.0)])
def test_one_shots_do_not_spend_a_deadline_that_someone_set(cohort: int, patience_s: float) -> None:
    """Ten steps of a second are left and the one-shot takes half a second; anyone of the cohort may be in a
    hurry, also behind a leader without a deadline.
    """
    for deadline, phase in ((10.0, "step"), (10.4, "step"), (10.6, "once"), (math.inf, "once")):
        assert one_shots_against_a_cohort(10, 1.0, cohort, 0.5, 4, patience_s, deadline=deadline) == phase


def test_a_group_with_one_at_its_last_step_is_no_group_of_one_shots() -> None:
    """Others of it go on for as long as the leader's: it has its turn like any."""
    driven, runner = drive(slots=64, costs={"": flat()})
    driven.add("leader", only_steps(10))
    driven.add("last", only_steps(1, size="o"))
    driven.add("begun", only_steps(10, size="o"))
    driven.launch()
    assert runner.log[0].ids == ["leader"]


def test_one_shots_of_less_urgent_priority_wait() -> None:
    driven, runner = drive(costs={"": flat(), "once": flat(0.01)})
    driven.add("leader", Ask(steps=10, encode=False), priority=1)
    driven.add("later", Ask(once=True, size="o"), priority=2)
    driven.launch()
    assert runner.log[0].phase == "step"


CACHED = {"step": affine(2.0, 1.0), "shallow": affine(0.5, 0.1)}


def two_cohorts(
    ahead: int,
    new: int,
    costs: Mapping[str, Cost],
    *,
    priorities: tuple[int, int] = (0, 0),
    **how: Any,
) -> tuple[Drive, FakeRunner]:
    """`new` requests come while `ahead` others, at interval 2, have done their first deep step."""
    driven, runner = drive(slots=64, limit=64, costs=costs)
    ask = only_steps(6, interval=2)
    driven.crowd("a", ahead, ask, priority=priorities[0])
    driven.fill()
    driven.crowd("n", new, ask, priority=priorities[1], **how)
    driven.forward()
    return driven, runner


@FIXED
@given(
    st.integers(1, 9), st.integers(1, 9), st.floats(1, 4), st.floats(0, 0.02), st.floats(1, 4), st.floats(0, 0.02),
    st.booleans(),
)  # fmt: skip
def test_the_order_of_two_cohorts_is_the_one_that_saves_more(
    ahead: int, new: int, deep_fixed: float, deep: float, shallow_fixed: float, shallow: float, hurried: bool
) -> None:
    """By the sums: either order ends with both having run and together again, and `hold` and `go` are what rows' steps
    are worth where all ride together, less what they cost.
    """
    costs = {"step": affine(deep_fixed, deep), "shallow": affine(shallow_fixed, shallow)}
    all_ = ahead + new
    hold = ahead * costs["shallow"](all_) / all_ - costs["shallow"](ahead)
    go = new * costs["step"](all_) / all_ - costs["step"](new)
    driven, runner = two_cohorts(ahead, new, costs, deadline=500.0 if hurried else math.inf)
    driven.fill()
    if abs(hold - go) > 1e-6:
        assert runner.log[-1].phase == ("shallow" if hold > go else "step")


OWN_S = 6.0 + 3 * 3.0 + 3 * 0.6  # what a newcomer takes by itself, after the first step of four
LINEAR = {"step": linear(2.0), "shallow": linear(0.25)}


@pytest.mark.parametrize(
    ("ahead", "costs", "priorities", "deadline", "phase"),
    [
        (1, LINEAR, (0, 0), 500.0, "step"),  # nothing is saved, and the more urgent goes
        (1, LINEAR, (0, 0), math.inf, "shallow"),
        (4, CACHED, (0, 0), OWN_S + 0.85, "step"),  # nobody is held against a deadline: a shallow step takes 0.9 s
        (4, CACHED, (0, 0), OWN_S + 0.95, "shallow"),
        (4, CACHED, (1, 0), 500.0, "step"),  # nor for lesser priorities
        (4, CACHED, (0, 0), 500.0, "shallow"),
        (4, CACHED, (0, 1), 500.0, "shallow"),
    ],
)
def test_a_newcomer_is_held_only_where_that_saves_and_harms_nobody(
    ahead: int, costs: Mapping[str, Cost], priorities: tuple[int, int], deadline: float, phase: str
) -> None:
    driven, runner = two_cohorts(ahead, 1, costs, priorities=priorities, deadline=deadline)
    driven.fill()
    assert runner.log[-1].phase == phase


def test_newcomers_are_held_for_one_shallow_iteration_and_then_ride_along() -> None:
    """Even the more urgent one, for half a second: else two and a half are paid for a step of its own."""
    driven, runner = two_cohorts(4, 1, CACHED, deadline=500.0)
    driven.complete()
    wide = [(launch.phase, len(launch.ids)) for launch in runner.log]
    assert wide == [*zip(["step", "shallow"] * 4, [4, 4, 5, 5, 5, 5, 1, 1], strict=True)]


def test_nobody_is_held_twice_in_a_row() -> None:
    """With an interval of three a second cohort is two shallow steps away: it is not waited for as well."""
    driven, runner = drive(slots=64, limit=64, costs=CACHED)
    ask = only_steps(30, interval=3)
    cohorts = driven.crowd("a", 4, ask)
    driven.scheduler.schedule(0.0)  # admits; this batch is never launched
    driven.scheduler._batcher.flying.clear()
    for request, step in zip(cohorts, [2, 2, 1, 1], strict=True):  # the next one: one and two shallow before a deep
        request.in_flight = False
        request.work.step = step
        request.phase = ask.phase(step)
        runner.committed[request.id] = ask.trace[:step]
    driven.add("new", ask, deadline=500.0)
    for _ in range(2):
        driven.fill()
        driven.forward()
    assert [launch.phase for launch in runner.log] == ["shallow", "step"]
    assert runner.log[1].ids == ["new", "a0", "a1"]


@pytest.mark.parametrize("interval", [2, 3])
def test_cohorts_come_together_and_stay(interval: int) -> None:
    """Whenever they came: once all ride together, every forward is of all of them."""
    rng = random.Random(interval)
    driven, runner = drive(slots=64, limit=64, costs=CACHED)
    for number in range(10):
        driven.add(f"r{number}", only_steps(60, interval=interval))
        driven.run(until=driven.clock.now + rng.uniform(0, 9))
    driven.run()
    assert 10 * 60 / len(runner.log) > 5, "on average more than half of them share a forward"
    driven.verify_idle()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_newcomer_joins_at_the_next_iteration(depth: int) -> None:
    driven, runner = drive(depth=depth)
    driven.add("old", Ask(steps=9, encode=False))
    driven.fill()
    driven.forward()
    driven.fill()
    driven.add("new", Ask(steps=2, encode=False))
    driven.fill()
    assert runner.log[-1].ids == ["old"]
    driven.forward()
    driven.fill()
    assert runner.log[-1].ids == ["old", "new"]
    driven.complete()


def test_nothing_waits_while_its_lane_idles() -> None:
    """At every moment a lane with ready requests holds a batch."""
    rng = random.Random(5)
    driven, runner = drive(lanes_of=VAE_LANE, costs={"": affine(1.0, 0.2), "vae": linear(0.7)})
    for number in range(300):
        if number < 100:
            driven.add(f"r{number}", Ask(steps=rng.randint(1, 5)), deadline=driven.clock.now + 1e6)
        driven.fill()
        busy = {batch.lane for batch, _ in driven.flying}
        for request in driven.scheduler.live.values():
            if request.state is State.RUNNING and not request.in_flight:
                assert runner.lane_of(runner.group(request)) in busy
        driven.forward()


def test_modalities_overlap_on_their_lanes_and_take_turns_on_a_shared_one() -> None:
    for lane, took in (("text", 4.0), ("main", 8.0)):
        clock = Clock()
        image = FakeRunner(clock)
        text = FakeRunner(clock, modality="text", lanes_of={"step": lane})
        driven = Drive([image, text], clock)
        driven.add("i", STEPS)
        driven.add("t", STEPS, modality="text")
        driven.complete()
        assert clock.now == took


def test_a_second_place_never_fragments_a_cohort() -> None:
    driven, runner = drive(depth=2, costs={"": bucketed(affine(1.0, 0.01))})
    driven.crowd("r", 3, only_steps(6))
    driven.launch()
    driven.crowd("l", 2, only_steps(6))
    assert driven.launch() == []
    driven.run()
    assert [len(launch.ids) for launch in runner.log] == [3, 5, 5, 5, 5, 5, 2]


@FIXED
@given(st.integers(1, 16), st.lists(st.integers(0, 6), max_size=8))
def test_with_flat_cost_a_second_place_changes_nothing(count: int, later: list[int]) -> None:
    """The same forwards, whatever the depth."""
    logs = []
    for depth in (1, 2):
        driven, runner = drive(depth=depth, slots=64, limit=32)
        arrivals = sorted(later)
        driven.crowd("r", count, STEPS)
        while arrivals or not driven.scheduler.idle:
            while arrivals and arrivals[0] <= driven.clock.now:
                driven.add(f"l{len(arrivals)}", STEPS)
                arrivals.pop(0)
            driven.fill()
            driven.forward(driven.clock.now + 1.0)
        logs.append([launch.ids for launch in runner.log])
    assert logs[0] == logs[1]


def test_a_second_place_is_used_where_cost_is_linear() -> None:
    driven, _ = drive(depth=2, costs={"": linear()})
    driven.crowd("r", 4, STEPS)
    assert [len(batch.requests) for batch in driven.fill()] == [1, 1]
    driven.complete()
    assert driven.clock.now == 16.0


def test_a_second_place_is_used_by_another_group_and_not_before_the_first() -> None:
    driven, runner = drive(depth=2)
    driven.add("steps", Ask(steps=4, encode=False))
    driven.add("encode", Ask(steps=1, size="l"))
    driven.fill()
    assert [launch.ids for launch in runner.log] in ([["encode"], ["steps"]], [["steps"], ["encode"]])
    assert driven.forward()
    driven.complete()


def test_a_second_place_is_not_for_less_urgent_priorities() -> None:
    """They would double the time of every step of the urgent one."""
    driven, runner = drive(depth=2)
    urgent = driven.add("urgent", STEPS)
    driven.add("later", only_steps(50, size="l"), priority=5)
    driven.run(until=4.0)
    assert urgent.ended == 4.0
    assert [launch.ids for launch in runner.log] == [["urgent"]] * 4
    driven.complete()


def test_a_decision_asks_the_runner_as_often_whatever_the_queue() -> None:
    calls = []
    for waiting in (10, 1_000, 10_000):
        driven, runner = drive(slots=8, limit=8, costs={"": affine(1.0, 0.3)})
        driven.crowd("r", 8 + waiting, Ask(steps=20))
        driven.fill()
        driven.forward()
        before = runner.calls
        assert len(driven.launch()) == 1
        calls.append(runner.calls - before)
    assert max(calls) <= min(calls) + 40
    assert max(calls) < 200
