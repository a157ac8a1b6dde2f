"""The simulated runner answers the scheduler as the real one does, and keeps its books."""

from __future__ import annotations

from dataclasses import replace

import pytest

from contract.plan import DeepCache
from core.batching.request import Request
from core.batching.runner import NotYet, Runner
from lab.simulation.runner import Device, IterationSpan, SimulatedRunner
from lab.simulation.traffic import Guidance, picture
from pipeline.backends.backend import Widths
from pipeline.backends.torch_backend import TorchBackend
from pipeline.checkpoints.load import load
from pipeline.runner import ImageRunner
from tests.lab.simulation.tables import SIZE, affine

CACHED = [None, DeepCache(2), DeepCache(3, "resnet", first=1, last=1), DeepCache(deep_steps=(0, 3))]


@pytest.fixture(scope="module")
def real() -> ImageRunner:
    runner = ImageRunner(TorchBackend(load("random:tiny"), Widths(max_rows=8)), max_requests=4)
    yield runner
    runner.close()


GUIDED = [True, False, (0.0, 0.5), (0.4, 1.0), (0.2, 0.75)]


@pytest.mark.parametrize("guided", GUIDED, ids=str)
@pytest.mark.parametrize("cached", CACHED)
def test_it_answers_as_the_real_runner_does(real: ImageRunner, guided: Guidance, cached: DeepCache | None) -> None:
    now = 0.0
    native = (real.model.native, real.model.native)
    costs = affine()
    costs = type(costs)("any", {(p, native if s == SIZE else s): r for (p, s), r in costs.measured.items()})
    simulated = SimulatedRunner(costs, Device(max_requests=4, max_rows=8), lambda: now)
    pair: list[tuple[Runner, Request]] = []
    for runner in (real, simulated):
        parameters = replace(picture(native, 6, guided, cached), prompt="a red boat")
        request = Request("a", "image", parameters)
        runner.check(request)
        assert runner.admit(request) is None
        pair.append((runner, request))
    assert real.modality == simulated.modality
    while True:
        answers = []
        for runner, request in pair:
            group, then = runner.group(request), runner.next_group(request)
            answers.append(
                {
                    "phase": request.phase,
                    "group": group[:2],
                    "then": then and then[:2],
                    "rows": runner.rows(request),
                    "iterations": runner.iterations(request),
                    "limit": runner.limit(group),
                    "lane": runner.lane_of(group),
                    "held": runner.held(),
                }
            )
        assert answers[0] == answers[1]
        outcomes = []
        for runner, request in pair:
            ticket = runner.launch([request])
            if runner is simulated:
                assert not ticket.ready()
                now = ticket.ends
            outcomes.append(ticket.outcome()["a"])
        assert outcomes[0].progress == outcomes[1].progress
        assert outcomes[0].finished == outcomes[1].finished
        if outcomes[0].finished:
            break
    for runner, request in pair:
        runner.release(request)
        assert runner.held() == 0


@pytest.mark.parametrize("guided", GUIDED, ids=str)
@pytest.mark.parametrize("cached", CACHED)
def test_what_is_left_is_what_it_will_take(cached: DeepCache | None, guided: Guidance) -> None:
    now = 0.0
    runner = SimulatedRunner(affine(), Device(), lambda: now)
    request = Request("a", "image", picture(SIZE, 6, guided, cached))
    assert runner.admit(request) is None
    left: list[tuple[float, float]] = []
    finished = False
    while not finished:
        left.append((now, runner.left_s(request, runner.rows(request))))
        ticket = runner.launch([request])
        now = ticket.ends
        finished = ticket.outcome()["a"].finished
    vae_from = left[-1][0]
    for moment, left_s in left[1:-1]:
        assert left_s == pytest.approx(vae_from - moment)
    assert left[-1][1] == pytest.approx(now - vae_from)


def test_room_is_counted_in_slots_and_bytes() -> None:
    runner = SimulatedRunner(affine(), Device(max_requests=3, memory_bytes=52), lambda: 0.0)
    requests = [
        Request(str(n), "image", picture(SIZE, 4, True, cached)) for n, cached in enumerate((DeepCache(2), None))
    ]
    assert runner.admit(requests[0]) is None and runner.memory.taken == 1 + 2 * (10 + 5)
    assert runner.admit(requests[1]) is None and runner.memory.taken == 31 + 21
    assert runner.admit(Request("2", "image", picture(SIZE, 4, False, None))) and runner.memory.taken == 52
    runner.release(requests[1])
    runner.release(requests[0])
    assert runner.memory.taken == 0 and runner.held() == 0
    unbound = SimulatedRunner(affine(), Device(max_requests=1), lambda: 0.0)
    assert unbound.admit(requests[0]) is None and unbound.admit(requests[1]) == NotYet()


def test_a_row_is_given_back_after_the_last_guided_step() -> None:
    now, taken = 0.0, []
    runner = SimulatedRunner(affine(), Device(), lambda: now)
    request = Request("a", "image", picture(SIZE, 4, (0.0, 0.5), DeepCache(2)))
    assert runner.admit(request) is None
    finished = False
    while not finished:
        taken.append(runner.memory.taken)
        ticket = runner.launch([request])
        now = ticket.ends
        finished = ticket.outcome()["a"].finished
    assert taken == [1 + 3 * 15] * 3 + [1 + 15] * 3  # encoding, two guided steps, two unguided ones, the VAE
    runner.release(request)
    assert runner.memory.taken == 0


def test_a_lane_runs_one_after_the_other() -> None:
    spans: list[IterationSpan] = []
    runner = SimulatedRunner(affine(), Device(), lambda: 1.0, spans.append)
    requests = [Request(str(n), "image", picture(SIZE, 4, False, None)) for n in range(2)]
    for request in requests:
        runner.admit(request)
    first, second = (runner.launch([request]) for request in requests)
    assert spans[0].begins == 1.0 and spans[1].begins == spans[0].ends == first.ends
    assert second.ends - first.ends == pytest.approx(first.ends - 1.0) and [span.rows for span in spans] == [1, 1]
    assert not first.ready()
