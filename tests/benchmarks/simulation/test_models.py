"""The coarse fleet: as the fine one where both apply, and nobody is lost between models, loads and scaled devices."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.capacity import PLANS, stage
from benchmarks.simulate import capacity
from benchmarks.simulation import costs, traffic
from benchmarks.simulation.fleet import StepLevel
from benchmarks.simulation.models import ModelFleet, ModelJob, Residency, Scaling, Stage
from benchmarks.simulation.runner import Device
from contract.plan import DeepCache

H200 = costs.read(costs.find("h200"))
SHORT = Stage(2, (0.0, 0.1, 0.15, 0.2), 0.01, 0.02, (0, 1, 2, 3))
LONG = Stage(5, (0.0, 0.1, 0.15), 0.0, 0.02, (0, 1, 2))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("gpus", "load"), [(1, 0.5), (1, 0.85), (4, 0.7)])
def test_it_agrees_with_the_fine_fleet(plan: str, gpus: int, load: float) -> None:
    picture = stage(H200, plan, 32)
    steps, guided, cached = PLANS[plan]
    mix = traffic.Mix(
        size=traffic.always((1024, 1024)),
        steps=traffic.always(steps),
        guided=traffic.always(guided),
        deepcache=traffic.always(None if cached is None else DeepCache(cached.interval)),
    )
    arrivals = traffic.jobs(0, 1200, load * capacity(H200, Device(), mix) * gpus, mix)
    fine = StepLevel(H200, Device(), gpus=gpus).run(arrivals)
    fleet = ModelFleet(gpus, places=32, residency=Residency(), unit_s=picture.least_s, first=(0,))
    coarse = fleet.run([ModelJob(job.arrival, 0, (picture,)) for job in arrivals])
    seconds = np.array(fine.ended) - [job.arrival for job in arrivals]
    for figure in (np.mean, lambda values: np.percentile(values, 99)):
        assert figure(coarse.latencies) == pytest.approx(figure(seconds), rel=0.1)
    assert coarse.busy_s / coarse.ends == pytest.approx(fine.busy_s / max(fine.ended), rel=0.05)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    gpus=st.integers(1, 5),
    models=st.integers(1, 7),
    residency=st.builds(
        Residency, loaded=st.integers(1, 3), pinned=st.integers(0, 3), load_s=st.sampled_from([0.0, 3.0]),
        switch_s=st.sampled_from([0.0, 0.5]),
    ),
    places=st.sampled_from([1, 2, 8]),
    scaled=st.booleans(),
    rate=st.sampled_from([0.5, 5.0, 30.0]),
)  # fmt: skip
def test_every_job_ends_once_whatever_is_loaded_and_scaled(
    seed: int, gpus: int, models: int, residency: Residency, places: int, scaled: bool, rate: float
) -> None:
    rng = np.random.default_rng(seed)
    arrivals = traffic.arrivals(rng, 120, rate, traffic.Bursts(2.0, 20.0)).tolist()
    stages = [(SHORT,), (SHORT, LONG), (LONG,)]
    jobs = [ModelJob(when, int(rng.integers(models)), stages[rng.integers(3)]) for when in arrivals]
    scaling = Scaling(0, gpus, work_s=1.0, poll_s=2.0, start_s=3.0, cooldown_s=5.0) if scaled else None
    fleet = ModelFleet(gpus, places=places, residency=residency, unit_s=0.2, scaling=scaling)
    usage = fleet.run(jobs)
    for job, latency in zip(jobs, usage.latencies, strict=True):
        assert latency >= sum(part.steps * part.round_s[1] + part.after_s for part in job.stages) - 1e-6
    assert usage.most_devices <= gpus and 0 < usage.busy_s <= usage.device_s + 1e-6
    assert usage.loads >= len({job.model for job in jobs})
    assert all(worker.in_hand == 0 and not worker.batches and not worker.jobs for worker in fleet._workers)
    assert all(len(worker.models) <= residency.loaded for worker in fleet._workers)
    assert all(len(worker.pinned) <= residency.pinned for worker in fleet._workers)


def test_a_cold_model_costs_its_load_and_a_pinned_one_its_switch() -> None:
    residency = Residency(loaded=1, pinned=1, load_s=7.0, switch_s=0.5)
    jobs = [ModelJob(20.0 * k, model, (SHORT,)) for k, model in enumerate((0, 1, 1, 0, 2, 1))]
    usage = ModelFleet(1, places=8, residency=residency, unit_s=0.2).run(jobs)
    least = SHORT.solo_s
    for latency, load_s in zip(usage.latencies, (7.0, 7.0, 0.0, 0.5, 7.0, 7.0), strict=True):
        assert load_s + least - 1e-6 <= latency <= load_s + least + 1.0 + 1e-6  # a worker looks every second
    assert (usage.loads, usage.switches) == (4, 1)


def test_a_busy_model_is_loaded_by_a_second_device() -> None:
    jobs = [ModelJob(0.1 * k, 0, (LONG,)) for k in range(200)]
    usage = ModelFleet(2, places=4, residency=Residency(load_s=5.0), unit_s=LONG.least_s).run(jobs)
    assert usage.loads == 2


def test_a_cascade_costs_its_drafts_and_what_it_draws_anew() -> None:
    jobs = [ModelJob(100.0 * k, 0, (SHORT, LONG) if k % 4 == 0 else (SHORT,)) for k in range(40)]
    usage = ModelFleet(1, places=8, residency=Residency(), unit_s=0.5, first=(0,)).run(jobs)
    assert usage.busy_s == pytest.approx(40 * SHORT.solo_s + 10 * LONG.solo_s)


def test_devices_come_with_work_and_go_without() -> None:
    burst = [ModelJob(0.02 * k, 0, (LONG,)) for k in range(400)]
    jobs = [*burst, ModelJob(2000.0, 0, (LONG,))]
    scaling = Scaling(0, 6, work_s=5.0, poll_s=5.0, start_s=30.0, cooldown_s=60.0)
    usage = ModelFleet(6, places=8, residency=Residency(), unit_s=LONG.least_s, scaling=scaling).run(jobs)
    assert usage.most_devices == 6
    assert usage.latencies[0] >= 30.0 and usage.latencies[-1] >= 30.0  # from none, both times
    assert usage.device_s < 6 * 400 and not math.isnan(sum(usage.latencies))


def test_a_model_is_dropped_once_its_last_jobs_have_ended() -> None:
    """Only then is another read in its place."""
    slow = Stage(100, (0.0, 0.1, 0.15), 0.0, 0.02, (0, 1, 2))
    residency = Residency(loaded=1, load_s=3.0)
    usage = ModelFleet(1, places=8, residency=residency, unit_s=10.0).run(
        [ModelJob(0.0, 0, (slow,)), ModelJob(4.0, 1, (SHORT,))]
    )
    assert usage.latencies[1] >= usage.latencies[0] - 4.0 + residency.load_s + SHORT.solo_s - 1e-6
