"""Reads the load of each model: its queued and running jobs, and their estimated work."""

from __future__ import annotations

from typing import Any

from core.jobs import keys
from core.jobs.broker import model_queue
from core.jobs.connection import RedisClient
from core.jobs.record import QueueBacklog

_FIELDS = ("queued", "queued_ms", "running", "running_ms")


class ModelBacklogs:
    """The loads of queues, whole and by model. Changes nothing."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client

    def whole(self, queue: str) -> QueueBacklog:
        """A queue's load."""
        return _backlog(self._client.hmget(keys.backlog(queue), *_FIELDS))

    def read(self, queue: str) -> dict[str, QueueBacklog]:
        """The load of a queue by model, of the models of which jobs wait or run; their sum is the queue's load."""
        reply: Any = self._client.smembers(keys.active_models(queue))
        models = sorted(reply)
        with self._client.pipeline(transaction=False) as pipe:
            for model in models:
                pipe.hmget(keys.backlog(model_queue(queue, model)), *_FIELDS)
            return dict(zip(models, map(_backlog, pipe.execute()), strict=True))


def _backlog(fields: Any) -> QueueBacklog:
    # Below zero for a while, by model, where a process of an older version has ended what it did not count.
    return QueueBacklog(*(max(0, int(field or 0)) for field in fields))
