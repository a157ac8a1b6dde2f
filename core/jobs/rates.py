"""Rate limits: counters in Redis shared by all replicas, using the algorithm of the `limits` library.

Uses the library's windows, keys and scripts; the result is computed here, so that a counter costs one round trip, or
none where it is part of another script.
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

# The library's own scripts, as functions for ours to call. They use KEYS and ARGV as parameter names.
LIMITS = f"""
local function limits_acquire(KEYS, ARGV)
{RedisStorage.SCRIPT_ACQUIRE_SLIDING_WINDOW.decode()}
end

local function limits_window(KEYS, ARGV)
{RedisStorage.SCRIPT_SLIDING_WINDOW.decode()}
end

"""


@dataclass(frozen=True, slots=True)
class RateLimitState:
    """A counter's state. `allowed`: the request just counted was within the limit; `reset_s`: when the full limit is
    available again; `wait_s`: when the refused request would be within it, infinite for one that costs more than the
    whole limit.
    """

    allowed: bool
    limit: int
    remaining: int
    reset_s: float
    wait_s: float = 0.0

    @property
    def never(self) -> bool:
        """Whether the refused request costs more than the whole limit."""
        return math.isinf(self.wait_s)

    @property
    def retry_after_s(self) -> int:
        """The seconds after which a retry may succeed, clamped to 1 to 120."""
        return math.ceil(min(120, max(1, self.wait_s)))


@dataclass(frozen=True, slots=True)
class RateLimitCost:
    """A cost against a rate limit such as 60/minute. `tenant` is the caller, `unit` the limited action, `model` the
    only model whose actions count; empty: all count.
    """

    rate: str
    tenant: str
    unit: str
    cost: int = 1
    model: str = ""

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments of `charge` in `lua/shared/charge.lua`."""
        item = _parsed(self.rate)
        last, this = _keys(self.rate, self.unit, self.tenant, self.model)
        return last, this, str(item.amount), str(item.get_expiry()), str(self.cost)

    @property
    def window_s(self) -> int:
        """The seconds of a window of the rate."""
        return int(_parsed(self.rate).get_expiry())

    @property
    def limit(self) -> int:
        """The number of its unit that the rate allows per window."""
        return _parsed(self.rate).amount

    def standing(self, reply: Sequence[int]) -> RateLimitState:
        """Decode `charge`'s answer: allowed, then count and remaining ms of the previous window and of the current
        one.
        """
        allowed, *window = reply
        return rate_limit_state(_parsed(self.rate), bool(allowed), window, self.cost)


def rate_limit_state(item: RateLimitItem, allowed: bool, window: Sequence[int], cost: int = 1) -> RateLimitState:
    """Compute what the library's `SlidingWindowCounterRateLimiter.get_window_stats` does, on values its script has
    read, and when a refused cost fits.
    """
    last, last_ms, this, this_ms = window
    last_s, this_s, span_s = max(0, last_ms) / 1000, max(0, this_ms) / 1000, item.get_expiry()
    remaining = item.amount - math.floor(last * last_s / span_s + this)
    resets = [last_s % (span_s / last)] if last else []
    resets += [this_s % span_s] if this else []
    if allowed:
        wait_s = 0.0
    elif cost > item.amount:
        wait_s = math.inf
    else:
        wait_s = _wait_s(item.amount - cost, last, last_s, this, this_s, span_s)
    return RateLimitState(allowed, item.amount, max(0, remaining), min(resets, default=0.0), wait_s)


def _wait_s(room: int, last: int, last_s: float, this: int, this_s: float, span_s: float) -> float:
    """Seconds until the windows count `room` at most, if nothing is added.

    The previous window's count fades evenly until its end; then the current one becomes the previous.
    """
    fading, left_s = (last, last_s) if this <= room else (this, this_s)
    above = room - this if this <= room else room
    return max(0.0, left_s - (above + 1) * span_s / fading) if fading else 0.0


class RateLimiter(RedisStore):
    """Rate limit counters. Windows slide, so that two bursts cannot meet at a window's border."""

    def __init__(self, redis: RedisClient | str) -> None:
        super().__init__(redis)
        self._take = self._client.script("rates/take", LIMITS)
        self._refund = self._client.script("rates/refund")

    def take(self, *charges: RateLimitCost) -> list[RateLimitState]:
        """Charge the counters, all or none; returns their states, up to the first whose limit is exceeded.

        Raises `StoreDown`, and `StoreFull` if nothing can be written.
        """
        replies: list[str] = self._take(*_arguments(charges))
        return [
            charge.standing([int(number) for number in reply.split()])
            for charge, reply in zip(charges, replies, strict=False)
        ]

    def refund(self, *charges: RateLimitCost) -> None:
        """Take back charges whose purpose was refused."""
        self._refund(*_arguments(charges))


def _arguments(charges: Sequence[RateLimitCost]) -> list[str]:
    return [value for charge in charges for value in charge.arguments]


@cache
def _parsed(rate: str) -> RateLimitItem:
    return parse(rate)


@lru_cache(maxsize=4096)
def _keys(rate: str, unit: str, tenant: str, model: str) -> tuple[str, str]:
    """Keys of the previous and current window in the library's Redis storage."""
    this = f"{PREFIX}limits:{{{_parsed(rate).key_for(unit, tenant, *filter(None, [model]))}}}"
    return f"{this}/-1", this
