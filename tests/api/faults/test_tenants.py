"""Nothing one tenant does to its batches, files and receivers touches another's: on real processes and sockets."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image

from api.batches.feeder import BatchFeeder
from api.concurrency.tenant_pool import Deadline
from api.http import body
from api.jobs.webhook_sender import WebhookSender
from api.jobs.webhooks import Unreachable, call
from api.text.drafts import CHAT
from core.config import Settings
from core.jobs.keyring import USUAL_SCOPES
from core.jobs.record import record_id
from tests.api.batches import test_routes as test_batches
from tests.api.batches.test_routes import ended, told
from tests.api.batches.test_text_batches import begin, lines
from tests.api.batches.test_text_feeder import CARDS, Desk, Scribe, ask, contents
from tests.api.faults import rivals
from tests.api.jobs.test_webhooks import Receiver
from tests.api.world import (
    BATCH,
    CARD,
    PATIENCE_S,
    SERVE,
    Api,
    Worker,
    changed,
    client_of,
    eventually,
    opened,
    process,
    token_of,
)  # fmt: skip

URL = test_batches.URL


@contextlib.contextmanager
def tenants(settings: Settings) -> Iterator[tuple[Api, openai.OpenAI, openai.OpenAI, openai.OpenAI]]:
    """An API, two who have a key each, and one who may do everything."""
    scopes = {"ann": USUAL_SCOPES, "bob": USUAL_SCOPES, "chief": ["admin"]}
    tokens = [token_of(settings, name, of, rate="100000/second") for name, of in scopes.items()]
    with Api(settings) as api, contextlib.ExitStack() as clients:
        eventually(lambda: api.get("/readyz").status_code == 200)
        ann, bob, chief = (clients.enter_context(client_of(api.url, token)) for token in tokens)
        yield api, ann, bob, chief


def handed_in(client: openai.OpenAI, data: bytes) -> str:
    return client.files.create(file=("asked.jsonl", data), purpose="batch").id


def begun(client: openai.OpenAI, file: str, endpoint: Any = CHAT) -> str:
    return client.batches.create(input_file_id=file, endpoint=endpoint, completion_window="24h").id


def put(client: openai.OpenAI, id: str) -> str:
    """Make a job of a chosen id; returns that of its record."""
    client.put(f"/jobs/{id}", body={"type": "image", "prompt": "a cat"}, cast_to=object)
    return record_id(client.api_key.split("_")[1], id)


@pytest.fixture
def scribe(settings: Settings) -> Iterator[Scribe]:
    with Scribe(settings) as scribe:
        scribe.announce_all(CARDS)
        yield scribe


@contextlib.contextmanager
def writing(scribe: Scribe) -> Iterator[None]:
    """What waits is answered."""
    over = threading.Event()

    def write_all() -> None:
        while not over.wait(0.02):
            for id, _ in scribe.texts():
                scribe.answer(id)

    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(write_all)
        try:
            yield
        finally:
            over.set()
            written.result()


def ended_beside(scribe: Scribe, ann: openai.OpenAI, bob: openai.OpenAI, worst: str) -> Any:
    """Ann's batch once it has ended, beside one of bob's, which is answered whole."""
    best = begin(bob, CHAT, *ask(*"xyz")).id
    with writing(scribe):
        assert contents(bob, best) == list("xyz")
        return ended(ann, worst)


# -- batches -----------------------------------------------------------------------------------------------------------


def test_who_takes_the_id_of_a_line_harms_nobody(settings: Settings, scribe: Scribe) -> None:
    """A picture under the id that a line of text would have, as the id was once made."""
    settings = changed(settings, batch_texts=2)
    with tenants(settings) as (_, ann, bob, _):
        worst = begin(ann, CHAT, *ask(*"abcdef")).id
        for line in range(2, 6):
            id = "job_" + hashlib.sha256(f"{worst}/{line}".encode()).hexdigest()[:24]
            scribe.finish(scribe.take(put(ann, id)))
        done = ended_beside(scribe, ann, bob, worst)
        assert done.request_counts.completed + done.request_counts.failed == 6


@pytest.mark.parametrize("code", ["job_lost", "internal_error"])
def test_a_line_that_goes_wrong_ends_alone(settings: Settings, scribe: Scribe, code: str) -> None:
    """Its owner erases its job and has a picture drawn under its id; or a worker says it succeeded, with nothing."""
    with tenants(changed(settings, batch_texts=2)) as (_, ann, bob, _):
        worst = begin(ann, CHAT, *ask(*"abcd")).id
        eventually(lambda: len(scribe.texts()) == 2)
        id = scribe.next()
        if code == "job_lost":
            ann.delete(f"/jobs/{id}", cast_to=object)
            with contextlib.suppress(openai.APIStatusError):  # while it is still going
                scribe.finish(scribe.take(put(ann, id)))
        else:
            assert scribe.store.leases.succeed(id, scribe.take(id).attempt, {})
        done = ended_beside(scribe, ann, bob, worst)
        assert (done.request_counts.completed, done.request_counts.failed) == (3, 1)
        (line,) = told(ann, done.error_file_id)
        assert line["response"]["body"]["error"]["code"] == code


# Dies where a batch was put into the list of those that are worked at, if that is a step of its own.
DIES = (
    "import os, redis\n"
    "zadd = redis.Redis.zadd\n"
    "redis.Redis.zadd = lambda self, name, *more, **options: (\n"
    "    os.kill(os.getpid(), 9) if name == 'diptych:batches' else zadd(self, name, *more, **options))\n" + SERVE
)


def test_a_batch_that_there_is_is_worked_at(settings: Settings, scribe: Scribe) -> None:
    """Whenever the API dies that makes it."""
    with (
        process(DIES, settings) as (_, http),
        client_of(http.base_url) as client,
        contextlib.suppress(openai.APIConnectionError),
    ):
        begin(client, CHAT, *ask("a"))
    made = {key.rpartition(":")[2] for key in scribe.redis.scan_iter("diptych:batch:*")}
    assert set(scribe.redis.zrange("diptych:batches", 0, -1)) == made


def test_a_batch_is_looked_at_while_others_are_answered(settings: Settings, scribe: Scribe) -> None:
    """12 MiB of lines that take long to look at."""
    deep = json.dumps({"messages": [{"role": "user", "content": "a"}], "metadata": [[[]]] * 300}).encode()
    line = b'{"custom_id": "%d", "method": "POST", "url": "' + CHAT.encode() + b'", "body": ' + deep + b"}"
    data = b"\n".join(line % k for k in range(12 * 2**20 // len(line)))
    with process(SERVE, settings) as (_, http), client_of(http.base_url) as client:
        file = handed_in(client, data)
        with rivals.Heartbeat(http.base_url.port or 0) as heartbeat:
            eventually(lambda: heartbeat.answers)
            before = heartbeat.answers
            begun(client, file)
            assert heartbeat.answers - before >= 4, "others wait for it"


def test_the_pictures_of_a_batch_are_never_all_in_memory(settings: Settings) -> None:
    """A batch of 120 MiB of pictures in base64 is written into its file."""
    count, size = 40, 3 * 2**20
    asked = [{"prompt": "a cat", "steps": 2, "size": "64x64", "response_format": "b64_json"}] * count
    with Worker(settings) as worker:
        worker.announce()
        with process(SERVE, settings) as (child, http), client_of(http.base_url) as client:
            eventually(lambda: http.get("/readyz").status_code == 200)
            batch = begun(client, handed_in(client, test_batches.lines(*asked)), URL)
            picture = worker.artifacts.put(b"\x89PNG" + bytes(size), "image/png")
            image = {"key": picture, "width": 64, "height": 64, "media_type": "image/png", "size_bytes": size}
            for k in range(count):
                claim = worker.take(eventually(worker.messages_left)[0][0])
                if k == count - 1:
                    before = rivals.peak_mib(child.pid)
                assert worker.store.leases.succeed(claim.id, claim.attempt, {"images": [{**image, "seed": k}]})
            done = ended(client, batch)
            grown = rivals.peak_mib(child.pid) - before
            assert done.request_counts.completed == count
            file = client.files.retrieve(done.output_file_id)
            assert file.bytes > count * size * 4 / 3
            assert grown < 100


def test_files_that_come_in_are_never_all_in_memory(settings: Settings) -> None:
    """Eight of 31 MiB, handed in at once."""
    data = b"x" * (31 * 2**20)
    with process(SERVE, settings) as (child, http):
        eventually(lambda: http.get("/v1/files").status_code == 200)
        before = rivals.peak_mib(child.pid)

        def hand_in(k: int) -> int:
            named = {"file": ("a", b"%d" % k + data)}
            return http.post("/v1/files", files=named, data=BATCH).status_code

        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(hand_in, range(8))) == {200}
        assert rivals.peak_mib(child.pid) - before < 150


def test_many_batches_are_looked_at_in_few_commands(settings: Settings, scribe: Scribe) -> None:
    """Of a key whose share is taken, however many batches it has: commands per pass, not seconds."""
    desk = Desk(changed(settings, batch_texts=1))
    feeder = BatchFeeder(desk.service)
    for batches in (9, 36):
        while scribe.redis.zcard("diptych:batches") < batches:
            desk.batch(*ask(*map(str, range(20))))
        feeder.work()
        with scribe.redis.monitor() as monitor:
            for _ in range(10):
                feeder.work()
            scribe.redis.echo("over")
            sent = 0
            for command in monitor.listen():  # what a script does itself is said to come from "lua"
                if command["command"] == "ECHO over":
                    break
                sent += command["client_type"] != "lua"
        assert sent <= 10 * 3
    desk.close()


def test_a_pass_reads_the_lines_that_it_begins(
    settings: Settings, scribe: Scribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line is parsed once to be begun, however many batches there are."""
    desk = Desk(changed(settings, batch_texts=20))
    for k in range(20):
        desk.batch(*ask(*(f"{k} {line}" for line in range(50))))
    parsed: list[int] = []
    parse = body.parse
    monkeypatch.setattr(body, "parse", lambda raw: parsed.append(1) or parse(raw))
    feeder = BatchFeeder(desk.service)
    for _ in range(10):
        feeder.work()
        for id, _ in scribe.texts()[:2]:
            scribe.answer(id)
    begun = len(scribe.ids())
    desk.close()
    assert 20 <= begun <= len(parsed) <= 2 * begun


def test_an_admin_sees_everybodys_batches(settings: Settings, scribe: Scribe) -> None:
    with tenants(settings) as (_, ann, bob, chief):
        ids = [begin(one, CHAT, *ask("a")).id for one in (ann, bob, ann)]
        scribe.redis.delete("diptych:every_batch", "diptych:every_batch_indexed")  # as of an older version
        assert sorted(batch.id for batch in chief.batches.list().data) == sorted(ids)
        page = chief.batches.list(limit=2)
        assert page.has_more and len(chief.batches.list(after=page.data[-1].id).data) == 1
        assert {batch.id for batch in bob.batches.list().data} == {ids[1]}


# -- files -------------------------------------------------------------------------------------------------------------


def kept(folder: Path) -> set[str]:
    """What lies on the disk. `os.walk` passes over folders that the service removes meanwhile; `rglob` raises."""
    return {name for _, _, names in os.walk(folder / "artifacts") for name in names}


def test_what_is_deleted_leaves_the_disk(settings: Settings, folder: Path, scribe: Scribe) -> None:
    """Unless another file, or a batch that is still worked at, needs the same."""
    with tenants(settings) as (_, ann, bob, _):
        once, twice = (lines(CHAT, *ask(text)) for text in "ab")
        alone, mine, theirs = handed_in(ann, once), handed_in(ann, twice), handed_in(bob, twice)
        eventually(lambda: len(kept(folder)) == 2)
        batch = begun(ann, alone)
        for file in (alone, mine):
            ann.files.delete(file)
        with writing(scribe):
            assert ended(ann, batch).request_counts.completed == 1, "it went on without its file"
        eventually(lambda: hashlib.sha256(once).hexdigest()[2:] + ".jsonl" not in kept(folder))
        assert bob.files.content(theirs).content == twice
        bob.files.delete(theirs)
        eventually(lambda: hashlib.sha256(twice).hexdigest()[2:] + ".jsonl" not in kept(folder))


def test_erasing_a_job_shortens_nobodys_file(settings: Settings, folder: Path) -> None:
    """A file that is, byte for byte, what the job of another made."""
    stream = io.BytesIO()
    Image.new("RGB", (8, 8)).save(stream, "PNG")
    with Worker(settings) as worker, contextlib.ExitStack() as stack:
        worker.announce()
        _, ann, bob, _ = stack.enter_context(tenants(settings))
        id = ann.post("/jobs", body={"type": "image", "prompt": "a cat"}, cast_to=dict)["id"]  # type: ignore[index]
        claim = worker.take(id)
        picture = worker.artifacts.put_kept(stream.getvalue(), "image/png", worker.store.upkeep.keep)
        image = {"key": picture, "seed": 1, "width": 8, "height": 8, "media_type": "image/png", "size_bytes": 1}
        assert worker.store.leases.succeed(claim.id, claim.attempt, {"images": [image]}, [picture])
        file = bob.files.create(file=("a.png", stream.getvalue()), purpose="vision")
        before = worker.redis.zscore("diptych:kept", picture)
        ann.delete(f"/jobs/{id}", cast_to=object)
        assert worker.redis.zscore("diptych:kept", picture) == before
        bob.files.delete(file.id)
        eventually(lambda: picture.rpartition("/")[2] not in kept(folder))


def test_a_file_that_a_job_names_stays_with_the_job(alone: tuple[Api, Worker]) -> None:
    api, worker = alone
    data = lines(CHAT, *ask("a"))
    with client_of(api.url) as client:
        file = handed_in(client, data)
        (key,) = worker.redis.zrange("diptych:kept", 0, -1)
        claim = worker.take(api.order())
        assert worker.store.leases.succeed(claim.id, claim.attempt, {"images": []}, [key])
        client.files.delete(file)
    assert worker.redis.zscore("diptych:kept", key) > 1000 * (worker.redis.time()[0] + api.settings.retention_s)
    assert worker.artifacts.get(key) == data


def test_a_key_has_so_many_bytes_of_files(settings: Settings, scribe: Scribe) -> None:
    settings = changed(settings, files_quota_bytes=1000)
    token = token_of(settings, "carl", ["files"], file_bytes=1500)
    with tenants(settings) as (api, ann, bob, _), client_of(api.url, token) as carl:
        handed_in(carl, b"x" * 1500)  # the key's own limit goes over the service's
        with pytest.raises(openai.RateLimitError):
            handed_in(carl, b"x")
        files = [handed_in(ann, b"%d" % k + b"x" * 399) for k in range(2)]
        with pytest.raises(openai.RateLimitError) as caught:
            handed_in(ann, b"x" * 201)
        assert (
            caught.value.code == "files_quota_exceeded" and caught.value.response.headers["x-should-retry"] == "false"
        )
        handed_in(ann, b"x" * 200)
        handed_in(bob, b"x" * 1000)
        ann.files.delete(files[0])
        handed_in(ann, b"y" * 400)
        with ThreadPoolExecutor(8) as pool:  # at once, too
            ann.files.delete(files[1])

            def one_more(k: int) -> bool:
                with contextlib.suppress(openai.RateLimitError):
                    return bool(handed_in(ann, b"%d" % k + b"z" * 199))
                return False

            assert sum(pool.map(one_more, range(8))) == 2
        assert sum(file.bytes for file in ann.files.list().data) == 1000


# -- receivers ---------------------------------------------------------------------------------------------------------


def test_bad_receivers_keep_nobody_waiting(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty that are silent, and some that trickle or go on for ever; and the API ends when it is told to."""
    monkeypatch.setenv("DIPTYCH_WEBHOOK_PRIVATE", "true")
    kinds = [rivals.trickling_status, rivals.trickling, rivals.continuing, rivals.continuing, *[rivals.silent] * 40]
    with Worker(settings) as worker, contextlib.ExitStack() as stack:
        worker.announce()
        bad = [stack.enter_context(rivals.receiver(kind)) for kind in kinds]
        good = stack.enter_context(Receiver())
        with process(SERVE, settings) as (child, http):
            eventually(lambda: http.get("/readyz").status_code == 200)

            def order(*urls: str) -> None:
                for url in urls:
                    asked = {"type": "image", "prompt": "a cat", "webhook_url": url}
                    worker.work(http.post("/v1/jobs", json=asked).json()["id"])

            def calls() -> int:
                return sum(len(calls) for _, calls in bad)

            order(*(url for url, _ in bad))
            eventually(lambda: calls() >= 20)
            order(*[good.url] * 3)
            eventually(lambda: len(good.heard) == 3, "good receivers wait")
            order(*(url for url, _ in bad))
            before = calls()
            eventually(lambda: calls() > before)
            child.terminate()
            assert child.wait(PATIENCE_S / 4) == -signal.SIGTERM


def test_one_key_with_many_receivers_keeps_no_other_waiting(settings: Settings) -> None:
    """160 ends to tell to silent receivers, and one of another key that came last."""
    settings = changed(settings, webhook_private=True, rate="")
    with Worker(settings) as worker, contextlib.ExitStack() as stack:
        worker.announce()
        silent = [stack.enter_context(rivals.receiver(rivals.silent))[0] for _ in range(40)]
        good = stack.enter_context(Receiver())
        _, ann, bob, _ = stack.enter_context(tenants(settings))
        for k in range(160):
            _order(ann, worker, silent[k % 40])
        _order(bob, worker, good.url)
        heard = eventually(lambda: good.heard and len(good.heard))
        assert heard == 1
        waiting = sum(worker.redis.zcard(key) for key in worker.redis.scan_iter("diptych:webhooks*"))
        assert waiting >= 100, "it was told long before all of the other's were tried"


def _order(client: openai.OpenAI, worker: Worker, url: str) -> None:
    asked = {"type": "image", "prompt": "a cat", "webhook_url": url, "n": 1, "steps": 1, "size": "64x64"}
    id = client.post("/jobs", body=asked, cast_to=dict)["id"]  # type: ignore[index]
    worker.work(id)


def test_a_receiver_is_told_after_the_record_should_be_gone(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tries span hours; the record waits for them, and then goes as all others."""
    settings = changed(settings, webhook_private=True, retention_s=0.5)
    monkeypatch.setattr(WebhookSender.__init__, "__defaults__", ((1.5, 1.5),))
    with opened(settings, CARD) as (api, worker), Receiver(500, 500) as receiver:
        id = api.order(webhook_url=receiver.url)
        worker.work(id)
        eventually(lambda: len(receiver.heard) == 3)
        assert [json.loads(body)["data"]["id"] for _, _, body in receiver.heard] == [id] * 3
        eventually(lambda: worker.store.get(id) is None, "its record stays")


def test_a_call_takes_no_longer_than_it_may() -> None:
    """Whatever an answer is like."""
    for kind in (rivals.silent, rivals.trickling_status, rivals.continuing):
        with rivals.receiver(kind) as (url, _):
            bound = Deadline(0.3)
            with pytest.raises(Unreachable, match=r"it does not answer|its response is not HTTP"):
                call(url, {}, b"{}", private=True, bound=bound)
