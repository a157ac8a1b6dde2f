"""Jobs whose end somebody wants to be told: kept from the very script that ends them until they were told, or given up.

Each owner has lanes, one a receiver, and is served in turn: however much waits for one, the next is another's. Knows
who is due and how often it was tried; knows nothing of how anybody is told.
`lua/shared/lanes.lua` says which keys hold it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Self

from core.config import Settings
from core.jobs.connection import RedisClient, RedisStore
from core.jobs.record import milliseconds, to_json


@dataclass(frozen=True, slots=True)
class Due:
    """A job whose end is to be told now, and how often that failed. `host` is the receiver's, with its port.

    Another job may have its id when that was told: nothing that is said of this one is taken for that one's.
    """

    id: str
    tries: int
    owner: str
    host: str
    incarnation: str = ""


class Webhooks(RedisStore):
    """The lanes in which webhooks wait.

    `retention_s`: how long the record of a job that ended is kept, once that was told.
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
    ) -> list[Due]:
        """Jobs whose end is to be told now, of all owners and receivers in turn; nobody else gets them `within_s`.

        Nothing of the owners, and of the lanes (owner and receiver), that are named.
        """
        skipped = {
            "owners": dict.fromkeys(without, True),
            "lanes": {f"{owner}|{host}": True for owner, host in without_lanes},
        }
        flat: Any = self._due(milliseconds(within_s), limit, of_owner, of_lane, to_json(skipped))
        return [
            Due(id, int(tries), owner, host, incarnation)
            for id, tries, owner, host, incarnation in zip(*(flat[k::5] for k in range(5)), strict=True)
        ]

    def settle(self, due: Due) -> None:
        """It was told, or is given up."""
        self._settle(due.id, due.owner, due.host, "", 0, self._retention_ms, due.incarnation)

    def again(self, due: Due, after_s: float, *, failed: bool = True) -> None:
        """It could not be told, and is tried again. Not `failed`: nobody tried."""
        after_ms = milliseconds(after_s)
        self._settle(due.id, due.owner, due.host, after_ms, int(failed), self._retention_ms, due.incarnation)
