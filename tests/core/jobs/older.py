"""Turns jobs into what versions before queues by model left in Redis."""

from __future__ import annotations

from typing import Any

import redis

from tests.core.jobs.books import kombu


def sent_by_older(client: redis.Redis, id: str) -> None:
    """A queued job, as a version with one queue for all models wrote it; its message is the caller's."""
    record: Any = client.hgetall(f"diptych:job:{id}")
    queue, level = record["modality"], record["level"]
    own = kombu(queue, record["model"])
    client.hdel(f"diptych:job:{id}", "routed")
    client.zrem(f"diptych:sent:{own}:{level}", id)
    client.zadd(f"diptych:sent:{queue}:{level}", {id: record["sequence"]})
    client.hincrby(f"diptych:backlog:{own}", "queued", -1)
    client.hincrby(f"diptych:backlog:{own}", "queued_ms", -int(record["work_ms"]))
