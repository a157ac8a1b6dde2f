"""Stores job records; every state change is one Lua script, so that a job is never lost and never finished twice.

Does not use Celery: callers send the envelopes that its methods return.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

from core.config import Settings
from core.jobs import creation, keys, rates
from core.jobs.connection import RedisClient, RedisStore
from core.jobs.job_lists import JobLists
from core.jobs.leases import JobLeases
from core.jobs.limits import JobLimits
from core.jobs.model_backlogs import ModelBacklogs
from core.jobs.record import (
    FIELDS,
    Job,
    JobDraft,
    QueueBacklog,
    QueuePosition,
    milliseconds,
    pairs,
)
from core.jobs.upkeep import MARGIN_MS, JobUpkeep

_USUAL = JobLimits()
_KNOWN = tuple(name for name in FIELDS if name != "parameters")


class QueueFull(RuntimeError):
    """The queue's limit of waiting jobs is reached, or a limit of the owner. Not a `StoreError`: the store works."""

    def __init__(self, queue: str, limit: int) -> None:
        super().__init__(f"the {queue} queue holds {limit} jobs and takes no more")
        self.queue = queue
        self.limit = limit


class JobStore(RedisStore):
    """The job records: create, read and end jobs. Workers use its `leases`, sweeps its `upkeep`; `lists` reads many
    records, and `by_model` tells the load of each model.

    On a full Redis only `create` and `report` are refused. A call whose reply was lost may be repeated with the same
    arguments: it takes effect once, and returns the same result (except `claim`, which then returns None until the
    lease has expired).

    An id may be reused: where an `incarnation` may be given, a job of that id with another incarnation counts as
    unknown. A worker's `attempt` is its claim's `fence`; a bare number is equivalent where no id is reused.
    """

    def __init__(self, redis: RedisClient | str, limits: JobLimits = _USUAL) -> None:
        super().__init__(redis)
        self.leases = JobLeases(self._client, limits)
        self.upkeep = JobUpkeep(self._client, limits)
        self.by_model = ModelBacklogs(self._client)
        self.lists = JobLists(self._client)
        self._retention_ms = milliseconds(limits.retention_s)
        self._max_queued = limits.max_queued
        self._create = self._client.script("jobs/create", rates.LIMITS)
        self._cancel = self._client.script("jobs/cancel")
        self._follow = self._client.script("jobs/follow")
        self._standing = self._client.script("jobs/standing")
        self._erase = self._client.script("jobs/erase")
        self._empty = self._client.script("jobs/empty")

    @classmethod
    def of(cls, settings: Settings, redis: RedisClient | None = None) -> Self:
        return cls(redis or settings.redis_url, JobLimits.of(settings))

    def create(
        self,
        draft: JobDraft[Any],
        message: str = "",
        charges: Sequence[rates.RateLimitCost] = (),
        limits: creation.OwnerLimits = creation.UNLIMITED,
    ) -> Job:
        """Create a queued job's record, and push `message` into its queue's list, which makes a worker look at it.

        Without a message the caller sends the draft's `envelope`. Raises `QueueFull`, also where a limit of the owner
        or of `charges` is reached, and `StoreFull`, with nothing created or charged. If the job exists its summary is
        returned, unchanged; where clients choose ids, its `owner` and `digest` tell whether it is the same.
        """
        answer = self._create(creation.argument(draft, self._max_queued, message, charges, limits=limits))
        job = creation.outcome(draft, charges, answer).job
        if job is None:
            raise QueueFull(draft.modality, self._max_queued)
        return job

    def get(self, id: str) -> Job | None:
        """Read a record; None if it does not exist or has expired. Raises `UnreadableRecord`."""
        fields: Any = self._client.hgetall(keys.job(id))
        return Job.of(id, fields) if fields else None

    def reread(self, job: Job) -> Job | None:
        """Read the record of a job whose request is known. None: there is none, or another job has the id. Raises
        `UnreadableRecord`.
        """
        values: Any = self._client.hmget(keys.job(job.id), _KNOWN)
        fields = {name: value for name, value in zip(_KNOWN, values, strict=True) if value is not None}
        read = Job.of(job.id, {**fields, "parameters": "{}"}) if fields else None
        return None if read is None or not read.same(job) else replace(read, parameters=job.parameters)

    def preview(self, id: str, image: int, incarnation: str = "") -> bytes | None:
        """The newest preview of an unfinished image, as PNG. None: there is none."""
        reply: Any = self._client.hmget(keys.preview(id), str(image), "of")
        look, of = reply
        return base64.b64decode(look) if look and incarnation in ("", of) else None

    def cancel(self, id: str, incarnation: str = "") -> Job | None:
        """Cancel a queued or running job at once and notify its worker. An ended job stays unchanged. None: unknown.

        Returns it as `JobLists.summary` does.
        """
        fields = pairs(self._cancel(id, self._retention_ms, incarnation))
        return Job.of(id, fields) if fields else None

    def erase(self, id: str, incarnation: str = "") -> bool:
        """Delete a job, after cancelling it if it lives. Its artifacts go too, unless others reference them. False:
        unknown.

        A worker still running it cannot write to a later job with this id.
        """
        return bool(self._erase(id, self._retention_ms, self._retention_ms + MARGIN_MS, incarnation))

    def follow(self, id: str, incarnation: str = "") -> bool:
        """Report a live job's progress from now on, with all of its text. False: the job is not live."""
        return bool(self._follow(id, incarnation))

    def empty(self, queue: str, limit: int = 500) -> int:
        """Cancel up to `limit` waiting jobs of a queue. Returns how many; fewer than `limit`
        means the queue is empty. In portions, because Redis serves nobody else during a script.
        """
        return int(self._empty(queue, self._retention_ms, limit))

    def standing(self, id: str) -> QueuePosition | None:
        """The position of a queued job. None: it is not queued."""
        answer = self._standing(id)
        return None if not answer else QueuePosition(int(answer[0]), QueueBacklog(*map(int, answer[1:])))

    def backlog(self, queue: str) -> QueueBacklog:
        """A queue's load, in jobs and in estimated work."""
        return self.by_model.whole(queue)
