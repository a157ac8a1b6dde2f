"""Limits on how a request arrives: what follows an answer is not parsed, and chunks and header fields are counted."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from api import files
from api.http import connection as http_connection
from api.http import protocol
from api.http.connection import MAX_FIELDS
from api.pictures import forms as picture_forms
from core.jobs.keyring import Keyring
from core.jobs.record import JobDraft
from deployment.redis import RedisServer
from tests.api.http.test_protocol import MUCH_S, connected, ended
from tests.api.world import BATCH, CARD, Api, Worker, opened, settings_of
from tests.faults.payloads import form_body

CHUNKED, CLOSE = "Transfer-Encoding: chunked", "Connection: close"
REFUSED = (401, "invalid_api_key", "close")


def head(path: str = "/v1/jobs", *lines: str, kind: str = "application/json") -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Type: {kind}", *lines, "\r\n"]).encode()


def chunked(pieces: list[bytes]) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def read(data: bytes) -> tuple[int, str | None, str | None]:
    """Status, error's code and `Connection` header of the one response in these bytes."""
    start, _, body = data.partition(b"\r\n\r\n")
    status, *lines = start.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    assert int(headers["content-length"]) == len(body)
    return int(status.split()[1]), (json.loads(body).get("error") or {}).get("code"), headers.get("connection")


def answer(api: Api, data: bytes) -> tuple[int, str | None, str | None]:
    """As `read`, to these bytes."""
    with connected(api) as client:
        with contextlib.suppress(OSError):
            client.sendall(data)
        return read(ended(client))


@pytest.fixture(scope="module")
def guarded(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """An API with a key, on a database of its own: requests without one are answered before their bodies are read."""
    settings = settings_of(redis_server.url.replace("/0", "/1"), tmp_path_factory.mktemp("data"))
    with contextlib.closing(Keyring.of(settings)) as keyring:
        keyring.add("the first")
    with Api(settings) as api:
        yield api


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/files", "/nowhere"])
@pytest.mark.parametrize("lines", [[CHUNKED], [CLOSE, CHUNKED]])
def test_an_answer_before_the_end_of_the_body_closes_the_connection(guarded: Api, path: str, lines: list[str]) -> None:
    """Although an endless body of one-byte chunks goes on; and the client reads the whole answer."""
    with connected(guarded) as client:
        client.sendall(head(path, *lines))
        told = read(ended(client, lambda: client.sendall(b"1\r\na\r\n")))
        assert told == ((404, "not_found", "close") if path == "/nowhere" else REFUSED)


def test_a_client_that_writes_all_before_it_reads_gets_the_answer(guarded: Api) -> None:
    """The connection lingers: closing it with unread data would reset it, and lose the answer."""
    with connected(guarded) as client:
        client.sendall(head("/v1/jobs", CLOSE, f"Content-Length: {16 * 2**20}") + bytes(16 * 2**20))
        assert read(ended(client)) == REFUSED


def test_a_client_that_sends_for_longer_gets_the_answer_too(guarded: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its body arrives steadily, the connection lingers."""
    monkeypatch.setattr(protocol, "_LINGER_S", linger_s := 0.5)
    for _ in range(20):  # until this machine does not stall for so long
        with connected(guarded) as client:
            client.sendall(head("/v1/jobs", CLOSE, "Content-Length: 1000000"))
            start, gaps, reset = time.monotonic(), [0.0], False
            while sum(gaps) < 3 * linger_s and not reset:
                try:
                    client.sendall(bytes(1000))
                except (BrokenPipeError, ConnectionResetError):  # many clients do not read the answer then
                    reset = True
                time.sleep(0.02)
                gaps.append(time.monotonic() - start - sum(gaps))
            if max(gaps) < linger_s / 4:
                assert not reset and read(ended(client)) == REFUSED
                return
    pytest.skip("this machine stalls all the time")


@pytest.mark.parametrize(
    "limits", [{"_LINGER_S": 0.2, "_MOST_LINGER_S": 0.5}, {"MAX_DISCARDED": 200_000, "_LINGER_S": 10 * MUCH_S}]
)
def test_lingering_has_an_end(guarded: Api, monkeypatch: pytest.MonkeyPatch, limits: dict[str, float]) -> None:
    """By time, and by the amount that a client sends."""
    for name, value in limits.items():
        monkeypatch.setattr(http_connection if name == "MAX_DISCARDED" else protocol, name, value)
    with connected(guarded) as client:
        client.sendall(head("/v1/jobs", CHUNKED))
        until = time.monotonic() + MUCH_S
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            while time.monotonic() < until:
                client.sendall(bytes(10_000))
                time.sleep(0.01)


def test_the_largest_upload_may_be_discarded() -> None:
    largest = picture_forms._MOST * picture_forms.MAX_BYTES + picture_forms._ENVELOPE
    assert max(largest, files.MAX_BYTES + files._ENVELOPE) < http_connection.MAX_DISCARDED


@pytest.mark.parametrize("length", ["99999999999999999999", "1000"])
def test_a_client_that_ends_its_body_early_gets_an_answer(shared: Api, length: str) -> None:
    """Also while the rate limit is charged, before the body is looked at."""
    with connected(shared) as client:
        client.sendall(head("/v1/completions", f"Content-Length: {length}") + b"{}")
        client.shutdown(socket.SHUT_WR)
        assert read(ended(client))[:2] in ((400, "invalid_body"), (413, "body_too_large"))


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/files", "/v1/images/edits"])
def test_two_lengths_of_a_body_are_refused(shared: Api, path: str) -> None:
    """A limit could be checked by one and the body read by the other."""
    data = head(path, "Content-Length: 2", CHUNKED) + chunked([bytes(1000)])
    assert answer(shared, data) == (400, "invalid_http", "close")


def test_a_whole_body_keeps_the_connection(guarded: Api) -> None:
    with connected(guarded) as client:
        for _ in range(3):
            client.sendall(head("/v1/jobs", "Content-Length: 2") + b"{}")
            data = b""
            while b"\r\n\r\n" not in data or not data.endswith(b"}"):
                data += client.recv(65_536)
            assert read(data) == (401, "invalid_api_key", None)


def test_what_follows_the_start_of_an_answer_is_not_parsed(shared: Api, worker: Worker) -> None:
    """An event stream goes on, whatever its client still sends in the name of a body."""
    worker.store.create(JobDraft("told", "image", "emoji-xl", {"n": 1, "steps": 1}))
    head = b"GET /v1/jobs/told/events HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connected(shared) as client:
        client.sendall(head)
        data = client.recv(65_536)
        assert data.startswith(b"HTTP/1.1 200 OK")
        client.sendall(b"no chunk at all\r\n" * 100)
        worker.take("told")
        worker.store.cancel("told")
        data += ended(client)
        assert b"event: cancelled\n" in data, data


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/images/edits", "/v1/chat/completions"])
def test_a_body_in_tiny_chunks_is_refused(shared: Api, path: str) -> None:
    """By their number, however fast they come."""
    body = json.dumps({"type": "image", "prompt": "a" * 20_000}).encode()
    data = head(path, CLOSE, CHUNKED) + chunked([bytes([byte]) for byte in body])
    assert answer(shared, data) == (400, "chunks_too_small", "close")


@pytest.mark.parametrize(("size", "status"), [(1, 202), (20, 400), (256, 400), (8192, 400)])
def test_chunks_of_usual_sizes_are_read(shared: Api, size: int, status: int) -> None:
    """And a short body in chunks of one byte: it is only the prompt that is too long."""
    body = json.dumps({"type": "image", "prompt": "a" * min(900_000, size * 900)}).encode()
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    told = answer(shared, head("/v1/jobs", CLOSE, CHUNKED) + chunked(pieces))
    assert told[:2] == (status, None if status == 202 else "invalid_value")


def test_header_fields_are_counted_and_bounded(shared: Api) -> None:
    get = ["GET /healthz HTTP/1.1", "Host: localhost", CLOSE]
    for count, expected in ((MAX_FIELDS, 200), (MAX_FIELDS + 1, 431), (100 * MAX_FIELDS, 431)):
        lines = [*get, *(f"X-{k}: {k}" for k in range(count - 2)), "\r\n"]
        told = answer(shared, "\r\n".join(lines).encode())
        assert told[:2] == (expected, None if expected == 200 else "headers_too_large"), count
    too_long = "\r\n".join([*get, "X-Long: " + "a" * 200_000]).encode()
    assert answer(shared, too_long)[:2] == (431, "headers_too_large")
    trailer = b"".join(b"X-%d: 1\r\n" % k for k in range(MAX_FIELDS + 2))
    data = head("/v1/jobs", CLOSE, CHUNKED) + b"2\r\n{}\r\n0\r\n" + trailer + b"\r\n"
    assert answer(shared, data)[:2] == (431, "headers_too_large")


def test_lines_of_a_body_are_no_header_fields(shared: Api) -> None:
    """Also where they come in one segment with the head."""
    body = b"{\n" + b"\n" * 5000 + b"}"
    assert answer(shared, head("/v1/jobs", f"Content-Length: {len(body)}", CLOSE) + body)[0] == 400


@pytest.mark.quick(0, 1)
@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/files", "/v1/batches"])
def test_the_first_key_closes_the_service_to_a_body_that_is_on_its_way(
    redis_url: str, tmp_path: Path, path: str
) -> None:
    """Although its request came before the key: access is checked again where something is created."""
    settings = settings_of(redis_url, tmp_path)
    kind, body = "application/json", b'{"type": "image", "prompt": "a cat"}'
    if path == "/v1/files":
        kind, body = "multipart/form-data; boundary=edge", form_body({"purpose": b"batch"}, {"file": b"{}"})
    with contextlib.closing(Keyring.of(settings)) as keyring, opened(settings, CARD) as (api, worker):
        if path == "/v1/batches":
            upload = api.client.post("/v1/files", data=BATCH, files={"file": ("a", b"{}")}).json()
            fields = {"endpoint": "/v1/images/generations", "completion_window": "24h"}
            body = json.dumps({"input_file_id": upload["id"], **fields}).encode()
        records = set(worker.redis.scan_iter())
        with connected(api) as client:
            client.sendall(head(path, f"Content-Length: {len(body)}", CLOSE, "Expect: 100-continue", kind=kind))
            assert client.recv(65_536).startswith(b"HTTP/1.1 100"), "its body is waited for"
            keyring.add("the first")
            client.sendall(body)
            assert read(ended(client)) == REFUSED
        assert not worker.ids()
        assert not any("file:" in key or "batch:" in key for key in set(worker.redis.scan_iter()) - records)
