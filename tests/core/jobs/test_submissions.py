"""Jobs made by one event loop: in order, exactly as many as may be, once each, whatever happens to the connection."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.jobs import submissions as module
from core.jobs.connection import StoreDown, StoreFull
from core.jobs.creation import JobCreation, OwnerLimits
from core.jobs.rates import RateLimitCost
from core.jobs.record import JobDraft, JobState, QueueBacklog, QueuePosition, new_id
from core.jobs.store import JobStore
from core.jobs.submissions import Submissions
from deployment.redis import RedisServer
from tests.core import refusals
from tests.core.jobs import books
from tests.core.jobs.drafts import draft
from tests.core.jobs.loops import PATIENCE_S, run
from tests.core.jobs.severed import Severed
from tests.core.present import present

REQUESTS = RateLimitCost("1000/hour", "key", "requests")
CHARGES = (REQUESTS, RateLimitCost("8/day", "key", "pictures"))


@asynccontextmanager
async def submitting(url: str, max_queued: int = 100_000) -> AsyncIterator[Submissions]:
    submissions = Submissions(url, max_queued)
    try:
        yield submissions
    finally:
        await submissions.close()


async def crowd(
    submissions: Submissions, n: int, charges: tuple[RateLimitCost, ...] = (), always: int = 0
) -> list[JobCreation]:
    drafts = [draft() for _ in range(n)]
    return await asyncio.gather(*(submissions.make(one, f"of {one.id}", charges, always) for one in drafts))


def sent(client: redis.Redis, level: int = 3) -> list[str]:
    """Messages of pictures that wait, oldest first."""
    messages: Any = client.lrange(f"image.emoji-xl:{level}", 0, -1)
    return list(messages[::-1])


DRAFTS = st.builds(
    JobDraft,
    id=st.builds(new_id),
    modality=st.sampled_from(("image", "text")),
    model=st.text("abc-/é", max_size=9),
    request=st.dictionaries(
        st.text(max_size=4),
        st.integers() | st.text() | st.booleans() | st.none() | st.floats(allow_nan=False, allow_infinity=False),
    ),
    priority=st.integers(0, 9),
    deadline_s=st.none() | st.floats(1000, 1e9),
    work_ms=st.integers(0, 10**12),
    owner=st.text("abz09_-", max_size=64),
    digest=st.text("0123456789abcdef", max_size=32),
    webhook=st.none() | st.fixed_dictionaries({"url": st.just("https://x/ü"), "base": st.text(max_size=5)}),
    inputs=st.lists(st.sampled_from(("a.png", "b.png")), max_size=3).map(tuple),
    trace=st.text("0123-", max_size=9),
)  # fmt: skip


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(DRAFTS, min_size=1, max_size=4))
def test_a_job_is_told_as_it_stands_in_redis(
    redis_url: str, store: JobStore, client: redis.Redis, drafts: list[JobDraft]
) -> None:
    async def work() -> list[JobCreation]:
        async with submitting(redis_url) as submissions:
            return list(await asyncio.gather(*(submissions.make(one) for one in drafts)))

    for one, made in zip(drafts, run(work), strict=True):
        assert made.created and made.job == store.get(one.id)
        assert client.hget(f"diptych:job:{one.id}", "trace") == one.trace
        assert client.zscore("diptych:deadlines", one.id) == (made.job.deadline and round(made.job.deadline * 1000))
    books.Books.of(client).check()


async def test_where_each_stands(submissions: Submissions, store: JobStore) -> None:
    made = [await submissions.make(draft(priority=p, work_ms=10)) for p in (5, 9, 0, 4, 9)]
    assert [one.standing.ahead for one in made] == [0, 1, 0, 2, 4]
    assert made[-1].standing == QueuePosition(4, QueueBacklog(5, 50, 0, 0)) == store.standing(made[-1].job.id)


async def test_messages_lie_in_the_order_of_the_calls(submissions: Submissions, client: redis.Redis) -> None:
    drafts = [draft(priority=(5, 9)[k % 2]) for k in range(300)]  # more than one round trip takes
    await asyncio.gather(*(submissions.make(one, one.id) for one in drafts))
    ids = [one.id for one in drafts]
    for level, own in ((3, ids[::2]), (9, ids[1::2])):
        assert sent(client, level) == client.zrange(f"diptych:sent:image.emoji-xl:{level}", 0, -1) == own


async def test_no_more_jobs_than_the_quota(redis_url: str, submissions: Submissions, client: redis.Redis) -> None:
    charges = (REQUESTS, RateLimitCost("30/hour", "key", "pictures"))
    async with submitting(redis_url) as other:  # another API
        halves = await asyncio.gather(crowd(submissions, 50, charges, 1), crowd(other, 50, charges, 1))
    made = [one for half in halves for one in half]
    jobs = [one for one in made if one.job is not None]
    assert sorted(one.charges[1].remaining for one in jobs) == list(range(30))
    assert sorted(one.charges[0].remaining for one in made) == list(range(900, 1000)), "asking was counted every time"
    assert all(not one.charges[1].allowed and not one.full for one in made if one.job is None)
    assert len(books.Books.of(client).records) == client.llen("image.emoji-xl:3") == 30


async def test_a_rate_that_is_used_up_costs_no_quota(submissions: Submissions) -> None:
    made = await crowd(submissions, 9, (RateLimitCost("4/hour", "key", "requests"), CHARGES[1]), 1)
    assert [one.job is not None for one in made] == [True] * 4 + [False] * 5
    assert [len(one.charges) for one in made] == [2] * 4 + [1] * 5
    assert made[3].charges[1].remaining == 4


async def test_a_full_queue_counts_who_asks_and_no_pictures(
    redis_url: str, store: JobStore, client: redis.Redis
) -> None:
    async with submitting(redis_url, max_queued=3) as submissions:
        made = await crowd(submissions, 5, CHARGES, 1)
        store.cancel(present(made[0].job).id)
        last = await submissions.make(draft(), "", CHARGES, 1)
    assert [(one.job is None, one.full) for one in made] == [(False, False)] * 3 + [(True, True)] * 2
    assert [one.charges[0].remaining for one in made] == [999, 998, 997, 996, 995]
    assert [len(one.charges) for one in made[3:]] == [1, 1]
    assert last.job is not None and last.charges[1].remaining == 4
    books.Books.of(client).check()


async def test_what_is_there_is_returned_and_costs_no_quota(
    submissions: Submissions, store: JobStore, client: redis.Redis
) -> None:
    wanted = draft(owner="key", digest="d")
    first = await submissions.make(wanted, "m", CHARGES, 1)
    store.leases.claim(wanted.id, "ada")
    again, counted = [await submissions.make(wanted, "m", CHARGES, always) for always in (1, 2)]
    assert first.created and not again.created and again.job == store.get(wanted.id) and again.standing is None
    assert again.job.state is JobState.RUNNING and [one.remaining for one in again.charges] == [998]
    assert [one.remaining for one in counted.charges] == [997, 6]
    assert sent(client) == ["m"]


async def test_an_answer_that_gets_lost(redis_url: str, store: JobStore, client: redis.Redis) -> None:
    """Redis has done it, and the connection breaks: it is asked again, and the jobs are there once."""
    severed, wanted = Severed(redis_url), [draft() for _ in range(3)]
    async with submitting(severed.url) as submissions:
        await submissions.make(draft())  # the script is known from here on
        severed.cut(wanted[1].id)
        made = await asyncio.gather(*(submissions.make(one, one.id, CHARGES, 1) for one in wanted))
    severed.close()
    assert severed.cuts == 1
    assert [one.job for one in made] == [store.get(one.id) for one in wanted]
    assert sent(client) == [one.id for one in wanted]
    books.Books.of(client).check()
    window = next(key for key in client.scan_iter("diptych:limits:*pictures*"))
    assert client.get(window) == "3", "each picture is counted once"


async def test_a_redis_that_dies_and_comes_back(
    submissions: Submissions, mortal: RedisServer, client: redis.Redis
) -> None:
    before = await crowd(submissions, 3)
    mortal.kill()
    for refused in await asyncio.gather(*(submissions.make(draft()) for _ in range(5)), return_exceptions=True):
        assert isinstance(refused, StoreDown)
    await asyncio.to_thread(mortal.start)  # which has forgotten the script
    made = [*before, *await crowd(submissions, 3)]
    assert sent(client) == [f"of {one.job.id}" for one in made]
    books.Books.of(client).check()


async def test_what_a_hanging_redis_makes_in_the_end_is_taken_back(
    submissions: Submissions, redis_server: RedisServer, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their callers were told that there are no jobs. Where a caller chose the id, asking again finds the job."""
    monkeypatch.setattr(module, "TIMEOUT_S", 0.5)
    assert redis_server.process is not None
    pid, chosen = redis_server.process.pid, draft(digest="d")
    await submissions.make(draft(id="before"))
    os.kill(pid, signal.SIGSTOP)
    try:
        asked = [*(draft() for _ in range(64)), chosen]
        told = await asyncio.gather(*(submissions.make(one, one.id) for one in asked), return_exceptions=True)
    finally:
        os.kill(pid, signal.SIGCONT)
    until = asyncio.get_running_loop().time() + PATIENCE_S
    while submissions._doubtful:
        assert asyncio.get_running_loop().time() < until
        await asyncio.sleep(0.01)
    again = await submissions.make(chosen)
    assert again.job is not None and again.job.id == chosen.id
    assert {type(one) for one in told} == {StoreDown}
    found = books.Books.of(client)
    found.check()
    assert set(found.records) == {"before", chosen.id}


async def test_who_was_refused_for_sure_has_nothing_taken_back(submissions: Submissions, client: redis.Redis) -> None:
    with refusals.no_replicas(client), pytest.raises(StoreDown, match="replicas"):
        await submissions.make(draft())
    assert not submissions._doubtful


async def test_a_full_redis_makes_nothing(submissions: Submissions, full: redis.Redis) -> None:
    await submissions.make(draft(), "m", (REQUESTS,), 1)
    before = sorted(full.scan_iter("*")), books.Books.of(full)
    full.config_set("maxmemory", 1)
    for _ in range(2):
        with pytest.raises(StoreFull):
            await submissions.make(draft(), "m", (REQUESTS,), 1)
    assert (sorted(full.scan_iter("*")), books.Books.of(full)) == before
    full.config_set("maxmemory", 0)
    assert (await submissions.make(draft(), "m", (REQUESTS,), 1)).charges[0].remaining == 998


async def test_a_caller_that_goes_away(submissions: Submissions, client: redis.Redis) -> None:
    calls = [asyncio.create_task(submissions.make(draft(), str(k))) for k in range(6)]
    await asyncio.sleep(0)
    calls[0].cancel()
    calls[3].cancel()
    made = [await call for k, call in enumerate(calls) if k not in (0, 3)]
    assert all(one.created for one in made)
    assert [m for m in sent(client) if m not in "03"] == ["1", "2", "4", "5"]


async def test_closing_tells_who_waits(submissions: Submissions, client: redis.Redis) -> None:
    await submissions.make(draft())
    await asyncio.to_thread(client.client_pause, 1500)
    calls = [asyncio.create_task(submissions.make(draft())) for _ in range(3)]
    await asyncio.sleep(0.05)
    await submissions.close()
    for call in calls:
        with pytest.raises(StoreDown):
            await call


def test_an_address_of_no_use() -> None:
    with pytest.raises(ValueError):
        Submissions("http://a", 1)


async def test_an_owners_share_is_held_exactly_and_what_others_left_behind_in_it_is_cleared(
    submissions: Submissions, client: redis.Redis, store: JobStore
) -> None:
    """A process of an older version takes jobs without saying so in the owner's set: such entries cost no place."""

    limits = OwnerLimits(waiting=20)
    made = await asyncio.gather(*(submissions.make(draft(owner="me"), limits=limits) for _ in range(30)))
    assert [one.job is not None for one in made] == [True] * 20 + [False] * 10
    assert all(one.share and not one.full for one in made[20:])
    assert (await submissions.make(draft(owner="you"), limits=limits)).job is not None
    assert client.scard("diptych:waiting:image:me") == 20
    for one in made[:20]:
        assert one.job is not None and store.leases.claim(one.job.id, "worker") is not None
    assert client.exists("diptych:waiting:image:me") == 0
    client.sadd("diptych:waiting:image:me", *(f"gone-{k}" for k in range(40)))
    refused = 0
    while (await submissions.make(draft(owner="me"), limits=limits)).job is None:
        refused += 1
    assert refused <= 1, "sixteen of them went with each"
