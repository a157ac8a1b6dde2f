"""Runs arrival traces on the engine, and on request-level batching with the same runner, with or without a window."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from contract.image import ImageParameters
from contract.plan import DeepCache
from core.batching.engine import Engine
from core.batching.request import Request
from lab.bench.harness import record
from pipeline.runner import ImageRunner

BATCH = 8  # pictures of a static batch


Server = Callable[[Request, Callable[[], None]], None]
"""Takes a request, and calls back when it is done."""
Draw = Callable[[Sequence[Request]], None]
"""Draws a batch to its end."""


class Order(NamedTuple):
    """The image that every client asks for. `cached` None: without DeepCache."""

    side: int
    steps: int
    cached: DeepCache | None

    def request(self, name: str, seed: int) -> Request:
        prompt = f"{name}: a small red boat on a lake"
        parameters = ImageParameters(prompt, seed, self.side, self.side, steps=self.steps, deepcache=self.cached)
        return Request(name, "image", parameters)


def draw_batch(runner: ImageRunner, requests: Sequence[Request]) -> None:
    """Draw a batch to its end, as request-level batching does: all join at the start and leave at the end."""
    for request in requests:
        if runner.admit(request) is not None:
            raise record.BenchError(f"the runner has no room for a batch of {len(requests)}")
    live = list(requests)
    while live:
        group = runner.group(live[0])
        rows, count = 0, 0
        while count < len(live) and rows + runner.rows(live[count]) <= max(runner.limit(group), 1):
            rows += runner.rows(live[count])
            count += 1
        together, live = live[:count], live[count:]
        outcomes = runner.launch(together).outcome()
        for request in together:
            if outcomes[request.id].error is not None or outcomes[request.id].finished:
                runner.release(request)
        unfinished = [r for r in together if not outcomes[r.id].finished and outcomes[r.id].error is None]
        live = [*live, *unfinished]


class RequestLevel:
    """Serves batches of what waits, up to `BATCH`, once `window_s` has passed since the first of them came."""

    def __init__(self, draw: Draw, window_s: float) -> None:
        self._draw = draw
        self._window_s = window_s
        self._waiting: deque[tuple[Request, Callable[[], None], float]] = deque()
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, request: Request, done: Callable[[], None]) -> None:
        with self._changed:
            self._waiting.append((request, done, time.monotonic()))
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting))
                until = self._waiting[0][2] + self._window_s
                while len(self._waiting) < BATCH and (left := until - time.monotonic()) > 0:
                    self._changed.wait(left)
                batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
            self._draw([request for request, _, _ in batch])
            for _, done, _ in batch:
                done()


def step_level(engine: Engine) -> Server:
    """The engine as a server."""
    return lambda request, done: engine.submit(request).add_done_callback(lambda _: done())


def poisson(rate: float, count: int, seed: int = 0) -> list[float]:
    """Seconds at which so many requests come, at `rate` a second."""
    moments: list[float] = np.random.default_rng(seed).exponential(1 / rate, count).cumsum().tolist()
    return moments


class Played(NamedTuple):
    """The outcome of a trace: seconds that each picture took, and all of it together."""

    latencies: list[float]
    seconds: float


def play(name: str, server: Server, order: Order, trace: Sequence[float]) -> Played:
    """Submit at the trace's times, however the server responds, and measure latencies from the due times."""
    from rich.console import Console
    from rich.progress import track

    latencies: list[float] = []
    all_done = threading.Semaphore(0)
    started = time.monotonic()
    for index, due in enumerate(track(trace, description=name, console=Console(stderr=True), transient=True)):
        request = order.request(f"{name}-{index}", index)
        time.sleep(max(0.0, started + due - time.monotonic()))

        def done(due: float = due) -> None:
            latencies.append(time.monotonic() - started - due)
            all_done.release()

        server(request, done)
    for _ in trace:
        all_done.acquire()
    return Played(latencies, time.monotonic() - started)


def latency_summary(plays: Sequence[Played]) -> dict[str, float]:
    """Percentiles over the pictures of all traces that one server was played."""
    latencies = [latency for played in plays for latency in played.latencies]
    p50, p99 = np.percentile(latencies, [50, 99])
    return {
        "p50_s": round(float(p50), 4),
        "p99_s": round(float(p99), 4),
        "mean_s": round(float(np.mean(latencies)), 4),
        "images_per_s": round(len(latencies) / sum(played.seconds for played in plays), 4),
    }
