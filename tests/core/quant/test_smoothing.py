"""Smoothing: the paper's formula, exact in floats before anything is rounded, and one scale per half of an input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.quant.linear import LEVELS
from core.quant.smoothing import inverse_scales, smoothing
from tests.core.quant.stage import normal

few = settings(max_examples=60)
alphas = st.floats(0, 1)


def ranges(seed: int, channels: int) -> torch.Tensor:
    """Magnitudes over several orders, as activations have them."""
    return normal(seed, channels, scale=2).exp()


@few
@given(channels=st.integers(1, 40), alpha=alphas, seed=st.integers(0, 999))
def test_the_formula_is_the_papers(channels: int, alpha: float, seed: int) -> None:
    x, w = ranges(seed, channels), ranges(seed + 1, channels)
    wanted = np.power(x.double().numpy(), alpha) / np.power(w.double().numpy(), 1 - alpha)
    assert np.allclose(smoothing(x, w, alpha).numpy(), wanted, rtol=1e-5)


def test_alpha_moves_what_is_hard_from_the_activations_into_the_weights() -> None:
    x, w = ranges(0, 20), ranges(1, 20)
    assert torch.allclose(x / smoothing(x, w, 1.0), torch.ones(20))  # activations all alike
    assert torch.allclose(w * smoothing(x, w, 0.0), torch.ones(20))  # weights all alike
    s = smoothing(x, w, 0.5)
    assert torch.allclose(x / s, w * s, rtol=1e-5)  # the paper's α = 0.5: both share it


@few
@given(
    rows=st.integers(1, 9), channels=st.integers(2, 40), columns=st.integers(1, 20), seed=st.integers(0, 999),
    alpha=st.one_of(st.none(), alphas), second=st.integers(0, 39),
)  # fmt: skip
def test_folding_changes_nothing_before_rounding(
    rows: int, channels: int, columns: int, seed: int, alpha: float | None, second: int
) -> None:
    """(x · inverse) · (w / inverse) is x · w."""
    x = normal(seed, rows, channels) * ranges(seed + 1, channels)
    w = normal(seed + 2, columns, channels)
    activations, weights = x.abs().amax(0), w.abs().amax(0)
    smooth = None if alpha is None else smoothing(activations, weights, alpha)
    inverse = inverse_scales(activations, smooth, second if 0 < second < channels else None).double()
    exact = x.double() @ w.double().t()
    assert torch.allclose((x * inverse) @ (w / inverse).t(), exact, rtol=1e-9, atol=1e-9 * float(exact.abs().max()))


@few
@given(channels=st.integers(2, 40), alpha=st.one_of(st.none(), alphas), seed=st.integers(0, 999), data=st.data())
def test_what_calibration_saw_fills_the_levels_and_does_not_leave_them(
    channels: int, alpha: float | None, seed: int, data: st.DataObject
) -> None:
    """Also in each half of a concatenation by itself."""
    halves = data.draw(st.one_of(st.none(), st.integers(1, channels - 1)))
    activations = ranges(seed, channels)
    smooth = None if alpha is None else smoothing(activations, ranges(seed + 1, channels), alpha)
    levels = activations * inverse_scales(activations, smooth, halves)
    for part in (levels,) if halves is None else (levels[:halves], levels[halves:]):
        assert part.max() == pytest.approx(LEVELS, rel=1e-4)


@few
@given(channels=st.integers(2, 40), alpha=st.one_of(st.none(), alphas), seed=st.integers(0, 999), data=st.data())
def test_a_layers_input_scales_are_the_smoothing_and_one_scale_behind_it(
    channels: int, alpha: float | None, seed: int, data: st.DataObject
) -> None:
    """By the formula in numpy: LEVELS / max(x / s) / s, for each half by itself."""
    halves = data.draw(st.one_of(st.none(), st.integers(1, channels - 1)))
    x, w = ranges(seed, channels), ranges(seed + 1, channels)
    smooth = None if alpha is None else smoothing(x, w, alpha)
    s = np.ones(channels) if alpha is None else x.double().numpy() ** alpha / w.double().numpy() ** (1 - alpha)
    for found, seen, scale in zip(
        np.split(inverse_scales(x, smooth, halves).numpy(), [halves or 0]),
        np.split(x.numpy(), [halves or 0]), np.split(s, [halves or 0]), strict=True,
    ):  # fmt: skip
        if len(found):
            assert np.allclose(found, LEVELS / (seen / scale).max() / scale, rtol=1e-4)


def test_plain_is_one_scale_for_all_channels() -> None:
    assert torch.equal(inverse_scales(torch.tensor([1.0, 4.0, 2.0])), torch.full((3,), LEVELS / 4.0))
    found = inverse_scales(torch.tensor([1.0, 4.0, 2.0]), None, 1)
    assert torch.equal(found, torch.tensor([LEVELS / 1.0, LEVELS / 4.0, LEVELS / 4.0]))


def test_channels_that_were_always_zero_have_finite_scales() -> None:
    dead = torch.zeros(4)
    for activations, weights in ((dead, dead), (dead, torch.ones(4)), (torch.tensor([0.0, 1, 2, 3]), dead)):
        for alpha in (0.0, 0.5, 1.0):
            s = smoothing(activations, weights, alpha)
            assert (s > 0).all() and inverse_scales(activations, s).isfinite().all()


@pytest.mark.parametrize("halves", [0, -1, 3, 4])
def test_halves_outside_of_the_channels_are_refused(halves: int) -> None:
    with pytest.raises(ValueError, match=f"second half of 3 channels cannot begin at {halves}"):
        inverse_scales(torch.ones(3), None, halves)


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_alpha_is_between_nought_and_one(alpha: float) -> None:
    with pytest.raises(ValueError, match="alpha must be between 0 and 1"):
        smoothing(torch.ones(3), torch.ones(3), alpha)
