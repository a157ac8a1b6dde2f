"""What a newer version wrote, or nobody can read, is skipped and counted, and holds nobody up."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from core.jobs.cards import card_json, model_card, worker_card
from core.jobs.record import Job, JobState, new_id
from core.jobs.registry import Registry
from core.jobs.store import JobStore
from core.jobs.unreadable import TALLY, UnreadableRecord
from tests.contract.test_card import IMAGE
from tests.core.jobs import books
from tests.core.jobs.drafts import RECORD, draft, make
from tests.core.jobs.test_registry import WORKER
from tests.core.present import present

MODEL_CARD = card_json(IMAGE)
BROKEN_CARDS: dict[str, Any] = {
    "no JSON": "{",
    "no object": "[]",
    "newer": json.dumps({**MODEL_CARD, "v": 2}),
    "no version": json.dumps({**MODEL_CARD, "v": "soon"}),
    "a field missing": json.dumps({name: MODEL_CARD[name] for name in MODEL_CARD if name != "costs"}),
    "sizes that are words": json.dumps({**MODEL_CARD, "sizes": ["128x128"]}),
    "limits that are none": json.dumps({**MODEL_CARD, "limits": None}),
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("card", BROKEN_CARDS.values(), ids=BROKEN_CARDS)
def test_a_card_that_cannot_be_read_is_skipped_counted_and_told_once(
    registry: Registry, client: redis.Redis, caplog: pytest.LogCaptureFixture, card: str
) -> None:
    name = new_id()
    registry.announce(WORKER, 60.0)
    client.hset("diptych:models", name, card)
    client.zadd("diptych:workers", {name: 2**53})
    client.set(f"diptych:worker:{name}", card)
    before = TALLY.counts()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert registry.models() == [replace(IMAGE, live=True)]
            assert registry.workers() == [WORKER]
    after = TALLY.counts()
    assert {kind: after[kind] - before[kind] for kind in after} == {"record": 0, "model card": 1, "worker card": 1}
    assert len([line for line in caplog.messages if name in line]) == 2
    assert registry.has_model(name)
    registry.forget_model(name)
    assert not registry.has_model(name)


def test_a_worker_with_one_model_that_cannot_be_read_is_seen_with_the_others() -> None:
    raw = card_json(WORKER)
    raw["models"].append({"name": "of tomorrow"})
    assert worker_card("ada", json.loads(json.dumps(raw))) == WORKER


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from([*MODEL_CARD, *card_json(WORKER)]), inner),
))  # fmt: skip
def test_whatever_lies_there_is_read_or_refused(raw: Any) -> None:
    for read in (model_card, worker_card):
        for mixed in (raw, {**card_json(WORKER), **MODEL_CARD, **raw} if isinstance(raw, dict) else raw):
            try:
                read("x", mixed)
            except UnreadableRecord as error:
                assert error.reason


BROKEN_RECORDS: dict[str, dict[str, str]] = {
    "newer": {"v": "2"},
    "an unknown state": {"state": "dreaming"},
    "garbage": {"parameters": "{"},
    "no object": {"parameters": "[1]"},
    "no number": {"created": "yesterday"},
}


@pytest.mark.parametrize("fields", BROKEN_RECORDS.values(), ids=BROKEN_RECORDS)
def test_a_list_goes_on_past_a_record_that_cannot_be_read(
    store: JobStore, client: redis.Redis, fields: dict[str, str]
) -> None:
    ids = [make(store, owner="eve") for _ in range(3)]
    client.hset(f"diptych:job:{ids[1]}", mapping=fields)
    before = TALLY.counts()["record"]
    for owner in ("eve", None):
        page = present(store.lists.page(owner))
        assert [job.id for job in page.jobs] == [ids[2], ids[0]]
    with pytest.raises(UnreadableRecord) as caught:
        store.get(ids[1])
    assert caught.value.owner == "eve"
    assert TALLY.counts()["record"] == before + 1
    assert store.erase(ids[1])
    assert store.get(ids[1]) is None


DAMAGED = [{"v": "2"}, {"work_ms": "much"}, {"state": "dreaming"}, {"lost": "x"}]


@pytest.mark.parametrize("fields", DAMAGED, ids=str)
@pytest.mark.parametrize("running", [True, False])
def test_sweeps_go_on_past_it(store: JobStore, client: redis.Redis, fields: dict[str, str], running: bool) -> None:
    """Its neighbours' deadlines, leases and messages are looked after all the same."""

    ids = [make(store, deadline_s=500) for _ in range(3)]
    if running:
        for id in ids:
            assert store.leases.claim(id, "ada") is not None
    client.hset(f"diptych:job:{ids[1]}", mapping=fields)
    books.age(client, 5000)
    swept = [store.upkeep.sweep() for _ in range(3)]
    assert sorted(id for one in swept for id in one.expired) == sorted((ids[0], ids[2]))
    later = make(store)
    books.age(client, 5000)
    assert [envelope.id for envelope in store.upkeep.sweep().send] == [later]
    assert store.empty("image") >= 1


def test_a_claim_of_what_cannot_be_read(store: JobStore, client: redis.Redis) -> None:
    damaged, newer = (make(store) for _ in range(2))
    client.hset(f"diptych:job:{damaged}", "parameters", "[")
    assert store.leases.claim(damaged, "ada") is None
    client.hset(f"diptych:job:{damaged}", "parameters", "{}")
    job = present(store.get(damaged))
    assert job.state is JobState.FAILED and present(job.error)["code"] == "record_unreadable"
    client.hset(f"diptych:job:{newer}", "v", "2")
    # Of no model that is served here: workers of its version take it.
    assert store.leases.glance(newer) == (True, False, "")


def test_records_of_before_there_were_versions(store: JobStore, client: redis.Redis) -> None:
    job = store.create(draft())
    assert client.hget(f"diptych:job:{job.id}", "v") == "1"
    client.hdel(f"diptych:job:{job.id}", "v")
    assert store.get(job.id) == job
    assert store.leases.claim(job.id, "ada") is not None


FIELDS = (
    "v", "modality", "state", "parameters", "priority", "created", "attempt", "lost", "work_ms", "result", "error",
    "webhook", "deadline",
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(FIELDS), st.text(max_size=6)))
def test_whatever_a_record_holds_is_read_or_refused(fields: dict[str, str]) -> None:
    for mixed in (fields, {**RECORD, **fields}):
        try:
            Job.of("x", mixed)
        except UnreadableRecord as error:
            assert error.reason
