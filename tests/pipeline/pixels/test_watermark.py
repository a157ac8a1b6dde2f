"""The invisible watermark: what is embedded is read, by an independent reader too, and hardly changes the image."""

from __future__ import annotations

import colorsys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from pipeline.pixels import watermark

Pixels = np.ndarray[Any, np.dtype[np.uint8]]


def textured(height: int, width: int, seed: int) -> Pixels:
    """Smooth colours without black and white, where clipping undoes the mark."""
    noise = np.random.default_rng(seed).integers(60, 196, (height // 16 + 2, width // 16 + 2, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC))


def read(pixels: Pixels) -> tuple[int, ...]:
    """The message by the published definition, block by block, in plain Python."""
    height, width = (side // 4 * 4 for side in pixels.shape[:2])
    red, green, blue = (pixels[:height, :width, channel].astype(float) for channel in range(3))
    u = np.floor(0.492 * (blue - (0.299 * red + 0.587 * green + 0.114 * blue)) + 128.5)
    scores: list[list[bool]] = [[] for _ in range(48)]
    number = 0
    for top in range(0, height // 2 - 3, 4):
        for left in range(0, width // 2 - 3, 4):
            block = [
                u[2 * y : 2 * y + 2, 2 * x : 2 * x + 2].sum() / 2
                for y in range(top, top + 4) for x in range(left, left + 4)
            ]  # fmt: skip
            scores[number % 48].append(max(map(abs, block[1:])) % 36 > 18)
            number += 1
    return tuple(int(2 * sum(bits) > len(bits)) for bits in scores)


@settings(max_examples=8, deadline=None)
@given(height=st.integers(400, 600), width=st.integers(400, 600), seed=st.integers(0, 99))
def test_what_is_embedded_is_read(height: int, width: int, seed: int) -> None:
    pixels = textured(height, width, seed)
    marked = watermark.embed(pixels)
    for bits, least, most in (
        (watermark.read(marked), 45, 48),
        (read(marked), 45, 48),
        (watermark.read(pixels), 0, 40),
    ):
        assert least <= sum(a == b for a, b in zip(bits, watermark.MESSAGE, strict=True)) <= most
    assert np.abs(marked.astype(int) - pixels).mean() < 0.6  # of 255


def test_small_images_stay_as_they_are() -> None:
    pixels = textured(255, 256, 0)
    assert watermark.embed(pixels) is pixels


@pytest.mark.parametrize(
    "color", [(0, 0, 0), (255, 255, 255), tuple(int(255 * c) for c in colorsys.hsv_to_rgb(0.6, 1, 1))]
)
def test_any_flat_image_can_be_marked(color: tuple[int, int, int]) -> None:
    pixels = np.full((301, 403, 3), color, np.uint8)
    assert np.abs(watermark.embed(pixels).astype(int) - pixels).max() <= 36
