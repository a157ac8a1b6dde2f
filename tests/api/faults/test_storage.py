"""An object store that never answers, is full or refuses: what needs it is told so, and nothing else notices."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import ClassVar

import httpx2
import pytest

from core.artifacts import ArtifactError, Artifacts, ArtifactUnwritable, StorageDown, StorageFull
from core.config import Settings
from core.jobs.files import FileStore
from core.jobs.record import JobDraft, JobState
from tests.api.faults import rivals
from tests.api.world import BATCH, CARD, Api, Worker, changed, check_error, eventually, opened, use_s3
from tests.disks import small_disk
from tests.http_server import Handler, LocalServer

WITHIN_S = 2.0
MUCH_S = 30.0  # what takes milliseconds, on a machine that may stall
KEY = f"sha256/00/{'0' * 62}.png"
CROWD = 40  # more than threads of any kind


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[None]]:
    """An entry for each connection to it."""
    with rivals.receiver(rivals.silent) as (url, calls):
        use_s3(monkeypatch, url)
        yield calls


def hand_in(client: httpx2.Client, data: bytes = b"{}") -> httpx2.Response:
    return client.post("/v1/files", files={"file": ("a.jsonl", data)}, data=BATCH)


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return changed(settings, artifacts_url="s3://bucket/pictures", storage_s=WITHIN_S)


def test_every_call_ends_in_time(hung: list[None]) -> None:
    artifacts = Artifacts("s3://bucket/pictures", WITHIN_S)
    for call in (lambda: artifacts.get(KEY), lambda: artifacts.delete(KEY), lambda: artifacts.put(b"x", "image/png")):
        before = time.monotonic()
        with pytest.raises(ArtifactError) as caught:
            call()
        assert isinstance(caught.value, StorageDown), caught.value
        assert time.monotonic() - before < 2 * MUCH_S, "by itself the client tries again for minutes"
    assert hung, "it was asked"


def test_nothing_else_waits_for_it(hung: list[None], settings: Settings) -> None:
    with opened(settings, CARD) as (api, worker):
        worker.store.create(JobDraft("drawn", "image", "emoji-xl", {"n": 1, "width": 64, "height": 64}))
        claim = worker.take("drawn")
        picture = {"key": KEY, "seed": 1, "width": 64, "height": 64, "media_type": "image/png", "size_bytes": 1}
        assert worker.store.leases.succeed("drawn", claim.attempt, {"images": [picture], "engine_s": 0.1})
        worker.redis.zadd("diptych:kept", {KEY: 1})  # its time is over: each API's sweep has it to delete
        eventually(lambda: len(hung) >= 1, "nobody deletes it")
        with httpx2.Client(base_url=api.url, timeout=MUCH_S) as client, ThreadPoolExecutor(CROWD) as crowd:
            before = len(hung)
            waiting = [crowd.submit(client.get, "/v1/jobs/drawn/images/0") for _ in range(CROWD)]
            eventually(lambda: len(hung) > before, "nobody asks for the picture")
            assert client.get("/v1/jobs/drawn").status_code == 200
            assert client.get("/healthz").status_code == 200 and client.get("/readyz").status_code == 200
            late = client.post("/v1/jobs", json={"type": "image", "prompt": "a cat"}).json()["id"]
            assert client.post(f"/v1/jobs/{late}/cancel").json()["status"] == "cancelled"
            for answer in (one.result() for one in waiting):
                check_error(answer, 503, code="storage_down")
                assert int(answer.headers["retry-after"]) > 0 and "x-should-retry" not in answer.headers
            check_error(hand_in(client), 503, code="storage_down")


class HalfHung(Handler):
    """It says how large everything is, and hands nothing out."""

    protocol_version = "HTTP/1.1"
    over = threading.Event()
    unanswered: ClassVar[list[str]] = []

    def respond(self) -> None:
        if self.command == "HEAD":
            self.send_response(200)
            self.send_header("Content-Length", str(4 * 2**20))
            self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
            self.end_headers()
        else:
            self.unanswered.append(self.path)
            self.over.wait(MUCH_S)
            self.close_connection = True


@pytest.fixture
def half_hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The requests that it leaves without an answer."""
    with LocalServer(HalfHung) as server:
        use_s3(monkeypatch, server.url)
        yield HalfHung.unanswered
        HalfHung.over.set()


def test_nothing_else_waits_while_files_are_read_part_by_part(
    half_hung: list[str], settings: Settings, redis_url: str
) -> None:
    settings = changed(settings, artifacts_url="s3://bucket/pictures", storage_s=8 * MUCH_S)
    with opened(settings, CARD) as (api, _), contextlib.ExitStack() as open_ones:
        with closing(FileStore(redis_url)) as files:
            file = files.add("", "large.jsonl", "batch", 4 * 2**20, KEY.replace("png", "jsonl"))
        job = api.order()
        for _ in range(CROWD):
            connection = open_ones.enter_context(socket.create_connection(("127.0.0.1", api.port)))
            connection.sendall(b"GET /v1/files/%s/content HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" % file.id.encode())
        eventually(lambda: len(half_hung) >= 8, "nobody reads the file")
        assert api.get(f"/v1/jobs/{job}").status_code == 200


def test_the_sweep_does_not_wait_for_it(hung: list[None], settings: Settings) -> None:
    with Worker(settings) as worker, Api(settings):
        worker.redis.zadd("diptych:kept", {KEY.replace("/00/", f"/{k:02x}/"): 1 for k in range(100)})
        eventually(lambda: len(hung) >= 1, "nobody deletes them")
        worker.store.create(JobDraft("late", "image", "emoji-xl", {"n": 1}, deadline_s=0.01))
        eventually(lambda: worker.is_("late", JobState.EXPIRED), "nobody sweeps")


class Refusing(Handler):
    """An object store that has nothing, takes its time to say so, and stores nothing."""

    status, said, slow_s = 507, b"", 0.0
    asked: ClassVar[list[str]] = []

    def respond(self) -> None:
        self.asked.append(self.command)
        if self.command == "PUT":
            self.body()
            self.answer(self.status, b"<Error><Code>%s</Code></Error>" % self.said)
            return
        time.sleep(self.slow_s)
        with contextlib.suppress(OSError):  # nobody waits for it any more
            self.answer(404)


@contextlib.contextmanager
def refusing(monkeypatch: pytest.MonkeyPatch, **answers: object) -> Iterator[list[str]]:
    """The methods of requests to it."""
    with LocalServer(type("Store", (Refusing,), {**answers, "asked": (asked := [])})) as server:
        use_s3(monkeypatch, server.url)
        yield asked


def test_nothing_is_written_where_looking_took_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking and writing end in the time of one operation: the first has a quarter of it."""
    with refusing(monkeypatch, slow_s=0.45 * WITHIN_S) as asked:
        with pytest.raises(StorageDown):
            Artifacts("s3://bucket", WITHIN_S).put(b"x", "image/png")
        assert set(asked) == {"HEAD"}


@pytest.mark.parametrize(
    ("status", "said", "kind"),
    [
        (507, b"InsufficientStorage", StorageFull), (507, b"XMinioStorageFull", StorageFull),
        (403, b"QuotaExceeded", StorageFull), (403, b"AccessDenied", ArtifactUnwritable),
        (503, b"SlowDown", StorageDown),
    ],
)  # fmt: skip
def test_why_an_object_store_does_not_write(
    status: int, said: bytes, kind: type[ArtifactError], monkeypatch: pytest.MonkeyPatch
) -> None:
    with refusing(monkeypatch, status=status, said=said), pytest.raises(ArtifactError) as caught:
        Artifacts("s3://bucket", WITHIN_S).put(b"x", "image/png")
    assert type(caught.value) is kind, caught.value


def test_a_full_disk_is_told_until_there_is_room(settings: Settings, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        settings = changed(settings, artifacts_url=disk.as_uri())
        with opened(settings) as (api, _):
            full = hand_in(api.client, b"0" * 2**21)
            check_error(full, 503, code="storage_full")
            assert int(full.headers["retry-after"]) > 0
            assert "drawn" not in full.text
            assert hand_in(api.client, b"0").status_code == 200


def test_a_store_that_refuses_to_write_is_not_blamed_on_a_picture(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refusing(monkeypatch, status=403, said=b"AccessDenied"):
        settings = changed(settings, artifacts_url="s3://bucket", storage_s=WITHIN_S)
        with opened(settings) as (api, _):
            refused = hand_in(api.client)
            check_error(refused, 500, code="artifact_unwritable")
            assert "drawn" not in refused.text
