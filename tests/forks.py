"""Starts Python processes by forking one that has imported what they need: imports are most of a short process's cost.

A `Fork` differs from `subprocess.Popen` in that alone: it has an environment, a session and standard streams of its
own, runs its module or code as `__main__`, and exits as an interpreter does. What preloading could hide, such as an
import that fails, is left to tests that start whole commands.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.children import python_path

ROOT = Path(__file__).resolve().parents[1]
# What to import for an API, for a worker of stand-ins, and for one that computes.
API, WORKER = ("api.app",), ("workers.boot", "core.batching.engine")
REAL = (*WORKER, "workers.build", "pipeline.checkpoints.tiny")
_STATUS = struct.Struct("i")
_MOST_BYTES, _MOST_FDS = 2**20, 8
_ENDING_S = 30.0  # for a server to end, once nobody can ask it for anything


class Fork:
    """A process that was forked, with the part of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int, ended: int) -> None:
        """`ended` is the descriptor from which its exit status is read. `stderr` is there if it was piped."""
        self.pid = pid
        self.returncode: int | None = None
        self.stderr: IO[str] | None = None
        self._ended = ended

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code. Raises `subprocess.TimeoutExpired`."""
        code = self._look(timeout)
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return code

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._ended], [], [], timeout)[0]:
            data = os.read(self._ended, _STATUS.size)
            os.close(self._ended)
            assert data, "the process that forks has ended"
            self.returncode = os.waitstatus_to_exitcode(*_STATUS.unpack(data))
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Server:
    """A process that has imported `modules`, and forks for whoever connects."""

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._process: subprocess.Popen[bytes] | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("")  # to a name that the kernel chooses
        self._listener.listen()
        self.address: bytes = self._listener.getsockname()
        self._alive, self._life = os.pipe()  # it ends when nobody has the writing end any more

    def fileno(self) -> int:
        """The descriptor that can be read once someone connects."""
        return self._listener.fileno()

    def start(self) -> None:
        descriptors = (self._listener.fileno(), self._alive)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.forks", *map(str, descriptors), *self._modules], cwd=ROOT,
            stdin=subprocess.DEVNULL, pass_fds=descriptors, start_new_session=True,
            env={**os.environ, "PYTHONPATH": python_path(ROOT)},
        )  # fmt: skip
        self.leave()

    def leave(self) -> None:
        """Close this process's listener, so that nobody waits for a connection once the one that forks has ended."""
        self._listener.close()

    def close(self) -> None:
        """End it, and wait for it, so that what its forks cost is counted. Forks that still run go on."""
        self.leave()
        os.close(self._life)
        os.close(self._alive)
        if self._process is None:
            return
        try:
            self._process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:  # a process that a test has left still has `_life`
            self._process.kill()
            self._process.wait()


class Forker:
    """A connection to a process that forks: to `address`, or to one of its own, which has imported `modules`."""

    def __init__(self, *modules: str, address: bytes | None = None) -> None:
        self._lock = threading.Lock()
        self._own: Server | None = None
        if address is None:
            self._own = Server(*modules)
            self._own.start()
            address = self._own.address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(address)

    def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        stderr: int = subprocess.PIPE,
        pass_fds: Sequence[int] = (),
        start_new_session: bool = False,
        niceness: int = 0,
    ) -> Fork:
        """Start `-m module words…` or `-c code words…`. Its standard output goes to `stderr` too, a descriptor or PIPE.

        The numbers of `pass_fds` are the same there.
        """
        ended, told = os.pipe()
        reading = None
        if stderr == subprocess.PIPE:
            reading, stderr = os.pipe()
        request = {
            "argv": list(argv), "env": dict(env), "pass_fds": list(pass_fds), "session": start_new_session,
            "niceness": niceness,
        }  # fmt: skip
        try:
            with self._lock:
                socket.send_fds(self._socket, [json.dumps(request).encode()], [told, stderr, *pass_fds])
                answer = self._socket.recv(_MOST_BYTES)
        except ConnectionError:
            answer = b""
        finally:
            os.close(told)
            if reading is not None:
                os.close(stderr)
        assert answer, "the process that forks has ended"
        fork = Fork(int(answer), ended)
        if reading is not None:
            fork.stderr = os.fdopen(reading, encoding="utf-8", errors="replace")
        return fork

    def close(self) -> None:
        self._socket.close()
        if self._own is not None:
            self._own.close()


SHARED: dict[tuple[str, ...], Server] = {}  # by what they import: those of all test processes
_FORKERS: dict[tuple[str, ...], Forker] = {}


def share() -> list[Server]:
    """Processes to fork from for all test processes, which are forked after this. Start each when it can be read."""
    SHARED.update({modules: Server(*modules) for modules in (API, WORKER, REAL)})
    return [*SHARED.values()]


def leave() -> None:
    """In a process that was forked after `share`: leave listening to the first one."""
    for server in SHARED.values():
        server.leave()


def end() -> None:
    """End what `share` began, once no test process is left."""
    while SHARED:
        SHARED.popitem()[1].close()


def forker(*modules: str) -> Forker:
    """The one that has imported these, for all tests of this process. `close` ends it."""
    if modules not in _FORKERS:
        shared = SHARED.get(modules)
        _FORKERS[modules] = Forker(*modules, address=shared and shared.address)
    return _FORKERS[modules]


def close() -> None:
    """Close what `forker` opened."""
    while _FORKERS:
        _FORKERS.popitem()[1].close()


def _serve(listener: socket.socket, alive: int) -> dict[str, Any] | None:
    """Fork what is asked for, and tell how forks ended. Returns in a fork, with what it is to run; at the end None."""
    clients: list[socket.socket] = []
    running: dict[int, int] = {}
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([listener, alive, woken, *clients], [], [])
        if woken in ready:
            os.read(woken, 4096)
            for pid, status in _reaped():
                with contextlib.suppress(BrokenPipeError):
                    os.write(running[pid], _STATUS.pack(status))
                os.close(running.pop(pid))
        if alive in ready:
            return None
        if listener in ready:
            clients.append(listener.accept()[0])
        for client in [client for client in clients if client in ready]:
            try:
                data, fds, _, _ = socket.recv_fds(client, _MOST_BYTES, _MOST_FDS)
            except ConnectionError:  # a test process was killed: others are served on
                data, fds = b"", []
            if not data:
                clients.remove(client)
                client.close()
                continue
            request = json.loads(data)
            pid = os.fork()
            if pid:
                running[pid] = fds[0]
                for fd in fds[1:]:
                    os.close(fd)
                with contextlib.suppress(ConnectionError):
                    client.send(str(pid).encode())
                continue
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for one in (listener, *clients):
                one.close()
            for fd in (alive, woken, wake, fds[0], *running.values()):
                os.close(fd)
            _become(request, fds[1:])
            return dict(request)


def _reaped() -> Iterator[tuple[int, int]]:
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield found


def _become(request: dict[str, Any], fds: Sequence[int]) -> None:
    """Give a fork its session, environment and descriptors."""
    if request["session"]:
        os.setsid()
    os.nice(request["niceness"])
    os.environ.clear()
    os.environ.update(request["env"])
    fds, wanted = [fds[0], *fds], [1, 2, *request["pass_fds"]]
    # First to numbers that are none of those, as one may be another's.
    moved = [os.dup2(fd, 200 + place) for place, fd in enumerate(fds)]
    for fd in {*fds}:
        os.close(fd)
    for fd, number in zip(moved, wanted, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def main() -> None:
    listener, alive, *modules = sys.argv[1:]
    for module in modules:
        importlib.import_module(module)
    request = _serve(socket.socket(fileno=int(listener)), int(alive))
    if request is None:
        return
    how, what, *words = request["argv"]
    sys.argv = [what if how == "-m" else how, *words]
    if how == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
