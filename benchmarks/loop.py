"""Runs a closed loop, with a fixed number of requests in flight, and measures its throughput."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from core.batching.engine import Engine
from core.batching.request import Outcome, Request


@dataclass
class Loop:
    """Keeps that many requests in flight while it is open, and records their results while `counts` is set.

    `moments` has the end of every request that did not fail, by `time.perf_counter`.
    """

    engine: Engine
    make: Callable[[int], Request]
    in_flight: int
    ended: list[float] = field(default_factory=list)  # seconds that each took
    tokens: int = 0
    steps: int = 0  # denoising steps, of all requests together
    gaps: list[float] = field(default_factory=list)  # seconds from token to token, of each iteration that brought any
    moments: list[float] = field(default_factory=list)
    error: BaseException | None = None  # of the last request that failed
    counts: bool = False
    _open: bool = True
    _numbers: Any = field(default_factory=itertools.count)
    _left: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    _passed: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def start(self) -> None:
        for _ in range(self.in_flight):
            self._next()

    def wait(self, ends: int) -> None:
        """Until so many more requests have ended, from now on."""
        while self._passed.acquire(blocking=False):
            pass
        for _ in range(ends):
            self._passed.acquire()

    def close(self) -> None:
        """Start no more requests, and wait for those in flight."""
        self._open = False
        for _ in range(self.in_flight):
            self._left.acquire()

    def _next(self) -> None:
        if not self._open:
            self._left.release()
            return
        request = self.make(next(self._numbers))
        started = time.perf_counter()
        last: float | None = None

        def hear(_: Request, outcome: Outcome) -> None:
            nonlocal last
            if outcome.token is None:
                self.steps += self.counts and not outcome.finished
                return
            now = time.perf_counter()
            if self.counts:
                self.tokens += len(outcome.token.tokens)
                if last is not None:
                    self.gaps += [(now - last) / len(outcome.token.tokens)] * len(outcome.token.tokens)
            last = now

        def done(future: Future[Any]) -> None:
            now, error = time.perf_counter(), future.exception()
            if error is not None:
                self.error = error
            else:
                self.moments.append(now)
                self.ended += [now - started] * self.counts
            self._passed.release()
            self._next()

        request.listener = hear
        self.engine.submit(request).add_done_callback(done)
