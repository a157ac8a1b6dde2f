"""Estimates of jobs: what each phase and extension counts, and of those with a refiner, whose steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.card import ImageCosts
from contract.estimates import least_s, work_s
from contract.image import ImageJob
from contract.image_prompt import ImagePrompt
from tests.contract.test_card import IMAGE

SIDE, NAME = 128, "128x128"
COSTS = ImageCosts(row_step_s={NAME: 1.0}, shallow_row_step_s={"block": {NAME: 0.25}}, control_row_step_s={NAME: 0.5})
CARD = replace(IMAGE, costs=COSTS, deepcache="off")


def job(**fields: Any) -> ImageJob:
    return ImageJob.read(
        {"prompt": "x", "n": 1, "seed": 1, "steps": 20, "guidance_scale": 5.0, "width": SIDE, "height": SIDE, **fields}
    )


def refined(start: float, **fields: Any) -> ImageJob:
    return job(refiner={"model": "refiner", "from": start}, **fields)


@given(st.integers(2, 60), st.floats(0.05, 0.95), st.floats(0, 0.9))
def test_controls_and_image_prompts_cost_nothing_in_a_refiners_steps(steps: int, share: float, begin: float) -> None:
    """They act on the model's own steps only, and there as without a refiner."""
    own = refined(share, steps=steps).picture.own_steps
    acting = sum(step / steps >= begin for step in range(own))
    plain_s = work_s(CARD, refined(share, steps=steps))
    given = {"model": "edges", "start": begin}
    assert work_s(CARD, refined(share, steps=steps, control=[given])) - plain_s == pytest.approx(2 * acting * 0.5)
    assert work_s(CARD, refined(share, steps=steps, image_prompts=[given])) - plain_s == pytest.approx(
        2 * acting * ImagePrompt.SHARE
    )


@given(st.integers(2, 60))
def test_without_a_refiner_all_steps_are_the_models_own(steps: int) -> None:
    assert job(steps=steps).picture.own_steps == steps
    with_control = job(steps=steps, control=[{"model": "edges"}])
    assert work_s(CARD, with_control) - work_s(CARD, job(steps=steps)) == pytest.approx(2 * steps * 0.5)


@given(st.integers(1, 10))
def test_each_image_of_a_job_is_encoded_drawn_and_decoded(n: int) -> None:
    card = replace(CARD, costs=replace(COSTS, encode_s=3.0, vae_s=7.0))
    assert work_s(card, job(n=n, steps=4)) == pytest.approx(n * (3 + 2 * 4 + 7))


@pytest.mark.parametrize(("side", "near"), [(64, 64), (88, 64), (96, 128), (128, 128), (512, 128)])
def test_an_unmeasured_size_is_scaled_from_the_nearest_by_its_area(side: int, near: int) -> None:
    """Nearest by the ratio of areas, not by their difference: 96² is 2.25 times 64², and 128² 1.78 times 96²."""
    seconds = {64: 1.0, 128: 10.0}
    card = replace(CARD, costs=ImageCosts(row_step_s={f"{own}x{own}": s for own, s in seconds.items()}))
    expected = 2 * 4 * seconds[near] * side**2 / near**2
    assert work_s(card, job(width=side, height=side, steps=4)) == pytest.approx(expected)


@given(st.integers(1, 100), st.floats(0.05, 0.95))
def test_a_refiner_begins_at_the_step_nearest_to_its_share(steps: int, start: float) -> None:
    assert abs(refined(start, steps=steps).picture.own_steps - start * steps) <= 0.5


def test_a_refiners_steps_are_deep() -> None:
    cached = {"interval": 2, "depth": "block"}
    assert work_s(CARD, refined(0.5, deepcache=cached)) == pytest.approx(2 * (5 + 5 * 0.25 + 10))


def test_an_edits_skipped_steps_are_the_models() -> None:
    edited = refined(0.8, edit={"image": "k", "strength": 0.5})
    assert (edited.picture.made, edited.picture.own_steps) == (10, 6)
    assert refined(0.8, edit={"image": "k", "strength": 0.1}).picture.own_steps == 0


@given(st.integers(1, 60), st.integers(1, 3), st.sampled_from(["control", "image_prompts"]))
def test_the_least_counts_nothing_for_extensions_that_no_iteration_confirmed(steps: int, n: int, field: str) -> None:
    least = ImageCosts(solo_step_s={NAME: 1.0}, row_step_s={NAME: 1.0})
    card = replace(CARD, least_costs=least)
    extended = job(steps=steps, n=n, **{field: [{"model": "edges"}]})
    assert least_s(card, extended) == least_s(card, job(steps=steps, n=n)) == pytest.approx(2 * steps * n)
    assert work_s(card, extended) > work_s(card, job(steps=steps, n=n)), "what is expected counts them"
    confirmed = replace(card, least_costs=replace(least, control_row_step_s={NAME: 0.25}))
    added_s = 2 * steps * n * 0.25 if field == "control" else 0
    assert least_s(confirmed, extended) - least_s(card, extended) == pytest.approx(added_s)


@pytest.mark.parametrize(
    ("announced_s", "confirmed_s", "expected_s"), [(0.5, 0.0, 0.0), (0.5, 0.25, 0.25), (0.0, 0.0, 7.0)]
)
def test_the_least_of_a_tiny_decoder_is_its_own_where_it_is_announced(
    announced_s: float, confirmed_s: float, expected_s: float
) -> None:
    """Also before one of its iterations ran: the VAE's says nothing of it."""
    costs = ImageCosts(vae_s=9.0, vae_tiny_s=announced_s)
    card = replace(CARD, costs=costs, least_costs=ImageCosts(vae_s=7.0, vae_tiny_s=confirmed_s))
    assert least_s(card, job(vae="tiny")) == expected_s
    assert least_s(card, job()) == 7.0
