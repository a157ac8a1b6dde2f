"""Answers with pictures in base64 are streamed: the same bytes, checked first, and never whole in the API's memory."""

from __future__ import annotations

import base64
import contextlib
import random
import socket

import httpx2
import pytest

from api.concurrency.held_bytes import HeldBytes
from api.pictures import inline_images
from api.service import Service
from core.artifacts import ArtifactError
from core.config import Settings
from tests.api.easel import asked, conclude
from tests.api.world import PATIENCE_S, SERVE, Api, Worker, check_error, eventually, parsed, process
from tests.faults.monitor import Monitor, usage

MIB = 2**20


SIZES = (MIB + 1, 0, 1, 2, 3 * 2**17, 3 * 2**17 + 1, 6 * MIB)
PICTURES = [random.Random(size).randbytes(size) for size in SIZES]


def test_large_and_small_pictures_are_streamed_as_they_are(shared: Api, worker: Worker) -> None:
    id, answer = asked(worker, shared.draw, n=len(SIZES), stream=True)
    worker.finish(worker.take(id), *PICTURES)
    events = parsed(iter(answer.result(PATIENCE_S).text.split("\n")))
    assert [base64.b64decode(event.data["b64_json"], validate=True) for event in events] == PICTURES


def test_a_damaged_picture_is_an_error_before_the_first_byte(shared: Api, worker: Worker) -> None:
    data = random.Random(9).randbytes(MIB)
    id, answer = asked(worker, shared.draw, response_format="b64_json")
    key = worker.artifacts.put(data, "image/png")
    (shared.settings.data_dir / "artifacts" / key).write_bytes(data[:-1] + b"!")
    conclude(worker, id, {"key": key, "size_bytes": None})
    check_error(answer.result(PATIENCE_S), 500, code="artifact_unreadable")


def test_a_store_that_fails_inside_an_event_ends_the_connection(
    shared: Api, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other event is written into its data."""
    read = inline_images._part

    def failing(service: Service, key: str, at: int, length: int) -> bytes:
        if at:
            raise ArtifactError("the storage does not answer")
        return read(service, key, at, length)

    monkeypatch.setattr(inline_images, "_part", failing)

    def receive() -> bytes:
        received, fields = b"", {"prompt": "x", "stream": True}
        stream = shared.client.stream("POST", "/v1/images/generations", json=fields)
        with stream as response, contextlib.suppress(httpx2.RemoteProtocolError):
            for piece in response.iter_bytes():
                received += piece
            received += b" (complete)"
        return received

    id, answer = asked(worker, receive)
    worker.finish(worker.take(id), bytes(7 * MIB))
    received = answer.result(PATIENCE_S)
    assert received.startswith(b"event: image_generation.completed\ndata: {")
    assert b"event: error" not in received and not received.endswith(b" (complete)")


def test_a_client_that_does_not_read_holds_no_pictures(settings: Settings) -> None:
    body = b'{"prompt": "x", "n": 10, "response_format": "b64_json"}'
    with Worker(settings) as worker, process(SERVE, settings) as (child, client):
        worker.announce()
        eventually(lambda: client.get("/readyz").status_code == 200)
        with socket.create_connection(("127.0.0.1", client.base_url.port or 0)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            head = f"POST /v1/images/generations HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
            connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            (id,) = eventually(worker.ids)
            before = usage(child.pid)[0]
            with Monitor(str(client.base_url), child.pid) as monitor:
                worker.finish(worker.take(id), *(random.Random(k).randbytes(4 * MIB) for k in range(10)))
                assert connection.recv(12) == b"HTTP/1.1 200"
                for _ in range(100):  # turns of its loop, in which it may read on
                    assert client.get("/healthz").status_code == 200
        assert monitor.peak_mib() - before < 60


@pytest.mark.parametrize("limit", [0, 3 * MIB, 64 * MIB])
def test_answers_hold_no_more_than_the_service_allows_and_let_go_of_it(
    shared: Api, worker: Worker, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """Images that do not fit into the memory are read again as they are sent; all arrive as they are."""
    held = HeldBytes(limit)
    service: Service = shared.server.config.app.state.service  # type: ignore[union-attr]
    monkeypatch.setattr(service, "inline_bytes", held)
    reads: list[str] = []
    part = inline_images._part

    def counted(service: Service, key: str, at: int, length: int) -> bytes:
        reads.append(key)
        return part(service, key, at, length)

    monkeypatch.setattr(inline_images, "_part", counted)
    id, answer = asked(worker, shared.draw, n=len(SIZES), response_format="b64_json")
    worker.finish(worker.take(id), *PICTURES)
    response = answer.result(PATIENCE_S)
    assert int(response.headers["content-length"]) == len(response.content)
    assert [base64.b64decode(image["b64_json"], validate=True) for image in response.json()["data"]] == PICTURES
    assert len(set(reads)) == (1 if limit else 6)
    eventually(lambda: held.count == 0)
