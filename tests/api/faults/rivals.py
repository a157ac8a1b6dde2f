"""Tenants at their worst, for tests: receivers that never answer, trickle, or go on for ever; and a process looked at.

All real sockets and a real process; nothing here is timed.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def silent(client: socket.socket, over: threading.Event) -> None:
    """Takes what it is told, and says nothing."""
    over.wait()


def trickling(client: socket.socket, over: threading.Event, start: bytes = b"HTTP/1.1 200 OK\r\nX-Slow: ") -> None:
    """Answers with a header that never ends, a byte at a time."""
    client.sendall(start)
    while not over.wait(0.2):
        client.sendall(b"0")


def trickling_status(client: socket.socket, over: threading.Event) -> None:
    """Never gets as far as its status."""
    trickling(client, over, b"HTTP/1.1 2")


def continuing(client: socket.socket, over: threading.Event) -> None:
    """`100 Continue`, for ever, as fast as it can."""
    while not over.is_set():
        client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)


@contextmanager
def receiver(kind: Callable[[socket.socket, threading.Event], None]) -> Iterator[tuple[str, list[None]]]:
    """A receiver of this kind, as long as the context is open: its address, and an entry for each call."""
    over, calls, clients = threading.Event(), list[None](), list[socket.socket]()
    server = socket.create_server(("127.0.0.1", 0), backlog=128)

    def serve(client: socket.socket) -> None:
        with contextlib.suppress(OSError), client:
            client.recv(65536)
            kind(client, over)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = server.accept()
                clients.append(client)
                calls.append(None)
                threading.Thread(target=serve, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/", calls
    finally:
        over.set()
        server.close()
        for client in clients:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)


def peak_mib(pid: int) -> float:
    """The most memory that a process ever had, in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("this system does not say")


class Heartbeat:
    """Asks /healthz again and again while the context is open, each time on a connection of its own."""

    def __init__(self, port: int) -> None:
        self.answers = 0
        self._port = port
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.02):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 60) as client:
                client.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
                if client.recv(64).startswith(b"HTTP/1.1 200"):
                    self.answers += 1
