"""Limits on how a request arrives: what follows an answer is not parsed, and chunks and header fields are counted."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from api import edits, files, http_connection, protocol
from api.http_connection import MAX_FIELDS
from core.jobs.keyring import Keyring
from core.jobs.record import JobDraft
from deployment.redis import RedisServer
from tests.api.test_protocol import MUCH_S, connected, ended
from tests.api.world import Api, Worker, eventually, settings_of
from tests.faults.payloads import form_body

HEAD = "POST {} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def guarded(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """An API with a key, on a database of its own: requests without one are answered before their bodies are read."""
    settings = settings_of(redis_server.url.replace("/0", "/1"), tmp_path_factory.mktemp("data"))
    with contextlib.closing(Keyring.of(settings)) as keyring:
        keyring.add("the first")
    with Api(settings) as api:
        yield api


def answer(data: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the one response in these bytes."""
    head, _, body = data.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return int(status.split()[1]), headers, body


def code(body: bytes) -> str:
    return str(json.loads(body)["error"]["code"])


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/files", "/nowhere"])
@pytest.mark.parametrize("closes", [False, True])
def test_an_answer_before_the_end_of_the_body_closes_the_connection(guarded: Api, path: str, closes: bool) -> None:
    """Although an endless body of one-byte chunks goes on; and the client reads the whole answer."""
    with connected(guarded) as client:
        client.sendall((HEAD.format(path) + "Connection: close\r\n" * closes).encode())
        client.sendall(b"Transfer-Encoding: chunked\r\n\r\n")
        status, headers, body = answer(ended(client, lambda: client.sendall(b"1\r\na\r\n")))
        assert status in (401, 404) and code(body) in ("invalid_api_key", "not_found")
        assert headers["connection"] == "close"
        assert int(headers["content-length"]) == len(body)


def test_a_client_that_writes_all_before_it_reads_gets_the_answer(guarded: Api) -> None:
    """The connection lingers: closing it with unread data would reset it, and lose the answer."""
    with connected(guarded) as client:
        client.sendall(f"{HEAD.format('/v1/jobs')}Connection: close\r\nContent-Length: {16 * 2**20}\r\n\r\n".encode())
        client.sendall(bytes(16 * 2**20))
        status, headers, text = answer(ended(client))
        assert (status, code(text), headers["connection"]) == (401, "invalid_api_key", "close")


def test_a_client_that_sends_for_longer_gets_the_answer_too(guarded: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its body arrives steadily, the connection lingers."""
    monkeypatch.setattr(protocol, "_LINGER_S", linger_s := 0.5)
    for _ in range(20):  # until this machine does not stall for so long
        with connected(guarded) as client:
            head = f"{HEAD.format('/v1/jobs')}Connection: close\r\nContent-Length: 1000000\r\n\r\n"
            client.sendall(head.encode())
            start, gaps, reset = time.monotonic(), [0.0], False
            while sum(gaps) < 3 * linger_s and not reset:
                try:
                    client.sendall(bytes(1000))
                except (BrokenPipeError, ConnectionResetError):  # many clients do not read the answer then
                    reset = True
                time.sleep(0.02)
                gaps.append(time.monotonic() - start - sum(gaps))
            if max(gaps) < linger_s / 4:
                assert not reset
                status, headers, text = answer(ended(client))
                assert (status, code(text), headers["connection"]) == (401, "invalid_api_key", "close")
                return
    pytest.skip("this machine stalls all the time")


def test_lingering_has_an_end(guarded: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_LINGER_S", 0.2)
    monkeypatch.setattr(protocol, "_MOST_LINGER_S", 0.5, raising=False)
    with connected(guarded) as client:
        client.sendall((HEAD.format("/v1/jobs") + "Transfer-Encoding: chunked\r\n\r\n").encode())
        until = time.monotonic() + MUCH_S
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            while time.monotonic() < until:
                client.sendall(bytes(1000))
                time.sleep(0.01)


def test_the_largest_upload_may_be_discarded() -> None:
    largest = edits._MOST * edits.MAX_BYTES + edits._ENVELOPE
    assert max(largest, files.MAX_BYTES + files._ENVELOPE) < http_connection.MAX_DISCARDED


@pytest.mark.parametrize("length", ["99999999999999999999", "1000"])
def test_a_client_that_ends_its_body_early_gets_an_answer(shared: Api, length: str) -> None:
    """Also while the rate limit is charged, before the body is looked at."""
    with connected(shared) as client:
        client.sendall(f"{HEAD.format('/v1/completions')}Content-Length: {length}\r\n\r\n{{}}".encode())
        client.shutdown(socket.SHUT_WR)
        status, _, text = answer(ended(client))
        assert (status, code(text)) in ((400, "invalid_body"), (413, "body_too_large"))


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/files", "/v1/images/edits"])
def test_two_lengths_of_a_body_are_refused(shared: Api, path: str) -> None:
    """A limit could be checked by one and the body read by the other."""
    with connected(shared) as client:
        client.sendall(f"{HEAD.format(path)}Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        client.sendall(chunked([bytes(1000)]))
        status, headers, text = answer(ended(client))
        assert (status, code(text), headers["connection"]) == (400, "invalid_http", "close")
        assert "Content-Length" in json.loads(text)["error"]["message"]


def test_a_whole_body_keeps_the_connection(guarded: Api) -> None:
    request = f"{HEAD.format('/v1/jobs')}Content-Length: 2\r\n\r\n{{}}".encode()
    with connected(guarded) as client:
        for _ in range(3):
            client.sendall(request)
            data = b""
            while b"\r\n\r\n" not in data or not data.endswith(b"}"):
                data += client.recv(65_536)
            status, headers, _ = answer(data)
            assert status == 401 and "connection" not in headers


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


def test_what_is_discarded_is_bounded(guarded: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that goes on for ever is cut off by the amount that it sends."""
    monkeypatch.setattr(http_connection, "MAX_DISCARDED", 200_000)
    monkeypatch.setattr(protocol, "_LINGER_S", 10 * MUCH_S)
    with connected(guarded) as client:
        client.sendall((HEAD.format("/v1/jobs") + "Transfer-Encoding: chunked\r\n\r\n").encode())
        assert client.recv(65_536).startswith(b"HTTP/1.1 401")
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            for _ in range(2000):
                client.sendall(bytes(65_536))


def chunked(pieces: list[bytes]) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/images/edits", "/v1/chat/completions"])
def test_a_body_in_tiny_chunks_is_refused(shared: Api, path: str) -> None:
    """By their number, however fast they come."""
    body = json.dumps({"type": "image", "prompt": "a" * 20_000}).encode()
    with connected(shared) as client:
        client.sendall((HEAD.format(path) + "Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n").encode())
        with contextlib.suppress(OSError):
            client.sendall(chunked([bytes([byte]) for byte in body]))
        status, headers, text = answer(ended(client))
        assert (status, code(text), headers["connection"]) == (400, "chunks_too_small", "close")


@pytest.mark.parametrize("size", [1, 20, 256, 8192])
def test_chunks_of_usual_sizes_are_read(shared: Api, size: int) -> None:
    """And a short body in chunks of one byte."""
    body = json.dumps({"type": "image", "prompt": "a" * min(900_000, size * 900)}).encode()
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    with connected(shared) as client:
        head = "Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
        client.sendall((HEAD.format("/v1/jobs") + head).encode() + chunked(pieces))
        status, _, text = answer(ended(client))
        assert status == 202 or json.loads(text)["error"]["param"] == "prompt", "it was read"


def head_of(fields: int) -> bytes:
    lines = [f"X-{k}: {k}" for k in range(fields - 2)]
    return "\r\n".join(["GET /healthz HTTP/1.1", "Host: localhost", "Connection: close", *lines, "", ""]).encode()


def test_header_fields_are_counted(shared: Api) -> None:
    for fields, expected in ((MAX_FIELDS, 200), (MAX_FIELDS + 1, 431), (100 * MAX_FIELDS, 431)):
        with connected(shared) as client:
            client.sendall(head_of(fields))
            status, _, text = answer(ended(client))
            assert status == expected, fields
            assert status == 200 or code(text) == "headers_too_large"


def test_headers_that_are_too_long_are_431(shared: Api) -> None:
    with connected(shared) as client:
        with contextlib.suppress(OSError):
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"a" * 200_000)
        status, _, text = answer(ended(client))
        assert (status, code(text)) == (431, "headers_too_large")


def test_trailer_fields_are_counted(shared: Api) -> None:
    trailer = b"".join(b"X-%d: 1\r\n" % k for k in range(MAX_FIELDS + 2))
    with connected(shared) as client:
        client.sendall((HEAD.format("/v1/jobs") + "Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n").encode())
        client.sendall(b"2\r\n{}\r\n0\r\n" + trailer + b"\r\n")
        status, _, text = answer(ended(client))
        assert (status, code(text)) == (431, "headers_too_large")


def test_lines_of_a_body_are_no_header_fields(shared: Api) -> None:
    """Also where they come in one segment with the head."""
    body = b"{\n" + b"\n" * 5000 + b"}"
    with connected(shared) as client:
        head = f"{HEAD.format('/v1/jobs')}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        client.sendall(head.encode() + body)
        assert answer(ended(client))[0] == 400


@pytest.mark.quick(0, 2)
@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/images/generations", "/v1/files", "/v1/batches"])
def test_the_first_key_closes_the_service_to_a_body_that_is_on_its_way(
    redis_url: str, tmp_path: Path, path: str
) -> None:
    """Although its request came before the key: access is checked again where something is created."""
    settings = settings_of(redis_url, tmp_path)
    file, kind = path == "/v1/files", "multipart/form-data; boundary=edge"
    body = form_body({"purpose": b"batch"}, {"file": b"{}"}) if file else b'{"type": "image", "prompt": "a cat"}'
    if path == "/v1/images/generations":
        body = b'{"prompt": "a cat"}'
    with contextlib.closing(Keyring.of(settings)) as keyring, Worker(settings) as worker, Api(settings) as api:
        worker.announce()
        eventually(lambda: api.client.get("/readyz").status_code == 200)
        if path == "/v1/batches":
            upload = api.client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a", b"{}")}).json()
            fields = {"endpoint": "/v1/images/generations", "completion_window": "24h"}
            body = json.dumps({"input_file_id": upload["id"], **fields}).encode()
        records = set(worker.redis.scan_iter())
        with connected(api) as client:
            head = HEAD.format(path).replace("application/json", kind) if file else HEAD.format(path)
            length = f"Content-Length: {len(body)}\r\nConnection: close\r\nExpect: 100-continue\r\n\r\n"
            client.sendall((head + length).encode())
            assert client.recv(65_536).startswith(b"HTTP/1.1 100"), "its body is waited for"
            keyring.add("the first")
            client.sendall(body)
            status, _, text = answer(ended(client))
            assert (status, code(text)) == (401, "invalid_api_key"), text
        assert not worker.ids()
        assert not any("file:" in key or "batch:" in key for key in set(worker.redis.scan_iter()) - records)
