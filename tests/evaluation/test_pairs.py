"""PSNR and SSIM: against torchmetrics, and where there is nothing to tell."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from evaluation import pairs


def two(side: tuple[int, int], amount: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    smooth = np.kron(draw.integers(0, 256, (side[0] // 8, side[1] // 8, 3)), np.ones((8, 8, 1)))
    noisy = smooth + draw.normal(0, amount, smooth.shape)
    return tuple(np.clip(one, 0, 255).round().astype(np.uint8) for one in (smooth, noisy))  # type: ignore[return-value]


@pytest.mark.parametrize("amount", [1.0, 10.0, 60.0])
@pytest.mark.parametrize("side", [(64, 64), (40, 96)])
def test_they_are_torchmetrics(side: tuple[int, int], amount: float) -> None:
    from torchmetrics.functional.image import peak_signal_noise_ratio, structural_similarity_index_measure

    a, b = two(side, amount)
    x, y = (torch.tensor(one).permute(2, 0, 1)[None].double() for one in (a, b))
    assert pairs.psnr(a, b) == pytest.approx(float(peak_signal_noise_ratio(y, x, data_range=(0.0, 255.0))), rel=1e-6)
    _, every = structural_similarity_index_measure(y, x, data_range=255.0, return_full_image=True)
    within = every[..., 5:-5, 5:-5]  # theirs also counts windows over reflected borders, which the paper does not have
    assert pairs.ssim(a, b) == pytest.approx(float(within.mean()), rel=1e-6)


def test_equal_pictures_are_one_hundred_decibels_and_one() -> None:
    a, _ = two((32, 32), 0.0)
    assert pairs.psnr(a, a) == pairs.MOST_DB and pairs.ssim(a, a) == pytest.approx(1)
    one_off = a.copy()
    one_off[0, 0, 0] ^= 1
    assert pairs.psnr(a, one_off) == pytest.approx(10 * math.log10(255**2 * a.size))


def test_other_sizes_are_refused() -> None:
    a, _ = two((32, 32), 0.0)
    with pytest.raises(ValueError, match="32x32 and 24x32"):
        pairs.psnr(a, a[:, :24])
    with pytest.raises(ValueError, match="at least 11"):
        pairs.ssim(a[:8], a[:8])
