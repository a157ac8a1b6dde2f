"""The load by model is the count over the records, by whatever way they got where they are."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import redis

from core.jobs.broker import QUEUES
from core.jobs.record import QueueBacklog
from core.jobs.store import JobStore
from tests.core.jobs import books
from tests.core.jobs.drafts import make

MODELS = {"emoji-xl": "image", "someone/else's model": "image", "emoji-lm": "text"}


def counted(client: redis.Redis) -> dict[str, QueueBacklog]:
    """The same, over all records in Redis."""
    sums: dict[str, Counter[str]] = {}
    for record in books.Books.of(client).records.values():
        if record["state"] in books.LIVE:
            load = sums.setdefault(record["model"], Counter())
            load[record["state"]] += 1
            load[f"{record['state']}_ms"] += int(record["work_ms"])
    names = ("queued", "queued_ms", "running", "running_ms")
    return {model: QueueBacklog(*(load[name] for name in names)) for model, load in sums.items()}


@pytest.mark.parametrize("seed", range(3))
def test_it_is_the_count_over_the_records(store: JobStore, client: redis.Redis, seed: int) -> None:
    generator = random.Random(seed)
    assert [store.by_model.read(queue) for queue in QUEUES] == [{}, {}]
    ids: list[str] = []
    for _ in range(60):
        model = generator.choice([*MODELS])
        ids.append(
            make(store, model=model, modality=MODELS[model], work_ms=generator.choice((0, generator.randrange(5000))),
                 priority=generator.randrange(10))
        )  # fmt: skip
        id = generator.choice(ids)
        match generator.randrange(4):
            case 0:
                store.leases.claim(id, "worker-1")
            case 1:
                store.cancel(id)
            case 2 if (claim := store.leases.claim(id, "worker-1")) is not None:
                store.leases.hand_back(id, claim.fence)
            case 3 if (claim := store.leases.claim(id, "worker-1")) is not None:
                store.leases.succeed(id, claim.fence, {})
    expected = counted(client)
    assert len(expected) == 3
    for queue in QUEUES:
        assert store.by_model.read(queue) == {m: load for m, load in expected.items() if MODELS[m] == queue}
