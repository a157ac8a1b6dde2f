"""Our counters held against the `limits` library's: same keys, same counts, same arithmetic; exact under a crowd."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from limits import parse
from limits.storage import MemoryStorage, RedisStorage
from limits.strategies import SlidingWindowCounterRateLimiter

from core.jobs.connection import StoreDown
from core.jobs.rates import RateLimitCost, RateLimiter, rate_limit_state
from deployment.redis import RedisServer

PICTURES = RateLimitCost("5/day", "key", "pictures")
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
    cost = RateLimitCost("30/hour", "key", "requests")
    with ThreadPoolExecutor(16) as crowd:
        told = list(crowd.map(lambda _: rates.take(cost)[0], range(100)))
    allowed = [one for one in told if one.allowed]
    assert sorted(one.remaining for one in allowed) == list(range(30))
    assert all(one.remaining == 0 and one.reset_s > 0 for one in told if not one.allowed)
    assert not rates.take(cost)[0].allowed
    assert rates.take(RateLimitCost("30/hour", "key", "pictures"))[0].remaining == 29, "another counter"


def test_what_costs_more_than_the_whole_limit_is_refused_and_costs_nothing(rates: RateLimiter) -> None:
    (refused,) = rates.take(RateLimitCost("5/day", "key", "pictures", 6))
    assert not refused.allowed and refused.never and refused.remaining == 5
    assert rates.take(RateLimitCost("5/day", "key", "pictures", 5))[0].remaining == 0
    (refused,) = rates.take(PICTURES)
    assert not refused.allowed and not refused.never and 1 <= refused.retry_after_s <= 120


def test_a_redis_that_is_away(rates: RateLimiter, mortal: RedisServer) -> None:
    mortal.kill()
    with pytest.raises(StoreDown):
        rates.take(PICTURES)
    mortal.start()
    assert rates.take(PICTURES)[0].remaining == 4


def test_counters_end(rates: RateLimiter, client: redis.Redis) -> None:
    rates.take(RateLimitCost("5/minute", "key", "pictures"))
    assert all(0 < client.ttl(key) <= 120 for key in client.scan_iter("diptych:limits:*"))


def fits(room: int, last: int, last_ms: float, this: int, this_ms: float, span_ms: float, after_ms: float) -> bool:
    """Whether the library's script finds `room` in the windows later, if nothing is added."""
    last_ms, this_ms = last_ms - after_ms, this_ms - after_ms
    if 0 < this_ms < span_ms:
        last, last_ms, this = this, this_ms, 0
    elif this_ms <= 0:
        last, this = 0, 0
    return math.floor(last * max(0.0, last_ms) / span_ms) + this <= room


@given(
    st.sampled_from(RATES), st.integers(0, 2000), st.integers(0, 2000), st.integers(1, 1500), st.floats(1e-3, 1 - 1e-3)
)
def test_a_refused_cost_fits_after_its_wait_and_not_before(
    rate: str, last: int, this: int, cost: int, left: float
) -> None:
    item = parse(rate)
    span_ms = item.get_expiry() * 1000
    last, this = min(last, item.amount), min(this, item.amount)
    windows = last, round(span_ms * left), this, round(span_ms * (1 + left))
    room = item.amount - cost
    state = rate_limit_state(item, False, windows, cost)
    assert state.never == (room < 0) and 1 <= state.retry_after_s <= 120
    if room < 0 or fits(room, *windows, span_ms, 0):
        return
    wait_ms = 1000 * state.wait_s
    assert 0 <= wait_ms <= 2 * span_ms
    slack_ms = span_ms * 1e-9 + 0.01
    assert fits(room, *windows, span_ms, wait_ms + slack_ms)
    assert wait_ms < slack_ms or not fits(room, *windows, span_ms, wait_ms - slack_ms)


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from(("", "a", "b")), st.integers(0, 22)), min_size=1, max_size=3),
        min_size=1, max_size=12,
    )
)  # fmt: skip
def test_costs_count_together_or_not_at_all(
    rates: RateLimiter, client: redis.Redis, calls: list[list[tuple[str, int]]]
) -> None:
    client.flushdb()
    limits = {"": 20, "a": 9, "b": 14}
    counted = dict.fromkeys(limits, 0)
    for costs in calls:
        charges = [RateLimitCost(f"{limits[model]}/day", "key", "pictures", n, model) for model, n in costs]
        states = rates.take(*charges)
        after = dict(counted)
        for k, (model, n) in enumerate(costs):
            if after[model] + n > limits[model]:
                assert [state.allowed for state in states] == [True] * k + [False]
                assert states[-1].wait_s > 0 and states[-1].never == (n > limits[model])
                break
            after[model] += n
        else:
            assert all(state.allowed for state in states) and len(states) == len(costs)
            counted = after
    for model, limit in limits.items():
        (state,) = rates.take(RateLimitCost(f"{limit}/day", "key", "pictures", 0, model))
        assert state.remaining == limit - counted[model]


def test_what_is_given_back_counts_no_more_also_once_its_window_is_the_previous_one(
    rates: RateLimiter, client: redis.Redis
) -> None:
    cost = RateLimitCost("9/day", "key", "pictures", 4)
    (first,) = rates.take(cost)
    rates.refund(cost)
    assert first.remaining == 5 and rates.take(cost)[0].remaining == 5
    (this,) = client.keys("diptych:limits:*")
    client.pexpire(this, 86_000_000)  # its day is over
    assert rates.take(RateLimitCost("9/day", "key", "pictures"))[0].allowed
    rates.refund(cost)
    assert client.mget(f"{this}/-1", this) == ["1", "0"], "at most what is there, of the current one first"
    rates.refund(cost)
    assert client.mget(f"{this}/-1", this) == ["0", "0"]
