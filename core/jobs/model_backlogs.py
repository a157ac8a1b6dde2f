"""Reads the load of each model: its queued and running jobs, and their estimated work."""

from __future__ import annotations

from collections import Counter
from typing import Any

from core.jobs.broker import QUEUES
from core.jobs.connection import RedisClient, RedisStore
from core.jobs.record import QueueBacklog

_LOOKS = 1000  # jobs that a call examines of a queue, and of all that run: a millisecond or two of Redis


class ModelBacklogs(RedisStore):
    """The load of each model, counted over the job records. Changes nothing."""

    def __init__(self, redis: RedisClient | str, looks: int = _LOOKS) -> None:
        """`looks`: the most queued jobs of a queue, and the most running jobs, that a call examines."""
        super().__init__(redis)
        self._looks = looks
        self._by_model = self._client.script("jobs/by_model")

    def read(self) -> dict[str, QueueBacklog]:
        """The load of every model that has live jobs, by its name. A job counts for a millisecond at least, so that no
        load without work hides jobs.

        Of more than `looks` jobs the most urgent and the oldest are examined, and the others count as divided among the
        models like these, with as much work a job.
        """
        answer: Any = self._by_model(self._looks, *QUEUES)
        jobs: Counter[tuple[str, str]] = Counter()
        work_ms: Counter[tuple[str, str]] = Counter()
        for model, state, count, ms in zip(answer[::4], answer[1::4], answer[2::4], answer[3::4], strict=True):
            jobs[model, state] += count
            work_ms[model, state] += ms
        return {
            model: QueueBacklog(
                jobs[model, "queued"], work_ms[model, "queued"], jobs[model, "running"], work_ms[model, "running"]
            )
            for model in {*answer[::4]}
        }
