"""Runs functions on untrusted bytes in child processes, with limits on memory, CPU time, calls and idle time.

A child runs one module, which ends in `serve`, and calls its functions by name:
`function(arguments, blobs) -> (answer, blobs)`, where arguments and answers are JSON. It is killed and replaced at a
limit, and ended after so many calls or when idle, so that its memory returns to the system.
"""

from __future__ import annotations

import contextlib
import json
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

Answer = tuple[Any, list[bytes]]
Function = Callable[[Any, list[bytes]], Answer]

_ROOT = Path(__file__).resolve().parents[1]
_COUNT = struct.Struct(">II")  # length of the JSON, number of blobs
_LENGTH = struct.Struct(">Q")
_NICE = 5  # the event loop and the workers go first
_OPEN_FILES = 64
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
    """No answer in time, though the CPU time is not used up: the machine is overloaded."""


class ProcessPool:
    """Children of one module. As many as there are calls at once: the caller limits these. Thread-safe."""

    def __init__(
        self, module: str, *, memory_bytes: int, cpu_s: int, timeout_s: float, calls: int = 100, idle_s: float = 30.0
    ) -> None:
        """Starts no process yet. `memory_bytes` limits a child's address space, `cpu_s` and `timeout_s` one call."""
        self._arguments = [module, str(memory_bytes), str(cpu_s)]
        self._timeout_s, self._calls, self._idle_s = timeout_s, calls, idle_s
        self._lock = threading.Lock()
        self._idle: list[_Child] = []  # used last: at the end
        self._timer: threading.Timer | None = None
        self._closed = False

    def call(self, function: str, arguments: Any, blobs: Sequence[bytes] = ()) -> Answer:
        """Call a function of the module in a child. Blocks.

        Raises `CallRefused`, `CallCrashed`, `CallTimeout`; OSError if no process can be started.
        """
        child = self._take()
        kept = False
        try:
            answer = child.call(function, arguments, blobs, self._timeout_s)
            kept = child.calls < self._calls
            return answer
        except CallRefused:
            kept = child.calls < self._calls
            raise
        finally:
            if kept:
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
        with self._lock:
            if self._idle:
                return self._idle.pop()
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
            self._timer = threading.Timer(self._idle_s, self._end_idle)
            self._timer.daemon = True
            self._timer.start()

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
        self.idle_since = 0.0
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip

    def call(self, function: str, arguments: Any, blobs: Sequence[bytes], timeout_s: float) -> Answer:
        """Raises `CallError`; unless it is `CallRefused` the process can no longer be used."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self.calls += 1
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            self._process.kill()

        timer = threading.Timer(timeout_s, expire)
        timer.daemon = True
        timer.start()
        try:
            _write(self._process.stdin, [function, arguments], blobs)
            (status, answer), returned = _read(self._process.stdout)
        except (OSError, EOFError, ValueError):
            self._process.kill()
            code = self._process.wait()
            if expired.is_set():
                raise CallTimeout(f"was not processed within {timeout_s:.0f} seconds") from None
            raise CallCrashed(_CAUSES.get(-code, "cannot be decoded")) from None
        finally:
            timer.cancel()
        if status == "refused":
            raise CallRefused(answer)
        if status != "done":
            raise CallCrashed(answer)
        return answer, returned

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
    memory_bytes, cpu_s = map(int, sys.argv[1:])
    by_name = {function.__name__: function for function in functions}
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the parent ends its children
    os.nice(_NICE)
    _limit(resource.RLIMIT_AS, memory_bytes)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_NOFILE, _OPEN_FILES)
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            (name, given), blobs = _read(stdin)
            usage = resource.getrusage(resource.RUSAGE_SELF)
            used_s = int(usage.ru_utime + usage.ru_stime)
            _limit(resource.RLIMIT_CPU, used_s + cpu_s + 1, resource.RLIM_INFINITY)
            status, answer, returned = _run(by_name[name], given, blobs)
            _write(stdout, [status, answer], returned)
            del given, blobs, answer, returned
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


def _limit(what: int, soft: int, hard: int | None = None) -> None:
    """Set a limit of this process, within the one that it has."""
    most = resource.getrlimit(what)[1]
    hard = soft if hard is None else hard
    if most != resource.RLIM_INFINITY:
        soft, hard = min(soft, most), most if hard == resource.RLIM_INFINITY else min(hard, most)
    resource.setrlimit(what, (soft, hard))


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
