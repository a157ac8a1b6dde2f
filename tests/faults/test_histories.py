"""Tests that the checker accepts a short random history of a real service, and that the player works."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.faults.histories.checker import check
from tests.faults.histories.clocks import Clocks
from tests.faults.histories.faults import draw, possible
from tests.faults.histories.history import play
from tests.faults.histories.proxy import CUT, HANG, PASS, SLOW, Proxy
from tests.faults.histories.record import Fault, History
from tests.faults.histories.world import World

# Faults that write into Redis or send requests, and end by themselves.
JOINING = ("broken_messages", "new_fields", "hostile_bodies", "broken_bodies", "large_batch", "no_memory")


def test_a_short_history_is_accepted(tmp_path: Path) -> None:
    with World(tmp_path / "world", objects=True) as world:
        schedule = draw(16, possible(world), 6, 3.0) + [Fault(1.0, kind, seconds=0.3, size=1) for kind in JOINING]
        history = play(world, 16, schedule, 3.0)
        problems = check(history)
        if problems:
            history.write(tmp_path / "history.json")
        assert problems == [], world.logs()
        assert len(history.faults) >= 7 and sum(call.op == "submit" for call in history.calls) >= 10
        assert sum(fault.kind in JOINING for fault in history.faults) >= 4
        ops = {call.op for call in history.calls}
        assert {"hostile", "upload", "text", "files"} <= ops and len(history.levels) == len(world.parts)
    history.write(tmp_path / "played.json")
    assert History.read(tmp_path / "played.json") == history


class Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(OSError):
            while data := self.request.recv(100):
                self.request.sendall(data)


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that says back what it hears."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def test_a_proxy_can_be_hung_slowed_and_cut(echo: int) -> None:
    with closing(Proxy(echo)) as proxy:
        address = ("127.0.0.1", proxy.port)
        with socket.create_connection(address, timeout=30) as line:
            line.sendall(b"one")
            assert line.recv(10) == b"one"
            proxy.turn(HANG)
            line.sendall(b"two")
            line.settimeout(0.3)
            with pytest.raises(TimeoutError):
                line.recv(10)
            line.settimeout(30)
            proxy.turn(PASS)
            assert line.recv(10) == b"two"
            proxy.turn(SLOW, 0.3)
            began = time.monotonic()
            line.sendall(b"three")
            assert line.recv(10) == b"three" and time.monotonic() - began >= 0.6  # both ways
            proxy.turn(CUT)
            with pytest.raises(ConnectionError):
                if not line.recv(10):
                    raise ConnectionError
        with socket.create_connection(address, timeout=30) as line, pytest.raises(ConnectionError):
            if not line.recv(10):
                raise ConnectionError
        proxy.turn(PASS)
        with socket.create_connection(address, timeout=30) as line:
            line.sendall(b"again")
            assert line.recv(10) == b"again"


_CLOCK = "import sys, time\nfor _ in sys.stdin: print(time.time(), time.monotonic(), flush=True)"


def test_a_clock_is_set_while_its_process_runs(tmp_path: Path) -> None:
    clocks = Clocks(tmp_path)
    if not clocks.there:
        pytest.skip("no C compiler")
    command, place = [sys.executable, "-c", _CLOCK], clocks.environment("here")
    with subprocess.Popen(command, env=place, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        for seconds in (0.0, 1000.0, -1000.0, 0.0):
            clocks.set("here", seconds)
            print(file=process.stdin, flush=True)
            wall, steady = map(float, process.stdout.readline().split())
            assert abs(wall - time.time() - seconds) < 100 and abs(steady - time.monotonic()) < 100
        process.stdin.close()
