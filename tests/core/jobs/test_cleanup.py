"""The indices of jobs keep pace with what ends, and a list steps over what has gone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from core.jobs.job_lists import _LOOKS
from core.jobs.limits import JobLimits
from core.jobs.reaper import Reaper
from core.jobs.record import new_id
from core.jobs.store import JobStore
from tests.core import refusals
from tests.core.jobs import books
from tests.core.jobs.drafts import make
from tests.core.present import present


@pytest.fixture
def store(redis_url: str) -> Iterator[JobStore]:
    """Room for thousands, and no wait that a slow machine comes near."""
    store = JobStore(redis_url, JobLimits(lease_s=1000, resend_s=1000, overtime_s=1000, max_queued=100_000))
    yield store
    store.close()


def many(store: JobStore, count: int, model: str = "emoji-xl", owner: str = "eve") -> list[str]:
    return [make(store, model=model, owner=owner) for _ in range(count)]


def make_dead(store: JobStore, client: redis.Redis, count: int) -> None:
    """Leave in every index what so many jobs leave whose records' time is up: one job's entries, under other ids."""
    (id,) = many(store, 1)
    scores = {
        key: score for key in client.scan_iter("diptych:*", _type="zset")
        if (score := client.zscore(key, f"eve|{id}")) is not None
    }  # fmt: skip
    assert {"diptych:jobs", "diptych:jobs:eve"} <= {*scores}
    names = [f"eve|{new_id()}" for _ in range(count - 1)]
    for key, score in scores.items():
        client.zadd(key, dict.fromkeys(names, score))
    client.zadd("diptych:ended", dict.fromkeys(names, 1))
    die(client, [id])


def scripts(client: redis.Redis) -> int:
    """How many scripts Redis has run."""
    counted = client.info("commandstats")
    return sum(int(counted.get(f"cmdstat_{name}", {"calls": 0})["calls"]) for name in ("eval", "evalsha"))


def die(client: redis.Redis, ids: list[str]) -> None:
    """Their records' time is up, as Redis ends them by itself."""
    with client.pipeline(transaction=False) as pipe:
        for id in ids:
            pipe.delete(f"diptych:job:{id}")
            pipe.zadd("diptych:ended", {f"eve|{id}": 1})
        pipe.execute()


def test_one_wake_of_the_reaper_clears_all_that_is_over(store: JobStore, client: redis.Redis) -> None:
    make_dead(store, client, 1499)
    (kept,) = many(store, 1)
    store.cancel(kept)
    reaper, passes = Reaper(store.upkeep, lambda envelope: None), 0
    while reaper._pass():
        passes += 1
        assert passes < 100
    assert client.zcard("diptych:jobs") == client.zcard("diptych:jobs:eve") == client.zcard("diptych:ended") == 1


def test_a_record_that_is_still_there_stays_listed(store: JobStore, client: redis.Redis) -> None:
    """Its time is up in the list, and Redis has not ended it yet: it is looked at again then."""
    (id,) = many(store, 1)
    store.cancel(id)
    client.zadd("diptych:ended", {f"eve|{id}": 1})
    store.upkeep.sweep()
    assert client.zscore("diptych:jobs", f"eve|{id}") and (client.zscore("diptych:ended", f"eve|{id}") or 0) > 1
    client.pexpire(f"diptych:job:{id}", 1)
    while client.exists(f"diptych:job:{id}"):
        pass
    books.age(client, 0)
    client.zadd("diptych:ended", {f"eve|{id}": 1})
    store.upkeep.sweep()
    assert not client.zcard("diptych:jobs") and not client.zcard("diptych:ended")


def test_a_page_steps_over_thousands_that_are_gone(store: JobStore, client: redis.Redis) -> None:
    first = many(store, 2)
    make_dead(store, client, 4500)
    last = many(store, 1)
    found, after, pages = [], "", 0
    while True:
        page = present(store.lists.page(None, limit=2, after=after))
        assert page.after or not page.more
        found += [job.id for job in page.jobs]
        after, pages = page.after, pages + 1
        if not page.more:
            break
    assert found == [last[0], *reversed(first)] and pages <= 5
    assert client.zcard("diptych:jobs") == 3


def test_a_page_of_nothing_but_what_is_gone_is_the_last(store: JobStore, client: redis.Redis) -> None:
    make_dead(store, client, 4500)
    before = scripts(client)
    assert store.lists.page("eve", limit=1) is not None
    assert scripts(client) - before >= 4500 // _LOOKS, "one script keeps Redis for no longer than that many take"
    make_dead(store, client, 4500)
    for model in ("", "emoji-xl"):
        page = present(store.lists.page("eve", model=model))
        assert not page.jobs and not page.more


@pytest.mark.parametrize("live", [True, False])
def test_what_happened_to_an_erased_job_is_soon_forgotten(store: JobStore, client: redis.Redis, live: bool) -> None:
    """At once, or as soon as those who followed it to its end may have read that."""
    (id,) = many(store, 1)
    if not live:
        store.cancel(id)
    assert store.erase(id)
    left_ms: Any = client.pttl(f"diptych:events:{id}")
    assert 0 < left_ms <= 60_000 if live else left_ms == -2


def test_a_list_of_a_redis_that_takes_no_writes(store: JobStore, client: redis.Redis) -> None:
    first = many(store, 1)
    make_dead(store, client, 2500)
    with refusals.no_replicas(client):
        page = present(store.lists.page(None))
    assert [job.id for job in page.jobs] == first and not page.more


def test_a_clock_that_is_set_back_delays_no_lease(store: JobStore, client: redis.Redis) -> None:
    running, waiting = many(store, 2)
    assert store.leases.claim(running, "ada") is not None
    store.upkeep.sweep()
    books.age(client, -100_000)  # all that is noted lies a day ahead now
    store.upkeep.sweep()
    books.age(client, 1100)  # a lease later
    store.upkeep.sweep()  # nobody swept meanwhile, which gives each lease its time once more
    books.age(client, 1100)
    assert running in {envelope.id for envelope in store.upkeep.sweep().send}
    assert waiting not in client.zrange("diptych:leases", 0, -1)
