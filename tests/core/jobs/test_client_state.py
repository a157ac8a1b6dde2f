"""What APIs keep in Redis between requests: by API and owner, for a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
import redis

from core.jobs.client_state import ClientState
from core.jobs.store import JobStore
from tests.core.jobs.drafts import draft


@pytest.fixture
def store(redis_url: str) -> Iterator[ClientState]:
    store = ClientState(redis_url, "sdapi")
    yield store
    store.close()


def test_options_are_kept_by_api_and_owner(store: ClientState, redis_url: str) -> None:
    assert store.options("ann") == {}
    store.set_options("ann", {"sd_model_checkpoint": "é [1]", "CLIP_stop_at_last_layers": 2, "off": False})
    store.set_options("ann", {"off": None})
    assert store.options("ann") == {"sd_model_checkpoint": "é [1]", "CLIP_stop_at_last_layers": 2, "off": None}
    assert store.options("bob") == store.options("") == {}
    with closing(ClientState(redis_url, "another")) as other:
        assert other.options("ann") == {}


def test_open_requests_are_listed_until_they_end(store: ClientState, jobs: JobStore) -> None:
    first, second, third = (jobs.create(draft(owner=owner)).id for owner in ("ann", "ann", ""))
    store.open("ann", first, "task: 1")
    store.open("ann", second)
    store.open("ann", "job_gone")
    store.open("", third, "task: 1")

    def listed(owner: str) -> set[str]:
        return {job.id for job in store.open_jobs(owner)}

    assert listed("ann") == {first, second} and listed("") == {third}
    store.open("bob", third)
    assert listed("bob") == set(), "another's job"
    store.close_requests("ann", first, "job_unknown")
    assert listed("ann") == {second}
    jobs.cancel(second)
    assert listed("ann") == set()
    assert store.job_of_task("ann", "task: 1") == first, "for some time after its end"
    assert store.job_of_task("", "task: 1") == third and store.job_of_task("bob", "task: 1") is None


def test_every_key_expires(store: ClientState, redis_url: str) -> None:
    store.set_options("ann", {"a": 1})
    store.open("ann", "job_1", "task")
    with redis.Redis.from_url(redis_url) as client:
        lasts = [client.pttl(key) for key in client.scan_iter("diptych:sdapi*")]
    assert len(lasts) == 3 and min(lasts) > 0
