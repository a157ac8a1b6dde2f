"""How long the jobs of a batch are kept: until it has noted what came of them, whatever is asked of all others."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from core.jobs.batches import BatchRecord, BatchStore
from core.jobs.files import File
from core.jobs.record import JobDraft, new_id
from core.jobs.store import JobStore
from tests.core.jobs.books import Books
from tests.core.jobs.test_ledger import end, pass_time
from tests.core.present import present

DAYS_S = 2 * 86_400


@pytest.fixture
def batches(redis_url: str) -> Iterator[BatchStore]:
    store = BatchStore(redis_url, retention_s=60)
    yield store
    store.close()


def batch_of(batches: BatchStore) -> BatchRecord:
    file = File("file-" + 24 * "0", "ann", "x.jsonl", "batch", 2, "sha256/00/" + 62 * "0" + ".jsonl", 1)
    return batches.add("ann", "/v1/chat/completions", file, 9, "http://x/", None, [])


def drafted(jobs: JobStore, digest: str, **more: Any) -> str:
    fields: dict[str, Any] = {"modality": "text", "model": "m", "request": {}, "owner": "ann", **more}
    return jobs.create(JobDraft(id=new_id(), digest=digest, **fields)).id


def left_s(client: redis.Redis, id: str) -> float:
    """For which the record is kept, which is also what the list of those that ended says."""
    left_ms: Any = client.pttl(f"diptych:job:{id}")
    listed: Any = client.zscore("diptych:ended", f"ann|{id}")
    seconds, micros = client.time()
    assert abs(listed - 1000 * seconds - micros / 1000 - left_ms) < 10_000
    return float(left_ms) / 1000


@pytest.mark.parametrize("way", ["succeeded", "failed", "cancelled", "expired"])
def test_a_texts_record_waits_until_it_is_noted(
    jobs: JobStore, batches: BatchStore, client: redis.Redis, way: str
) -> None:
    batch = batch_of(batches)
    id, other = drafted(jobs, batch.id, keep_s=DAYS_S), drafted(jobs, batch.id)
    assert batches.begin(batch.id, 0, id)
    for job in (id, other):
        end(jobs, job, way=way)
    assert left_s(client, other) <= 60 < DAYS_S - 60 < left_s(client, id) <= DAYS_S
    Books.of(client).check()
    assert not batches.note(batch.id, 1, {}, "completed"), "another line"
    assert left_s(client, id) > 60
    assert batches.note(batch.id, 0, {"said": 1}, "completed")
    assert left_s(client, id) <= 60
    assert not batches.note(batch.id, 0, {"said": 2}, "completed")
    assert list(batches.results(batch.id)) == [(0, {"said": 1})]
    Books.of(client).check()


@pytest.mark.parametrize("status", ["cancelling", "cancelled", "failed"])
def test_a_batch_that_is_to_end_begins_no_line(batches: BatchStore, status: str) -> None:
    """Whoever acts on what it read before is told so, and the line is not counted."""
    batch = batch_of(batches)
    assert batches.refuse(batch.id, 0, {}, 10) and batches.turn(batch, status)
    assert not batches.begin(batch.id, 1, "job", 20) and not batches.refuse(batch.id, 1, {}, 20)
    after = present(batches.batch(batch.id))
    assert (after.next, after.failed) == (1, 1)


@pytest.mark.parametrize("errors", [[], [{"line": 1, "message": "no JSON"}]], ids=["in progress", "failed"])
def test_a_batch_whose_reply_was_lost_is_created_once(
    jobs: JobStore, batches: BatchStore, client: redis.Redis, monkeypatch: pytest.MonkeyPatch, errors: list[Any]
) -> None:
    """The call is repeated, perhaps after the batch has gone on, or when its owner's share is full."""
    monkeypatch.setattr(secrets, "token_hex", lambda count: "0" * 2 * count)
    file = File("file-" + 24 * "0", "ann", "x.jsonl", "batch", 2, "sha256/00/" + 62 * "0" + ".jsonl", 1)

    def add(metadata: dict[str, str], stored: int | None = None) -> BatchRecord:
        return batches.add("ann", "/v1/chat/completions", file, 9, "http://x/", metadata, errors, stored=stored)

    first = add({"a": "b"})
    if not errors:
        assert batches.refuse(first.id, 0, {}, 10)
    key = f"diptych:batch:{first.id}"
    client.hset(key, "created", "1700000000")
    state = lambda: (client.hgetall(key), _books(client, key))  # noqa: E731
    before = state()
    again = add({"other": "x" * 1000}, stored=1)
    assert again.id == first.id and again.created == 1_700_000_000 and state() == before
    assert [batch.id for batch in present(batches.batches("ann")).items] == [first.id]
    Books.of(client).check()


def _books(client: redis.Redis, key: str) -> dict[str, Any]:
    """Everything that is counted and listed beside a record."""
    books: dict[str, Any] = {}
    for name in sorted(map(str, client.keys("diptych:*"))):
        if name != key:
            kind: Any = client.type(name)
            read = {"hash": client.hgetall, "zset": lambda n: client.zrange(n, 0, -1, withscores=True),
                    "set": client.smembers, "string": client.get}  # fmt: skip
            books[name] = read[str(kind)](name) if str(kind) in read else str(kind)
    return books


def test_a_record_of_the_version_before_is_kept_for_its_batch(
    jobs: JobStore, batches: BatchStore, client: redis.Redis
) -> None:
    """It does not say for how long; its digest is that of a batch."""
    batch = batch_of(batches)
    for digest, low, high in ((batch.id, DAYS_S - 60, DAYS_S), ("batch_of_nobody", 0, 60), ("", 0, 60)):
        id = drafted(jobs, digest)
        assert client.hdel(f"diptych:job:{id}", "keep_ms") == 1
        end(jobs, id)
        assert low < left_s(client, id) <= high


def test_one_that_should_be_gone_goes_when_it_is_noted(
    jobs: JobStore, batches: BatchStore, client: redis.Redis
) -> None:
    batch = batch_of(batches)
    id = drafted(jobs, batch.id, keep_s=DAYS_S)
    assert batches.begin(batch.id, 0, id)
    end(jobs, id)
    client.hincrby(f"diptych:job:{id}", "ended", -61_000)
    assert batches.note(batch.id, 0, {}, "completed")
    assert jobs.get(id) is None
    jobs.upkeep.sweep()
    assert not present(jobs.lists.page("ann")).jobs


def test_a_pictures_record_names_it_until_the_batch_is_written(
    jobs: JobStore, batches: BatchStore, client: redis.Redis
) -> None:
    batch = batch_of(batches)
    id = drafted(jobs, batch.id, modality="image", keep_s=DAYS_S)
    assert batches.begin(batch.id, 0, id) and jobs.upkeep.keep("made")
    end(jobs, id, "made")
    assert batches.note(batch.id, 0, {}, "completed")
    assert left_s(client, id) > DAYS_S - 60
    pass_time(client, 2 * 24 * 60)
    assert jobs.upkeep.due() == []
    pass_time(client, 61)
    assert jobs.upkeep.due() == ["made"]


def test_what_is_erased_goes_as_soon_as_anything(jobs: JobStore, client: redis.Redis) -> None:
    id = drafted(jobs, "a line", modality="image", inputs=("begun",), keep_s=DAYS_S)
    assert jobs.upkeep.keep("made") and jobs.upkeep.keep("begun")
    end(jobs, id, "made")
    assert jobs.erase(id)
    pass_time(client)
    assert sorted(jobs.upkeep.due()) == ["begun", "made"]
