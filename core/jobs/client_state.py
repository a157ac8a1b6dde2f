"""Stores what an API keeps between the requests of an owner's clients: options that were set, and open requests.

Keys in Redis, all of which expire; `api` is the API's name:

    {api}_options:{owner}        hash: an option's name → its value as JSON
    {api}_open:{owner}           hash: id of a job whose request is open → seconds since the epoch
    {api}_task:{owner}:{task}    id of the job of a task whose name the client chose
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from core.jobs import keys
from core.jobs.connection import RedisClient, RedisStore
from core.jobs.keys import PREFIX
from core.jobs.record import JobState

_OPTIONS_MS = 30 * 86_400_000
_OPEN_MS = 86_400_000  # as long as a job's record is kept by default
_TASK_MS = 3_600_000
_MOST = 100  # open requests that are looked at
_LIVE = (JobState.QUEUED, JobState.RUNNING)


@dataclass(frozen=True, slots=True)
class OpenJob:
    """A live job for which a request waits."""

    id: str
    state: JobState
    incarnation: str


class ClientState(RedisStore):
    """The options and open requests of all owners at one API; "" is the owner of all requests without keys."""

    def __init__(self, redis: RedisClient | str, api: str) -> None:
        super().__init__(redis)
        self._api = api

    def options(self, owner: str) -> dict[str, Any]:
        """The options that the owner set, by name."""
        reply: Any = self._client.hgetall(self._options_key(owner))
        return {name: json.loads(text) for name, text in reply.items()}

    def set_options(self, owner: str, values: Mapping[str, Any]) -> None:
        """Set these options, which are kept for a month from now."""
        with self._client.pipeline(transaction=False) as pipe:
            pipe.hset(self._options_key(owner), mapping={name: json.dumps(value) for name, value in values.items()})
            pipe.pexpire(self._options_key(owner), _OPTIONS_MS)
            pipe.execute()

    def open(self, owner: str, job_id: str, task: str | None = None) -> None:
        """Note that a request waits for this job, and which task it is."""
        with self._client.pipeline(transaction=False) as pipe:
            pipe.hset(self._open_key(owner), job_id, str(int(time.time())))
            pipe.pexpire(self._open_key(owner), _OPEN_MS)
            if task is not None:
                pipe.set(self._task_key(owner, task), job_id, px=_TASK_MS)
            pipe.execute()

    def close_requests(self, owner: str, *job_ids: str) -> None:
        """Note that no request waits for these jobs any more."""
        self._client.hdel(self._open_key(owner), *job_ids)

    def open_jobs(self, owner: str) -> list[OpenJob]:
        """The live jobs for which requests wait, in the order of these, at most a hundred. What else there is, and what
        is too old, is forgotten.
        """
        reply: Any = self._client.hgetall(self._open_key(owner))
        oldest = time.time() - _OPEN_MS / 1000
        ids = sorted((id for id in reply if int(reply[id]) >= oldest), key=lambda id: int(reply[id]))[:_MOST]
        with self._client.pipeline(transaction=False) as pipe:
            for id in ids:
                pipe.hmget(keys.job(id), "owner", "state", "incarnation")
            records: Any = pipe.execute()
        jobs = [
            OpenJob(id, JobState(state), incarnation or "")
            for id, (owned_by, state, incarnation) in zip(ids, records, strict=True)
            if owned_by == owner and state in _LIVE
        ]
        live = {job.id for job in jobs}
        if gone := [id for id in reply if (id in ids and id not in live) or int(reply[id]) < oldest]:
            self.close_requests(owner, *gone)
        return jobs

    def job_of_task(self, owner: str, task: str) -> str | None:
        """The id of the task's job; None if there was none in the last hour."""
        reply: Any = self._client.get(self._task_key(owner, task))
        return None if reply is None else str(reply)

    def _options_key(self, owner: str) -> str:
        return f"{PREFIX}{self._api}_options:{owner}"

    def _open_key(self, owner: str) -> str:
        return f"{PREFIX}{self._api}_open:{owner}"

    def _task_key(self, owner: str, task: str) -> str:
        return f"{PREFIX}{self._api}_task:{owner}:{hashlib.sha256(task.encode()).hexdigest()[:32]}"
