"""The simulated fleet: nobody is lost or served twice, lanes never overlap, and known queues come out as known."""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.plan import DeepCache
from core.jobs.broker import level
from lab.simulation.fleet import StepLevel
from lab.simulation.runner import Device, IterationSpan, phases_of
from lab.simulation.simulate import capacity, solo_s
from lab.simulation.traffic import Bursts, Mix, SimulatedJob, WeightedChoice, always, jobs, picture
from tests.lab.simulation.tables import OTHER, SIZE, affine

SOME = Mix(
    size=WeightedChoice((SIZE, OTHER), (2.0, 1.0)),
    steps=WeightedChoice((3, 5), (1.0, 1.0)),
    guided=WeightedChoice((True, False), (3.0, 1.0)),
    deepcache=WeightedChoice((None, DeepCache(2), DeepCache(3, "resnet")), (1.0, 1.0, 1.0)),
    deadline_s=WeightedChoice((math.inf, 0.5, 3.0), (2.0, 1.0, 1.0)),
    priority=WeightedChoice((5, 0, 9), (2.0, 1.0, 1.0)),
)
PLAIN = Mix(size=always(SIZE), steps=always(4))


def least_s(costs, job: SimulatedJob) -> float:
    return solo_s(costs, job.parameters)  # nothing costs less where a wider forward costs more


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10_000),
    gpus=st.integers(1, 5),
    image_jobs=st.sampled_from([1, 2, 4, 32]),
    depth=st.sampled_from([1, 2]),
    rate=st.sampled_from([0.5, 5.0, 50.0]),
    bursts=st.sampled_from([None, Bursts(0.5, 2.0)]),
    memory=st.sampled_from([None, 31, 100]),
    fixed=st.sampled_from([0.0, 0.02, 0.2]),
)
def test_every_job_ends_once_and_no_lane_runs_two_batches(
    seed: int,
    gpus: int,
    image_jobs: int,
    depth: int,
    rate: float,
    bursts: Bursts | None,
    memory: int | None,
    fixed: float,
) -> None:
    costs = affine(fixed)
    spans: dict[tuple[int, str], list[IterationSpan]] = defaultdict(list)
    device = Device(max_requests=6, max_rows=8, memory_bytes=memory)
    asked = jobs(seed, 40, rate, SOME, bursts)
    fleet = StepLevel(
        costs, device, gpus=gpus, image_jobs=image_jobs, depth=depth,
        on_launch=lambda engine, span: spans[engine, span.lane].append(span),
    )  # fmt: skip
    served = fleet.run(asked)
    for job, ended, missed in zip(asked, served.ended, served.missed, strict=True):
        assert ended >= job.arrival
        if missed:
            assert ended >= job.deadline
        else:
            assert ended < job.deadline and ended - job.arrival >= least_s(costs, job) * (1 - 1e-9)
    assert {engine for engine, _ in spans} <= set(range(gpus))
    for mine in spans.values():
        assert all(a.ends <= b.begins for a, b in pairwise(mine))
    everything = [span for mine in spans.values() for span in mine]
    assert served.busy_s == pytest.approx(sum(span.ends - span.begins for span in everything))
    done = Counter()  # rows by phase that finished pictures need; expired ones may have had some
    for job, missed in zip(asked, served.missed, strict=True):
        for group, rows in phases_of(job.parameters):
            done[group.phase] += 0 if missed else rows
    ran = Counter()
    for span in everything:
        ran[span.phase] += span.rows
    assert all(ran[phase] >= rows for phase, rows in done.items())
    if not any(served.missed):
        assert ran == done


def test_without_deadlines_no_row_runs_twice() -> None:
    costs, ran, needed = affine(), Counter(), Counter()
    mix = Mix(size=SOME.size, steps=SOME.steps, guided=SOME.guided, deepcache=SOME.deepcache, priority=SOME.priority)
    asked = jobs(3, 300, 8.0, mix)
    fleet = StepLevel(costs, Device(), gpus=2, on_launch=lambda _, span: ran.update({span.phase: span.rows}))
    assert not any(fleet.run(asked).missed)
    for job in asked:
        for group, rows in phases_of(job.parameters):
            needed[group.phase] += rows
    assert ran == needed


@pytest.mark.parametrize("cached", [None, DeepCache(2), DeepCache(3, "resnet")])
@pytest.mark.parametrize("guided", [True, False])
def test_one_request_on_one_device_takes_the_sum_of_its_costs(guided: bool, cached: DeepCache | None) -> None:
    costs, parameters = affine(), picture(SIZE, 7, guided, cached)
    served = StepLevel(costs, Device(), gpus=1).run([SimulatedJob(0, 2.5, parameters, 5, math.inf)])
    assert served.ended[0] - 2.5 == pytest.approx(sum(costs(*group, rows) for group, rows in phases_of(parameters)))


@settings(max_examples=15)
@given(seed=st.integers(0, 10_000), gpus=st.integers(1, 4), load=st.sampled_from([0.3, 0.9, 2.0]))
def test_one_job_at_a_time_is_the_queue_of_the_textbooks(seed: int, gpus: int, load: float) -> None:
    """With one job in hand a fleet is a G/D/c queue, first in first out (Kiefer and Wolfowitz, 1955)."""
    costs, parameters = affine(), picture(SIZE, 4, True, None)
    each_s = solo_s(costs, parameters)
    asked = jobs(seed, 60, load * gpus / each_s, PLAIN)
    free = [0.0] * gpus
    expected = []
    for job in asked:
        ends = max(job.arrival, heapq.heappop(free)) + each_s
        heapq.heappush(free, ends)
        expected.append(ends)
    assert StepLevel(costs, Device(), gpus=gpus, image_jobs=1).run(asked).ended == pytest.approx(expected)


def test_the_backlog_is_ordered_by_level_and_then_by_arrival() -> None:
    """All wait behind one job: kombu's four levels, and first in first out within one."""
    costs, parameters = affine(), picture(SIZE, 4, True, None)
    priorities = [5, 9, 0, 3, 5, 4, 8, 1]
    asked = [SimulatedJob(i, 0.001 * i, parameters, priority, math.inf) for i, priority in enumerate(priorities)]
    ended = StepLevel(costs, Device(), gpus=1, image_jobs=1).run(asked).ended
    assert sorted(range(1, 8), key=lambda i: ended[i]) == sorted(range(1, 8), key=lambda i: (level(priorities[i]), i))


def test_whoever_has_asked_for_longest_gets_the_job() -> None:
    costs, parameters = affine(), picture(SIZE, 4, True, None)
    on: list[int] = []
    fleet = StepLevel(costs, Device(), gpus=3, on_launch=lambda engine, span: on.append(engine))
    served = fleet.run([SimulatedJob(i, 0.0, parameters, 5, math.inf) for i in range(3)])
    assert set(on) == {0, 1, 2} and served.ended == pytest.approx([solo_s(costs, parameters)] * 3)


def test_a_worker_has_no_more_in_hand_than_it_may() -> None:
    """Two workers of two jobs each: of five that come together the fifth waits for the first end."""
    costs, parameters = affine(), picture(SIZE, 4, True, None)
    widest = Counter()
    fleet = StepLevel(
        costs, Device(), gpus=2, image_jobs=2, on_launch=lambda engine, span: widest.update({(engine, span.rows): 1})
    )
    served = fleet.run([SimulatedJob(i, 0.0, parameters, 5, math.inf) for i in range(5)])
    assert max(rows for _, rows in widest) == 4
    assert served.ended[4] >= min(served.ended[:4]) + solo_s(costs, parameters) * (1 - 1e-9)


@pytest.mark.parametrize("cached", [None, DeepCache(2)])
def test_throughput_at_saturation_comes_near_the_tables_bound(cached: DeepCache | None) -> None:
    costs, device = affine(0.05, 0.01), Device()
    mix = Mix(size=always(SIZE), steps=always(10), deepcache=always(cached))
    asked = jobs(0, 600, 5 * capacity(costs, device, mix), mix)
    bound = capacity(costs, device, mix)
    served = StepLevel(costs, device, gpus=1).run(asked)
    reached = len(asked) / (max(served.ended) - asked[0].arrival)
    assert 0.9 * bound <= reached <= bound


def test_an_expired_request_leaves_at_its_deadline() -> None:
    """Behind a long forward of others, not at the end of it."""
    costs, parameters = affine(1.0, 0.0), picture(SIZE, 4, True, None)
    asked = [SimulatedJob(0, 0.0, parameters, 5, math.inf), SimulatedJob(1, 0.1, parameters, 5, 0.3)]
    served = StepLevel(costs, Device(), gpus=1).run(asked)
    assert served.missed == [False, True] and served.ended[1] == 0.3
