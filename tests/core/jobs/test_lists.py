"""Pages of lists: each holds what it should, and no more is read for it."""

from __future__ import annotations

from typing import Any

import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.jobs.batches import BatchStore
from core.jobs.files import File, FileStore
from tests.core.present import present

PURPOSES = ("batch", "vision", "batch_output")


def fill(client: redis.Redis, kinds: list[str | None]) -> list[File]:
    """Make files with these purposes, oldest first; None: the record of one that is gone, and not in the result."""
    client.flushdb()
    made = []
    with client.pipeline(transaction=False) as pipe:
        for k, purpose in enumerate(kinds):
            id = f"file-{k:024x}"
            pipe.zadd("diptych:files:ann", {id: 1_000_000 + k})
            if purpose is not None:
                file = File(id, "ann", f"{k}.jsonl", purpose, 10, "key", 1_000_000 + k)
                fields: dict[Any, Any] = {
                    "owner": "ann", "name": file.name, "purpose": purpose, "size": 10, "key": "key",
                    "created": file.created,
                }  # fmt: skip
                pipe.hset(f"diptych:file:{id}", mapping=fields)
                made.append(file)
        pipe.execute()
    return made


def calls(client: redis.Redis) -> dict[str, int]:
    """How often each command ran, also in scripts."""
    stats: dict[str, Any] = client.info("commandstats")  # type: ignore[assignment]
    return {name.removeprefix("cmdstat_"): int(stat["calls"]) for name, stat in stats.items()}


KINDS = st.lists(st.sampled_from([*PURPOSES, None]), max_size=30) | st.builds(
    lambda few, n: few * n, st.lists(st.sampled_from([*PURPOSES, None]), min_size=1, max_size=5), st.integers(1, 300)
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(KINDS, st.sampled_from([None, *PURPOSES]), st.booleans(), st.sampled_from([1, 2, 7, 100, 101, 1000]))
def test_pages_are_the_list(
    files: FileStore, client: redis.Redis, kinds: list[str | None], purpose: str | None, oldest: bool, limit: int
) -> None:
    """Every file once, in order; all pages but the last are full, and the last one says so."""
    expected = [file for file in fill(client, kinds) if purpose in (None, file.purpose)]
    if not oldest:
        expected.reverse()
    after, walked = "", 0
    while True:
        page = present(files.files("ann", purpose=purpose, oldest=oldest, after=after, limit=limit))
        assert page.items == expected[walked : walked + limit]
        walked += len(page.items)
        assert page.more == (walked < len(expected))
        if not page.more:
            break
        after = page.items[-1].id
    assert files.files("ann", after="file-of-nobody") is None
    assert present(files.files("bob")).items == []


def test_a_page_of_a_long_list_reads_the_page(files: FileStore, client: redis.Redis) -> None:
    """Also where few of many files have the purpose: the others' records stay in Redis."""
    fill(client, ["vision"] * 4000 + ["batch"] + ["vision"] * 1000)
    files.files("ann", limit=1)
    for purpose, limit, records in ((None, 20, 21), ("batch", 20, 1), ("batch_output", 1000, 0), (None, 1000, 1001)):
        before = calls(client)
        page = files.files("ann", purpose=purpose, limit=limit)
        after = calls(client)
        assert page is not None and len(page.items) == min(records, limit)
        assert after.get("hgetall", 0) - before.get("hgetall", 0) <= records
        assert after["evalsha"] - before.get("evalsha", 0) <= 11, "round trips"


def test_batches_are_listed_alike(redis_url: str, client: redis.Redis) -> None:
    store = BatchStore(redis_url)
    file = File("file-1", "ann", "a.jsonl", "batch", 1, "sha256/00/" + 62 * "0" + ".jsonl", 1)
    ids = [store.add(owner, "/v1/completions", file, 1, "", None, []).id for owner in ("ann", "bob") * 60]
    every = {
        owner: [batch.id for batch in present(store.batches(owner, limit=1000)).items] for owner in (None, "ann", "bob")
    }
    assert sorted(every[None]) == sorted(ids)
    assert (sorted(every["ann"]), sorted(every["bob"])) == (sorted(ids[::2]), sorted(ids[1::2]))
    before = calls(client)
    page = present(store.batches(None, after=every[None][10], limit=10))
    assert [batch.id for batch in page.items] == every[None][11:21] and page.more
    assert calls(client)["hgetall"] - before["hgetall"] <= 11
    store.close()
