"""Clients that are slow, silent or do not read, on real sockets: each is let go in time, and others notice nothing."""

from __future__ import annotations

import contextlib
import fcntl
import json
import socket
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator

import httpx2
import pytest

from api.http.protocol import _SLOWEST
from core.config import Settings
from core.jobs.record import JobDraft
from tests.api.world import SERVE, Api, Worker, changed, eventually, opened, process

CLIENT_S = 1.0
PATIENT_S = 60.0  # by a clock that is set forward
MUCH_S = 30.0  # what must have come by then, on a machine that may stall
SCARCE = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)); " + SERVE


@pytest.fixture
def api(settings: Settings) -> Iterator[Api]:
    with Api(changed(settings, client_s=CLIENT_S)) as api:
        yield api


@pytest.fixture
def patient(settings: Settings) -> Iterator[Api]:
    with Api(changed(settings, client_s=PATIENT_S)) as api:
        yield api


def connected(api: Api, small: bool = False) -> socket.socket:
    client = socket.socket()
    if small:  # or the kernel would take in megabytes for who reads nothing
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(MUCH_S)
    client.connect(("127.0.0.1", api.port))
    return client


class LoopClock:
    """The clock of an API's event loop, which tests set forward: how long a machine stalls then decides nothing."""

    def __init__(self, api: Api) -> None:
        (protocol,) = {each.loop for each in eventually(lambda: api.server.server_state.connections)}
        self._loop, self._ahead_s, now = protocol, 0.0, protocol.time
        self._loop.time = lambda: now() + self._ahead_s

    def forward(self, seconds: float) -> None:
        """Set it forward, and return once what is due by then has run."""
        self._ahead_s += seconds
        for _ in range(2):
            turned = threading.Event()
            self._loop.call_soon_threadsafe(turned.set)
            assert turned.wait(MUCH_S)


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


def test_a_body_that_comes_steadily_is_waited_for(patient: Api) -> None:
    """For several times as long as anybody may stall."""
    portion = int(1.5 * _SLOWEST * PATIENT_S / 5)
    body = json.dumps({"type": "image", "prompt": "a cat", "steps": 10**6}).encode() + b" " * 20 * portion
    with connected(patient) as client:
        head = "POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
        clock = LoopClock(patient)
        for at in range(0, len(body), portion):
            try:
                client.sendall(body[at : at + portion])
            except OSError:
                raise AssertionError(ended(client)) from None
            eventually(lambda: _unsent(client) == 0, "it is not read")
            clock.forward(PATIENT_S / 5)
        assert ended(client).startswith(b"HTTP/1.1 503"), "no model: it was read"


def _unsent(client: socket.socket) -> int:
    """Bytes that the other side's kernel has not taken."""
    count = bytearray(4)
    fcntl.ioctl(client.fileno(), termios.TIOCOUTQ, count)
    return int.from_bytes(count, sys.byteorder)


def test_who_does_not_read_is_closed_and_who_reads_slowly_is_not(patient: Api) -> None:
    api = patient
    with Worker(api.settings) as worker:
        worker.store.create(JobDraft("large", "image", "emoji-xl", {"n": 1, "width": 64, "height": 64}))
        (data,) = worker.finish(worker.take("large"), bytes(8 * 2**20))
    ask = b"GET /v1/jobs/large/images/0 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with connected(api, small=True) as stalled, connected(api, small=True) as slow:
        for client in (stalled, slow):
            client.sendall(ask)
        read, clock = 0, LoopClock(api)
        eventually(lambda: all(c._read_timeout._timer for c in api.server.server_state.connections), "both are served")
        for _ in range(20):
            portion = 2 * _SLOWEST * PATIENT_S // 5
            while portion > 0 and (piece := slow.recv(int(portion))):
                read, portion = read + len(piece), portion - len(piece)
            clock.forward(PATIENT_S / 5)
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
