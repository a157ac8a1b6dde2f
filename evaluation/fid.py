"""Fréchet distance between two sets of features. Knows means and covariances; knows nothing of pictures."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Gaussian(NamedTuple):
    """Mean [D] and covariance [D, D] (divided by n − 1) of features, in fp64."""

    mean: Tensor
    covariance: Tensor


def gaussian(features: Tensor) -> Gaussian:
    """Of features [N, D], N at least 2."""
    if features.dim() != 2 or len(features) < 2:
        raise ValueError(f"features must be [N, D] with N at least 2, not {list(features.shape)}")
    whole = features.double()
    return Gaussian(whole.mean(0), torch.cov(whole.T))


def fid(a: Gaussian, b: Gaussian) -> float:
    """|μ₁ − μ₂|² + tr(Σ₁ + Σ₂ − 2 (Σ₁ Σ₂)^½) (Heusel et al., 2017, equation 6).

    The trace of the root is taken from the eigenvalues of Σ₁^½ Σ₂ Σ₁^½, which are those of Σ₁ Σ₂ and real.
    """
    values, vectors = torch.linalg.eigh(a.covariance)
    root = vectors * values.clamp_min(0).sqrt() @ vectors.T
    cross = torch.linalg.eigvalsh(root @ b.covariance @ root).clamp_min(0).sqrt().sum()
    distance = (a.mean - b.mean).square().sum() + a.covariance.trace() + b.covariance.trace() - 2 * cross
    return float(distance)
