"""Clients that are slow, silent or do not read, on real sockets: each is let go in time, and others notice nothing."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator

import httpx2
import pytest

from core.config import Settings
from core.jobs.record import JobDraft
from tests.api.world import SERVE, Api, Worker, changed, eventually, opened, process

CLIENT_S = 1.0
MUCH_S = 30.0  # what must have come by then, on a machine that may stall
SCARCE = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)); " + SERVE


@pytest.fixture
def api(settings: Settings) -> Iterator[Api]:
    with Api(changed(settings, client_s=CLIENT_S)) as api:
        yield api


def connected(api: Api, small: bool = False) -> socket.socket:
    client = socket.socket()
    if small:  # or the kernel would take in megabytes for who reads nothing
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(MUCH_S)
    client.connect(("127.0.0.1", api.port))
    return client


def ended(client: socket.socket, send: Callable[[], None] = lambda: None) -> bytes:
    """What is answered until the connection is closed, while `send` is called again and again."""
    answer, until = b"", time.monotonic() + MUCH_S
    client.settimeout(0.1)
    while time.monotonic() < until:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            send()
        try:
            piece = client.recv(65_536)
        except TimeoutError:
            continue
        except ConnectionResetError:
            return answer
        if not piece:
            return answer
        answer += piece
    raise AssertionError(f"never closed: {answer!r}")


def check_timeout(answer: bytes) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ") and b"connection: close" in head.lower()
    assert json.loads(body)["error"]["code"] == "request_timeout"


def test_headers_that_trickle_are_not_waited_for(api: Api) -> None:
    with connected(api) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n")
        check_timeout(ended(client, lambda: client.sendall(b"X-More: 1\r\n")))
    with connected(api) as client:  # and the second request of a connection
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /he")
        first, _, second = ended(client).partition(b"HTTP/1.1 408")
        assert first.startswith(b"HTTP/1.1 200") and second


def test_who_says_nothing_is_closed(api: Api) -> None:
    with connected(api) as client:
        assert ended(client) == b""
    eventually(lambda: not api.server.server_state.connections)


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/files", "/nowhere"])
def test_a_body_that_trickles_is_not_waited_for(api: Api, path: str) -> None:
    with connected(api) as client:
        kind = "multipart/form-data; boundary=x" if path == "/v1/files" else "application/json"
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: 100000\r\n\r\n"
        client.sendall(head.encode() + (b"--x\r\n" if path == "/v1/files" else b"{"))
        answer = ended(client, lambda: client.sendall(b"a" if path == "/v1/files" else b" "))
        if path == "/nowhere":
            assert answer.startswith(b"HTTP/1.1 404")
        else:
            check_timeout(answer)


def test_a_body_that_comes_steadily_is_waited_for(api: Api) -> None:
    """For several times as long as anybody may stall."""
    body = json.dumps({"type": "image", "prompt": "a cat", "steps": 10**6}).encode() + b" " * 40_000
    with connected(api) as client:
        head = "POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
        for at in range(0, len(body), 2000):
            try:
                client.sendall(body[at : at + 2000])
            except OSError:
                raise AssertionError(ended(client)) from None
            time.sleep(CLIENT_S / 5)
        assert ended(client).startswith(b"HTTP/1.1 503"), "no model: it was read"


def test_who_does_not_read_is_closed_and_who_reads_slowly_is_not(api: Api) -> None:
    with Worker(api.settings) as worker:
        worker.store.create(JobDraft("large", "image", "emoji-xl", {"n": 1, "width": 64, "height": 64}))
        (data,) = worker.finish(worker.take("large"), bytes(8 * 2**20))
    ask = b"GET /v1/jobs/large/images/0 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with connected(api, small=True) as stalled, connected(api, small=True) as slow:
        for client in (stalled, slow):
            client.sendall(ask)
        read = 0
        for _ in range(20):
            read += len(slow.recv(20_000))
            time.sleep(CLIENT_S / 5)
        eventually(lambda: len(api.server.server_state.connections) == 1, "the one that reads nothing stays")
        while piece := slow.recv(2**20):
            read += len(piece)
        assert read > len(data), "all of it, and headers"
    eventually(lambda: not api.server.server_state.connections)


def test_an_event_stream_that_nobody_reads_is_closed(api: Api) -> None:
    with Worker(api.settings) as worker:
        worker.store.create(JobDraft("told", "image", "emoji-xl", {"n": 1}))
        with connected(api, small=True) as client:
            client.sendall(b"GET /v1/jobs/told/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            eventually(lambda: api.server.server_state.connections)
            assert client.recv(15) == b"HTTP/1.1 200 OK"
            event = {"type": "progress", "data": json.dumps({"padding": "x" * 500_000})}

            def closed() -> bool:
                worker.redis.xadd("diptych:events:told", event, maxlen=10)
                return not api.server.server_state.connections

            eventually(closed, "it is still served")


def test_idle_connections_make_way(settings: Settings) -> None:
    """More of them than this process may open files: whoever asks for something is answered."""
    with process(SCARCE, settings) as (_, client), contextlib.ExitStack() as idle:
        address = (client.base_url.host, client.base_url.port)
        for k in range(300):
            one = idle.enter_context(socket.create_connection(address, timeout=MUCH_S))
            if k % 2:
                one.sendall(b"GET /healthz HTTP/1.1\r\n")
        for _ in range(5):
            with httpx2.Client(base_url=client.base_url, timeout=MUCH_S) as newcomer:
                assert newcomer.get("/healthz").status_code == 200


def test_where_all_are_busy_a_new_one_is_told(settings: Settings) -> None:
    settings = changed(settings, connections=3)
    with opened(settings) as (api, worker), contextlib.ExitStack() as streams:
        worker.store.create(JobDraft("told", "image", "emoji-xl", {"n": 1}))
        for _ in range(3):
            client = streams.enter_context(connected(api))
            client.sendall(b"GET /v1/jobs/told/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(15) == b"HTTP/1.1 200 OK"
        with connected(api) as client:
            answer = ended(client)
            assert answer.startswith(b"HTTP/1.1 503") and b"too_many_connections" in answer
        assert len(api.server.server_state.connections) <= 4
