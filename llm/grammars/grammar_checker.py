"""Asks a child process (grammar_process.py) whether schemas can be compiled within limits, and remembers answers."""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from contract.errors import Invalid
from contract.json_schema import FIELD
from llm.grammars import grammar_process
from llm.grammars.grammar_process import read_frame, write_frame

log = logging.getLogger(__name__)

_REMEMBERED = 1024
_START_S = 120.0  # until the process has read the tokenizer
_ANSWER_S = 60.0  # in which it gets its second of the CPU, on however busy a machine
_TRIES = 2  # if something ends the process, such as the kernel's memory killer


class GrammarChecker:
    """Checks schemas for one tokenizer; the process starts with the first. Thread-safe."""

    def __init__(self, tokenizer: str, vocabulary: int, ends: Sequence[int]) -> None:
        """`tokenizer` is the JSON of a fast tokenizer, `ends` its end tokens."""
        self._first = {"tokenizer": tokenizer, "vocabulary": vocabulary, "ends": list(ends)}
        self._process: subprocess.Popen[bytes] | None = None
        self._remembered: OrderedDict[bytes, str | None] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, kind: str, text: str) -> None:
        """Raise `Invalid` for a grammar that cannot be enforced, and RuntimeError if no process answers."""
        key = hashlib.sha256(f"{kind} {text}".encode()).digest()
        with self._lock:
            if key not in self._remembered:
                self._remembered[key] = self._ask(kind, text)
                if len(self._remembered) > _REMEMBERED:
                    self._remembered.popitem(last=False)
            self._remembered.move_to_end(key)
            error = self._remembered[key]
        if error is not None:
            raise Invalid(FIELD, error)

    def close(self) -> None:
        with self._lock:
            self._end()

    def _ask(self, kind: str, text: str) -> str | None:
        """Return why the grammar is refused; None if it is not."""
        for _ in range(_TRIES):
            try:
                error: str | None = self._exchange(self._process or self._start(), [kind, text], _ANSWER_S)["error"]
                return error
            except (EOFError, BrokenPipeError):
                log.warning("the process that checks schemas ended with %d", self._end())
        raise RuntimeError("the process that checks schemas does not last")

    def _start(self) -> subprocess.Popen[bytes]:
        # By path, and with its folder not on sys.path: it imports nothing of this project.
        self._process = process = subprocess.Popen(
            [sys.executable, "-P", grammar_process.__file__, str(grammar_process.MEMORY_BYTES)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            self._exchange(process, self._first, _START_S)
        except (EOFError, BrokenPipeError):
            raise RuntimeError(f"the process that checks schemas does not start ({self._end()})") from None
        return process

    def _exchange(self, process: subprocess.Popen[bytes], value: Any, timeout_s: float) -> Any:
        """Send a frame and return the answer. Raises EOFError or BrokenPipeError if the process ends, RuntimeError if
        it does not answer in time.
        """
        assert process.stdin is not None and process.stdout is not None
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            process.kill()

        timer = threading.Timer(timeout_s, expire)  # it may hang while it reads, too
        timer.daemon = True
        timer.start()
        try:
            write_frame(process.stdin, value)
            return read_frame(process.stdout)
        except BaseException as error:
            if not expired.is_set() and isinstance(error, EOFError | BrokenPipeError):
                raise
            self._end()  # an answer that nobody has read would be the next schema's
            if expired.is_set():
                raise RuntimeError("the process that checks schemas does not answer") from None
            raise
        finally:
            timer.cancel()

    def _end(self) -> int:
        """End the process; returns its exit code, or 0 without one."""
        process, self._process = self._process, None
        if process is None:
            return 0
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):  # what it had not read
                stream.close()
        try:
            return process.wait(1.0)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


class TurnsByTenant:
    """A lock that a tenant's threads take one at a time, so that many of one tenant's delay another's by one turn."""

    def __init__(self) -> None:
        self._waiting: Counter[str] = Counter()
        self._locks: dict[str, threading.Lock] = {}
        self._books = threading.Lock()
        self._turn = threading.Lock()

    @contextmanager
    def turn(self, tenant: str) -> Iterator[None]:
        with self._books:
            self._waiting[tenant] += 1
            lock = self._locks.setdefault(tenant, threading.Lock())
        try:
            with lock, self._turn:
                yield
        finally:
            with self._books:
                self._waiting[tenant] -= 1
                if not self._waiting[tenant]:
                    del self._waiting[tenant], self._locks[tenant]
