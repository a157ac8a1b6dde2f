"""Cards of image models: their costs follow what iterations take, whatever a loaded start measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import pytest

from contract.card import FULL, ImageCosts
from contract.estimates import least_s
from contract.image import ImageJob, ImageParameters
from core.graphs import ExecutableKey
from pipeline.backends.phases import DEEP, ENCODE, SHALLOW, STEPS, VAE
from pipeline.backends.timing import PhaseCosts
from pipeline.backends.torch_backend import TorchBackend
from pipeline.runner import ImageRunner
from tests.pipeline.worlds import model, shared_lane, solo
from workers.images.cards import image_card
from workers.images.handler import ImageJobHandler

_ROW_S = {DEEP: 0.010, SHALLOW["block"]: 0.004, VAE: 0.020, ENCODE: 0.005}


def true_s(phase: str, rows: int) -> float:
    return _ROW_S[phase] * (1 + rows)


class Clock:
    """The seconds that a test sets."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def runner(clock: Clock) -> Iterator[ImageRunner]:
    backend = TorchBackend(model("plain"))
    backend.costs = PhaseCosts(clock=clock)
    runner = ImageRunner(backend, lane=shared_lane())
    yield runner
    runner.close()


def key(runner: ImageRunner, phase: str, rows: int) -> ExecutableKey:
    side = runner.model.native
    return ExecutableKey(phase, rows, (0, 0) if phase == ENCODE else (side, side))


def job(runner: ImageRunner) -> ImageJob:
    side = runner.model.native
    return ImageJob(ImageParameters("a cat", 1, side, side, steps=10, guidance_scale=5.0), 1)


def numbers(costs: ImageCosts) -> list[float]:
    values: list[float] = []
    for value in asdict(costs).values():
        nested = [value] if not isinstance(value, dict) else [*value.values()]
        for each in nested:
            values += each.values() if isinstance(each, dict) else [each]
    return values


def test_costs_of_a_start_under_load_are_right_after_one_picture_and_refuse_nothing_before(
    runner: ImageRunner,
) -> None:
    costs = runner.backend.costs
    for phase in (DEEP, SHALLOW["block"], VAE):
        for rows in (1, 2) if phase == VAE else (2, 4, 8, 16, 32):
            costs.measure(key(runner, phase, rows), False, 300 * true_s(phase, rows))
    slow = image_card(runner)
    assert least_s(slow, job(runner)) == 0 and not any(numbers(slow.least_costs))
    for phase, rows in ((ENCODE, 2), *[(DEEP, 2)] * 10, (SHALLOW["block"], 2), (VAE, 1)):
        costs.observe(key(runner, phase, rows), False, true_s(phase, rows))
    card, side = image_card(runner), runner.model.native
    named = f"{side}x{side}"
    best_s = {phase: true_s(phase, 32) / 32 for phase in STEPS if phase in _ROW_S}
    assert card.costs.solo_step_s[named] == pytest.approx(true_s(DEEP, 2))
    for actual, expected in (
        (card.costs.row_step_s[named], best_s[DEEP]),
        (card.costs.shallow_row_step_s["block"][named], best_s[SHALLOW["block"]]),
        (card.costs.encode_s, true_s(ENCODE, 2)),
        (card.capacity_per_s, slow.capacity_per_s * 300),
    ):
        assert expected / 1.5 <= actual <= 1.5 * expected
    assert card.costs.vae_s <= true_s(VAE, 1)
    assert 0 < least_s(card, job(runner)) <= true_s(ENCODE, 2) + 10 * true_s(DEEP, 2) + true_s(VAE, 1)


def test_what_is_measured_before_requests_confirms_nothing_and_their_iterations_do(runner: ImageRunner) -> None:
    runner.prepare(measure_s=60.0)
    measured = image_card(runner)
    assert all(measured.costs.solo_step_s.values()) and measured.costs.vae_s
    assert not any(numbers(measured.least_costs))
    side = runner.model.native
    solo(runner, ImageParameters("a cat", 1, side, side, steps=2, guidance_scale=5.0, vae=FULL))
    least = image_card(runner).least_costs
    assert all((*least.solo_step_s.values(), *least.row_step_s.values(), least.encode_s, least.vae_s))


def test_an_idle_workers_card_drops_what_a_load_has_shown_and_keeps_what_it_expects(
    runner: ImageRunner, clock: Clock
) -> None:
    """Else no deadline would be accepted again, and no job would run that corrects it."""
    handler, costs = ImageJobHandler(runner), runner.backend.costs
    for phase, rows in ((ENCODE, 2), (DEEP, 2), (SHALLOW["block"], 2), (VAE, 1)):
        costs.observe(key(runner, phase, rows), False, 300 * true_s(phase, rows))
    loaded = handler.card()
    assert least_s(loaded, job(runner)) > 10 * true_s(DEEP, 2)
    clock.now_s = 61.0
    idle = handler.card()
    assert not any(numbers(idle.least_costs)) and idle.costs == loaded.costs


def test_wide_batches_under_a_load_do_not_raise_the_least_of_an_image(runner: ImageRunner) -> None:
    for phase, rows in ((DEEP, 32), *[(DEEP, 2)] * 50):
        runner.backend.costs.observe(key(runner, phase, rows), False, (10 if rows > 2 else 1) * true_s(phase, rows))
    named = f"{runner.model.native}x{runner.model.native}"
    least = image_card(runner).least_costs
    assert least.solo_step_s[named] == pytest.approx(true_s(DEEP, 2))
    assert 0 < least.row_step_s[named] <= true_s(DEEP, 2) / 2 * 1.001


def test_of_a_model_that_has_left_memory_iterations_have_shown_nothing(runner: ImageRunner) -> None:
    """It is loaded with curves of its own, and until then nothing runs."""
    resident: list[ImageRunner | None] = [None, runner]
    handler = ImageJobHandler(runner, resident=lambda: resident[-1])
    for phase, rows in ((ENCODE, 2), (DEEP, 2), (VAE, 1)):
        runner.backend.costs.observe(key(runner, phase, rows), False, true_s(phase, rows))
    assert least_s(handler.card(), job(runner)) > 0
    resident.pop()
    assert least_s(handler.card(), job(runner)) == 0
