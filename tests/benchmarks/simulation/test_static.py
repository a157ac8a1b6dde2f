"""Request-level batching: the policy and the costs of benchmarks.traces, with a window and without."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.harness import traces
from benchmarks.simulate import solo_s
from benchmarks.simulation.fleet import Clock
from benchmarks.simulation.runner import Device, SimulatedRunner, SimulatedTicket
from benchmarks.simulation.static import SimulatedRequestLevel, draw
from benchmarks.simulation.traffic import Mix, SimulatedJob, WeightedChoice, always, jobs, picture
from contract.plan import DeepCache
from core.batching.request import Request
from tests.benchmarks.simulation.tables import OTHER, SIZE, affine

WANTED = picture(SIZE, 4, True, None)
PLAIN = Mix(size=always(SIZE), steps=always(4))


class Ticking(SimulatedRunner):
    """Its clock moves on with every forward, as for one who waits for each."""

    def launch(self, requests: Sequence[Request]) -> SimulatedTicket:
        ticket = super().launch(requests)
        self.clock.now = ticket.ends
        return ticket


@pytest.mark.parametrize("cached", [None, DeepCache(2), DeepCache(3, "resnet")])
@pytest.mark.parametrize("guided", [True, False])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_a_batch_costs_what_draw_batch_takes(count: int, guided: bool, cached: DeepCache | None) -> None:
    clock, costs, device = Clock(), affine(), Device()
    parameters = picture(SIZE, 6, guided, cached)
    runner = Ticking(costs, device, clock)
    traces.draw_batch(runner, [Request(str(i), "image", parameters) for i in range(count)])
    assert clock.now == pytest.approx(sum(seconds for *_, seconds in draw(costs, device, parameters, count)))
    assert runner.held() == 0


@settings(max_examples=15)
@given(seed=st.integers(0, 10_000), load=st.sampled_from([0.5, 1.0, 4.0]))
def test_without_a_window_batches_are_those_of_the_arrivals_benchmark(seed: int, load: float) -> None:
    """Its own thread is led through the trace, event by event, and asked what it draws each time."""
    asked = jobs(seed, 30, load / solo_s(affine(), WANTED), PLAIN)
    simulated: list[tuple[float, float, list[int]]] = []
    SimulatedRequestLevel(
        affine(), Device(), gpus=1, batch=traces.BATCH,
        on_batch=lambda gpu, begins, ends, taken: simulated.append((begins, ends, [job.index for job in taken])),
    ).run(asked)  # fmt: skip

    drawn: list[list[int]] = []
    begun, may_end = threading.Semaphore(0), threading.Semaphore(0)

    def draw_when_told(requests: Sequence[Request]) -> None:
        drawn.append([int(request.id) for request in requests])
        begun.release()
        assert may_end.acquire(timeout=60)

    server = traces.RequestLevel(draw_when_told, 0.0)
    submitted = 0
    for begins, ends, _ in simulated:
        while submitted < len(asked) and asked[submitted].arrival <= begins:  # nothing runs: the first one begins
            server.submit(Request(str(submitted), "image", WANTED), lambda: None)
            submitted += 1
        assert begun.acquire(timeout=60)
        while submitted < len(asked) and asked[submitted].arrival <= ends:
            server.submit(Request(str(submitted), "image", WANTED), lambda: None)
            submitted += 1
        may_end.release()
    assert drawn == [taken for *_, taken in simulated]
    assert sorted(index for taken in drawn for index in taken) == list(range(30))


def test_a_window_is_waited_for_by_less_than_a_batch() -> None:
    costs, each_s = affine(), solo_s(affine(), WANTED)
    alone = SimulatedRequestLevel(costs, Device(), gpus=1, batch=4, window_s=3.0).run(
        [SimulatedJob(0, 1.0, WANTED, 5, math.inf)]
    )
    assert alone.ended == [pytest.approx(4.0 + each_s)]
    together = [SimulatedJob(i, 0.1 * i, WANTED, 5, math.inf) for i in range(4)]
    batch_s = sum(seconds for *_, seconds in draw(costs, Device(), WANTED, 4))
    full = SimulatedRequestLevel(costs, Device(), gpus=1, batch=4, window_s=3.0).run(together)
    assert full.ended == [pytest.approx(0.3 + batch_s)] * 4


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    gpus=st.integers(1, 3),
    window_s=st.sampled_from([0.0, 0.5, 3.0]),
    rate=st.sampled_from([1.0, 10.0, 100.0]),
)
def test_batches_are_of_one_kind_and_devices_draw_one_at_a_time(
    seed: int, gpus: int, window_s: float, rate: float
) -> None:
    mix = Mix(
        size=WeightedChoice((SIZE, OTHER), (1.0, 1.0)),
        steps=WeightedChoice((3, 5), (1.0, 1.0)),
        deepcache=WeightedChoice((None, DeepCache(2)), (1.0, 1.0)),
        deadline_s=WeightedChoice((math.inf, 1.0), (1.0, 1.0)),
        priority=WeightedChoice((0, 5), (1.0, 2.0)),
    )
    asked, batches = jobs(seed, 60, rate, mix), []
    fleet = SimulatedRequestLevel(
        affine(), Device(), gpus=gpus, batch=4, window_s=window_s, on_batch=lambda *batch: batches.append(batch)
    )
    served = fleet.run(asked)
    taken = [job.index for *_, together in batches for job in together]
    assert len(set(taken)) == len(taken)
    for job in asked:
        ended = served.ended[job.index]
        assert ended >= job.arrival and served.missed[job.index] == (ended >= job.deadline)
        assert job.index in taken or ended == job.deadline
    free = [0.0] * gpus
    for gpu, begins, ends, together in batches:
        assert 1 <= len(together) <= 4 and len({job.parameters for job in together}) == 1
        assert begins >= free[gpu] and all(job.arrival <= begins for job in together)
        oldest = min(job.arrival for job in together)
        assert len(together) == 4 or begins >= oldest + window_s
        free[gpu] = ends
