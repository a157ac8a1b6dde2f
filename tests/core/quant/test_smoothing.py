"""Smoothing: the paper's formula, exact in floats before anything is rounded, and one scale per half of an input."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.quant.linear import LEVELS
from core.quant.smoothing import inverse_scales, smoothing
from tests.core.quant.stage import Many, Seed, normal

few = settings(max_examples=60)
Alpha = Annotated[float, st.floats(0, 1)]


def ranges(seed: int, channels: int) -> torch.Tensor:
    """Magnitudes over several orders, as activations have them."""
    return normal(seed, channels, scale=2).exp()


@few
@given(...)
def test_the_formula_is_the_papers(channels: Many, alpha: Alpha, seed: Seed) -> None:
    x, w = ranges(seed, channels), ranges(seed + 1, channels)
    wanted = np.power(x.double().numpy(), alpha) / np.power(w.double().numpy(), 1 - alpha)
    assert np.allclose(smoothing(x, w, alpha).numpy(), wanted, rtol=1e-5)


@few
@given(...)
def test_a_layers_input_scales_are_the_smoothing_and_one_scale_behind_it(
    channels: Many, alpha: Alpha | None, half: Annotated[int, st.integers(0, 40)], seed: Seed
) -> None:
    """By the formula in numpy: LEVELS / max(x / s) / s, for each half by itself."""
    halves = half if 0 < half < channels else None
    x, w = ranges(seed, channels), ranges(seed + 1, channels)
    smooth = None if alpha is None else smoothing(x, w, alpha)
    s = np.ones(channels) if alpha is None else x.double().numpy() ** alpha / w.double().numpy() ** (1 - alpha)
    for found, seen, scale in zip(
        np.split(inverse_scales(x, smooth, halves).numpy(), [halves or 0]),
        np.split(x.numpy(), [halves or 0]), np.split(s, [halves or 0]), strict=True,
    ):  # fmt: skip
        if len(found):
            assert np.allclose(found, LEVELS / (seen / scale).max() / scale, rtol=1e-4)


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
