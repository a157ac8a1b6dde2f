"""Reads the load of each model: its queued and running jobs, and their estimated work."""

from __future__ import annotations

from collections import Counter
from typing import Any

from core.jobs.connection import RedisClient
from core.jobs.record import QueueBacklog

_EXAMINED = 1000  # jobs of a state: a millisecond or two of Redis


class ModelBacklogs:
    """The load of the queues by model, counted over the job records. Changes nothing."""

    def __init__(self, client: RedisClient) -> None:
        self._by_model = client.script("jobs/by_model")

    def read(self, queue: str, examined: int = _EXAMINED) -> dict[str, QueueBacklog]:
        """The load of a queue by model, of the models of which jobs wait or run; their sum is the queue's load.

        Of more than `examined` jobs of a state the most urgent and the oldest are read, and the others count as divided
        among the models like these.
        """
        answer: Any = self._by_model(queue, examined)
        sums: Counter[tuple[str, str]] = Counter()
        for model, state, jobs, work_ms in zip(answer[::4], answer[1::4], answer[2::4], answer[3::4], strict=True):
            sums[model, state], sums[model, f"{state}_ms"] = jobs, work_ms
        names = ("queued", "queued_ms", "running", "running_ms")
        return {model: QueueBacklog(*(sums[model, name] for name in names)) for model in {*answer[::4]}}
