"""Jobs in hand, on a real engine with the stand-in's runner: whatever happens, nothing of a job stays in the engine."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from math import inf
from typing import Any

import pytest

from contract.errors import Invalid
from contract.image import ImageParameters
from core.batching.engine import Aborted, Closed, Engine, Expired
from core.batching.request import Request
from core.jobs.record import Claim
from tests.workers.crew import eventually
from tests.workers.stage import StageRunner
from workers.claims.active_jobs import ActiveJob, ActiveJobs


def claim(id: str = "job", attempt: int = 1) -> Claim:
    return Claim(id, attempt, "image", "stage", {}, 5, None, False)


def ask(k: int, prompt: str = "x", steps: int = 3, **how: Any) -> Request:
    return Request(f"job/1/{k}", "image", ImageParameters(prompt, k, 32, 32, steps=steps), **how)


def apart(work: ActiveJob, requests: list[Request]) -> Future[Any]:
    """Its `make`, on another thread."""
    pool = ThreadPoolExecutor(1)
    made = pool.submit(work.make, requests)
    pool.shutdown(wait=False)
    return made


@pytest.mark.parametrize(
    ("error", "last", "deadline_s"),
    [(RuntimeError, {"prompt": "FAIL"}, inf), (Invalid, {"steps": 0}, inf), (Expired, {"steps": 1000}, 0.05)],
    ids=["failed", "refused", "expired"],
)
def test_one_that_ends_stops_the_rest(
    engine: Engine, runner: StageRunner, error: type[Exception], last: dict[str, Any], deadline_s: float
) -> None:
    requests = [ask(0, steps=1000), ask(1, **last, deadline=engine.clock() + deadline_s)]
    with pytest.raises(error):
        ActiveJob(claim(), engine).make(requests)
    assert requests[0].work is None or requests[0].work.step < requests[0].parameters.steps
    eventually(lambda: runner.held() == 0)


def test_stopped_at_any_time(engine: Engine, runner: StageRunner) -> None:
    work = ActiveJob(claim(), engine)
    assert not work.begun
    made = apart(work, [ask(k, steps=1000) for k in range(3)])
    eventually(lambda: work.begun)
    work.stop()
    assert isinstance(made.exception(30), Aborted)
    assert not work.dropped
    eventually(lambda: runner.held() == 0)
    with pytest.raises(Aborted):
        work.make([ask(7)])  # stopped before it began


def test_a_closed_engine_takes_nothing(runner: StageRunner) -> None:
    engine = Engine([runner])
    engine.close()
    with pytest.raises(Closed):
        ActiveJob(claim(), engine).make([ask(0)])


def test_what_is_in_hand(engine: Engine) -> None:
    active_jobs = ActiveJobs()
    first, other = ActiveJob(claim("a"), engine), ActiveJob(claim("b", 3), engine)
    active_jobs.add(first)
    active_jobs.add(other)
    assert active_jobs.leases() == {"a": "1", "b": "3"} and "a" in active_jobs
    assert not active_jobs.abandon("b", "2") and not active_jobs.abandon("c") and not other.dropped
    assert active_jobs.abandon("b", "3") and other.dropped
    active_jobs.remove(other)
    assert active_jobs.works() == [first]


def test_a_job_that_comes_back_replaces_what_was_lost(engine: Engine) -> None:
    active_jobs = ActiveJobs()
    first, second = ActiveJob(claim("a", 1), engine), ActiveJob(claim("a", 2), engine)
    active_jobs.add(first)
    active_jobs.add(second)
    assert first.dropped and not second.dropped
    active_jobs.remove(first)  # the late end of the first attempt does not touch the second
    assert active_jobs.leases() == {"a": "2"}
