"""Provides a Redis per test module, workers for each test, and what sweeps where no worker lives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from core.batching.engine import Engine
from core.batching.runner import Lane
from core.jobs.limits import JobLimits
from core.jobs.reaper import Reaper
from core.jobs.store import JobStore
from tests.servers import redis_server, redis_url
from tests.workers.crew import Crew
from tests.workers.stage import StageRunner

__all__ = ["redis_server", "redis_url"]


@pytest.fixture
def crew(redis_url: str, tmp_path: Path) -> Iterator[Crew]:
    crew = Crew(redis_url, tmp_path)
    yield crew
    crew.close()


@pytest.fixture
def runner() -> Iterator[StageRunner]:
    """Has two places."""
    lane = Lane()
    yield StageRunner("image", lane, 0.005, 2, lambda event, request: None)
    lane.close()


@pytest.fixture
def engine(runner: StageRunner) -> Iterator[Engine]:
    """Nothing of any job may stay in it."""
    with Engine([runner]) as engine:
        yield engine
        assert engine.counts() == {"image": (0, 0)}


@pytest.fixture
def max_attempts() -> int:
    """Of the reaper's jobs."""
    return 3


@pytest.fixture
def reaper(crew: Crew, max_attempts: int) -> Iterator[None]:
    """Sweeps as the API does: also where no worker lives."""
    store = JobStore(crew.url, JobLimits(lease_s=1.0, max_attempts=max_attempts))
    reaper = Reaper(
        store.upkeep, lambda envelope: crew.send(envelope.id, envelope.queue, envelope.priority), every_s=0.1
    )
    reaper.start()
    yield
    reaper.stop()
    store.close()
