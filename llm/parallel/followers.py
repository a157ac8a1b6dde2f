"""Rank 0's side of the processes that run a text model with it: starts them, tells them each step, and watches them.

A rank that ends takes the others with it: a collective without it would never end. So the worker ends at once, with the
reason, and its jobs are delivered to another one.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import torch

from contract.parallel import Parallel
from core import threads
from core.threads import VitalThread
from llm.checkpoints.load import TextModelError
from llm.parallel.ranks import CLOSE, RankGroup, open_store, pack
from llm.parallel.shards import Rank

LOADER = "llm.checkpoints.precision:load"
RANK_LOST = 70  # exit code, of a device that is lost
_LOAD_S = 3600.0  # for a rank to read its part of the model
_BUILD_S = 300.0  # and to allocate its cache
_END_S = 10.0
_REPORT_S = 3.0  # for the end of a rank to be reported: its exit code is waited for


class Process(Protocol):
    """What is used of `subprocess.Popen`."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


Launch = Callable[[socket.socket], Process]
"""Starts a follower on its end of a connection."""


def _launch(connection: socket.socket) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", f"{__package__}.follower", str(connection.fileno()), str(os.getpid())],
        pass_fds=[connection.fileno()], stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )  # fmt: skip


def _end(reason: str) -> None:
    threads.end_process(RANK_LOST, "exiting: %s", reason)


class Followers:
    """The processes of all ranks but 0.

    They start to load at once. Then `join`, `ready`, and a message for each step.
    """

    def __init__(
        self, parallel: Parallel, arguments: Mapping[str, Any], *, device: torch.device, loader: str = LOADER,
        on_lost: Callable[[str], None] = _end, launch: Launch = _launch,
    ) -> None:  # fmt: skip
        """`loader`, as module:function, is called with the arguments, a device and a rank, and returns a `TextModel`,
        or this and more. `on_lost` is called, with the reason, on another thread when a rank ends. Raises
        `TextModelError`.
        """
        if device.type == "cuda" and torch.cuda.device_count() - (device.index or 0) < parallel.ranks:
            raise TextModelError(
                f"text_parallel: {parallel} takes {parallel.ranks} GPUs from {device} on, and torch sees "
                f"{torch.cuda.device_count()}"
            )
        self.parallel = parallel
        self._arguments = {"loader": loader, **arguments}
        self._device = device if device.type != "cuda" else torch.device("cuda", device.index or 0)
        self._on_lost = on_lost
        self._launch = launch
        self._connections: dict[int, Connection] = {}
        self._processes: dict[int, Process] = {}
        self._closed = False
        self._watching = threading.Event()
        self._reported = threading.Event()
        self._started: Exception | bool | None = None
        begun = threading.Event()
        self._stop, self._stopped = os.pipe()
        # One thread starts and watches them: on Linux a child ends with the thread that started it.
        self._thread = VitalThread(target=self._run, args=(begun,), name="ranks", daemon=True)
        self._thread.start()
        begun.wait()
        if isinstance(self._started, Exception):
            self.close()
            raise TextModelError(f"text_parallel: a rank does not start ({self._started})") from self._started

    def loaded(self, digest: str) -> None:
        """Wait for the others to have loaded. Raises `TextModelError` if one has not, or has another model."""
        for number, (other,) in self._answers("loaded", _LOAD_S):
            if other != digest:
                self.close()
                raise TextModelError(f"text_parallel: rank {number} has read another model than rank 0")

    def join(self, options: Mapping[str, Any]) -> RankGroup:
        """Make a group of all ranks. `options` are those of `select`, by which the others build their part next."""
        store = open_store()
        for connection in self._connections.values():
            connection.send((store.port, dict(options)))
        try:
            return RankGroup(Rank(0, self.parallel), self._device, store)
        except RuntimeError as error:
            self.close()
            raise TextModelError(f"text_parallel: the ranks do not find each other ({error})") from error

    def ready(self) -> None:
        """Wait for the others to have built their part, and watch them from now on. Raises `TextModelError`."""
        for _ in self._answers("ready", _BUILD_S):
            pass
        self._watching.set()

    def tell(self, message: bytes) -> None:
        """Send a message to all. One that has ended is reported by `on_lost`."""
        for connection in self._connections.values():
            with suppress(OSError):
                connection.send_bytes(message)

    def await_report(self) -> None:
        """Give `on_lost` time to report a rank that has ended: a failed step may tell of that sooner, and without its
        name.
        """
        self._reported.wait(_REPORT_S)

    def close(self) -> None:
        """End the processes. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._watching.is_set():  # others wait for no message of this kind, and end with their connection
            self.tell(pack(CLOSE))
        os.close(self._stopped)
        self._watching.set()
        for connection in self._connections.values():
            connection.close()
        for process in self._processes.values():
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._thread.join()
        os.close(self._stop)

    # -- the thread that starts and watches --------------------------------------------------------------------------

    def _run(self, begun: threading.Event) -> None:
        try:
            for number in range(1, self.parallel.ranks):
                self._start(number)
        except Exception as error:
            self._started = error
        begun.set()
        self._watching.wait()
        numbers = {connection: number for number, connection in self._connections.items()}
        while not self._closed:
            for source in wait([self._stop, *numbers]):
                if isinstance(source, Connection) and not self._closed:
                    self._on_lost(self._lost(numbers.pop(source), _last(source)))
                    self._reported.set()

    def _start(self, number: int) -> None:
        ours, theirs = socket.socketpair()
        self._connections[number] = Connection(ours.detach())
        with theirs:
            self._processes[number] = self._launch(theirs)
        device = self._device if self._device.type != "cuda" else torch.device("cuda", self._device.index + number)
        self._connections[number].send((self._arguments, str(device), Rank(number, self.parallel)))

    def _answers(self, expected: str, timeout_s: float) -> Any:
        """Each rank's number and what it answers. Raises `TextModelError` with a rank's error."""
        for number, connection in self._connections.items():
            try:
                kind, *values = connection.recv() if connection.poll(timeout_s) else ("error", "does not answer")
            except (EOFError, OSError):
                kind, values = "error", [""]
            if kind != expected:
                reason = self._lost(number, str(values[0]))
                self.close()
                raise TextModelError(f"text_parallel: {reason}")
            yield number, values

    def _lost(self, number: int, reason: str) -> str:
        process = self._processes[number]
        if not reason:
            with suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
            code = process.poll()
            reason = "closed its connection" if code is None else f"ended with exit code {code}"
        return f"{Rank(number, self.parallel)} (process {process.pid}): {reason}"


def _last(connection: Connection) -> str:
    """The error that a rank sent before it ended; "" if there is none."""
    try:
        _, reason = connection.recv()
        return str(reason)
    except (EOFError, OSError, ValueError):
        return ""
