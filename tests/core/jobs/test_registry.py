"""Cards come, live as long as they said, and go; messages to workers arrive."""

from __future__ import annotations

import json
import logging
import threading
import time
from dataclasses import replace

import pytest
import redis

from core.jobs.cards import WorkerCard
from core.jobs.connection import StoreDown
from core.jobs.registry import Registry, condition_faults, log_condition_faults
from core.jobs.store import JobStore
from deployment.redis import RedisServer
from tests.contract.test_card import IMAGE, TEXT
from tests.core.jobs import books
from tests.core.jobs.drafts import draft, make

WORKER = WorkerCard(
    id="ada",
    host="here",
    pid=7,
    state="ready",
    message="drawing",
    started=1_700_000_000.5,
    models=[IMAGE],
    in_flight={"image": 2},
    limits={"image": 32, "text": 64},
    version="0.1.0",
)


def test_card_survives_the_way(registry: Registry, client: redis.Redis) -> None:
    assert registry.workers() == registry.models() == []
    registry.announce(WORKER, 15.0)
    assert registry.workers() == [WORKER]
    assert registry.models() == [replace(IMAGE, live=True)]
    assert 0 < client.pttl("diptych:worker:ada") <= 15_000
    later = replace(WORKER, state="draining", in_flight={})
    registry.announce(later, 100.0)
    assert registry.workers() == [later]
    assert 15_000 < client.pttl("diptych:worker:ada") <= 100_000


def test_silent_workers_are_not_listed(registry: Registry, client: redis.Redis) -> None:
    registry.announce(WORKER, 15.0)
    registry.announce(replace(WORKER, id="bob", models=[replace(TEXT, name="other")]), 15.0)
    assert [worker.id for worker in registry.workers()] == ["ada", "bob"]
    client.delete("diptych:worker:ada")  # as its time to live does
    assert [worker.id for worker in registry.workers()] == ["bob"]
    assert [(model.name, model.live) for model in registry.models()] == [("emoji-xl", False), ("other", True)]
    # And a day later nothing is left of it.
    books.age(client, 90_000)
    registry.announce(replace(WORKER, id="eve"), 15.0)
    assert client.zrange("diptych:workers", 0, -1) == ["eve"]


@pytest.mark.parametrize("state", ["starting", "draining"])
def test_only_ready_workers_serve(registry: Registry, state: str) -> None:
    registry.announce(replace(WORKER, state=state), 15.0)
    assert registry.models() == [replace(IMAGE, loaded=False)]


def test_a_model_is_loaded_if_it_is_in_the_memory_of_any_worker(registry: Registry) -> None:
    gone = replace(IMAGE, loaded=False)
    registry.announce(replace(WORKER, models=[IMAGE]), 15.0)
    registry.announce(replace(WORKER, id="bob", models=[gone]), 15.0)  # was heard last
    assert registry.models() == [replace(IMAGE, live=True)]
    registry.announce(replace(WORKER, models=[gone]), 15.0)
    assert registry.models() == [replace(gone, live=True)]


def test_forget(registry: Registry, client: redis.Redis, full: redis.Redis) -> None:
    registry.announce(WORKER, 15.0)
    client.xadd("diptych:control:ada", {"cancel": "job_x"})
    full.config_set("maxmemory", 1)
    registry.announce(WORKER, 15.0)  # a heart beats on a full Redis too
    registry.deregister("ada")
    assert registry.workers() == []
    assert registry.models() == [replace(IMAGE, loaded=False)]
    assert client.keys() == ["diptych:models"]


def test_what_would_lose_jobs_is_logged(
    registry: Registry, full: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """As `diptych doctor` says it; of an API and of a worker at their start."""
    assert condition_faults({"policy": "noeviction", "appends": "1"}) == []
    full.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with caplog.at_level(logging.WARNING):
            log_condition_faults(registry)
    finally:
        full.config_set("maxmemory-policy", "noeviction")
    assert "allkeys-lru: jobs would be evicted" in caplog.text


@pytest.mark.parametrize("newer", [True, False])
def test_cards_of_another_version(registry: Registry, client: redis.Redis, newer: bool) -> None:
    registry.announce(WORKER, 15.0)
    card = json.loads(client.get("diptych:worker:ada") or "")
    (model,), expected = card["models"], IMAGE
    if newer:
        card["colour"] = model["colour"] = "blue"
    else:
        for name in ("kernels", "kernels_reason", "loras"):
            del model[name]
        expected = replace(IMAGE, kernels="", kernels_reason="", loras=())
    client.set("diptych:worker:ada", json.dumps(card))
    client.hset("diptych:models", "emoji-xl", json.dumps(model))
    assert registry.workers() == [replace(WORKER, models=[expected])]
    assert registry.models() == [replace(expected, live=True)]


def test_control(registry: Registry, store: JobStore) -> None:
    assert registry.control("ada", "0", 0) == []
    assert registry.control("ada", "0", 0.05) == []
    ids = []
    for _ in range(2):
        ids.append(make(store))
        store.leases.claim(ids[-1], "ada")
        store.cancel(ids[-1])
    messages = registry.control("ada", "0", 60)
    assert [(message["cancel"], message["attempt"]) for _, message in messages] == [(id, "1") for id in ids]
    assert registry.control("ada", messages[0][0], 60) == messages[1:]
    assert registry.control("ada", messages[1][0], 0) == []
    assert registry.control("bob", "0", 0) == []


def test_control_waits(registry: Registry, store: JobStore, client: redis.Redis) -> None:
    job = store.create(draft())
    store.leases.claim(job.id, "ada")
    got: list[tuple[str, dict[str, str]]] = []
    thread = threading.Thread(target=lambda: got.extend(registry.control("ada", "0", 120)))
    thread.start()
    while not any(each["flags"] == "b" for each in client.client_list()):
        time.sleep(0.001)
    store.cancel(job.id)
    thread.join()
    assert [message for _, message in got] == [{"cancel": job.id, "attempt": "1", "of": job.incarnation}]


def test_control_waits_longer_than_an_answer_may_take(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.jobs.registry._BLOCK_S", 0.05)
    begun = time.monotonic()
    assert registry.control("ada", "0", 0.3) == []  # several reads
    assert time.monotonic() - begun >= 0.3


def test_redis_away(registry: Registry, mortal: RedisServer) -> None:
    registry.announce(WORKER, 100.0)
    mortal.kill()
    for call in (
        lambda: registry.announce(WORKER, 15.0),
        lambda: registry.deregister("ada"),
        registry.workers,
        registry.models,
        lambda: registry.control("ada", "0", 0),
    ):
        with pytest.raises(StoreDown):
            call()
    mortal.start()
    assert registry.workers() == [WORKER]
