"""How often who may ask: counters in Redis that all replicas share, by the `limits` library.

Knows counters and windows; knows nothing of keys, and not what is counted.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import cache

from limits import RateLimitItem, parse
from limits.errors import StorageError
from limits.storage import RedisStorage
from limits.strategies import SlidingWindowCounterRateLimiter

from core.jobs.connection import StoreDown, connect
from core.jobs.keys import PREFIX


@dataclass(frozen=True, slots=True)
class Standing:
    """How a counter stands. `allowed`: what was asked for just now was within it; `reset_s`: when all of it is back."""

    allowed: bool
    limit: int
    remaining: int
    reset_s: float

    @property
    def retry_after_s(self) -> int:
        """When it is worth another try, within 1 to 120 seconds."""
        return min(120, max(1, math.ceil(self.reset_s)))


class Rates:
    """Thread-safe; connects at its first command. Windows slide, so that no two bursts meet at their border."""

    def __init__(self, url: str) -> None:
        self._client = connect(url)
        self._storage: RedisStorage | None = None

    def close(self) -> None:
        """Give the connections back."""
        self._client.close()

    def take(self, rate: str, who: str, what: str, cost: int = 1) -> Standing:
        """Count `cost` of something that somebody asks for, such as 60/minute allows it. Raises `StoreDown`."""
        item = _parsed(rate)
        try:
            limiter = SlidingWindowCounterRateLimiter(self._open())
            # What costs more than a whole window holds is counted as all of it.
            allowed = limiter.hit(item, what, who, cost=min(cost, item.amount))
            reset, remaining = limiter.get_window_stats(item, what, who)
        except StorageError as error:
            raise StoreDown("Redis does not count") from error
        return Standing(allowed, item.amount, max(0, remaining), max(0.0, reset - time.time()))

    def _open(self) -> RedisStorage:
        if self._storage is None:  # it talks to Redis as soon as it is made
            self._storage = RedisStorage(
                "redis://", connection_pool=self._client.connection_pool, key_prefix=f"{PREFIX}limits",
                wrap_exceptions=True,
            )  # fmt: skip
        return self._storage


@cache
def _parsed(rate: str) -> RateLimitItem:
    return parse(rate)
