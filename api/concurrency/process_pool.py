"""Runs functions on untrusted bytes in child processes, with limits on memory, CPU time, calls and idle time.

A child runs one module, which ends in `serve`, and calls its functions by name:
`function(arguments, blobs) -> (answer, blobs)`, where arguments and answers are JSON. It is killed and replaced at a
limit, and ended after so many calls or when idle, so that its memory returns to the system. A call whose child dies
without having used up its CPU time is made once more, in a new one: it may have been another's fault.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from core.threads import started

Answer = tuple[Any, list[bytes]]
Function = Callable[[Any, list[bytes]], Answer]

log = logging.getLogger(__name__)

_ROOT = Path(__file__).resolve().parents[2]
_COUNT = struct.Struct(">II")  # length of the JSON, number of blobs
_LENGTH = struct.Struct(">Q")
NICE = 10  # the event loop and the workers (5 under `diptych serve`) go first
_OPEN_FILES = 64
_EXIT_S = 1.0  # from the end of a child's output to its exit
_MOST_BYTES = 256 * 2**20  # of one blob or value: what a child claims is not trusted
_CAUSES: dict[int, str] = {
    signal.SIGXCPU: "takes too long to decode",
    signal.SIGKILL: "takes too much memory to decode",
}


class CallError(RuntimeError):
    """A call that has no answer. The message says why, in words for clients."""


class CallRefused(CallError):
    """The function raised ValueError: its input is invalid."""


class CallCrashed(CallError):
    """The input costs more memory or CPU time than a call may use, or the child died of it."""


class CallTimeout(CallError):
    """An error: no answer in time, though the CPU time is not used up. The machine is overloaded."""


class CallFailed(CallError):
    """The child ended by itself before its first answer: whatever the input, it cannot run."""


class _ChildDied(Exception):
    """The child of a call ended, killed by no limit of the call. `error` says so, in words for clients."""

    def __init__(self, error: CallError) -> None:
        super().__init__(str(error))
        self.error = error


class ProcessPool:
    """Children of one module. As many as there are calls at once: the caller limits these. Thread-safe."""

    def __init__(
        self, module: str, *, memory_bytes: int, cpu_s: int, timeout_s: float, calls: int = 100, idle_s: float = 30.0,
        niceness: int = NICE,
    ) -> None:  # fmt: skip
        """Starts no process yet. `memory_bytes` limits a child's address space, `cpu_s` and `timeout_s` one call.

        `niceness` is added to this process's.
        """
        self._arguments = [module, str(memory_bytes), str(cpu_s), str(niceness)]
        self._timeout_s, self._calls, self._idle_s = timeout_s, calls, idle_s
        self._lock = threading.Lock()
        self._idle: list[_Child] = []  # used last: at the end
        self._timer: threading.Timer | None = None
        self._closed = False

    def call(self, function: str, arguments: Any, blobs: Sequence[bytes] = ()) -> Answer:
        """Call a function of the module in a child. Blocks.

        Raises `CallRefused`, `CallCrashed`, `CallTimeout`, `CallFailed`; OSError if no process can be started.
        """
        try:
            return self._call(self._take(), function, arguments, blobs)
        except _ChildDied:
            pass
        try:
            return self._call(_Child(self._arguments), function, arguments, blobs)
        except _ChildDied as died:
            if isinstance(died.error, CallFailed):
                log.error("a process of %s ended before its first answer", self._arguments[0])
            raise died.error from None

    def _call(self, child: _Child, function: str, arguments: Any, blobs: Sequence[bytes]) -> Answer:
        """Call in this child, and keep or end it. Raises also `_ChildDied`."""
        reusable = False
        try:
            answer = child.call(function, arguments, blobs, self._timeout_s)
            reusable = True
            return answer
        except CallRefused:
            reusable = True
            raise
        finally:
            if reusable and not child.expired and child.calls < self._calls:
                self._put_back(child)
            else:
                child.end()

    def close(self) -> None:
        """End the idle children. Those of calls in progress end with their call."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            if self._timer is not None:
                self._timer.cancel()
        for child in idle:
            child.end()

    def _take(self) -> _Child:
        while True:
            with self._lock:
                if not self._idle:
                    break
                child = self._idle.pop()
            if child.runs:
                return child
            child.end()  # killed meanwhile, as where memory is short
        return _Child(self._arguments)

    def _put_back(self, child: _Child) -> None:
        child.idle_since = time.monotonic()
        with self._lock:
            if not self._closed:
                self._idle.append(child)
                self._watch()
                return
        child.end()

    def _watch(self) -> None:
        """Start the timer that ends idle children, unless it runs. Call with the lock held."""
        if self._timer is None and self._idle and not self._closed:
            due = min(child.idle_since for child in self._idle) + self._idle_s
            timer = threading.Timer(max(0.0, due - time.monotonic()), self._end_idle)
            timer.daemon = True
            self._timer = timer if started(timer) else None

    def _end_idle(self) -> None:
        until = time.monotonic() - self._idle_s
        with self._lock:
            self._timer = None
            ended = [child for child in self._idle if child.idle_since <= until]
            self._idle = [child for child in self._idle if child.idle_since > until]
            self._watch()
        for child in ended:
            child.end()


class _Child:
    """One process, used by one thread at a time."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """Start it. Raises OSError."""
        self.calls = 0
        self.expired = False  # killed since a call took too long
        self.idle_since = 0.0
        self._lock = threading.Lock()
        self._finished = self._answered = 0  # the number of the last call that ended, of the last that was answered
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def call(self, function: str, arguments: Any, blobs: Sequence[bytes], timeout_s: float) -> Answer:
        """Raises `CallError` and `_ChildDied`; unless it is `CallRefused` the process can no longer be used."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self.calls += 1
        number = self.calls

        def expire() -> None:
            with self._lock:  # the timer may be late: never kill the process for a call that has ended
                if self._finished < number:
                    self.expired = True
                    self._process.kill()

        timer = threading.Timer(timeout_s, expire)
        timer.daemon = True
        timer.start()
        try:
            _write(self._process.stdin, [function, arguments], blobs)
            (status, answer), returned = _read(self._process.stdout)
            self._answered = number
        except (OSError, EOFError, ValueError):
            raise self._death(timeout_s) from None
        finally:
            with self._lock:
                self._finished = number
            timer.cancel()
        if status == "refused":
            raise CallRefused(answer)
        if status != "done":
            raise CallCrashed(answer)
        return answer, returned

    def _death(self, timeout_s: float) -> CallError | _ChildDied:
        """Wait for the process, killing it if it does not exit by itself; return why the call has no answer."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)
        self._process.kill()
        code = self._process.wait()
        if self.expired:
            return CallTimeout(f"was not processed within {timeout_s:.0f} seconds")
        if code > 0 and not self._answered:
            return _ChildDied(CallFailed("cannot be processed at the moment"))
        crash = CallCrashed(_CAUSES.get(-code, "cannot be decoded"))
        return crash if code == -signal.SIGXCPU else _ChildDied(crash)

    def end(self) -> None:
        """Kill it and wait for it."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what it did not read cannot be written any more
                    pipe.close()
        self._process.wait()


def serve(*functions: Function) -> NoReturn:
    """Run a child: limit this process, and answer calls of these functions until the standard input ends."""
    memory_bytes, cpu_s, niceness = map(int, sys.argv[1:])
    by_name = {function.__name__: function for function in functions}
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the parent ends its children
    os.nice(niceness)
    _limit(resource.RLIMIT_AS, memory_bytes)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_NOFILE, _OPEN_FILES)
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            (name, arguments), blobs = _read(stdin)
            usage = resource.getrusage(resource.RUSAGE_SELF)
            used_s = int(usage.ru_utime + usage.ru_stime)
            _limit(resource.RLIMIT_CPU, used_s + cpu_s + 1, resource.RLIM_INFINITY)
            status, answer, returned = _run(by_name[name], arguments, blobs)
            _write(stdout, [status, answer], returned)
            del arguments, blobs, answer, returned
    os._exit(0)


def _run(function: Function, arguments: Any, blobs: list[bytes]) -> tuple[str, Any, list[bytes]]:
    try:
        return "done", *function(arguments, blobs)
    except ValueError as error:
        return "refused", str(error), []
    except MemoryError:
        return "failed", "takes too much memory to decode", []
    except Exception:
        return "failed", "cannot be decoded", []


def _limit(resource_kind: int, soft: int, hard: int | None = None) -> None:
    """Set a limit of this process, within the one that it has."""
    limit = resource.getrlimit(resource_kind)[1]
    hard = soft if hard is None else hard
    if limit != resource.RLIM_INFINITY:
        soft, hard = min(soft, limit), limit if hard == resource.RLIM_INFINITY else min(hard, limit)
    resource.setrlimit(resource_kind, (soft, hard))


def _write(stream: IO[bytes], value: Any, blobs: Sequence[bytes]) -> None:
    text = json.dumps(value).encode()
    stream.write(_COUNT.pack(len(text), len(blobs)) + text)
    for blob in blobs:
        stream.write(_LENGTH.pack(len(blob)))
        stream.write(blob)
    stream.flush()


def _read(stream: IO[bytes]) -> tuple[Any, list[bytes]]:
    """Raises EOFError, ValueError."""
    length, count = _COUNT.unpack(_exactly(stream, _COUNT.size))
    value = json.loads(_exactly(stream, length))
    return value, [_exactly(stream, _LENGTH.unpack(_exactly(stream, _LENGTH.size))[0]) for _ in range(count)]


def _exactly(stream: IO[bytes], length: int) -> bytes:
    if length > _MOST_BYTES:
        raise ValueError(f"{length} bytes are too many")
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return data
