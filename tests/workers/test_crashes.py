"""What is left of jobs when workers die, hang, sleep or lose Redis: every job ends, once, and none is lost."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from core.jobs.record import JobState
from deployment.redis import RedisServer
from tests.workers.crew import Crew, Hired, eventually
from tests.workers.test_worker import most_at_once
from workers.heartbeat import STUCK

LEASE_S = 1.0
LONG = 1000


@pytest.fixture
def max_attempts() -> int:
    return 2


def hire(crew: Crew, *switches: str, **settings: Any) -> Hired:
    return crew.hire(*switches, **{"lease_s": LEASE_S, "max_attempts": 2, **settings})


def test_a_crash_costs_an_attempt_and_suspects_run_alone(crew: Crew, reaper: None) -> None:
    """A worker dies with two jobs in hand. Both are done by the next one, each while nothing else is."""
    first = hire(crew, "--text")
    companion = crew.ask("text", steps=LONG, prompt="STEP=0.02")
    crew.running(companion)
    killer = crew.ask(prompt="KILL=1")
    assert first.wait() == -signal.SIGKILL
    crew.redis.hset(f"diptych:job:{companion}", "parameters", '{"prompt": "short now", "steps": 5}')
    second = hire(crew, "--text", "--step", "0.02")
    others = [crew.ask(seed=k) for k in range(6)] + [crew.ask("text") for _ in range(6)]
    for id in (companion, killer, *others):
        crew.succeeded(id)
    for id in (companion, killer):
        job = crew.job(id)
        assert (job.attempt, job.lost, job.suspect) == (2, 1, True)
    inside: set[str] = set()
    for event in second.events:
        if event["event"] == "admit":
            inside.add(event["request"])
        elif event["event"] == "release":
            inside.remove(event["request"])
        suspects = [request for request in inside if request.startswith((companion, killer))]
        assert not suspects or len(inside) == 1


def test_a_hung_device_ends_the_process_and_the_job_goes_on_elsewhere(crew: Crew, reaper: None) -> None:
    worker = hire(crew, stuck_s=1.0)
    id = crew.ask(prompt="HANG=1")
    assert worker.wait() == STUCK
    assert "the device hangs" in worker.log and "Traceback" not in worker.log
    hire(crew, stuck_s=60)
    job = crew.ended(id)
    assert (job.state, job.attempt, job.lost) == (JobState.SUCCEEDED, 2, 1)


def test_a_worker_that_slept_too_long_finds_its_jobs_gone_and_serves_on(crew: Crew, reaper: None) -> None:
    sleeper = hire(crew, "--step", "0.02", stuck_s=1.5)
    id = crew.ask(steps=100)
    crew.running(id)
    sleeper.signal(signal.SIGSTOP)
    other = hire(crew)
    job = crew.ended(id)
    assert (job.state, job.attempt, job.lost) == (JobState.SUCCEEDED, 2, 1)
    assert job.worker.split("-")[-2] == str(other.process.pid)
    events = crew.events(id)
    assert other.stop() == 0
    sleeper.signal(signal.SIGCONT)
    eventually(lambda: sleeper.noted("release", f"{id}/1/"))  # its request is taken out of the engine …
    assert not sleeper.noted("done", f"{id}/1/")
    assert crew.ended(crew.ask()).state is JobState.SUCCEEDED  # … and it serves on
    assert crew.events(id) == events and crew.job(id) == job
    assert "this worker lost the lease of job " in sleeper.log and sleeper.process.poll() is None


def test_redis_restarts_under_a_busy_worker(crew: Crew, redis_server: RedisServer) -> None:
    """Twice. What was under way ends as if nothing had been; limits hold; what comes later is served."""
    worker = crew.hire("--text", "--step", "0.05", image_jobs=2, text_jobs=2)
    for _ in range(2):
        images = [crew.ask(steps=20, seed=k) for k in range(4)]
        for id in images[:2]:
            crew.running(id)
        redis_server.kill()
        redis_server.start()
        crew.succeeded(crew.ask("text"))
        jobs = [crew.ended(id) for id in images]
        assert [(job.state, job.attempt, job.lost) for job in jobs] == [(JobState.SUCCEEDED, 1, 0)] * 4
    assert most_at_once(worker)["image"] == 2
    assert worker.process.poll() is None and "Traceback" not in worker.log
