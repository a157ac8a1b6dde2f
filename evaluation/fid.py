"""Fréchet distance between two sets of features."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

CHUNK = 1024  # rows of features in memory at once


class StatisticsError(ValueError):
    """A file of statistics that cannot be used. The message names it."""


class Gaussian(NamedTuple):
    """Mean [D] and covariance [D, D] (divided by n − 1) of features, in fp64."""

    mean: Tensor
    covariance: Tensor


def gaussian(features: Tensor, counts: Tensor | None = None) -> Gaussian:
    """Of features [N, D], each as often as `counts` [N] says (default: once); at least 2 in all.

    Two passes over chunks, so that features may lie in a file; the second is about the mean, which keeps digits.
    """
    if features.dim() != 2:
        raise ValueError(f"features must be [N, D], not {list(features.shape)}")
    weights = torch.ones(len(features), dtype=torch.float64) if counts is None else counts.double()
    whole = float(weights.sum())
    if whole < 2:
        raise ValueError(f"features must be at least 2, not {whole:g}")
    mean = torch.zeros(features.shape[1], dtype=torch.float64)
    for part, weight in _chunks(features, weights):
        mean += weight @ part
    mean /= whole
    covariance = torch.zeros(len(mean), len(mean), dtype=torch.float64)
    for part, weight in _chunks(features, weights):
        centred = part - mean
        covariance += (centred * weight[:, None]).T @ centred
    return Gaussian(mean, covariance / (whole - 1))


def resampled(features: Tensor, counts: Tensor) -> Iterator[Gaussian]:
    """`gaussian(features, once)` for each of `counts` [R, N], in one pass each.

    About the mean of all, which is near every resample's own: so the sum of squares keeps its digits too.
    """
    about = gaussian(features).mean
    for once in counts.double():
        whole = float(once.sum())
        moved = torch.zeros_like(about)
        squares = torch.zeros(len(about), len(about), dtype=torch.float64)
        for start in range(0, len(features), CHUNK):
            part = features[start : start + CHUNK].double() - about
            weighted = part * once[start : start + CHUNK, None]
            moved += weighted.sum(0)
            squares += part.T @ weighted
        moved /= whole
        yield Gaussian(about + moved, (squares - whole * torch.outer(moved, moved)) / (whole - 1))


def fid(a: Gaussian, b: Gaussian) -> float:
    """|μ₁ − μ₂|² + tr(Σ₁ + Σ₂ − 2 (Σ₁ Σ₂)^½) (Heusel et al., 2017, equation 6)."""
    return FrechetDistance(a)(b)


class FrechetDistance:
    """FID from one Gaussian, whose root is taken once, to any other.

    The trace of (Σ₁ Σ₂)^½ is taken from the eigenvalues of Σ₁^½ Σ₂ Σ₁^½, which are those of Σ₁ Σ₂ and real. Eigenvalues
    of rounding alone are left out: of fewer pictures than dimensions most are such, and their roots would be 1e-8.
    """

    def __init__(self, reference: Gaussian) -> None:
        self.reference = reference
        values, vectors = torch.linalg.eigh(reference.covariance)
        kept = values > _floor(values)
        self._root = vectors[:, kept] * values[kept].sqrt()  # [D, r]

    def __call__(self, other: Gaussian) -> float:
        if other.mean.shape != self.reference.mean.shape:
            raise ValueError(f"{len(other.mean)} features cannot be compared with {len(self.reference.mean)}")
        values = torch.linalg.eigvalsh(self._root.T @ other.covariance @ self._root)
        cross = values[values > _floor(values)].sqrt().sum()
        moved = (other.mean - self.reference.mean).square().sum()
        return float(moved + self.reference.covariance.trace() + other.covariance.trace() - 2 * cross)


def read(path: Path, width: int) -> Gaussian:
    """`mu` [D] and `sigma` [D, D] of an `.npz`, as MLPerf's val2014.npz holds them. Raises `StatisticsError`."""
    try:
        # Opened here: np.load leaves a file that is no archive open.
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as found:
            mean, covariance = (torch.from_numpy(np.asarray(found[name], np.float64)) for name in ("mu", "sigma"))
    except KeyError:
        raise StatisticsError(f"{path}: holds no mu and sigma") from None
    except (OSError, ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise StatisticsError(f"{path}: cannot be read as .npz ({getattr(error, 'strerror', None) or error})") from None
    if mean.shape != (width,) or covariance.shape != (width, width):
        shapes = f"mu {list(mean.shape)} and sigma {list(covariance.shape)}"
        raise StatisticsError(f"{path}: has {shapes}; these features are {width} wide")
    if not (mean.isfinite().all() and covariance.isfinite().all()):
        raise StatisticsError(f"{path}: holds NaN or infinite numbers")
    return Gaussian(mean, covariance)


def save(path: Path, found: Gaussian) -> None:
    np.savez(path, mu=found.mean.numpy(), sigma=found.covariance.numpy())


def _floor(values: Tensor) -> float:
    return float(values.max()) * len(values) * torch.finfo(torch.float64).eps if len(values) else 0.0


def _chunks(features: Tensor, weights: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, len(features), CHUNK):
        weight = weights[start : start + CHUNK]
        there = weight > 0
        yield features[start : start + CHUNK][there].double(), weight[there]
