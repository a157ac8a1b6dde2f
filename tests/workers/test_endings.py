"""How a worker ends: what has begun is finished or handed back, at no cost to any job, and the process does end."""

from __future__ import annotations

import signal
import sys

from core.jobs.broker import PRIORITY_STEPS, list_key, model_queue
from core.jobs.record import JobState
from deployment.redis import RedisServer
from tests.workers.crew import Crew, eventually
from tests.workers.stage import MODEL

LONG = 1000
QUEUE = model_queue("image", MODEL)


def test_what_has_begun_is_finished_and_the_rest_is_handed_back(crew: Crew) -> None:
    """One job in the engine, two that wait in it, one that waits in the queue."""
    worker = crew.hire("--step", "0.1", image_jobs=3, max_requests=1)
    begun = crew.ask(steps=8, n=1)
    crew.running(begun)
    waiting = [crew.ask(seed=k) for k in range(3)]
    eventually(lambda: [crew.job(id).state for id in waiting].count(JobState.RUNNING) == 2)
    assert worker.stop() == 0
    assert crew.job(begun).state is JobState.SUCCEEDED
    assert {crew.job(id).state for id in waiting} == {JobState.QUEUED}
    assert crew.card(worker) is None and crew.redis.hlen("unacked") == 0 and "Traceback" not in worker.log
    crew.hire()
    jobs = [crew.ended(id) for id in waiting]
    assert {(job.state, job.lost, job.suspect) for job in jobs} == {(JobState.SUCCEEDED, 0, False)}
    assert sorted(job.attempt for job in jobs) == [1, 2, 2]
    assert "queued" in [type for type, _ in crew.events(waiting[0])][1:]


def test_what_takes_too_long_is_handed_back(crew: Crew) -> None:
    """Also while something compiles, which cannot be interrupted and must not keep the process from ending, and where
    the device hangs.
    """
    worker = crew.hire("--compiling", drain_s=0.3)
    id = crew.ask(prompt="HANG", n=2)
    crew.running(id)
    worker.signal(signal.SIGINT)
    assert worker.wait() == 0
    job = crew.job(id)
    assert (job.state, job.attempt, job.lost, job.suspect) == (JobState.QUEUED, 1, 0, False)
    assert crew.redis.llen(QUEUE) == 1  # its new message
    assert "is handed back" in worker.log and crew.card(worker) is None


def test_a_worker_that_is_still_loading_ends_at_once(crew: Crew) -> None:
    worker = crew.hire("--load", "3600", ready=False)
    card = eventually(lambda: (card := crew.card(worker)) and card.message == "loading the stage" and card)
    assert card and card.state == "starting"
    assert worker.stop() == 0 and crew.card(worker) is None


def test_a_worker_ends_though_redis_is_away(crew: Crew, redis_server: RedisServer) -> None:
    worker = crew.hire(drain_s=0.5)
    id = crew.ask(steps=LONG)
    crew.running(id)
    redis_server.kill()
    try:
        eventually(lambda: "cannot be reached" in worker.log)
        assert worker.stop() == 0
    finally:
        redis_server.start()
    assert "Traceback" not in worker.log


def test_a_job_that_waits_for_a_suspect_is_given_back(crew: Crew) -> None:
    """The suspect runs alone; whoever waits at the gate has claimed nothing, and only its message goes back."""
    worker = crew.hire(drain_s=0.3)
    suspect = crew.make(steps=LONG)
    crew.redis.hset(f"diptych:job:{suspect}", "suspect", "1")
    crew.send(suspect)
    crew.running(suspect)
    others = [crew.ask(seed=k) for k in range(5)]
    # Redis may owe the worker one message; for more it does not ask while it could not begin with them.
    assert crew.redis.llen(list_key(QUEUE, 3)) >= 4
    assert worker.stop() == 0
    assert [crew.job(id).attempt for id in others] == [0] * 5
    crew.redis.hset(f"diptych:job:{suspect}", "parameters", '{"prompt": 1}')
    crew.hire()
    assert [crew.ended(id).state for id in others] == [JobState.SUCCEEDED] * 5
    assert crew.ended(suspect).state is JobState.FAILED


def test_what_redis_hands_out_to_a_worker_that_ends_goes_back(crew: Crew) -> None:
    """Redis still owes it an answer for up to a second, and that answer may be a message."""
    worker = crew.hire()
    worker.signal(signal.SIGTERM)
    eventually(lambda: "draining" in worker.log)
    ids = [crew.ask(seed=k) for k in range(3)]
    assert worker.wait() == 0
    assert {crew.job(id).attempt for id in ids} == {0} and crew.redis.hlen("unacked") == 0
    assert sum(crew.redis.llen(list_key(QUEUE, level)) for level in PRIORITY_STEPS) == 3


BROKEN = """
import sys
from tests.workers import stage
from workers import prefetch

def append(self, message, delivery_tag, usual=prefetch.BoundedQoS.append):
    usual(self, message, delivery_tag)
    if self._prefetch.counts()["image"]:
        raise ZeroDivisionError("a bug of Celery's")

prefetch.BoundedQoS.append = append
sys.exit(stage.main())
"""


def test_where_celery_breaks_the_worker_ends_in_good_order(crew: Crew) -> None:
    worker = crew.hire(command=(sys.executable, "-c", BROKEN), drain_s=0.3)
    begun = crew.ask(steps=LONG)
    crew.running(begun)
    last = crew.ask()
    assert worker.wait() == 1
    assert "Unrecoverable error: ZeroDivisionError" in worker.log
    assert "Traceback" not in worker.log
    assert (crew.job(begun).state, crew.job(begun).lost) == (JobState.QUEUED, 0)
    assert crew.job(last).attempt == 0
    assert crew.card(worker) is None
