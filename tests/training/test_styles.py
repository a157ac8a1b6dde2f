"""Styles: pixel art is of blocks of few colours, and a pencil drawing follows edges and knows no colours."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.styles import BLOCK, LEVELS, STYLES, mosaic, pencil


@pytest.mark.parametrize("style", sorted(STYLES))
@given(seed=st.integers(0, 2**31), height=st.integers(3, 40), width=st.integers(3, 40))
@settings(max_examples=20, deadline=None)
def test_pictures_keep_their_shape_and_range_whatever_stands_beside_them(
    style: str, seed: int, height: int, width: int
) -> None:
    pixels = torch.rand(3, 3, height, width, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    made = STYLES[style](pixels)
    assert made.shape == pixels.shape and made.dtype == torch.float32
    assert float(made.min()) >= -1 and float(made.max()) <= 1
    assert torch.equal(STYLES[style](pixels[1:2])[0], made[1])


def test_pixel_art_is_of_blocks_of_few_colours() -> None:
    pixels = torch.rand(2, 3, 2 * BLOCK, 3 * BLOCK, generator=torch.Generator().manual_seed(1)) * 2 - 1
    made = mosaic(pixels)
    corners = made[..., ::BLOCK, ::BLOCK]
    assert torch.equal(made, corners.repeat_interleave(BLOCK, 2).repeat_interleave(BLOCK, 3))
    levels = torch.linspace(-1, 1, LEVELS)
    assert float((corners[..., None] - levels).abs().amin(-1).max()) < 1e-6
    means = pixels.reshape(2, 3, 2, BLOCK, 3, BLOCK).mean((3, 5))
    assert float((corners - means).abs().max()) <= 1 / (LEVELS - 1) + 1e-6
    assert torch.equal(mosaic(made), made)


def test_a_pencil_draws_edges_between_colours_of_one_brightness() -> None:
    red, green = torch.tensor([0.587, 0.0, 0.0]), torch.tensor([0.0, 0.299, 0.0])
    pixels = torch.empty(1, 3, 16, 16)
    pixels[..., :8], pixels[..., 8:] = red[None, :, None, None] * 2 - 1, green[None, :, None, None] * 2 - 1
    made = pencil(pixels)
    away, edge = made[..., :6], made[..., 7:9]
    assert float(away.std((2, 3)).max()) < 1e-5 and float(edge.max()) < float(away.min()) - 0.2
    torch.testing.assert_close(made[..., 0], made[..., -1], msg="equally bright surfaces are equally dark")


def test_a_pencil_has_no_colours() -> None:
    pixels = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(2)) * 2 - 1
    flat = pencil(pixels)[0].flatten(1)
    assert torch.linalg.matrix_rank(flat - flat[:, :1], atol=1e-4) == 1, "all lies between paper and graphite"
