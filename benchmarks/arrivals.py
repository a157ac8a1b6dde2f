"""Latency under Poisson arrivals: the engine against request-level batching, on one trace.

The peer runs on the same kernels at the same precision and with the same DeepCache schedule, by the engine's own
runner: it differs in nothing but when requests join and leave. Stock diffusers is played the trace too where it is fast
enough not to drown in it. Knows the engine and the runner; knows nothing of HTTP and queues.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from benchmarks import record
from benchmarks.ladder import stock_pipeline
from core.batching.engine import Engine
from core.batching.request import Request
from core.config import Settings
from pipeline.parameters import ImageParameters
from pipeline.runner import ImageRunner
from unet_opt import schedule
from unet_opt.schedule import DeepCache
from workers.build import build

LOAD = 0.7  # of what request-level batching can do on the same kernels
WINDOW_S = 3.0
_BATCH = 8  # pictures of a static batch
_SATURATING = 64  # pictures for the throughput under a full queue
_NAMES = {
    "engine": "step-level (engine)",
    "window_free": "request-level, what waits",
    "window_3s": "request-level, 3 s window",
    "diffusers": "diffusers, what waits",
}


class Server(Protocol):
    """Something that takes requests and says when each is done."""

    def submit(self, request: Request, done: Callable[[], None]) -> None: ...


Draw = Callable[[Sequence[Request]], None]
"""Draws a batch to its end."""


def run(settings: Settings, *, steps: int, pictures: int, results: Path | None) -> dict[str, Any]:
    """Measure what full static batches reach, then play one Poisson trace of `pictures` arrivals to each server."""
    if pictures < 1:
        raise record.BenchError("--pictures: must be at least 1")
    with record.alone(), build(settings, measure_s=15.0) as works:
        runner = works.images
        order = _Order(runner.model.native, steps, schedule.parse(settings.deepcache))
        if settings.compile:
            runner.execution.wait()
            runner.prepare(measure_s=15.0)
        pipeline = stock_pipeline(settings, steps, works.lane)

        def stock(requests: Sequence[Request]) -> None:
            pipeline([(request.parameters.prompt, request.parameters.seed) for request in requests])

        def same(requests: Sequence[Request]) -> None:
            draw_batch(runner, requests)

        capacity, stock_capacity = _capacity(same, order), _capacity(stock, order)
        saturated = _saturate(works.engine, order)
        rate = LOAD * capacity
        trace = np.random.default_rng(0).exponential(1 / rate, pictures).cumsum().tolist()
        servers: dict[str, Server] = {
            "engine": _Engine(works.engine),
            "window_free": RequestLevel(same, 0.0),
            "window_3s": RequestLevel(same, WINDOW_S),
        }
        if rate < 0.95 * stock_capacity:
            servers["diffusers"] = RequestLevel(stock, 0.0)
        measured = {name: _play(name, server, order, trace) for name, server in servers.items()}
        precision = runner.model.precision
    engine = measured["engine"]
    result: dict[str, Any] = {
        "rate_per_s": round(rate, 4),
        "load": LOAD,
        **measured,
        "capacity_per_s": round(capacity, 4),
        "diffusers_capacity_per_s": round(stock_capacity, 4),
        "saturated_per_s": round(saturated, 4),
        "saturated_ratio": round(saturated / capacity, 4),
        "p99_ratio": round(engine["p99_s"] / measured["window_free"]["p99_s"], 4),
        "arrivals": pictures,
        "steps": steps,
        "model": Path(settings.model_name).name,
        "precision": precision,
        "deepcache": settings.deepcache,
        "kernels": runner.execution.programs,
        "machine": record.machine(),
    }
    record.table(
        f"{pictures} Poisson arrivals at {rate:.2f}/s, {LOAD:.0%} of full static batches' {capacity:.2f}/s "
        f"(the engine's with a full queue: {saturated:.2f}/s; diffusers': {stock_capacity:.2f}/s)",
        ("batching", "p50", "p99", "engine's p50 against it", "engine's p99 against it"),
        [
            (
                _NAMES[name],
                f"{m['p50_s']:.2f} s",
                f"{m['p99_s']:.2f} s",
                f"{engine['p50_s'] / m['p50_s']:.2f}×",
                f"{engine['p99_s'] / m['p99_s']:.2f}×",
            )
            for name, m in measured.items()
        ],
    )
    record.publish("arrivals", result, results)
    return result


class _Order(NamedTuple):
    """What everybody asks for."""

    side: int
    steps: int
    cached: DeepCache | None

    def request(self, name: str, seed: int) -> Request:
        prompt = f"{name}: a small red boat on a lake"
        wanted = ImageParameters(prompt, seed, self.side, self.side, steps=self.steps, deepcache=self.cached)
        return Request(name, "image", wanted)


def _saturate(engine: Engine, order: _Order) -> float:
    """Pictures per second of the engine with a full queue, after a round that warms up: the median of three."""
    rates = []
    for number in range(4):
        started = time.perf_counter()
        futures = [engine.submit(order.request(f"full-{number}-{i}", i)) for i in range(_SATURATING)]
        for future in futures:
            future.result()
        rates.append(_SATURATING / (time.perf_counter() - started))
    return float(np.median(rates[1:]))


def _capacity(draw: Draw, order: _Order) -> float:
    """Pictures per second of full static batches, one after the other: the median of four."""
    rates = []
    for number in range(5):
        requests = [order.request(f"capacity-{id(draw)}-{number}-{i}", i) for i in range(_BATCH)]
        started = time.perf_counter()
        draw(requests)
        rates.append(_BATCH / (time.perf_counter() - started))
    return float(np.median(rates[1:]))


def draw_batch(runner: ImageRunner, requests: Sequence[Request]) -> None:
    """Draw a batch to its end, as request-level batching does: all join at the start and leave at the end."""
    for request in requests:
        if not runner.admit(request):
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
    """Serves batches of what waits, up to `_BATCH`, once `window_s` has passed since the first of them came."""

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
                while len(self._waiting) < _BATCH and (left := until - time.monotonic()) > 0:
                    self._changed.wait(left)
                batch = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
            self._draw([request for request, _, _ in batch])
            for _, done, _ in batch:
                done()


class _Engine:
    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def submit(self, request: Request, done: Callable[[], None]) -> None:
        self._engine.submit(request).add_done_callback(lambda _: done())


def _play(name: str, server: Server, order: _Order, trace: Sequence[float]) -> dict[str, float]:
    """Submit at the trace's times, whatever the server does, and take latencies from the times that were due."""
    from rich.console import Console
    from rich.progress import track

    latencies: list[float] = []
    all_done = threading.Semaphore(0)
    started = time.monotonic()
    for index, due in enumerate(track(trace, description=_NAMES[name], console=Console(stderr=True), transient=True)):
        request = order.request(f"{name}-{index}", index)
        time.sleep(max(0.0, started + due - time.monotonic()))

        def done(due: float = due) -> None:
            latencies.append(time.monotonic() - started - due)
            all_done.release()

        server.submit(request, done)
    for _ in trace:
        all_done.acquire()
    p50, p99 = np.percentile(latencies, [50, 99])
    return {
        "p50_s": round(float(p50), 4),
        "p99_s": round(float(p99), 4),
        "mean_s": round(float(np.mean(latencies)), 4),
        "images_per_s": round(len(trace) / (time.monotonic() - started), 4),
    }
