"""Tenants share the device: what one asks for, and how urgent it calls that, costs another no more than a share."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.batching.request import Request, State
from core.batching.scheduler import Scheduler
from core.batching.shares import _AWAY_S, _BURST_S, Shares, account
from tests.core.batching.fake import Ask, Clock, Cost, Drive, FakeRunner, affine, flat, linear, only_steps
from tests.core.batching.fake import drive as fake_drive
from tests.core.batching.test_preemption import Growing, add_texts, text, tick
from tests.core.batching.test_scheduler import FIXED, besiege

STEPS = only_steps(4)


def iterations_before(drive: Drive, runner: FakeRunner, end: str, tenant: str) -> int:
    """How many rows of a tenant's have run when this request has ended."""
    drive.finish(end)
    return sum(len(done) for id, done in runner.committed.items() if drive.asked[id].tenant == tenant)


def pictures(**how: Any) -> tuple[Drive, FakeRunner]:
    return fake_drive(slots=64, costs={"": linear()}, **how)


def two_lanes() -> tuple[Drive, FakeRunner, FakeRunner]:
    """Pictures and texts on lanes of one device: an iteration of a picture takes as long as 25 of a text."""
    clock = Clock()
    images = FakeRunner(clock, costs={"": linear(25.0)})
    texts = FakeRunner(clock, modality="text", lanes_of={"step": "text"})
    return Drive([images, texts], clock), images, texts


def test_what_may_wait_waits_for_other_tenants() -> None:
    drive, runner = pictures()
    drive.crowd("a", 30, STEPS, tenant="a", priority=9)
    drive.add("b", STEPS, tenant="b")
    assert iterations_before(drive, runner, "b", "a") == 0


def test_what_may_wait_waits_on_another_lane_of_the_same_device() -> None:
    drive, images, texts = two_lanes()
    drive.add("a", STEPS, tenant="a", priority=9)
    drive.add("b", STEPS, modality="text", tenant="b")
    iterations_before(drive, texts, "b", "b")
    assert not images.log
    drive.run()
    assert drive.asked["a"].state is State.DONE


def test_two_lanes_of_one_device_share_its_time_and_not_its_turns() -> None:
    """A picture's iteration takes as long as 25 of a text's: one for each of those would be 25 shares."""
    drive, images, _ = two_lanes()
    drive.add("a", only_steps(40), tenant="a")
    drive.add("b", only_steps(100), modality="text", tenant="b")
    assert iterations_before(drive, images, "b", "a") <= 100 / 25 + 1


def test_a_tenants_own_requests_on_two_lanes_do_not_wait_for_each_other() -> None:
    drive, _, _ = two_lanes()
    drive.add("a", STEPS, tenant="a", priority=9)
    drive.add("b", STEPS, modality="text", tenant="a")
    assert {batch.lane for batch in drive.launch()} == {"main", "text"}


def test_streams_of_another_tenant_take_no_more_than_a_turn_each() -> None:
    runner = Growing(1000, limit=64)
    runner.costs = {"": linear()}
    scheduler = Scheduler([runner])
    add_texts(scheduler, "a", 16, 50, tenant="a")
    scheduler.add(text("b", 20, tenant="b"), 0.0)
    others = 0
    while "b" in scheduler.live:
        others += sum(id != "b" for id in tick(scheduler, 0.0))
    assert others <= 20 + 16


@pytest.mark.parametrize(("each", "tenants", "together"), [(0.5, 2, 2), (0.6, 3, 3), (3.0, 2, 1)])
def test_tenants_share_an_iteration_that_takes_no_more_than_a_turn_of_each(
    each: float, tenants: int, together: int
) -> None:
    """As long as one alone takes, times their number, that of the first among them."""
    drive, _ = fake_drive(slots=64, costs={"": lambda rows: 1.0 + each * (rows - 1)})
    for name in range(tenants):
        drive.add(f"{name}", STEPS, tenant=f"{name}")
    (batch,) = drive.launch()
    assert len(batch.requests) == together


def test_streams_that_may_wait_join_where_they_cost_next_to_nothing() -> None:
    for each, joined in ((0.001, 9), (0.5, 1)):
        runner = Growing(1000, limit=64)
        runner.costs = {"": affine(1.0, each)}
        scheduler = Scheduler([runner])
        add_texts(scheduler, "a", 8, 5, tenant="a", priority=9)
        scheduler.add(text("b", 5, tenant="b"), 0.0)
        assert [len(batch.requests) for batch in scheduler.schedule(0.0)] == [joined]


def test_who_holds_more_places_gives_way() -> None:
    runner = Growing(8, limit=64)
    scheduler = Scheduler([runner])
    add_texts(scheduler, "a", 8, 30, tenant="a", priority=0)
    for now in range(3):
        tick(scheduler, float(now))
    scheduler.add(text("b", 2, tenant="b", priority=9), 3.0)
    scheduler.add(text("c", 9, tenant="c"), 3.0)
    for now in range(3, 5):
        tick(scheduler, float(now))
    assert {"c"} <= {request.id for request in scheduler.live.values() if request.state is State.RUNNING}


def test_who_waited_for_a_place_has_saved_nothing_up() -> None:
    drive, runner = fake_drive(slots=3, limit=1, costs={"": linear()})
    drive.add("a", Ask(steps=100, slots=2, encode=False, vae=False), tenant="a")
    drive.run(until=1.0)
    drive.add("w", Ask(steps=300, slots=2, encode=False, vae=False), tenant="w")
    drive.run(until=110.0)
    before = len(runner.committed["w"])
    drive.add("c", only_steps(20), tenant="c")
    assert iterations_before(drive, runner, "c", "w") - before <= 20 + 2


def test_a_second_place_is_free_for_other_tenants_whatever_is_under_way() -> None:
    for tenant, launched in (("a", []), ("b", ["second"])):
        drive, _ = fake_drive(limit=1, depth=2, costs={"": linear()})
        drive.add("first", STEPS, tenant="a", priority=0)
        drive.launch()
        drive.add("second", STEPS, tenant=tenant, priority=5)
        assert [request.id for batch in drive.launch() for request in batch.requests] == launched


def test_nothing_is_kept_of_tenants_that_are_gone() -> None:
    drive, _ = pictures()
    chance = random.Random(0)
    drive.add("stays", only_steps(400), tenant="stays")
    for k in range(300):
        drive.add(f"r{k}", only_steps(1), tenant=f"t{k}", priority=chance.randrange(6))
        drive.run(until=drive.clock.now + 2)
    charged = drive.scheduler._admission.shares._devices["image"].charged
    assert len(charged) < 50
    drive.run()
    drive.add("last", STEPS, tenant="last")
    assert len(charged) <= 1


asks = st.builds(
    Ask, steps=st.integers(1, 12), size=st.sampled_from("sml"), rows=st.integers(1, 2), encode=st.booleans(),
    vae=st.booleans(), interval=st.sampled_from([1, 3]), once=st.booleans(),
)  # fmt: skip
curves = st.sampled_from([flat(), linear(), affine(1.0, 0.1), affine(1.0, 2.0)])


@settings(FIXED, max_examples=40)
@given(
    few=st.tuples(asks, st.integers(0, 5), st.integers(0, 40)),
    many=st.lists(st.tuples(st.integers(1, 3), asks, st.integers(0, 9)), min_size=1, max_size=40),
    curve=curves,
    limit=st.sampled_from([1, 4, 16]),
    depth=st.integers(1, 2),
)
def test_a_tenant_with_one_request_has_its_share_beside_those_with_many(
    few: tuple[Ask, int, int], many: list[tuple[int, Ask, int]], curve: Cost, limit: int, depth: int
) -> None:
    """Whenever it comes it is done within as many times its time alone as there are tenants, and some iterations."""
    ask, priority, at = few
    clock = Clock()
    runner = FakeRunner(clock, slots=64, limit=limit, costs={"": curve})
    drive = Drive([runner], clock, depth)
    for k, (tenant, other, urgent) in enumerate(many):
        drive.add(f"o{k}", other, tenant=f"t{tenant}", priority=urgent)
    drive.run(until=float(at))
    came = clock.now
    drive.add("few", ask, tenant="few", priority=priority)
    drive.finish("few")
    tenants = len({tenant for tenant, _, _ in many}) + 1
    alone_s = len(ask.trace) * curve(ask.rows)
    widest_s = curve(max(limit, 2))
    assert clock.now - came <= 1.1 * tenants * alone_s + (tenants + depth) * widest_s
    drive.complete()


@settings(FIXED, max_examples=25)
@given(
    come=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 120), st.integers(0, 5)), min_size=2, max_size=16),
    limit=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 1000),
)
def test_from_when_two_tenants_run_neither_gets_ahead_of_the_other(
    come: list[tuple[str, int, int]], limit: int, seed: int
) -> None:
    """Nothing is saved up before, whether one was away, came and went, or had all to itself; nor is it forgiven."""
    drive, runner = pictures(limit=limit)
    chance = random.Random(seed)
    for k, (tenant, at, priority) in enumerate(sorted(come, key=lambda c: c[1])):
        drive.run(until=max(drive.clock.now, float(at)))
        short = only_steps(chance.randint(1, 20), size=chance.choice("sl"))
        drive.add(f"{tenant}{k}", short, tenant=tenant, priority=priority)
    for tenant in "xy":
        drive.run(until=drive.clock.now + chance.randint(1, 30))
        for k in range(chance.randint(1, 8)):
            drive.add(f"{tenant}{k}", only_steps(300, size=chance.choice("sl")), tenant=tenant)

    def rows(tenant: str) -> int:
        return sum(len(done) for id, done in runner.committed.items() if drive.asked[id].tenant == tenant)

    before = {tenant: rows(tenant) for tenant in "xy"}
    for _ in range(60):
        drive.fill()
        drive.forward()
        x, y = (rows(tenant) - before[tenant] for tenant in "xy")
        assert abs(x - y) <= 4 * limit + 2
    assert x + y >= 20


def visits(drive: Drive, step_s: float, pauses: list[float]) -> list[float]:
    """Seconds that each request of a tenant takes that pauses so long before each, beside another's flood."""
    drive.crowd("f", 24, only_steps(100_000), tenant="flood")
    seconds = []
    for k, pause_s in enumerate(pauses):
        drive.run(until=drive.clock.now + pause_s)
        came = drive.clock.now
        drive.add(f"v{k}", only_steps(20), tenant="visitor")
        drive.finish(f"v{k}")
        seconds.append(drive.clock.now - came)
    return seconds


NEAR_LINEAR = affine(0.003, 0.008)  # of an SDXL step on an H200, in seconds
ALONE_S = 20 * NEAR_LINEAR(1)


@settings(FIXED, max_examples=20)
@given(pauses=st.lists(st.floats(2 * ALONE_S, 5.0), min_size=2, max_size=5))
def test_who_takes_less_than_a_share_hardly_waits_for_a_flood(pauses: list[float]) -> None:
    drive, _ = fake_drive(slots=64, limit=16, costs={"": NEAR_LINEAR})
    assert max(visits(drive, NEAR_LINEAR(1), pauses)) <= 1.4 * ALONE_S


@settings(FIXED, max_examples=10)
@given(away_s=st.floats(0.0, 20.0), limit=st.sampled_from([1, 4, 16]), curve=st.sampled_from([NEAR_LINEAR, flat(0.1)]))
def test_no_more_than_a_burst_is_saved_up(away_s: float, limit: int, curve: Cost) -> None:
    drive, _ = fake_drive(slots=64, limit=limit, costs={"": curve})
    for tenant in ("stays", "returns"):
        drive.add(tenant, only_steps(3, size=tenant), tenant=tenant)
    drive.crowd("s", 20, only_steps(300, size="stays"), tenant="stays")
    drive.run(until=drive.clock.now + away_s)
    drive.crowd("r", 20, only_steps(300, size="returns"), tenant="returns")
    charged = drive.scheduler._admission.shares._devices["image"].charged
    back = dict(charged)
    while drive.clock.now < away_s + 8.0:
        drive.fill()
        assert drive.forward()
        ahead = (charged["returns", False] - back["returns", False]) - (charged["stays", False] - back["stays", False])
        assert -2 * curve(limit) <= ahead <= _BURST_S + 2 * curve(limit)


def test_leaving_and_coming_back_mints_no_credit() -> None:
    """However many others have gone, of whom some are forgotten."""
    drive, _ = fake_drive(slots=64, limit=4, costs={"": NEAR_LINEAR})
    device = drive.scheduler._admission.shares._devices["image"]
    drive.crowd("s", 40, only_steps(100_000), tenant="stays")
    drive.run(until=5.0)
    before, visits = dict(device.charged), 0
    while drive.clock.now < 35.0:
        device.charged |= {(f"gone{k}", False): device.virtual[0] + k for k in range(-5, 60)}
        visits += 1
        drive.add(f"v{visits}", only_steps(60), tenant="visitor")
        drive.finish(f"v{visits}")
        drive.run(until=drive.clock.now + 0.01)
    visitor_s = device.charged["visitor", False] - 5.0
    assert visitor_s <= device.charged["stays", False] - before["stays", False] + _BURST_S + 1.0


@pytest.mark.parametrize("comers", [1, 2, 7])
def test_the_credit_of_all_who_come_back_together_is_one_burst(comers: int) -> None:
    """Whoever comes first has all of it, and what each has used others may have."""
    drive, _ = fake_drive(slots=64, limit=16, costs={"": NEAR_LINEAR})
    drive.crowd("s", 24, only_steps(100_000), tenant="stays")
    drive.run(until=10.0)
    device = drive.scheduler._admission.shares._devices["image"]
    for k in range(comers):
        drive.add(f"c{k}", only_steps(300), tenant=f"comer {k}")
    credits = [max(0.0, device.virtual[0] - device.charged[f"comer {k}", False]) for k in range(comers)]
    assert credits[0] > _BURST_S / 2 and sum(credits) <= _BURST_S + 1e-9


@pytest.mark.quick(0)
@pytest.mark.parametrize("comers", [1, 20])
def test_many_who_come_back_together_cost_others_one_burst(comers: int) -> None:
    drive, runner = fake_drive(slots=64, limit=16, costs={"": NEAR_LINEAR})
    drive.crowd("s", 24, only_steps(100_000), tenant="stays")
    drive.run(until=10.0)
    for k in range(comers):
        drive.add(f"c{k}", only_steps(300, size=f"size {k}"), tenant=f"comer {k}")
    drive.run(until=10.0 + 1.5 * _BURST_S + comers)
    theirs = [launch.at for launch in runner.log if launch.ids[0].startswith("s")]
    gap_s = max(after - before for before, after in itertools.pairwise(theirs))
    assert gap_s <= _BURST_S + (comers + 2) * NEAR_LINEAR(16)


def test_batches_are_narrow_only_while_a_tenant_is_expected() -> None:
    drive, runner = fake_drive(slots=64, limit=16, costs={"": NEAR_LINEAR})
    visits(drive, NEAR_LINEAR(1), [1.0])
    came = drive.clock.now
    drive.run(until=came + _AWAY_S + 2 * NEAR_LINEAR(16))
    rows = [(launch.at - came, launch.rows) for launch in runner.log if launch.at > came + 0.1]
    assert max(row_count for at, row_count in rows if at < _AWAY_S - 1) <= 4
    assert rows[-1][1] >= 8


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("slots", [2, 64])
@pytest.mark.parametrize("tenant", ["one", "new{}"])
@pytest.mark.parametrize("priority", [0, 5, 9])
def test_no_request_starves_beside_any_tenants(depth: int, slots: int, tenant: str, priority: int) -> None:
    driven, _ = fake_drive(depth=depth, slots=slots, limit=1, starvation_s=30.0, patience_s=20.0)
    driven.add("before", STEPS, tenant="besieged", priority=9)
    low = driven.add("low", STEPS, tenant="besieged", priority=priority)
    besiege(
        driven, low, lambda n: driven.add(f"u{n}", Ask(steps=3, size="sl"[n % 2]), tenant=tenant.format(n)), until=150.0
    )


def test_a_tenant_whose_requests_are_all_old_does_not_go_before_others_for_it() -> None:
    drive, runner = pictures(starvation_s=20.0)
    drive.crowd("a", 40, STEPS, tenant="a", priority=9)
    drive.run(until=40.0)
    done = sum(map(len, runner.committed.values()))
    drive.add("b", STEPS, tenant="b")
    assert iterations_before(drive, runner, "b", "a") - done <= 16 + STEPS.steps


@settings(FIXED, max_examples=100)
@given(
    curve=st.sampled_from([flat(), linear(), affine(1.0, 0.1), affine(1.0, 0.01), affine(0.5, 2.0)]),
    there=st.lists(
        st.tuples(st.sampled_from("abcd"), st.integers(0, 9), st.integers(1, 3), st.booleans()), min_size=1, max_size=12
    ),
    iterations=st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=8, unique=True), min_size=1, max_size=6),
)
def test_an_iteration_is_charged_whole_and_once(
    curve: Cost, there: list[tuple[str, int, int, bool]], iterations: list[list[int]]
) -> None:
    """What all accounts pay together is what it cost; each pays for its own rows, and only those that took part."""
    runner = FakeRunner(Clock(), slots=64, costs={"": curve})
    shares = Shares({"image": runner})
    requests = []
    for k, (tenant, priority, rows, elder) in enumerate(there):
        request = Request(f"r{k}", "image", Ask(rows=rows, encode=False), priority=priority, tenant=tenant, aged=elder)
        request.phase = "step"
        requests.append(request)
        shares.enter(request)
        shares.begin(request)
    charged = shares._devices["image"].charged
    for chosen in iterations:
        batch = [requests[k] for k in chosen if k < len(requests)]
        if not batch:
            continue
        rows = sum(map(runner.rows, batch))
        group = runner.group(batch[0])
        before = dict(charged)
        shares.charge(runner, group, batch, rows)
        paid = {who: charged[who] - before[who] for who in charged}
        assert sum(paid.values()) == pytest.approx(runner.cost(group, rows))
        assert min(paid.values()) >= 0
        mine = account(batch[0])
        others = {account(request) for request in batch if request.tenant != batch[0].tenant}
        assert all(not seconds for who, seconds in paid.items() if who not in others | {mine})
        beside = {who: sum(runner.rows(r) for r in batch if account(r) == who) for who in others}
        for who, own in beside.items():
            share = own / sum(beside.values())
            assert paid[who] == pytest.approx(share * (runner.cost(group, rows) - paid[mine]))
        alone_s, whole_s = runner.cost(group, rows - sum(beside.values())), runner.cost(group, rows)
        assert paid[mine] == pytest.approx(whole_s if whole_s <= 1.1 * alone_s else alone_s)
