"""Measures the cost of a scheduling decision with many waiting requests: `python -m lab.bench.scheduling`.

Uses the simulator's image runner, which computes nothing, with 32 slots, batches of up to 16 rows and affine cost
curves. Requests are of two sizes, with all kinds of plans: full, guided for half of the steps or not at all, cached at
two intervals and depths, of 4 to 50 steps; a third has no deadline. Every request that ends is replaced immediately. An
iteration is `schedule`, `finish` and `take_ended`, on one core, without lane threads or devices.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from dataclasses import replace

from contract.image import ImageParameters
from contract.plan import AUTO, BLOCK, RESNET, DeepCache
from core.batching.request import Request, State
from core.batching.scheduler import Scheduler
from lab.bench.harness import record
from lab.bench.tables import TABLES
from lab.simulation.costs import ANY, DEEP, ENCODE, SHALLOW, VAE, Costs, Size
from lab.simulation.runner import Device, SimulatedRunner
from lab.simulation.traffic import Guidance, picture

SIZES: tuple[Size, ...] = ((512, 512), (768, 768))
STEPS = (4, 10, 20, 30, 50)
GUIDED: tuple[Guidance, ...] = (True, False, (0.0, 0.5), (0.25, 0.75))
CACHED = (None, AUTO, DeepCache(3, BLOCK), DeepCache(3, RESNET, last=1))
SAMPLERS = ("euler", "euler-ancestral", "dpm++2m", "lcm")  # requests share forwards whatever their samplers
_DEVICE = Device(max_requests=32, max_rows=16)
_SHARES = {DEEP: 1.0, **dict.fromkeys(SHALLOW.values(), 0.1), VAE: 2.0}  # of a deep step
_ITERATIONS = 2000
_WARM = 100  # iterations that admit, and warm up


def costs() -> Costs:
    """10 ms and 4 ms a row for a deep step at any size."""
    affine = {rows: 0.010 + 0.004 * rows for rows in (1, 2, 4, 8, 16)}
    steps = {
        (phase, size): {rows: share * cost_s for rows, cost_s in affine.items()}
        for phase, share in _SHARES.items()
        for size in SIZES
    }
    return Costs("affine", {(ENCODE, ANY): {rows: 0.1 * cost_s for rows, cost_s in affine.items()}, **steps})


def draw(rng: random.Random) -> ImageParameters:
    """A request by one of all plans."""
    parameters = picture(rng.choice(SIZES), rng.choice(STEPS), rng.choice(GUIDED), rng.choice(CACHED))
    return replace(parameters, scheduler=rng.choice(SAMPLERS))


def measure(waiting: int, iterations: int = _ITERATIONS) -> dict[str, float]:
    """Milliseconds per iteration with that many waiting requests: median, mean, 99th percentile and maximum."""
    rng, now = random.Random(waiting), 0.0
    runner = SimulatedRunner(costs(), _DEVICE, lambda: now)
    scheduler = Scheduler([runner])
    count = 0
    took_s: list[float] = []
    for iteration in range(iterations + _WARM):
        while len(scheduler.live) < waiting + _DEVICE.max_requests:
            count += 1
            deadline = now + rng.choice([1e3, 1e4, math.inf])
            request = Request(str(count), "image", draw(rng), priority=rng.randint(0, 3), deadline=deadline)
            scheduler.add(request, now)
        started = time.perf_counter()
        (batch,) = scheduler.schedule(now)
        scheduled_s = time.perf_counter() - started
        ticket = runner.launch(batch.requests)
        now = ticket.ends
        outcomes = ticket.outcome()
        started = time.perf_counter()
        scheduler.finish(batch, outcomes, now)
        ended = scheduler.take_ended()
        scheduled_s += time.perf_counter() - started
        assert all(request.state in (State.DONE, State.EXPIRED) for request in ended)
        if iteration >= _WARM:
            took_s.append(scheduled_s)
    took_s.sort()
    figures = {
        "median_ms": statistics.median(took_s),
        "mean_ms": statistics.fmean(took_s),
        "p99_ms": took_s[int(0.99 * len(took_s))],
        "max_ms": took_s[-1],
    }
    return {"waiting": waiting, "iterations": len(took_s)} | {k: round(1e3 * v, 4) for k, v in figures.items()}


def main() -> None:
    with record.alone():
        measured = {str(waiting): measure(waiting) for waiting in (0, 1_000, 10_000)}
    record.publish("scheduling", {"waiting": measured}, table=TABLES["scheduling"])


if __name__ == "__main__":
    main()
