"""Queues by model in the store: counts and positions, jobs of older versions, and what is kept of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import redis

from core.jobs.broker import Envelope, model_queue
from core.jobs.placement import ModelPlacement, Placement
from core.jobs.record import QueueBacklog
from core.jobs.registry import Registry
from core.jobs.store import JobStore
from tests.core.jobs import books
from tests.core.jobs.drafts import draft, make
from tests.core.jobs.older import sent_by_older
from tests.core.jobs.test_registry import WORKER
from tests.core.present import present

NAMES = ("emoji-xl", "owner/a: 50%", "third")


def left(client: redis.Redis) -> set[str]:
    """What is kept of kombu queues, beside the sum over models."""
    patterns = ("active", "sent", "mark", "backlog")
    found = {key for name in patterns for key in client.scan_iter(f"diptych:{name}:*", 1000)} | {*client.keys("image*")}
    return found - {"diptych:backlog:image"}


def test_a_queue_is_the_sum_of_its_models(store: JobStore, client: redis.Redis) -> None:
    ids = [make(store, model=NAMES[k % 3], work_ms=10 * k, priority=9 if k < 2 else 5) for k in range(9)]
    store.leases.claim(ids[8], "ada")
    by_model = store.by_model.read("image")
    assert by_model == {
        NAMES[0]: QueueBacklog(3, 90, 0, 0), NAMES[1]: QueueBacklog(3, 120, 0, 0), NAMES[2]: QueueBacklog(2, 70, 1, 80),
    }  # fmt: skip
    assert store.backlog("image") == QueueBacklog(8, 280, 1, 80)
    assert store.by_model.read("text") == {}
    # Over all models, as before there were queues of them.
    assert [present(store.standing(id)).ahead for id in [*ids[2:8], *ids[:2]]] == [*range(8)]
    books.Books.of(client).check()


def test_emptying_takes_the_most_urgent_of_all_models_first(store: JobStore) -> None:
    ids = [make(store, model=NAMES[k % 3], priority=(9, 5, 0)[k // 3]) for k in range(9)]
    assert store.empty("image", 4) == 4
    states = [present(store.get(id)).state.value for id in ids]
    assert (states[:3], states[6:]) == (["queued"] * 3, ["cancelled"] * 3)
    assert store.empty("image") == 5 and store.empty("image") == 0


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_kept_of_a_model_without_jobs(store: JobStore, client: redis.Redis, name: str) -> None:
    """Nor the messages of jobs that ended while they waited, where no worker of the model lives to take them."""
    queue, job = model_queue("image", name), draft(model=name)
    ids = [store.create(replace(job, id=f"job_{k}"), message=f"of {k}").id for k in range(3)]
    store.leases.claim(ids[0], "ada")
    store.upkeep.sweep()
    assert client.llen(f"{queue}:3") == 3, "messages of jobs that wait stay"
    store.cancel(ids[1])
    store.cancel(ids[2])
    store.upkeep.sweep()
    assert left(client) == {"diptych:active:image", f"diptych:backlog:{queue}"}, "one job runs"
    assert store.by_model.read("image") == {name: QueueBacklog(0, 0, 1, 0)}
    assert store.leases.succeed(ids[0], 1, {})
    store.upkeep.sweep()
    assert left(client) == set()
    make(store, model=name)
    assert store.by_model.read("image") == {name: QueueBacklog(1, 0, 0, 0)}


def finish(store: JobStore, id: str) -> None:
    assert store.leases.claim(id, "ada") is not None and store.leases.succeed(id, 1, {})


def hand_back(store: JobStore, id: str) -> None:
    assert store.leases.claim(id, "ada") is not None
    assert store.leases.hand_back(id, 1) == Envelope(id, "image", 0, model=NAMES[1])


def route(store: JobStore, id: str) -> None:
    assert store.leases.route(id) == Envelope(id, "image", 3, model=NAMES[1])
    assert store.leases.route(id) is None, "it is there already"


@pytest.mark.parametrize("act", [
    finish, hand_back, route, lambda store, id: store.cancel(id), lambda store, id: store.erase(id),
    lambda store, id: store.empty("image"),
])  # fmt: skip
def test_jobs_of_an_older_version_go_on(
    store: JobStore, client: redis.Redis, act: Callable[[JobStore, str], object]
) -> None:
    id, beside = make(store, model=NAMES[1], work_ms=70), make(store, model=NAMES[1], work_ms=5)
    sent_by_older(client, id)
    standing = present(store.standing(beside))
    assert (standing.ahead, standing.backlog.queued) == (1, 2)
    act(store, id)
    assert not client.exists("diptych:sent:image:3")
    store.cancel(beside)
    store.cancel(id)
    store.upkeep.sweep()
    books.Books.of(client).check()
    assert left(client) <= {"diptych:mark:image:3"}


def test_a_lost_message_of_an_older_version_is_sent_to_the_queue_of_its_model(
    store: JobStore, client: redis.Redis
) -> None:
    id = make(store, model=NAMES[1], work_ms=70)
    sent_by_older(client, id)
    books.push(client, "image", 3, id)
    books.age(client, 5000)
    assert store.upkeep.sweep().send == [], "its message waits"
    client.delete("image:3")
    assert store.upkeep.sweep().send == [Envelope(id, "image", 3, model=NAMES[1])]
    assert store.by_model.read("image") == {NAMES[1]: QueueBacklog(1, 70, 0, 0)}
    books.Books.of(client).check()


def test_what_an_older_version_does_meanwhile_is_mended(store: JobStore, client: redis.Redis) -> None:
    """It knows the queue of all models alone: it hands one job back into that, and cancels another."""
    back, gone = (make(store, model=NAMES[1]) for _ in range(2))
    queue = model_queue("image", NAMES[1])
    client.zrem(f"diptych:sent:{queue}:3", back)
    client.zadd("diptych:sent:image:0", {back: 99})
    client.hset(f"diptych:job:{back}", mapping={"level": 0, "sequence": 99})
    client.hset(f"diptych:job:{gone}", "state", "cancelled")
    client.hincrby("diptych:backlog:image", "queued", -1)
    books.age(client, 5000)
    assert store.upkeep.sweep().send == [Envelope(back, "image", 0, model=NAMES[1])]
    assert client.zrange(f"diptych:sent:{queue}:0", 0, -1) == [back]
    assert not client.exists("diptych:sent:image:0", f"diptych:sent:{queue}:3")
    finish(store, back)
    store.upkeep.sweep()
    assert store.by_model.read("image") == {} and left(client) == set()


def test_the_nearest_worker_is_the_one_with_the_least_delay_that_lives(
    redis_url: str, store: JobStore, registry: Registry, client: redis.Redis
) -> None:
    placement = ModelPlacement(redis_url)
    model = ("image", NAMES[1])
    for id in ("ada", "bob"):
        registry.announce(replace(WORKER, id=id), 600)
    assert placement.announce("ada", {model: 5.0}, 60) == {model: Placement(True, None)}
    assert placement.announce("bob", {model: 2.0}, 60) == {model: Placement(True, None)}
    make(store, model=NAMES[1])
    make(store, model=NAMES[1], priority=0)
    books.age(client, 30)
    make(store, model=NAMES[1])
    (state,) = placement.announce("ada", {model: 5.0}, 60).values()
    assert not state.nearest and state.waited_s is not None and 30 <= state.waited_s < 600
    placement.withdraw("bob", [model])
    assert placement.announce("ada", {model: 5.0}, 60)[model].nearest
    placement.announce("bob", {model: 2.0}, 60)
    assert not placement.announce("ada", {model: 5.0}, 60)[model].nearest
    registry.deregister("bob")  # as after a kill, once its card has expired
    assert placement.announce("ada", {model: 5.0}, 60)[model].nearest
    key = f"diptych:delays:{model_queue(*model)}"
    assert client.zrange(key, 0, -1) == ["ada"] and 0 < client.pttl(key) <= 60_000
    assert placement.announce("ada", {}, 60) == {}
    placement.close()
