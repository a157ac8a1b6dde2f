"""An id that is used again begins with nothing of who had it: events, previews, attempts, lists, webhooks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import asdict

import pytest
import redis

from core.jobs.events import EventReader
from core.jobs.keyring import Keyring
from core.jobs.limits import JobLimits
from core.jobs.record import JobDraft, JobState, ProgressReport
from core.jobs.store import JobStore
from core.jobs.webhooks import WebhookQueue
from tests.core.jobs.books import Books
from tests.core.jobs.loops import followed
from tests.core.present import present


@pytest.fixture
def brief(redis_url: str) -> Iterator[JobStore]:
    """A store whose records go a moment after their end."""
    store = JobStore(redis_url, JobLimits(retention_s=0.05))
    yield store
    store.close()


def draft(owner: str = "", **more: object) -> JobDraft:
    return JobDraft("logo", "image", "m", {}, owner=owner, **more)  # type: ignore[arg-type]


def forgotten(client: redis.Redis) -> None:
    while client.exists("diptych:job:logo"):
        pass


def test_a_claim_tells_what_the_jobs_key_does_to_flagged_pictures_even_once_it_is_revoked(
    store: JobStore, client: redis.Redis, redis_url: str
) -> None:
    keyring = Keyring(redis_url)
    strict, plain = keyring.add("strict", checker="refuse")[0], keyring.add("plain")[0]
    older = json.dumps({name: value for name, value in asdict(plain).items() if name != "checker"})
    client.hset("diptych:keys", "older", older)
    owners = {"a": strict.id, "b": plain.id, "c": "older", "d": "nobody", "e": "", "f": strict.id}
    for id, owner in owners.items():
        if id == "f":  # as a line of its batch is created
            keyring.revoke(strict.id)
        store.create(JobDraft(id, "image", "m", {}, owner=owner))
    keyring.close()
    # An API of a version that knows of no such action wrote these.
    client.hdel("diptych:job:a", "checker")
    claims = [store.leases.claim(id, "ada") for id in owners]
    assert [claim and claim.checker for claim in claims] == ["refuse", "", "", "", "", "refuse"]


@pytest.mark.parametrize("lives", [True, False])
def test_a_new_job_begins_with_nothing(store: JobStore, client: redis.Redis, lives: bool) -> None:
    store.create(draft("ann"))
    old = present(store.leases.claim("logo", "ada"))
    late = ProgressReport("logo", old.fence, {"step": 1}, previews={0: "UE5H"})
    assert not store.leases.report([late]).stale
    if not lives:
        store.leases.fail("logo", old.fence, "refused", "no")
    assert store.erase("logo")
    job = store.create(draft("bob"))
    assert job == store.get("logo") and job.attempt == 0
    assert [fields["type"] for _, fields in client.xrange("diptych:events:logo")] == ["queued"]
    assert client.pttl("diptych:events:logo") == -1, "its events stay for as long as it lives"
    assert store.preview("logo", 0) is None
    new = present(store.leases.claim("logo", "bob"))
    assert new.attempt == 1
    Books.of(client).check()
    # The worker that is still at the old one cannot write to the new one.
    assert not store.leases.succeed("logo", old.fence, {}) and not store.leases.fail("logo", old.fence, "a", "b")
    assert not store.leases.expire("logo", old.fence) and store.leases.hand_back("logo", old.fence) is None
    assert store.leases.report([late]).stale == store.leases.renew("bob", {"logo": old.fence}) == {"logo"}
    assert store.preview("logo", 0) is None
    assert store.leases.succeed("logo", new.fence, {})


def test_attempts_of_a_record_that_went_by_itself_are_others(brief: JobStore, client: redis.Redis) -> None:
    """A retention of a moment, and a worker that sleeps through all of it."""
    brief.create(draft())
    old = present(brief.leases.claim("logo", "ada"))
    brief.cancel("logo")
    forgotten(client)
    brief.create(draft())
    new = present(brief.leases.claim("logo", "bob"))
    assert (old.attempt, new.attempt) == (1, 1)
    assert not brief.leases.succeed("logo", old.fence, {"images": ["of the old one"]})
    assert present(brief.get("logo")).state is JobState.RUNNING


def test_who_has_the_id_next_is_in_no_list_of_the_last_one(brief: JobStore, client: redis.Redis) -> None:
    brief.create(draft("ann"))
    brief.cancel("logo")
    forgotten(client)
    brief.create(draft("bob"))
    for _ in range(2):
        page = present(brief.lists.page("ann"))
        assert page.jobs == [], "it is bob's"
        page = present(brief.lists.page(None))
        assert [job.owner for job in page.jobs] == ["bob"]
        while client.exists("diptych:ended"):
            brief.upkeep.sweep()
    assert client.zrange("diptych:jobs", 0, -1) == ["bob|logo"] and not client.exists("diptych:jobs:ann")


def test_what_was_meant_for_one_does_not_end_the_next(store: JobStore) -> None:
    """Who looked at a job, and cancels or erases it when its id is another's by then."""
    old = store.create(draft("ann"))
    store.erase("logo", old.incarnation)
    new = store.create(draft("bob"))
    assert new.incarnation != old.incarnation and not new.same(old)
    assert store.cancel("logo", old.incarnation) is None and not store.erase("logo", old.incarnation)
    assert not store.follow("logo", old.incarnation)
    assert store.get("logo") == new
    cancelled = present(store.cancel("logo", new.incarnation))
    assert cancelled.state is JobState.CANCELLED and cancelled.same(new)


def test_how_often_a_webhook_was_tried_is_no_inheritance(brief: JobStore, client: redis.Redis, redis_url: str) -> None:
    webhooks = WebhookQueue(redis_url)
    told = {"url": "https://a.example/", "base": "https://b.example/"}
    brief.create(draft(webhook=told))
    brief.cancel("logo")
    (due,) = webhooks.due(60)
    assert (due.id, due.tries) == ("logo", 0)
    webhooks.again(due, 0)
    client.delete("diptych:job:logo")  # by hand: until its receiver was told it would stay
    brief.create(draft(webhook=told))
    for left in webhooks.due(60):  # its predecessor's place in a lane: the sender looks, and lets it go
        webhooks.settle(left)
    brief.cancel("logo")
    assert [(due.id, due.tries) for due in webhooks.due(60)] == [("logo", 0)]
    webhooks.close()


async def test_followers_are_of_one_job(store: JobStore, reader: EventReader) -> None:
    """One follows a job that is erased, another comes for the next of its id: neither sees anything of the other's."""

    async def collect_of(incarnation: str = "") -> list[str]:
        return [event.type async for event in reader.subscribe("logo", "0", incarnation)]

    old = store.create(draft())
    stream = reader.subscribe("logo", "0", old.incarnation)
    assert (await anext(stream)).type == "queued"
    waits = asyncio.ensure_future(anext(stream, None))
    await followed(reader)
    store.erase("logo")
    new = store.create(draft())
    rest = [await waits, *[event async for event in stream]]
    assert [event.type for event in rest if event is not None] in ([], ["cancelled"])
    task = asyncio.create_task(collect_of(new.incarnation))
    assert await collect_of(old.incarnation) == []
    await followed(reader)
    await asyncio.to_thread(store.leases.claim, "logo", "ada")
    await asyncio.to_thread(store.leases.succeed, "logo", 1, {})
    assert await task == await collect_of() == ["queued", "running", "succeeded"]
    assert await collect_of(old.incarnation) == []


def test_no_two_jobs_of_one_moment_are_taken_for_one(store: JobStore) -> None:
    seen = set()
    for _ in range(50):
        job = store.create(draft())
        seen.add(job.incarnation)
        store.erase("logo")
    assert len(seen) == 50
