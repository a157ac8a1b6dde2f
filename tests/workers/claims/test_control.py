"""What a worker is told to stop: the attempt that nobody wants, and not the next job of its id."""

from __future__ import annotations

from core.batching.engine import Engine
from core.jobs.record import JobDraft
from tests.workers.crew import Crew, eventually
from workers.claims.active_jobs import ActiveJob, ActiveJobs
from workers.claims.control import ControlListener
from workers.claims.store_retry import StoreRetry


def taken(crew: Crew, id: str, engine: Engine) -> ActiveJob:
    crew.store.create(JobDraft(id, "image", "stage", {}))
    return ActiveJob(crew.claimed(id), engine)


def test_a_job_is_not_stopped_for_the_one_that_had_its_id(crew: Crew, engine: Engine) -> None:
    """It was erased, made anew and claimed by the same worker before that had heard of the erasing."""
    active_jobs = ActiveJobs()
    taken(crew, "logo", engine)
    crew.store.erase("logo")
    new, other = taken(crew, "logo", engine), taken(crew, "other", engine)
    active_jobs.add(new)
    active_jobs.add(other)
    crew.store.cancel("other")
    crew.redis.xadd("diptych:control:me", {"cancel": "nobody's"})  # as an API of a version before says it
    control = ControlListener(crew.registry, StoreRetry(), "me", active_jobs.abandon)
    control.start()
    eventually(lambda: other.dropped, "what comes after it is heard")
    assert not new.dropped
    crew.redis.xadd("diptych:control:me", {"cancel": "logo"})
    eventually(lambda: new.dropped, "a message that names the job alone")
    control.stop()
