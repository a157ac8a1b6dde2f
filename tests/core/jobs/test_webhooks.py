"""Who is told next: owners and receivers in turn, each try leased, and the record kept until it is settled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from core.jobs.record import Draft, new_id
from core.jobs.store import JobStore
from core.jobs.webhooks import Webhooks


@pytest.fixture
def jobs(redis_url: str) -> Iterator[JobStore]:
    store = JobStore(redis_url, retention_s=60)
    yield store
    store.close()


@pytest.fixture
def webhooks(redis_url: str) -> Iterator[Webhooks]:
    webhooks = Webhooks(redis_url, retention_s=60)
    yield webhooks
    webhooks.close()


def ended(jobs: JobStore, owner: str, host: str) -> str:
    webhook = {"url": f"http://{host}/hook", "base": "http://x/"}
    draft = Draft(new_id(), "image", "m", {}, owner=owner, webhook=webhook)
    jobs.create(draft)
    jobs.cancel(draft.id)
    return draft.id


def test_owners_and_receivers_take_turns(jobs: JobStore, webhooks: Webhooks) -> None:
    for k in range(50):
        ended(jobs, "ann", f"a{k % 2}")
    last = ended(jobs, "bob", "b")
    first = webhooks.due(60, 4, of_owner=3)
    assert [due.owner for due in first].count("ann") == 3 and last in {due.id for due in first}
    again = webhooks.due(60, 4, of_owner=4, of_lane=2)
    assert sorted(due.host for due in again) == ["a0", "a0", "a1", "a1"]
    assert not {due.id for due in first} & {due.id for due in again}, "they are leased"


def test_nothing_of_who_is_busy(jobs: JobStore, webhooks: Webhooks) -> None:
    for host in ("a0", "a1"):
        ended(jobs, "ann", host)
    ended(jobs, "bob", "b")
    found = webhooks.due(60, without={"bob"}, without_lanes={("ann", "a0")})
    assert [(due.owner, due.host) for due in found] == [("ann", "a1")]
    assert {due.host for due in webhooks.due(60)} == {"a0", "b"}


def test_a_try_counts_if_it_failed(jobs: JobStore, webhooks: Webhooks) -> None:
    id = ended(jobs, "ann", "A.example:80")
    (due,) = webhooks.due(60)
    assert (due.id, due.tries, due.host) == (id, 0, "a.example:80")
    webhooks.again(due, 0, failed=False)
    (due,) = webhooks.due(60)
    assert due.tries == 0
    webhooks.again(due, 0)
    (due,) = webhooks.due(60)
    assert due.tries == 1
    webhooks.again(due, 60)
    assert not webhooks.due(60)


def test_the_record_goes_when_it_was_told(jobs: JobStore, webhooks: Webhooks, client: redis.Redis) -> None:
    id = ended(jobs, "ann", "a")
    assert client.pttl(f"diptych:job:{id}") > 11 * 3_600_000
    (due,) = webhooks.due(60)
    webhooks.settle(due)
    assert client.pttl(f"diptych:job:{id}") <= 60_000
    assert not list(client.scan_iter("diptych:webhook*"))


def test_one_that_was_erased_is_forgotten(jobs: JobStore, webhooks: Webhooks, client: redis.Redis) -> None:
    jobs.erase(ended(jobs, "ann", "a"))
    assert not webhooks.due(60) and not list(client.scan_iter("diptych:webhook*"))
