"""Latency under Poisson arrivals: the engine against request-level batching, on one trace.

The baseline uses the same kernels, precision and DeepCache schedule, through the engine's own runner: it differs only
in when requests join and leave. `lab.bench.rivals` compares with other runtimes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from contract import plan
from core.batching.engine import Engine
from core.batching.request import Request
from core.config import Settings
from core.kernels.device import TORCH
from lab.bench.harness import provenance, record
from lab.bench.harness.loop import Loop
from lab.bench.harness.traces import (
    BATCH,
    Draw,
    Order,
    Played,
    RequestLevel,
    Server,
    draw_batch,
    latency_summary,
    play,
    poisson,
    step_level,
)
from lab.bench.harness.turns import alternate
from lab.bench.tables import TABLES
from workers.build import build

LOAD = 0.7  # of what request-level batching can do on the same kernels
WINDOW_S = 3.0
_IN_FLIGHT, _COUNTED = 64, 64  # pictures: twice what the engine draws at once, and so many of the throughput of a turn
_TURNS = 3
_ROUNDS = 4  # parts of the trace, played to all servers by turns
_NAMES = {
    "engine": "step-level (engine)", "window_free": "request-level, no window",
    "window_3s": "request-level, 3 s window",
}  # fmt: skip


def run(settings: Settings, *, steps: int, pictures: int, results: Path | None) -> dict[str, Any]:
    """Measure what full static batches reach, then play Poisson traces of `pictures` arrivals to each server."""
    if pictures < 1:
        raise record.BenchError("--pictures: must be at least 1")
    with record.alone(), build(settings, measure_s=15.0) as runtime:
        runner = runtime.images
        order = Order(runner.model.native, steps, plan.parse(settings.deepcache))
        if settings.compile:
            runner.backend.wait()
            runner.prepare(measure_s=15.0)

        def same(requests: Sequence[Request]) -> None:
            draw_batch(runner, requests)

        capacity, saturated, ratio = _throughput(runtime.engine, same, order)
        rate = LOAD * capacity
        servers: dict[str, Server] = {
            "engine": step_level(runtime.engine),
            "window_free": RequestLevel(same, 0.0).submit,
            "window_3s": RequestLevel(same, WINDOW_S).submit,
        }
        measured = _play(servers, order, rate, pictures)
        precision = runner.model.precision
    result: dict[str, Any] = {
        "rate_per_s": round(rate, 4), "load": LOAD, **measured, "capacity_per_s": round(capacity, 4),
        "saturated_per_s": round(saturated, 4),
        "saturated_ratio": round(ratio, 4),
        "p99_ratio": round(measured["engine"]["p99_s"] / measured["window_free"]["p99_s"], 4), "arrivals": pictures,
        "steps": steps, "model": Path(settings.model_name).name, "precision": precision,
        "deepcache": settings.deepcache, "kernels": runner.backend.kernels.name != TORCH,
    }  # fmt: skip
    return record.publish("arrivals", result, results, artifacts=provenance.EMOJI_XL, table=TABLES["arrivals"])


def _play(servers: Mapping[str, Server], order: Order, rate: float, pictures: int) -> dict[str, dict[str, float]]:
    """Play the same traces on every server, a part to each in turn: a shared machine's speed changes meanwhile."""
    each = -(-pictures // _ROUNDS)

    def measure(name: str, server: Server, part: int) -> Played:
        return play(name, server, order, poisson(rate, min(each, pictures - part * each), seed=part))

    plays = alternate(servers, -(-pictures // each), measure)
    return {name: latency_summary(played) for name, played in plays.items()}


def _throughput(engine: Engine, draw: Draw, order: Order) -> tuple[float, float, float]:
    """Images per second of full static batches, of the engine with a full queue, and the second over the first.

    They take turns, each turn of the queue held against the batches before and after it.

    A shared machine's speed changes from minute to minute; so neighbours are compared, and the median turn counts.
    """
    _static(draw, order)  # warms up
    static, saturated, ratios = [_static(draw, order)], [], []
    for number in range(_TURNS):
        saturated.append(_full_queue(engine, order, number))
        static.append(_static(draw, order))
        ratios.append(saturated[-1] / (sum(static[-2:]) / 2))
    return float(np.median(static)), float(np.median(saturated)), float(np.median(ratios))


def _full_queue(engine: Engine, order: Order, turn: int) -> float:
    """Pictures per second while there is always more to do, by denoising steps: neither filling nor emptying counts."""
    loop = Loop(engine, lambda number: order.request(f"full-{turn}-{number}", number), _IN_FLIGHT)
    loop.start()
    loop.reach(_IN_FLIGHT)
    loop.counts = True
    started = time.perf_counter()
    loop.reach(len(loop.moments) + _COUNTED)
    took_s = time.perf_counter() - started
    loop.counts = False
    loop.close()
    return loop.steps / order.steps / took_s


def _static(draw: Draw, order: Order) -> float:
    """Pictures per second of two full static batches, one after the other."""
    started = time.perf_counter()
    for batch in range(2):
        draw([order.request(f"static-{id(draw)}-{batch}-{i}", i) for i in range(BATCH)])
    return 2 * BATCH / (time.perf_counter() - started)
