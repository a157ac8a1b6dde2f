"""Distances between two images of the same caption and noise: PSNR, by torchmetrics, and SSIM."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from evaluation.pixels import Pixels

_Planes = npt.NDArray[np.float64]  # [C, H, W]

MOST_DB = 100.0  # dB of equal images, because a mean needs finite values
_WINDOW, _SIGMA, _K1, _K2, _LEVELS = 11, 1.5, 0.01, 0.03, 255.0


def psnr(a: Pixels, b: Pixels) -> float:
    """10 log₁₀(255² / mean squared difference) in dB, at most 100. Raises ValueError for different sizes."""
    from torchmetrics.functional.image import peak_signal_noise_ratio  # which imports slowly

    _same_size(a, b)
    x, y = (torch.tensor(picture, dtype=torch.float64) for picture in (a, b))
    return min(MOST_DB, float(peak_signal_noise_ratio(x, y, data_range=_LEVELS)))


def ssim(a: Pixels, b: Pixels) -> float:
    """Mean structural similarity over the three channels (Wang et al., 2004: Gaussian window 11×11, σ = 1.5).

    Windows lie within the picture. Raises ValueError for different sizes, and sides below 11 pixels.
    """
    # Not torchmetrics': in fp32 its difference of squares is rounding where a picture is flat, so that two equal white
    # images have 0.9992; in fp64 its grouped convolution takes 13 s for two images of 1024×1024, this 0.3 s.
    _same_size(a, b)
    if min(a.shape[:2]) < _WINDOW:
        raise ValueError(f"sides must be at least {_WINDOW} pixels")
    x, y = (picture.astype(np.float64).transpose(2, 0, 1) for picture in (a, b))
    mean_x, mean_y, square_x, square_y, product = (_blur(planes) for planes in (x, y, x * x, y * y, x * y))
    c1, c2 = (_K1 * _LEVELS) ** 2, (_K2 * _LEVELS) ** 2
    variance = square_x - mean_x**2 + square_y - mean_y**2
    covariance = product - mean_x * mean_y
    similarity = (2 * mean_x * mean_y + c1) * (2 * covariance + c2) / ((mean_x**2 + mean_y**2 + c1) * (variance + c2))
    return float(similarity.mean())


def _blur(planes: _Planes) -> _Planes:
    """[C, H, W] with the Gaussian window, which is one line after the other; only where it fits."""
    offsets = np.arange(_WINDOW) - _WINDOW // 2
    line = np.exp(-(offsets**2) / (2 * _SIGMA**2))
    line /= line.sum()
    height, width = planes.shape[1] - _WINDOW + 1, planes.shape[2] - _WINDOW + 1
    down = sum(weight * planes[:, k : k + height] for k, weight in enumerate(line))
    return np.asarray(sum(weight * down[:, :, k : k + width] for k, weight in enumerate(line)))


def _same_size(a: Pixels, b: Pixels) -> None:
    if a.shape != b.shape:
        sizes = " and ".join(f"{p.shape[1]}x{p.shape[0]}" for p in (a, b))
        raise ValueError(f"images of {sizes} cannot be compared")
