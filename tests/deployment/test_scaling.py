"""A kind of workers is scaled from nothing to many and back by the chart's formula, under a burst, with nothing lost.

The API, Redis, Celery and the workers' processes are real; the workers compute nothing, and KEDA is a stand-in.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.jobs.record import JobState
from tests.api.world import Api, eventually, settings_of
from tests.deployment import scaling
from tests.servers import redis_server, redis_url
from tests.workers.crew import PATIENCE_S, Crew, Hired
from tests.workers.stage import MODEL

__all__ = ["redis_server", "redis_url"]

MOST = 3
JOBS = 24
TARGET_S, LOADING_S = 120.0, 45.0


@pytest.fixture
def crew(redis_url: str, tmp_path: Path) -> Iterator[Crew]:
    crew = Crew(redis_url, tmp_path)
    yield crew
    crew.close()


@given(work_s=st.integers(0, 100_000), ready=st.integers(0, 50))
def test_the_workers_asked_for_do_the_work_in_time_and_no_fewer_would(work_s: int, ready: int) -> None:
    formula = scaling.formula(2, TARGET_S, LOADING_S)
    values = {"queued_0": work_s / 2, "running_0": 0.0, "queued_1": 0.0, "running_1": work_s / 2, "ready": float(ready)}
    asked = -int(-round(scaling.evaluated(formula, values), 9) // 1)

    def done_s(workers: int) -> float:
        """Seconds of work that so many do by the target: those that load do less."""
        return min(workers, ready) * TARGET_S + max(0, workers - ready) * (TARGET_S - LOADING_S)

    assert done_s(asked) >= work_s
    assert asked == 0 if work_s == 0 else asked == 1 or done_s(asked - 1) < work_s


class Replicas:
    """A Deployment of stage workers, of which each draws two pictures at once: the newest are stopped first."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self.live: list[Hired] = []
        self.stopped: list[Hired] = []
        self.peak = 0

    def scale(self, count: int) -> None:
        while len(self.live) < count:
            self.live.append(self._crew.hire("--load", "0.5", "--step", "0.02", ready=False, image_jobs=2, drain_s=30))
        while len(self.live) > count:
            self.stopped.append(self.live.pop())
            self.stopped[-1].signal(signal.SIGTERM)
        self.peak = max(self.peak, count)


def test_from_zero_to_many_and_back_with_nothing_lost(crew: Crew, redis_url: str, tmp_path: Path) -> None:
    settings = settings_of(redis_url, tmp_path, artifacts_url=crew.artifacts_url)
    replicas = Replicas(crew)
    with Api(settings) as api:
        metrics = lambda: api.client.get("/metrics").text  # noqa: E731
        places = scaling.locations([MODEL])
        queued = f'diptych_model_jobs{{model="{MODEL}",state="queued"}} {JOBS}.0'

        # A new Deployment has one pod, whose worker announces the model; without work it goes.
        replicas.live.append(crew.hire("--step", "0.02", drain_s=30))
        eventually(lambda: places["ready"] + " 1.0" in metrics())
        formula = scaling.formula(1, 2.0, 1.0)
        scaler = scaling.Autoscaler(formula, places, metrics, replicas.scale, MOST, 0.3, 0.3, replicas=1)
        while scaler.replicas:
            scaler.poll()
        assert [worker.wait() for worker in replicas.stopped] == [0]

        ids = [api.order(model=MODEL, size="32x32", steps=20) for _ in range(JOBS)]
        eventually(lambda: queued in metrics())
        until = time.monotonic() + PATIENCE_S
        while scaler.replicas or not all(crew.job(id).state.final for id in ids):
            assert time.monotonic() < until, [crew.job(id).state for id in ids]
            scaler.poll()
            time.sleep(0.1)
        assert replicas.peak == MOST
        codes = {worker.wait() for worker in replicas.stopped}
        assert codes <= {0, -signal.SIGTERM}, "one that has not begun to load ends at once"
    jobs = [crew.job(id) for id in ids]
    assert {job.state for job in jobs} == {JobState.SUCCEEDED} and not any(job.lost for job in jobs)
