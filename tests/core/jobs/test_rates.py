"""Our counters held against the `limits` library's: same keys, same counts, same arithmetic; exact under a crowd."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from limits import parse
from limits.storage import MemoryStorage, RedisStorage
from limits.strategies import SlidingWindowCounterRateLimiter

from core.jobs.connection import StoreDown
from core.jobs.rates import RateLimitCost, RateLimiter, rate_limit_state
from deployment.redis import RedisServer

RATES = ("3/second", "60/minute", "7/hour", "1000/day")


class Seen(MemoryStorage):
    """A storage whose windows are what a test says."""

    STORAGE_SCHEME = None

    def __init__(self, window: tuple[int, float, int, float]) -> None:
        super().__init__()
        self.window = window

    def get_sliding_window(self, key: str, expiry: int) -> tuple[int, float, int, float]:
        return self.window


@pytest.fixture
def rates(redis_url: str) -> Iterator[RateLimiter]:
    rates = RateLimiter(redis_url)
    yield rates
    rates.close()


@pytest.fixture
def library(redis_url: str) -> SlidingWindowCounterRateLimiter:
    return SlidingWindowCounterRateLimiter(RedisStorage(redis_url, key_prefix="diptych:limits"))


@given(
    st.sampled_from(RATES), st.integers(0, 2000), st.floats(0, 1), st.integers(0, 2000), st.floats(0, 2),
    st.integers(-2, -1) | st.none(),
)  # fmt: skip
def test_a_window_means_what_the_library_says(
    rate: str, last: int, last_left: float, this: int, this_left: float, gone: int | None
) -> None:
    item = parse(rate)
    last_ms, this_ms = (round(left * item.get_expiry() * 1000) for left in (last_left, this_left))
    if gone is not None:
        last, last_ms = 0, gone  # as Redis tells the time to live of what is not there
    before = time.time()
    said = SlidingWindowCounterRateLimiter(Seen((last, max(0, last_ms) / 1000, this, this_ms / 1000))).get_window_stats(
        item, "x"
    )
    after = time.time()
    ours = rate_limit_state(item, True, (last, last_ms, this, this_ms))
    assert (ours.allowed, ours.limit, ours.remaining) == (True, item.amount, max(0, said.remaining))
    assert said.reset_time - after - 1e-3 <= ours.reset_s <= said.reset_time - before + 1e-3


@pytest.mark.parametrize("rate", RATES[2:])
def test_counted_where_the_library_looks(
    rates: RateLimiter, library: SlidingWindowCounterRateLimiter, rate: str
) -> None:
    item = parse(rate)
    (first,) = rates.take(RateLimitCost(rate, "key", "requests", 2))
    assert (first.allowed, first.limit, first.remaining) == (True, item.amount, item.amount - 2)
    last, _, this, _ = library.storage.get_sliding_window(item.key_for("requests", "key"), item.get_expiry())
    assert last + this == 2
    assert library.hit(item, "requests", "key") and rates.take(RateLimitCost(rate, "other", "requests"))[0].allowed
    (told,) = rates.take(RateLimitCost(rate, "key", "requests"))
    assert told.allowed and told.remaining == item.amount - 4


def test_nobody_gets_more_than_the_rate(rates: RateLimiter) -> None:
    with ThreadPoolExecutor(16) as crowd:
        told = list(crowd.map(lambda _: rates.take(RateLimitCost("30/hour", "key", "requests"))[0], range(100)))
    allowed = [one for one in told if one.allowed]
    assert sorted(one.remaining for one in allowed) == list(range(30))
    assert all(one.remaining == 0 and one.reset_s > 0 for one in told if not one.allowed)
    assert not rates.take(RateLimitCost("30/hour", "key", "requests"))[0].allowed
    assert rates.take(RateLimitCost("30/hour", "key", "pictures"))[0].remaining == 29, "another counter"


def test_what_costs_more_than_a_window_is_all_of_it(rates: RateLimiter) -> None:
    assert rates.take(RateLimitCost("5/day", "key", "pictures", 9))[0].remaining == 0
    (refused,) = rates.take(RateLimitCost("5/day", "key", "pictures"))
    assert not refused.allowed and 1 <= refused.retry_after_s <= 120


def test_a_redis_that_is_away(rates: RateLimiter, mortal: RedisServer) -> None:
    mortal.kill()
    with pytest.raises(StoreDown):
        rates.take(RateLimitCost("5/day", "key", "pictures"))
    mortal.start()
    assert rates.take(RateLimitCost("5/day", "key", "pictures"))[0].remaining == 4


def test_counters_end(rates: RateLimiter, client: redis.Redis) -> None:
    rates.take(RateLimitCost("5/minute", "key", "pictures"))
    assert all(0 < client.ttl(key) <= 120 for key in client.scan_iter("diptych:limits:*"))
