"""An object store that never answers, is full or refuses: what needs it is told so, and nothing else notices."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import httpx2
import pytest

from core.artifacts import ArtifactError, Artifacts, ArtifactUnwritable, StorageDown, StorageFull
from core.config import Settings
from core.jobs.files import FileStore
from core.jobs.record import JobDraft, JobState
from tests.api.world import Api, Worker, check_error, eventually, opened, settings_of
from tests.disks import small_disk
from tests.http_server import Handler, LocalServer

WITHIN_S = 2.0
MUCH_S = 30.0  # what takes milliseconds, on a machine that may stall
KEY = f"sha256/00/{'0' * 62}.png"
CROWD = 40  # more than threads of any kind


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[socket.socket]]:
    """It holds what connected."""
    held: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0), backlog=1000) as listening:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    held.append(listening.accept()[0])

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        for name, value in {
            "AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{listening.getsockname()[1]}",
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        yield held
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(MUCH_S)
        for one in held:
            one.close()


@pytest.fixture
def settings(redis_url: str, folder: Path) -> Settings:
    return settings_of(redis_url, folder, artifacts_url="s3://bucket/pictures", storage_s=WITHIN_S)


def test_every_call_ends_in_time(hung: list[socket.socket]) -> None:
    artifacts = Artifacts("s3://bucket/pictures", WITHIN_S)
    for call in (lambda: artifacts.get(KEY), lambda: artifacts.delete(KEY), lambda: artifacts.put(b"x", "image/png")):
        before = time.monotonic()
        with pytest.raises(ArtifactError) as caught:
            call()
        assert isinstance(caught.value, StorageDown), caught.value
        assert time.monotonic() - before < 10 * WITHIN_S
    assert hung, "it was asked"


def test_nothing_else_waits_for_it(hung: list[socket.socket], settings: Settings) -> None:
    with opened(settings) as (api, worker):
        worker.announce()
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
            form = {"files": {"file": ("a.jsonl", b"{}")}, "data": {"purpose": "batch"}}
            refused = client.post("/v1/files", **form)
            check_error(refused, 503, code="storage_down")


@pytest.fixture
def half_hung(monkeypatch: pytest.MonkeyPatch, hung: list[socket.socket]) -> Iterator[list[bytes]]:
    """It says how large everything is, and hands nothing out. The requests that it leaves without an answer."""
    unanswered: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0), backlog=1000) as listening:

        def answer(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError), connection.makefile("rb") as lines:
                while line := lines.readline():
                    while lines.readline().strip():
                        pass
                    if not line.startswith(b"HEAD "):
                        unanswered.append(line)
                        continue
                    connection.sendall(
                        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n"
                        b"Last-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n\r\n" % (4 * 2**20)
                    )

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=answer, args=(listening.accept()[0],), daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{listening.getsockname()[1]}")
        yield unanswered
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(MUCH_S)


def test_nothing_else_waits_while_files_are_read_part_by_part(
    half_hung: list[bytes], redis_url: str, folder: Path
) -> None:
    settings = settings_of(redis_url, folder, artifacts_url="s3://bucket/pictures", storage_s=8 * MUCH_S)
    with opened(settings) as (api, worker), contextlib.ExitStack() as open_ones:
        worker.announce()
        files = FileStore(redis_url)
        file = files.add("", "large.jsonl", "batch", 4 * 2**20, KEY.replace("png", "jsonl"))
        files.close()
        job = api.order()
        for _ in range(CROWD):
            connection = open_ones.enter_context(socket.create_connection(("127.0.0.1", api.port)))
            connection.sendall(b"GET /v1/files/%s/content HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" % file.id.encode())
        eventually(lambda: len(half_hung) >= 16, "nobody reads the file")
        assert api.client.get(f"/v1/jobs/{job}").status_code == 200


def test_the_sweep_does_not_wait_for_it(hung: list[socket.socket], settings: Settings) -> None:
    with Worker(settings) as worker, Api(settings):
        worker.redis.zadd("diptych:kept", {KEY.replace("/00/", f"/{k:02x}/"): 1 for k in range(100)})
        eventually(lambda: len(hung) >= 1, "nobody deletes them")
        worker.store.create(JobDraft("late", "image", "emoji-xl", {"n": 1}, deadline_s=0.01))
        until = time.monotonic() + MUCH_S
        while not worker.is_("late", JobState.EXPIRED):
            assert time.monotonic() < until, "nobody sweeps"
            time.sleep(0.05)


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
        for name, value in {
            "AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": server.url,
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)
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


def test_a_full_disk_is_told_until_there_is_room(redis_url: str, folder: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        settings = settings_of(redis_url, folder, artifacts_url=disk.as_uri())
        with opened(settings) as (api, worker):
            worker.announce()
            data = {"purpose": "batch"}
            full = api.client.post("/v1/files", files={"file": ("a.jsonl", b"0" * 2**21)}, data=data)
            check_error(full, 503, code="storage_full")
            assert int(full.headers["retry-after"]) > 0
            assert "drawn" not in full.text
            assert api.client.post("/v1/files", files={"file": ("a.jsonl", b"0")}, data=data).status_code == 200


def test_a_store_that_refuses_to_write_is_not_blamed_on_a_picture(
    redis_url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refusing(monkeypatch, status=403, said=b"AccessDenied"):
        settings = settings_of(redis_url, folder, artifacts_url="s3://bucket", storage_s=WITHIN_S)
        with opened(settings) as (api, worker):
            worker.announce()
            form = {"files": {"file": ("a.jsonl", b"{}")}, "data": {"purpose": "batch"}}
            refused = api.client.post("/v1/files", **form)
            check_error(refused, 500, code="artifact_unwritable")
            assert "drawn" not in refused.text
