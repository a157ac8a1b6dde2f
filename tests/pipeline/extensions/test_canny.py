"""Canny's edges are OpenCV's, pixel by pixel: the digests below are of what `cv2.Canny` of OpenCV 5.0 found."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.extensions.canny import edges


def picture(kind: str, seed: int) -> np.ndarray:
    """Noise, flat blocks or slopes, [H, W, 3], of sides from 3 to 89."""
    rng = np.random.default_rng(seed)
    height, width = (int(side) for side in rng.integers(3, 90, 2))
    if kind == "noise":
        return rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    small = rng.integers(0, 256, (4, 5, 3), dtype=np.uint8)
    y, x = np.mgrid[:height, :width]
    if kind == "blocks":
        return small[y * 4 // height, x * 5 // width]
    ramp = y[..., None] * np.array([3, 1, 5]) + x[..., None] * np.array([2, 7, 1])
    return np.abs(ramp * 9 % 512 - 256).clip(0, 255).astype(np.uint8)


@pytest.mark.parametrize(
    ("kind", "digest"), [("noise", "f92a8e2d95a2d9da"), ("blocks", "012b844e071b04ca"), ("slopes", "68be474abff05223")]
)
def test_the_edges_are_opencvs(kind: str, digest: str) -> None:
    found = hashlib.sha256()
    for seed in range(12):
        made = edges(picture(kind, seed))
        assert (made[..., 0] == made[..., 1]).all() and (made[..., 0] == made[..., 2]).all()
        found.update(made[..., 0].tobytes())
    assert found.hexdigest()[:16] == digest


@given(st.integers(0, 10_000), st.sampled_from(["noise", "blocks", "slopes"]))
def test_higher_thresholds_find_no_more(seed: int, kind: str) -> None:
    some, fewer = edges(picture(kind, seed)), edges(picture(kind, seed), 150, 300)
    assert set(np.unique(some)) <= {0, 255} and (some[fewer > 0] > 0).all()
    assert (edges(picture(kind, seed), 300, 150) == fewer).all(), "as OpenCV, which takes them in either order"
