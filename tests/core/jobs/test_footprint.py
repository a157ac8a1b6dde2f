"""What an owner's records take in Redis is counted in bytes, limited, and given back, whatever ends them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import redis

from core.jobs.batches import BatchStore
from core.jobs.creation import UNLIMITED, OwnerLimits
from core.jobs.files import FileStore, ShareFull
from core.jobs.keyring import Keyring
from core.jobs.memory import StoreMemory
from core.jobs.record import Job, ProgressReport
from core.jobs.store import JobStore, QueueFull
from core.jobs.tenants import TenantRecords
from tests.core.jobs.drafts import draft
from tests.core.present import present

ANN, BOB = "ann", "bob"
ENDS = ("succeeded", "failed", "cancelled", "expired", "erased", "waiting", "running")
MB = 1_000_000


def text(size: int, **given: Any) -> Any:
    """A draft of a text job whose prompt has so many bytes."""
    return draft(modality="text", model="lm", request={"prompts": ["x" * size], "n": 1}, owner=ANN, **given)


def end(store: JobStore, job: Job, how: str, size: int = 10) -> None:
    """Bring a queued job into this state, with a result of this size."""
    if how == "waiting":
        return
    if how in ("cancelled", "erased"):
        assert store.cancel(job.id) if how == "cancelled" else store.erase(job.id)
        return
    claim = present(store.leases.claim(job.id, "worker"))
    keys = [f"sha256/00/{job.id}-{k}.png" for k in range(3)]
    if how == "succeeded":
        assert store.leases.succeed(job.id, claim.fence, {"text": "y" * size}, keys)
    elif how == "failed":
        assert store.leases.fail(job.id, claim.fence, "engine_error", "z" * size)
    elif how == "expired":
        assert store.leases.expire(job.id, claim.fence)


def used(client: redis.Redis) -> int:
    """The bytes of everything that Redis holds now, without its buffers."""
    info: Any = client.info("memory")
    return int(info["used_memory_dataset"])


def heavy(client: redis.Redis, owner: str = ANN) -> tuple[int, int]:
    """The counted sum of an owner's large records, and the sum of its parts."""
    parts: Any = client.zrange(f"diptych:heavy:{owner}", 0, -1, withscores=True)
    total: Any = client.get(f"diptych:heavy_bytes:{owner}")
    return int(total or 0), int(sum(score for _, score in parts))


@pytest.mark.parametrize("size", [10, 20_000])
@pytest.mark.parametrize("queue", ["image", "text"])
def test_no_record_takes_more_than_is_counted(
    store: JobStore, client: redis.Redis, redis_url: str, queue: str, size: int
) -> None:
    """Compared with Redis's own count, of so many jobs that its tables grow little beside them."""
    records = TenantRecords(redis_url)
    for how in ENDS:  # loads the scripts
        end(store, store.create(draft(owner=BOB)), how)
    before = used(client)
    for how in set(ENDS) - {"erased"}:  # whose events stay for a minute, for those who follow them
        for _ in range(30):
            job = store.create(draft(modality=queue, request={"prompts": ["x" * size]}, owner=ANN), "m" * 700)
            end(store, job, how, size // 2)
    counted = records.footprint(ANN)
    assert counted / 3 < used(client) - before <= counted
    assert heavy(client)[0] == heavy(client)[1]
    records.erase(store, ANN)
    assert records.footprint(ANN) == 0 and not client.exists(f"diptych:heavy:{ANN}", f"diptych:heavy_bytes:{ANN}")
    records.close()


@pytest.mark.parametrize("how", ["succeeded", "failed", "cancelled", "expired"])
def test_the_text_of_a_large_request_is_dropped_at_its_end(store: JobStore, client: redis.Redis, how: str) -> None:
    large, small = (store.create(text(size)) for size in (MB, 5000))
    assert heavy(client)[0] > MB
    for job in (large, small):
        end(store, job, how)
    assert heavy(client)[0] < 10_000 and heavy(client)[0] == heavy(client)[1]
    ended = present(store.get(large.id))
    assert ended.dropped > MB and ended.parameters == {} and ended.state.value == how
    kept = present(store.get(small.id))
    assert kept.dropped == 0 and kept.parameters == small.parameters


def test_a_line_keeps_its_request_until_its_result_is_noted(
    store: JobStore, client: redis.Redis, files: FileStore, redis_url: str
) -> None:
    batches = BatchStore(redis_url)
    file = files.add(ANN, "x", "batch", 9, "sha256/00/x.jsonl")
    batch = batches.add(ANN, "/v1/chat/completions", file, 1, "http://x/", None, [])
    job = store.create(text(MB, digest=batch.id))
    assert batches.begin(batch.id, 0, job.id, 9)
    end(store, job, "succeeded")
    assert present(store.get(job.id)).parameters == job.parameters, "the answer is made of both"
    assert batches.note(batch.id, 0, {"body": {}}, "completed")
    assert present(store.get(job.id)).dropped > MB and heavy(client)[0] == heavy(client)[1] < 10_000
    batches.close()


def test_a_full_share_refuses_its_owner_alone_until_something_is_given_back(store: JobStore) -> None:
    limits = OwnerLimits(stored=5 * MB)
    jobs = [store.create(text(MB), limits=limits) for _ in range(3)]
    with pytest.raises(QueueFull):
        store.create(text(MB), limits=limits)
    small = [store.create(text(10), limits=limits) for _ in range(50)]
    assert len(small) == 50, "what fits is taken"
    assert store.create(draft(owner=BOB, request={"prompt": "y" * MB}), limits=limits)
    assert store.create(draft(request={"prompt": "y" * MB}), limits=limits), "no owner, no limit"
    end(store, jobs[0], "succeeded")
    assert store.create(text(MB), limits=limits)
    assert store.create(text(MB, id=jobs[1].id), limits=limits).id == jobs[1].id, "it exists"


def test_what_expired_counts_no_more(jobs: JobStore, client: redis.Redis) -> None:
    """A record expires by itself; the sweep that drops its index entries gives back its bytes."""
    job = jobs.create(draft(owner=ANN, request={"prompt": "x" * MB}))
    end(jobs, job, "cancelled")
    assert heavy(client)[0] > 0.9 * MB, "an image's request is kept, for the record tells it"
    client.delete(f"diptych:job:{job.id}")
    client.zadd("diptych:ended", {f"{ANN}|{job.id}": 0})
    jobs.upkeep.sweep()
    assert heavy(client) == (0, 0)


def test_what_older_versions_left_counted_is_found_where_it_refuses(store: JobStore, client: redis.Redis) -> None:
    """They end and delete records without giving anything back."""
    limits = OwnerLimits(stored=5 * MB)
    jobs = [store.create(text(MB), limits=limits) for _ in range(3)]
    client.delete(f"diptych:job:{jobs[0].id}")
    client.hset(f"diptych:job:{jobs[1].id}", mapping={"parameters": "{}", "state": "succeeded"})
    assert heavy(client)[0] > 2.9 * MB
    assert store.create(text(MB), limits=limits)
    assert heavy(client)[0] == heavy(client)[1] < 2.6 * MB


@pytest.mark.parametrize("ended", ["cancelled", "completed"])
def test_a_batch_reserves_room_for_its_lines(
    store: JobStore, client: redis.Redis, files: FileStore, redis_url: str, ended: str
) -> None:
    """Its jobs are made within it, so that no batch waits for the room that others wait with."""
    batches, records = BatchStore(redis_url), TenantRecords(redis_url)
    file = files.add(ANN, "x", "batch", 9, "sha256/00/x.jsonl")

    def add(lines: int, errors: int = 0, stored: int | None = 10 * MB) -> Any:
        wrong = [{"message": "w" * 200}] * errors
        return batches.add(ANN, "/v1/images/generations", file, lines, "http://x/", None, wrong, stored=stored)

    with pytest.raises(ShareFull):
        add(2000)
    assert not client.keys("diptych:batch:*")
    batch = add(1000)
    reserved = records.footprint(ANN)
    with pytest.raises(ShareFull):
        add(1000)
    with pytest.raises(ShareFull):
        files.add(ANN, "x", "batch", 9, "sha256/00/y.jsonl", stored=reserved)
    for line in range(3):
        job = store.create(draft(owner=ANN, digest=batch.id), limits=UNLIMITED)
        assert batches.begin(batch.id, line, job.id)
        end(store, job, "succeeded")
        assert batches.note(batch.id, line, {"body": "r" * 900}, "completed")
    assert batches.refuse(batch.id, 3, {"body": "r" * 900})
    assert records.footprint(ANN) <= reserved, "and never more while it runs"
    assert batches.turn(present(batches.batch(batch.id)), ended)
    assert records.footprint(ANN) < 50_000 and heavy(client)[0] == heavy(client)[1]
    add(0, errors=100)
    assert heavy(client)[0] > 20_000, "a failed one keeps its errors"
    for each in (batches, records):
        each.close()


def test_a_revoked_key_gives_back_all_that_it_left(
    store: JobStore, client: redis.Redis, files: FileStore, redis_url: str
) -> None:
    batches, records, keyring = BatchStore(redis_url), TenantRecords(redis_url), Keyring(redis_url)
    owner = keyring.add("left")[0].id
    untouched = store.create(draft(owner=BOB))
    before = set(client.scan_iter("diptych:*"))
    rng = random.Random(5)
    for k in range(230):
        size = rng.choice((10, 4000, 50_000))
        job = store.create(draft(owner=owner, id=f"{owner}-{k}", request={"prompt": "x" * size}, keep_s=10**6))
        end(store, job, rng.choice(ENDS))
    files_made = [files.add(owner, "x", "batch", 9, f"sha256/00/{k}.jsonl") for k in range(120)]
    for file in files_made[:3]:
        batches.add(owner, "/v1/images/generations", file, 100, "http://x/", {"a": "b" * 500}, [])
    took = records.footprint(owner)
    erased = records.erase(store, owner)
    assert (erased.batches, erased.files, erased.file_bytes) == (3, 120, 1080) and 150 < erased.jobs < 230
    assert erased.store_bytes == took > 2 * MB and records.footprint(owner) == 0
    left = set(client.scan_iter("diptych:*")) - before
    shared = {"going", "kept", "held", "happened", "control", "mark", "ended", "naming", "events", "withdrawn"}
    assert {key.split(":")[1] for key in left} <= shared, left
    assert records.erase(store, owner).jobs == 0 and present(store.get(untouched.id)).owner == BOB
    for each in (batches, records, keyring):
        each.close()


def test_a_long_text_s_events_count_and_end_with_it(store: JobStore, client: redis.Redis) -> None:
    job = store.create(text(10, followed=True))
    claim = present(store.leases.claim(job.id, "worker"))
    for at in range(20):
        piece = {"index": 0, "at": at, "text": "x" * 10_000}
        store.leases.report([ProgressReport(job.id, claim.fence, {"tokens": at}, pieces=[piece])])
    assert heavy(client)[0] > 130_000
    assert store.leases.succeed(job.id, claim.fence, {"choices": []})
    assert heavy(client) == (0, 0) and 0 < client.pttl(f"diptych:events:{job.id}") <= 60_000


def test_memory_is_shared_more_evenly_where_it_is_scarce() -> None:
    assert StoreMemory().share(40, 3) is None and not StoreMemory().nearly_full
    assert StoreMemory(10, 1000).share(40, 3) == 400 and StoreMemory(10, 1000).share(0, 3) is None
    assert StoreMemory(749, 1000).share(40, 5) == 400 and StoreMemory(750, 1000).share(40, 5) == 100
    assert StoreMemory(899, 1000).nearly_full is False and StoreMemory(900, 1000).nearly_full is True


def test_a_key_that_was_revoked_before_is_barred_by_a_second_call(store: JobStore, redis_url: str) -> None:
    keyring = Keyring(redis_url)
    owner = keyring.add("x")[0].id
    assert keyring.revoke(owner) and not keyring.revoke(owner, end=True)
    with pytest.raises(QueueFull):
        store.create(draft(owner=owner))
    keyring.close()


def test_a_job_of_an_older_api_has_its_result_in_its_record(store: JobStore, client: redis.Redis) -> None:
    """That API reads no artifacts in place of results."""
    new, old = (store.create(text(10)).id for _ in range(2))
    client.hdel(f"diptych:job:{old}", "lays")
    assert [present(store.leases.claim(id, "worker")).lays for id in (new, old)] == [True, False]
