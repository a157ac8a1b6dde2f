"""How many bytes an owner's files have, and how long what they are of is held."""

from __future__ import annotations

import pytest
import redis

from core.jobs.batches import BatchStore
from core.jobs.files import KEPT_S, File, FilesFull, FileStore, new_file_id
from core.jobs.store import JobStore
from tests.core.jobs.drafts import make
from tests.core.jobs.test_ledger import end

ARTIFACT = "sha256/00/" + 62 * "0" + ".jsonl"


def add(files: FileStore, size: int = 10, *, owner: str = "ann", quota: int = 0) -> File:
    id = new_file_id()
    assert files.reserve(id, ARTIFACT)
    return files.add(owner, "x.jsonl", "batch", size, ARTIFACT, quota=quota, id=id)


def test_a_quota(files: FileStore) -> None:
    one = add(files, 60, quota=100)
    with pytest.raises(FilesFull) as caught:
        add(files, 41, quota=100)
    assert (caught.value.used, caught.value.quota, files.used_bytes("ann")) == (60, 100, 60)
    add(files, 40, quota=100)
    add(files, 100, owner="bob", quota=100)
    files.forget(one)
    files.forget(one)
    assert files.used_bytes("ann") == 40
    assert files.add("ann", "y", "batch", 60, ARTIFACT, quota=100, id=one.id).size == 60
    files.add("ann", "y", "batch", 60, ARTIFACT, quota=100, id=one.id)
    assert files.used_bytes("ann") == 100, "said again, it is the same"


def test_what_is_too_old_counts_no_more(files: FileStore, client: redis.Redis) -> None:
    old = add(files, 100, quota=100)
    client.zincrby("diptych:files:ann", -KEPT_S - 1, old.id)
    add(files, 100, quota=100)
    assert files.used_bytes("ann") == 100


def test_a_hold_that_is_shorter_shortens_no_other(files: FileStore, client: redis.Redis) -> None:
    """Whoever writes the same bytes again holds them for minutes, and a file of them stays for its month."""
    add(files)
    before = client.zscore("diptych:kept", ARTIFACT)
    assert files.reserve(new_file_id(), ARTIFACT)
    assert client.zscore("diptych:kept", ARTIFACT) == before


def test_the_last_holder_lets_it_go(files: FileStore, store: JobStore, redis_url: str) -> None:
    one, two = add(files), add(files)
    batches = BatchStore(redis_url)
    batch = batches.add("ann", "/v1/chat/completions", one, 1, "http://x/", None, [])
    for file in (one, two):
        files.forget(file)
        assert store.upkeep.due() == []
    assert batches.turn(batch, "completed")
    batches.close()
    assert store.upkeep.due() == [ARTIFACT]
    assert not files.reserve(new_file_id(), ARTIFACT), "it is being deleted"


def test_one_that_is_refused_holds_nothing(files: FileStore, store: JobStore) -> None:
    with pytest.raises(FilesFull):
        add(files, 2, quota=1)
    assert store.upkeep.due() == [ARTIFACT]


def test_who_makes_the_same_meanwhile_finds_it(files: FileStore, store: JobStore) -> None:
    """A job that makes it, and names it only after the file is deleted."""
    file = add(files)
    assert store.upkeep.keep(ARTIFACT)
    files.forget(file)
    assert store.upkeep.due() == []


def test_jobs_and_files_of_one_artifact(files: FileStore, store: JobStore, client: redis.Redis) -> None:
    file = add(files)
    job = make(store, owner="bob")
    end(store, job, ARTIFACT)
    files.forget(file)
    seconds = client.time()[0]
    left_s = client.zscore("diptych:kept", ARTIFACT) / 1000 - seconds
    assert 86_400 < left_s < 4 * 86_400, "as long as a job may name it, and no longer"


def test_a_batch_of_a_file_that_holds_nothing_takes_nothing_away(
    files: FileStore, store: JobStore, client: redis.Redis, redis_url: str
) -> None:
    """As a version made it that counted nothing."""
    file = add(files)
    client.delete(f"diptych:held:{ARTIFACT}")
    batches = BatchStore(redis_url)
    batch = batches.add("ann", "/v1/chat/completions", file, 1, "http://x/", None, [])
    assert batches.turn(batch, "completed")
    batches.close()
    assert store.upkeep.due() == []
