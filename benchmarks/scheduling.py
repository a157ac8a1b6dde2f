"""Measures the cost of a scheduling decision with many waiting requests: `python -m benchmarks.scheduling`.

Uses an image runner without computation, with 32 slots, batches of up to 16 rows and an affine cost curve; every
request that ends is replaced immediately. An iteration is `schedule`, `finish` and `take_ended`, on one core, without
lane threads or devices.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Hashable, Mapping, Sequence

from benchmarks import provenance, record
from core.batching.request import Outcome, Request, State
from core.batching.runner import Ticket
from core.batching.scheduler import Scheduler
from core.batching.slots import Slots

_STEPS = 20
_SLOTS = 32
_ITERATIONS = 2000


class NullRunner:
    """encode → 20 steps → vae, each of which takes no time. `parameters` is a size, `work` is [slot, steps
    left].
    """

    modality = "image"
    patience_s = 30.0

    def __init__(self) -> None:
        self.slots = Slots(_SLOTS)

    def check(self, request: Request) -> None:
        pass

    def admit(self, request: Request) -> bool:
        slots = self.slots.take()
        if slots is None:
            return False
        request.phase, request.work = "encode", [slots[0], _STEPS]
        return True

    def release(self, request: Request) -> None:
        self.slots.give([request.work[0]])

    def held(self) -> int:
        return self.slots.taken

    def group(self, request: Request) -> Hashable:
        return (request.phase, request.parameters)

    def rows(self, request: Request) -> int:
        return 1

    def iterations(self, request: Request) -> int:
        left: int = request.work[1]
        return left if request.phase == "step" else 1

    def left_s(self, request: Request, rows: int) -> float:
        return self.iterations(request) * self.cost(self.group(request), rows)

    def next_group(self, request: Request) -> Hashable:
        left = request.work[1]
        return ("vae" if left == 1 else "step", request.parameters) if request.phase != "vae" else None

    def limit(self, group: Hashable) -> int:
        return 16

    def lane(self, group: Hashable) -> str:
        return "main"

    def cost(self, group: Hashable, rows: int) -> float:
        return 0.010 + 0.004 * rows

    def launch(self, requests: Sequence[Request]) -> Ticket:
        raise NotImplementedError("iterations are taken by `step`")

    def step(self, requests: Sequence[Request]) -> Mapping[str, Outcome]:
        outcomes = {}
        for request in requests:
            outcome = Outcome()
            if request.phase == "vae":
                outcome.finished = True
            elif request.phase == "encode":
                request.phase = "step"
            else:
                request.work[1] -= 1
                if not request.work[1]:
                    request.phase = "vae"
            outcomes[request.id] = outcome
        return outcomes


def measure(waiting: int) -> dict[str, float]:
    """Milliseconds per iteration with that many waiting requests: median, mean, 99th percentile and maximum."""
    rng = random.Random(waiting)
    runner = NullRunner()
    scheduler = Scheduler([runner])
    now, count = 0.0, 0
    took_s: list[float] = []
    for iteration in range(_ITERATIONS + 100):
        while len(scheduler.live) < waiting + _SLOTS:
            count += 1
            deadline = now + rng.choice([1e3, 1e4, float("inf")])
            size = rng.choice(["512x512", "768x768"])
            scheduler.add(Request(str(count), "image", size, priority=rng.randint(0, 3), deadline=deadline), now)
        started = time.perf_counter()
        (batch,) = scheduler.schedule(now)
        scheduled_s = time.perf_counter() - started
        outcomes = runner.step(batch.requests)
        now += runner.cost(batch.group, batch.rows)
        started = time.perf_counter()
        scheduler.finish(batch, outcomes, now)
        ended = scheduler.take_ended()
        scheduled_s += time.perf_counter() - started
        assert all(request.state in (State.DONE, State.EXPIRED) for request in ended)
        if iteration >= 100:  # the first ones admit and warm up
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
    record.publish("scheduling", {"waiting": measured}, rooms=(*provenance.SCHEDULING, "benchmarks/scheduling.py"))


if __name__ == "__main__":
    main()
