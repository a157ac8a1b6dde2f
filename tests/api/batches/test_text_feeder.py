"""How batches of texts are fed: shares, priorities, ends of every kind, and APIs and workers that die meanwhile."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from api.batches.collector import LARGE
from api.batches.feeder import BatchFeeder
from api.service import Service
from api.text import drafts as text_drafts
from api.text.drafts import CHAT
from contract.card import ModelCard, TextCosts, TextOffer
from contract.errors import Invalid
from core.artifacts import NoArtifact
from core.config import Settings
from core.jobs.batches import BatchRecord, BatchStore
from core.jobs.cards import WorkerCard
from core.jobs.record import Claim, Job, JobDraft, JobState
from deployment.redis import RedisServer
from tests.api.batches import test_routes as test_batches
from tests.api.batches.test_routes import ended, told
from tests.api.batches.test_text_batches import begin, lines
from tests.api.world import (
    CARD,
    SERVE,
    TEXT,
    Api,
    Worker,
    changed,
    client_of,
    eventually,
    kept,
    process,
    settings_of,
    token_of,
)  # fmt: skip

CARDS = [CARD, dataclasses.replace(TEXT, limits=TextOffer(context=512), costs=TextCosts(token_s=0.01))]


class Scribe(Worker):
    """A worker of texts that is played by hand."""

    def announce_all(self, cards: list[ModelCard]) -> None:
        self.registry.announce(WorkerCard(self.name, "here", 1, "ready", "", 1.5, cards), 600)

    def texts(self) -> list[tuple[str, int]]:
        """Jobs of texts that wait, by Celery's lists, and at which level; the next one first."""
        # A message may outlive its job.
        queued = JobState.QUEUED
        return [(id, step) for id, step in self.messages("text") if (job := self.store.get(id)) and job.state is queued]

    def next(self) -> str:
        return eventually(self.texts)[0][0]

    def write(self, claim: Claim, length: int = 1) -> None:
        """Answer with what was asked, so many times."""
        said = claim.parameters["messages"][-1]["content"] * length
        choice = {"text": said, "finish_reason": "stop", "tokens": 1, "logprobs": []}
        result = {"choices": [choice], "prompt_tokens": [3], "cached_tokens": 0}
        assert self.store.leases.succeed(claim.id, claim.attempt, result)

    def answer(self, id: str) -> None:
        self.write(self.take(id))

    def answer_next(self, count: int = 1) -> None:
        for _ in range(count):
            self.answer(self.next())


@pytest.fixture
def scribe(settings: Settings) -> Iterator[Scribe]:
    with Scribe(settings) as scribe:
        scribe.announce_all(CARDS)
        yield scribe


def ask(*texts: str, **more: Any) -> list[dict[str, Any]]:
    return [{"messages": [{"role": "user", "content": text}], **more} for text in texts]


def done_of(client: openai.OpenAI, id: str) -> int:
    """How many of its lines are done."""
    counts = client.batches.retrieve(id).request_counts
    assert counts is not None
    return counts.completed


def content(line: dict[str, Any]) -> str:
    return str(line["response"]["body"]["choices"][0]["message"]["content"])


def contents(client: openai.OpenAI, id: str) -> list[str]:
    """What was answered to a batch's lines, once it has ended."""
    return [content(line) for line in told(client, ended(client, id).output_file_id)]


def test_shares_are_by_key_and_queue(settings: Settings, scribe: Scribe) -> None:
    """Texts wait for no pictures of the same key, and pictures for no texts."""
    with Api(changed(settings, batch_jobs=1, batch_texts=3)) as api, client_of(api.url) as client:
        pictures = test_batches.begin(client, test_batches.lines(*[{"prompt": "a cat", "steps": 2}] * 2))
        one, other = (begin(client, CHAT, *ask(*(f"{name}{k}" for k in range(4)))) for name in "ab")
        backlog = scribe.store.backlog
        eventually(lambda: (backlog("text").queued, backlog("image").queued) == (3, 1))
        for _ in range(8):
            scribe.answer_next()
            assert backlog("text").queued <= 3 and backlog("image").queued == 1
        assert all(ended(client, batch.id).request_counts.completed == 4 for batch in (one, other))
        assert client.batches.retrieve(pictures.id).status == "in_progress"


def test_they_are_the_least_urgent_unless_they_say(settings: Settings, scribe: Scribe) -> None:
    with Api(settings) as api, client_of(api.url) as client:
        batch = begin(client, CHAT, *ask("a", "b"), *ask("c", priority=1))
        eventually(lambda: len(scribe.texts()) == 3)
        assert [step for _, step in scribe.texts()] == [0, 9, 9]
        scribe.answer_next(3)
        assert contents(client, batch.id) == ["a", "b", "c"]


def test_they_wait_while_their_queue_is_full(settings: Settings, scribe: Scribe) -> None:
    """The queue of texts, that is: a full one of pictures is no matter."""
    with Api(changed(settings, max_queued=2)) as api, client_of(api.url) as client:
        assert [api.order() for _ in range(2)]
        batch = begin(client, CHAT, *ask(*"abcde"))
        for k in range(5):
            scribe.next()
            assert scribe.store.backlog("text").queued <= 2
            assert done_of(client, batch.id) <= k
            scribe.answer_next()
        assert contents(client, batch.id) == list("abcde")


@pytest.mark.parametrize("end", ["cancelled", "expired"])
def test_a_batch_that_ends_early(settings: Settings, scribe: Scribe, end: str) -> None:
    with Api(changed(settings, batch_texts=3)) as api, client_of(api.url) as client:
        batch = begin(client, CHAT, *ask(*"abcde"))
        eventually(lambda: len(scribe.texts()) == 3)
        scribe.answer_next()
        running = scribe.take(scribe.next())
        eventually(lambda: done_of(client, batch.id) == 1)
        if end == "cancelled":
            client.batches.cancel(batch.id)
        else:
            scribe.redis.hincrby(f"diptych:batch:{batch.id}", "created", -86_401)
        done = ended(client, batch.id)
        assert done.status == end and getattr(done, f"{end}_at")
        assert (done.request_counts.completed, done.request_counts.failed) == (1, 0)
        assert scribe.is_(running.id, JobState.CANCELLED) and not scribe.texts()
        assert contents(client, batch.id) == ["a"]
        left = told(client, done.error_file_id)
        assert [line["custom_id"] for line in left] == ["c1", "c2", "c3", "c4"]
        assert all(line["response"] is None and line["error"]["code"] == f"batch_{end}" for line in left)


def test_apis_and_workers_that_are_killed_lose_nothing(settings: Settings) -> None:
    """Records are kept for a moment only, and nobody reads them before that is over: a batch's stay until they are."""
    settings = changed(settings, retention_s=0.1, lease_s=0.5)
    with Scribe(settings) as scribe, Scribe(settings, "worker-2") as other:
        scribe.announce_all(CARDS)
        with process(SERVE, settings) as (child, http), client_of(http.base_url) as client:
            texts = [f"text {k}" for k in range(40)]
            batch = begin(client, CHAT, *ask(*texts))
            eventually(lambda: len(scribe.texts()) == 32)
            waiting = scribe.texts()
            child.kill()
            child.wait()
        for id, _ in waiting[:30]:
            scribe.answer(id)
        lost = [scribe.take(id) for id, _ in waiting[30:]]  # and this worker is never heard of again
        alone = scribe.store.create(dataclasses.replace(_draft(), id="alone"))
        scribe.answer(alone.id)
        eventually(lambda: scribe.store.get(alone.id) is None, "no record goes")
        with process(SERVE, settings) as (_, http), client_of(http.base_url) as client:
            for _ in range(10):
                other.answer(other.next())
            done = ended(client, batch.id)
            assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 40, 0)
            assert contents(client, batch.id) == texts
        assert not any(scribe.store.leases.succeed(claim.id, claim.attempt, {}) for claim in lost)


def _draft() -> Any:
    return text_drafts.draft(text_drafts.read(text_drafts.CHAT, ask("alone")[0]), CARDS[1], "")


def test_scopes_and_quotas(settings: Settings, scribe: Scribe) -> None:
    """Who may write may have a batch of texts, and no other; it takes nothing of a quota of pictures."""
    tokens = [token_of(settings, name, [name, "files"], quota="1/day") for name in ("text", "images")]
    with Api(settings) as api, client_of(api.url, tokens[0]) as writes, client_of(api.url, tokens[1]) as draws:
        batch = begin(writes, CHAT, *ask(*"abc"))
        scribe.answer_next(3)
        assert ended(writes, batch.id).request_counts.completed == 3
        with pytest.raises(openai.PermissionDeniedError):
            begin(draws, CHAT, *ask("a"))
        with pytest.raises(openai.PermissionDeniedError):
            test_batches.begin(writes, test_batches.lines({"prompt": "a cat"}))
        with pytest.raises(openai.NotFoundError):
            draws.batches.retrieve(batch.id)


# -- each line ends once, whatever becomes of it -----------------------------------------------------------------------

WAYS = ("well", "large", "refused", "failed", "invalid", "cancelled", "erased")
CODES = {"refused": "unknown_parameter", "failed": "engine_error", "invalid": "context_length_exceeded",
         "cancelled": "cancelled", "erased": "job_lost"}  # fmt: skip


class Desk:
    """A service without a server, and a batch's lines by their jobs."""

    def __init__(self, settings: Settings) -> None:
        self.service = Service(settings)
        self.service.cards.now = dataclasses.replace(self.service.cards.now, models=tuple(CARDS))

    def close(self) -> None:
        for part in ("batches", "files", "rates", "keyring", "registry", "store", "queue"):
            getattr(self.service, part).close()

    def batch(self, *bodies: dict[str, Any]) -> BatchRecord:
        file = kept(self.service, lines(CHAT, *bodies))
        return self.service.batches.add("", CHAT, file, len(bodies), "http://x/", None, [])

    def told(self, key: str | None) -> list[dict[str, Any]]:
        if key is None:
            return []
        file = self.service.files.file(key)
        assert file is not None
        return [json.loads(line) for line in self.service.artifacts.get(file.key).splitlines()]

    def found(self, batch: BatchRecord) -> BatchRecord:
        found = self.service.batches.batch(batch.id)
        assert found is not None
        return found


@pytest.fixture
def desk(settings: Settings) -> Iterator[Desk]:
    with closing(Desk(settings)) as desk:
        yield desk


@examples(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ways=st.lists(st.sampled_from(WAYS), min_size=1, max_size=9), share=st.integers(1, 4), data=st.data())
def test_every_line_is_told_once_in_order(
    redis_server: RedisServer, folder: Path, ways: list[str], share: int, data: st.DataObject
) -> None:
    settings = settings_of(redis_server.url, folder, batch_texts=share)
    with Scribe(settings) as scribe:
        scribe.redis.flushall()
        desk = Desk(settings)
        more: list[dict[str, Any]] = [{"tool": []} if way == "refused" else {} for way in ways]
        batch = desk.batch(*({**ask(str(k))[0], **more[k]} for k in range(len(ways))))
        # Who takes over knows nothing yet.
        both = itertools.cycle([BatchFeeder(desk.service), BatchFeeder(desk.service)])
        for _ in range(100):
            next(both).work()
            if desk.found(batch).status != "in_progress":
                break
            waiting = scribe.texts()
            assert len(waiting) <= share
            if waiting:
                id, _ = data.draw(st.sampled_from(waiting))
                claim = scribe.take(id)
                _end(scribe, claim, ways[int(claim.parameters["messages"][0]["content"])])
        done = desk.found(batch)
        well, ill = desk.told(done.output_file), desk.told(done.error_file)
        assert (done.status, done.completed, done.failed) == ("completed", len(well), len(ill))
        assert [line["custom_id"] for line in well] == [f"c{k}" for k, way in enumerate(ways) if way in WAYS[:2]]
        assert [line["custom_id"] for line in ill] == [f"c{k}" for k, way in enumerate(ways) if way in CODES]
        for line in well:
            k = int(line["custom_id"][1:])
            assert content(line) == str(k) * (20_000 if ways[k] == "large" else 1)
        for line in ill:
            assert line["response"]["body"]["error"]["code"] == CODES[ways[int(line["custom_id"][1:])]]
        assert not scribe.redis.keys("diptych:batch_done:*") + scribe.redis.keys("diptych:batch_jobs:*")
        desk.close()


def used_again(scribe: Scribe, id: str) -> Job:
    """Somebody erases the job of a line, and makes one of the same id."""
    assert scribe.store.erase(id)
    return scribe.store.create(JobDraft(id, "text", TEXT.name, {"messages": [], "n": 1}))


@pytest.mark.parametrize("status", ["cancelling", "expired"])
def test_a_batch_that_ends_leaves_alone_who_has_a_lines_id_by_now(
    desk: Desk, scribe: Scribe, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    """Its job was looked at, and is another before it is cancelled."""
    worker = BatchFeeder(desk.service)
    batch = desk.batch(*ask("a"))
    worker.work()
    (id,) = desk.service.batches.under_way(batch.id).values()
    others: list[Job] = []
    get = desk.service.store.get

    def slow(id: str) -> Job | None:
        found = get(id)
        if not others:
            others.append(used_again(scribe, id))
        return found

    monkeypatch.setattr(desk.service.store, "get", slow)
    if status == "cancelling":
        assert desk.service.batches.turn(desk.found(batch), status)
    else:
        scribe.redis.hset(f"diptych:batch:{batch.id}", "created", 1)
    worker.work()
    (other,) = others
    assert get(id) == other and other.state is JobState.QUEUED
    done = desk.found(batch)
    assert (done.status, done.completed) == ("cancelled" if status == "cancelling" else status, 0)


def test_a_line_that_comes_too_late_leaves_alone_who_has_its_id_by_now(
    desk: Desk, scribe: Scribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job was made while somebody cancelled the batch, and is another before it is taken back."""
    worker = BatchFeeder(desk.service)
    batch = desk.batch(*ask("a"))
    others: list[Job] = []
    begin = desk.service.batches.begin

    def late(id: str, line: int, job: str, place: int | None = None) -> bool:
        assert desk.service.batches.turn(desk.found(batch), "cancelling")
        begun = begin(id, line, job, place)
        others.append(used_again(scribe, job))
        return begun

    monkeypatch.setattr(desk.service.batches, "begin", late)
    worker.work()
    (other,) = others
    assert scribe.store.get(other.id) == other and other.state is JobState.QUEUED


def _end(scribe: Scribe, claim: Claim, way: str) -> None:
    if way in ("well", "large"):
        scribe.write(claim, 20_000 if way == "large" else 1)
    elif way == "cancelled":
        assert scribe.store.cancel(claim.id)
    elif way == "erased":
        assert scribe.store.erase(claim.id)
    elif way == "invalid":
        said = Invalid("messages", "they are too long", "context_length_exceeded")
        assert scribe.store.leases.fail(claim.id, claim.attempt, **said.to_dict())
    else:
        assert scribe.store.leases.fail(claim.id, claim.attempt, "engine_error", "no")


def test_who_comes_late_begins_nothing_of_a_batch_that_has_ended(redis_url: str, desk: Desk, scribe: Scribe) -> None:
    batch = desk.batch(*ask(*map(str, range(40))))
    worker, late = BatchFeeder(desk.service), BatchFeeder(desk.service)
    worker.work()
    begun = len(scribe.ids())
    stale = desk.service.batches.progress([batch.id])
    assert desk.service.batches.turn(stale[0].batch, "cancelling")
    eventually(lambda: worker.work() or desk.found(batch).status == "cancelled")
    late._store = test_batches.Stale(redis_url, stale)  # it acts on what it read before
    late.work()
    late._store.close()
    assert all(scribe.is_(id, JobState.CANCELLED) for id in scribe.ids())
    assert not list(scribe.redis.scan_iter("diptych:batch_jobs:*"))
    assert (desk.found(batch).next, desk.found(batch).failed, len(scribe.ids())) == (begun, 0, begun) and begun < 40


def test_what_is_large_lies_beside_redis(desk: Desk, scribe: Scribe) -> None:
    """It is read again when the file is written; one that somebody took away costs its own line alone."""
    worker = BatchFeeder(desk.service)
    batch = desk.batch(*ask("a", "b", "c"))
    worker.work()
    for length in (LARGE, LARGE, 1):
        scribe.write(scribe.take(scribe.next()), length)
    assert worker._collector.collect(*desk.service.batches.progress([batch.id])) == 0
    noted = dict(desk.service.batches.results(batch.id))
    assert [set(result) for result in noted.values()] == [{"laid"}, {"laid"}, {"status_code", "request_id", "body"}]
    assert max(map(len, scribe.redis.hvals(f"diptych:batch_done:{batch.id}"))) < 1000
    desk.service.artifacts.delete(noted[1]["laid"])
    with pytest.raises(NoArtifact):
        desk.service.artifacts.get(noted[1]["laid"])
    worker.work()
    done = desk.found(batch)
    assert (done.status, done.completed, done.failed) == ("completed", 2, 1)
    assert [content(line) for line in desk.told(done.output_file)] == ["a" * LARGE, "c"]
    (ill,) = desk.told(done.error_file)
    assert ill["custom_id"] == "c1" and ill["response"]["body"]["error"]["code"] == "artifact_unreadable"


def test_results_are_read_in_portions(redis_url: str, scribe: Scribe) -> None:
    """More than one command's, with one that goes meanwhile."""
    store = BatchStore(redis_url)
    scribe.redis.hset("diptych:batch_done:b", mapping={str(k): json.dumps({"k": k}) for k in range(250)})
    reading = store.results("b")
    first = next(reading)
    scribe.redis.hdel("diptych:batch_done:b", "249")
    assert [first, *reading] == [(k, {"k": k}) for k in range(249)]
    store.close()
