"""The jobs' records: every change of state is one Lua script, so that a job is never lost and never finished twice.

Knows states, leases, deadlines and counters; knows nothing of Celery: callers send the envelopes that it returns.
"""

from __future__ import annotations

import base64
from typing import Any, Self

from core.config import Settings
from core.jobs import creation, keys, rates
from core.jobs.broker import PRIORITY_STEPS
from core.jobs.connection import RedisClient
from core.jobs.leases import MARGIN_MS, JobLeases
from core.jobs.record import (
    Backlog,
    Draft,
    Job,
    JobState,
    Page,
    Standing,
    pairs,
)
from core.jobs.unreadable import TALLY, Unreadable
from core.jobs.upkeep import JobUpkeep

_LOOKS = 2000  # entries that one page of a list may look through


class QueueFull(RuntimeError):
    """A queue holds as many waiting jobs as it may. Not a `StoreError`: nothing is wrong with the store."""

    def __init__(self, queue: str, limit: int) -> None:
        super().__init__(f"the {queue} queue holds {limit} jobs and takes no more")
        self.queue = queue
        self.limit = limit


class JobStore(JobLeases, JobUpkeep):
    """The jobs' records: made, read, listed and ended for callers, and all that workers and sweeps do with them.

    On a full Redis only `create` and `report` are refused. A call that was cut off, so that nobody knows whether it
    took effect, may be repeated with the same arguments: it takes effect once, and answers as it would have (but for
    `claim`, which then says None until the lease has run out).

    An id may be another job's by now: where an `incarnation` may be given, a job of that id with another one counts as
    unknown. A worker's `attempt` is its claim's `fence`; a bare number says the same where no id is used again.

    `lease_s`: a worker silent for so long loses its jobs. `max_attempts`: as many workers lost while they ran it, and
    a job fails. `max_queued`: jobs that may wait in one queue. `retention_s`: how long the record and the events of a
    job that ended are kept. `resend_s`: how long a message may be on its way before it counts as lost. `overtime_s`:
    how long after its deadline a running job is left to its worker to expire.
    """

    def __init__(
        self,
        redis: RedisClient | str,
        *,
        lease_s: float = 15.0,
        max_attempts: int = 3,
        max_queued: int = 1000,
        retention_s: float = 86_400.0,
        resend_s: float = 5.0,
        overtime_s: float = 2.0,
    ) -> None:
        client = RedisClient.at(redis)
        JobLeases.__init__(self, client, lease_s=lease_s, retention_s=retention_s)
        JobUpkeep.__init__(
            self, client, lease_s=lease_s, max_attempts=max_attempts, retention_s=retention_s, resend_s=resend_s,
            overtime_s=overtime_s,
        )  # fmt: skip
        self._max_queued = max_queued
        self._create = client.script("jobs/create", rates.LIMITS)
        self._cancel = client.script("jobs/cancel")
        self._follow = client.script("jobs/follow")
        self._standing = client.script("jobs/standing")
        self._list = client.script("jobs/list")
        self._erase = client.script("jobs/erase")
        self._empty = client.script("jobs/empty")

    @classmethod
    def of(cls, settings: Settings, redis: RedisClient | None = None) -> Self:
        return cls(
            redis or settings.redis_url,
            lease_s=settings.lease_s,
            max_attempts=settings.max_attempts,
            max_queued=settings.max_queued,
            retention_s=settings.retention_s,
        )

    def create(self, draft: Draft) -> Job:
        """`make`, for who knows that the id is new."""
        return self.make(draft)[0]

    def make(self, draft: Draft, message: str = "") -> tuple[Job, bool]:
        """Make the record of a queued job, and put `message` into its queue's list, which has a worker look at it.

        Without one the caller sends `Envelope(job.id, job.modality, job.priority)`. Raises `QueueFull`, and `StoreFull`
        with nothing made. A draft that is already a job is returned as it stands; where clients choose ids, its `owner`
        and `digest` tell whether it is the same. With it comes whether this call made it, which one that was cut off
        and repeated does not know.
        """
        answer = self._create(creation.argument(draft, self._max_queued, message))
        made = creation.outcome(draft, (), answer)
        if made.job is None:
            raise QueueFull(draft.modality, self._max_queued)
        return made.job, made.made

    def get(self, id: str) -> Job | None:
        """The record; None if there is none, or no longer. Raises `Unreadable`."""
        fields: Any = self._client.hgetall(keys.job(id))
        return Job.of(id, fields) if fields else None

    def preview(self, id: str, image: int, incarnation: str = "") -> bytes | None:
        """The newest look at a picture in the making, as PNG. None: there is none, or no longer."""
        found: Any = self._client.hmget(keys.preview(id), str(image), "of")
        look, of = found
        return base64.b64decode(look) if look and incarnation in ("", of) else None

    def cancel(self, id: str, incarnation: str = "") -> Job | None:
        """End a queued or running job at once; its worker is told. One that has ended stays as it is. None: unknown."""
        fields = pairs(self._cancel(id, self._retention_ms, incarnation))
        return Job.of(id, fields) if fields else None

    def erase(self, id: str, incarnation: str = "") -> bool:
        """Forget a job, which ends it first if it lives. What it made goes too, unless others name it. False: unknown.

        A worker that is still at it cannot write to another job of this id.
        """
        return bool(self._erase(id, self._retention_ms, self._retention_ms + MARGIN_MS, incarnation))

    def follow(self, id: str, incarnation: str = "") -> bool:
        """Have a live job's progress told from now on, with all of its texts. False: it does not live."""
        return bool(self._follow(id, incarnation))

    def empty(self, queue: str, limit: int = 500) -> int:
        """Cancel up to `limit` jobs that wait in a queue, the most urgent first. Returns how many: fewer, and none is
        left. In portions, because Redis answers nobody else meanwhile.
        """
        return int(self._empty(queue, self._retention_ms, limit, *PRIORITY_STEPS))

    def standing(self, id: str) -> Standing | None:
        """Where a queued job waits. None: it does not wait."""
        answer = self._standing(id, *PRIORITY_STEPS)
        return None if not answer else Standing(int(answer[0]), Backlog(*map(int, answer[1:])))

    def page(
        self, owner: str | None, *, state: JobState | None = None, model: str = "", after: str = "", limit: int = 20
    ) -> Page | None:
        """Jobs of an owner (None: everybody's), newest first, after the one named. None: that one is not there.

        Where few of very many jobs are of this state and model, a page may be short, or empty, and there may be more.
        """
        rank = 0
        while True:
            answer = self._list("*" if owner is None else owner, state or "", model, limit, after, _LOOKS, rank)
            if answer == 0:
                return None
            last, more, rank, *ids = answer
            if last or more == "0":  # else all that was looked at is gone, and nothing to go on after
                break
        with self._client.pipeline(transaction=False) as pipe:
            for id in ids:
                pipe.hgetall(keys.job(id))
            found: Any = pipe.execute()
        jobs = []
        for id, fields in zip(ids, found, strict=True):
            try:
                if fields:  # one may have gone, or moved on, since the list was read
                    jobs.append(Job.of(id, fields))
            except Unreadable as error:
                TALLY.note(error)
        return Page(jobs, last, more == "1")

    def backlog(self, queue: str) -> Backlog:
        """What a queue holds, in jobs and in estimated work."""
        fields: Any = self._client.hmget(keys.backlog(queue), "queued", "queued_ms", "running", "running_ms")
        return Backlog(*(int(field or 0) for field in fields))
