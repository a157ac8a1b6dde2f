"""How often who may ask: counters in Redis that all replicas share, as the `limits` library counts.

Its windows, keys and scripts; what they tell is worked out here, so that a counter costs one round trip, or none where
it rides in another script. Knows counters and windows; knows nothing of keys, and not what is counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

from limits import RateLimitItem, parse
from limits.storage import RedisStorage

from core.jobs.connection import RedisClient, RedisStore
from core.jobs.keys import PREFIX

# The library's own scripts, as functions that ours can call. They name their parameters KEYS and ARGV.
LIMITS = f"""
local function limits_acquire(KEYS, ARGV)
{RedisStorage.SCRIPT_ACQUIRE_SLIDING_WINDOW.decode()}
end

local function limits_window(KEYS, ARGV)
{RedisStorage.SCRIPT_SLIDING_WINDOW.decode()}
end

"""


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


@dataclass(frozen=True, slots=True)
class Charge:
    """`cost` of something that somebody asks for, such as 60/minute allows it. `who` is asking for `what`."""

    rate: str
    who: str
    what: str
    cost: int = 1

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments of `charge` in `lua/shared/charge.lua`."""
        # What costs more than a whole window holds is counted as all of it.
        item = _parsed(self.rate)
        last, this = _keys(self.rate, self.what, self.who)
        return last, this, str(item.amount), str(item.get_expiry()), str(min(self.cost, item.amount))

    def standing(self, told: Sequence[int]) -> Standing:
        """From what that `charge` says: allowed, count and ms left of the last window, and of this one."""
        allowed, *window = told
        return standing(_parsed(self.rate), bool(allowed), window)


def standing(item: RateLimitItem, allowed: bool, window: Sequence[int]) -> Standing:
    """The library's `SlidingWindowCounterRateLimiter.get_window_stats` over what its script has read."""
    last, last_ms, this, this_ms = window
    last_s, this_s, span_s = max(0, last_ms) / 1000, max(0, this_ms) / 1000, item.get_expiry()
    remaining = item.amount - math.floor(last * last_s / span_s + this)
    resets = [last_s % (span_s / last)] if last else []
    resets += [this_s % span_s] if this else []
    return Standing(allowed, item.amount, max(0, remaining), min(resets, default=0.0))


class Rates(RedisStore):
    """The counters of rate limits. Windows slide, so that no two bursts meet at their border."""

    def __init__(self, redis: RedisClient | str) -> None:
        super().__init__(redis)
        self._take = self._client.script("rates/take", LIMITS)

    def take(self, charge: Charge) -> Standing:
        """Count. Raises `StoreDown`, and `StoreFull` where nothing can be counted."""
        told: str = self._take(*charge.arguments)
        return charge.standing([int(number) for number in told.split()])


@cache
def _parsed(rate: str) -> RateLimitItem:
    return parse(rate)


@lru_cache(maxsize=4096)
def _keys(rate: str, what: str, who: str) -> tuple[str, str]:
    """Where the library's Redis storage keeps the last window and this one."""
    this = f"{PREFIX}limits:{{{_parsed(rate).key_for(what, who)}}}"
    return f"{this}/-1", this
