"""Queues webhooks for ended jobs, from the script that ends a job until delivery succeeds or is given up.

Each owner has one lane per receiver, served in turn: a backlog for one receiver does not delay another. Delivery itself
is not done here. `lua/shared/lanes.lua` documents the keys.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Self

from core.config import Settings
from core.jobs.connection import RedisClient, RedisStore
from core.jobs.record import milliseconds, to_json


@dataclass(frozen=True, slots=True)
class DueWebhook:
    """A webhook due now, and its failed attempts so far. `host` is the receiver's, with its port. `live`: the
    message is of a job that runs. It may have ended if its start is asked for, and its end is not.

    The job's id may have been reused: the outcome is recorded for this incarnation only.
    """

    id: str
    tries: int
    owner: str
    host: str
    incarnation: str = ""
    live: bool = False


class WebhookQueue(RedisStore):
    """The lanes in which webhooks wait.

    `retention_s`: how long an ended job's record is kept after delivery.
    """

    def __init__(self, redis: RedisClient | str, *, retention_s: float = 86_400.0) -> None:
        super().__init__(redis)
        self._due = self._client.script("webhooks/due")
        self._settle = self._client.script("webhooks/settle")
        self._retention_ms = milliseconds(retention_s)

    @classmethod
    def of(cls, settings: Settings, redis: RedisClient | None = None) -> Self:
        return cls(redis or settings.redis_url, retention_s=settings.retention_s)

    def due(
        self,
        within_s: float,
        limit: int = 20,
        *,
        of_owner: int = 20,
        of_lane: int = 20,
        without: Collection[str] = (),
        without_lanes: Collection[tuple[str, str]] = (),
    ) -> list[DueWebhook]:
        """Take due webhooks, of all owners and receivers in turn; no other caller gets them `within_s`.

        The owners and lanes (owner and receiver) given are skipped.
        """
        skipped = {
            "owners": dict.fromkeys(without, True),
            "lanes": {f"{owner}|{host}": True for owner, host in without_lanes},
        }
        flat: Any = self._due(milliseconds(within_s), limit, of_owner, of_lane, to_json(skipped))
        return [
            DueWebhook(id, int(tries), owner, host, incarnation, lives == "1")
            for id, tries, owner, host, incarnation, lives in zip(*(flat[k::6] for k in range(6)), strict=True)
        ]

    def settle(self, due: DueWebhook) -> None:
        """Record that it was delivered, or given up."""
        self._settle(due.id, due.owner, due.host, "", 0, self._retention_ms, due.incarnation, int(due.live))

    def again(self, due: DueWebhook, after_s: float, *, failed: bool = True) -> None:
        """Requeue one that could not be delivered. Without `failed`, no attempt is counted."""
        after_ms = milliseconds(after_s)
        self._settle(
            due.id, due.owner, due.host, after_ms, int(failed), self._retention_ms, due.incarnation, int(due.live)
        )
