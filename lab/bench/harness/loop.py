"""Runs a closed loop, with a fixed number of requests in flight, and measures its throughput in windows."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from core.batching.engine import Engine
from core.batching.request import Outcome, Request

Make = Callable[[int], Request]
"""Makes the request of a number."""


@dataclass
class Loop:
    """Keeps that many requests in flight while it is open, and records their results while `counts` is set.

    `moments` has the end of every request that did not fail, by `time.perf_counter`.
    """

    engine: Engine
    make: Make
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

    def start(self) -> None:
        for _ in range(self.in_flight):
            self._next()

    def reach(self, ends: int) -> None:
        """Wait until so many requests have ended in all. Raises what one of them raised."""
        while len(self.moments) < ends:
            if self.error is not None:
                raise self.error
            time.sleep(0.002)

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
                self.ended += [now - started] * self.counts
                self.moments.append(now)
            self._next()

        request.listener = hear
        self.engine.submit(request).add_done_callback(done)


def whole_rounds(loop: Loop, seconds: float, begun: Callable[[], object] = lambda: None) -> tuple[int, float]:
    """Images, and the seconds that they took, over whole rounds of `in_flight`: a cohort's images end together.

    Counts from the end of the first round, when `begun` is called, for at least `seconds`; closes the loop.
    """
    in_flight, rounds = loop.in_flight, 0
    loop.start()
    try:
        loop.reach(in_flight)
        begun()
        loop.counts = True
        while rounds == 0 or loop.moments[-1] - loop.moments[in_flight - 1] < seconds:
            rounds += 1
            loop.reach(in_flight * (rounds + 1))
        loop.counts = False
    finally:
        loop.close()
    return rate(loop.moments, in_flight, rounds)


def rate(moments: list[float], in_flight: int, rounds: int) -> tuple[int, float]:
    """Images, and seconds, from the end of the first round to that of the last of so many after it."""
    images = in_flight * rounds
    return images, moments[in_flight - 1 + images] - moments[in_flight - 1]


def together(loops: Mapping[str, Loop], warm_s: float, seconds: float) -> None:
    """Run several loops at once, and count what happens in one window of them all."""

    def each(act: Callable[[Loop], object]) -> Iterable[object]:
        return [act(loop) for loop in loops.values()]

    each(Loop.start)
    time.sleep(warm_s)
    each(lambda loop: setattr(loop, "counts", True))
    time.sleep(seconds)
    each(lambda loop: setattr(loop, "counts", False))
    closing = [threading.Thread(target=loop.close) for loop in loops.values()]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join()
