"""A worker's threads: all run before its first job, and none is missed in silence, though memory may run out."""

from __future__ import annotations

import random
import resource
import signal
import sys
from pathlib import Path

import psutil
import pytest

from core.jobs.record import JobState
from tests.workers.crew import Crew, Hired, eventually

LONG = 1000


def threads(worker: Hired) -> set[str]:
    return {task.name for task in Path(f"/proc/{worker.process.pid}/task").iterdir()}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts the tasks of /proc")
def test_a_ready_worker_starts_no_thread(crew: Crew) -> None:
    """Neither for jobs, nor for those of another model, nor for its end: memory may be too short for one then."""
    worker = crew.hire("--text", image_jobs=5, text_jobs=3, drain_s=0.3)
    at_first = threads(worker)
    for id in [crew.ask(seed=k) for k in range(15)] + [crew.ask("text") for _ in range(9)]:
        crew.succeeded(id)
    crew.ask(model="another")
    long = [crew.ask(steps=LONG, seed=k) for k in range(5)]
    for id in long:
        crew.running(id)
    worker.signal(signal.SIGTERM)
    seen = set(at_first)
    eventually(lambda: seen.update(threads(worker)) or "draining" in worker.log)
    assert seen == at_first
    assert worker.wait() == 0
    assert {crew.job(id).state for id in long} == {JobState.QUEUED}


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="limits another process")
def test_memory_that_runs_out_for_a_time_stops_no_worker_for_ever(crew: Crew) -> None:
    """It serves on, or ends with a code, and then another worker has its jobs."""
    draw = random.Random(4)
    worker: Hired | None = None
    for _ in range(4):
        if worker is None or ended(worker):
            worker = crew.hire("--text", lease_s=0.5, max_attempts=100, image_jobs=4)
        pid = worker.process.pid
        size = psutil.Process(pid).memory_info().vms
        resource.prlimit(pid, resource.RLIMIT_AS, (size + draw.choice((-(2**24), 0, 2**16)), resource.RLIM_INFINITY))
        ids = [crew.ask(seed=k, n=3) for k in range(8)] + [crew.ask("text") for _ in range(4)]
        eventually(lambda worker=worker, ids=ids: ended(worker) or crew.job(ids[3]).attempt, "a claim")
        if not ended(worker):
            resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        eventually(lambda worker=worker, ids=ids: ended(worker) or all(crew.job(id).state.final for id in ids))
        assert worker.process.returncode != 0


def ended(worker: Hired) -> bool:
    return worker.process.poll() is not None
