"""Fréchet distance between two sets of features: by torchmetrics, or of few images by their inner products."""

from __future__ import annotations

import functools
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

CHUNK = 1024  # rows of features in memory at once


class FidStatisticsError(ValueError):
    """A file of statistics that cannot be used. The message names it."""


class Gaussian(NamedTuple):
    """Mean [D] and covariance [D, D] (divided by n − 1) of features, in fp64."""

    mean: Tensor
    covariance: Tensor


class FrechetDistance:
    """FID from one reference, which is read once, to any features (Heusel et al., 2017, equation 6).

    Features [N, D] may lie in a file: they are read in chunks. Numbers are fp64. Of at most D images the trace of the
    covariances' root comes from a symmetric [N, N] problem, in place of torchmetrics' [D, D] one that is not symmetric.
    Eigenvalues that are 0, as with a reference of fewer rows, each add their rounding: some 1e-8 of the largest root.
    """

    def __init__(self, reference: Tensor | Gaussian) -> None:
        from torchmetrics.image.fid import FrechetInceptionDistance  # which imports slowly

        self._width = reference.shape[1] if isinstance(reference, Tensor) else len(reference.mean)
        self._reference = reference
        self._spreads = not isinstance(reference, Tensor) or len(reference) > 1  # else torchmetrics refuses it
        self._metric = FrechetInceptionDistance(_Given(self._width), reset_real_features=False)
        if isinstance(reference, Tensor):
            self._add(reference, None, real=True)
        else:  # the sums that two pictures of these statistics would have
            mean, covariance = reference
            self._metric.real_features_sum = 2 * mean
            self._metric.real_features_cov_sum = covariance + 2 * torch.outer(mean, mean)
            self._metric.real_features_num_samples = torch.tensor(2)

    def __call__(self, features: Tensor, counts: Tensor | None = None) -> float:
        """The distance of features [N, D], each as often as `counts` [N] says; None: once."""
        if features.shape[1] != self._width:
            raise ValueError(f"{features.shape[1]} features cannot be compared with {self._width}")
        if 1 < len(features) <= self._width and self._spreads:
            return self._of_few(features.double(), counts)
        self._metric.reset()
        self._add(features, counts, real=False)
        return float(self._metric.compute())

    def _of_few(self, rows: Tensor, counts: Tensor | None) -> float:
        """The distance of rows [N, D]: with Σ₁ = XᵀX, the eigenvalues of Σ₁Σ₂ that are not 0 are those of XΣ₂Xᵀ."""
        weights = torch.ones(len(rows), dtype=rows.dtype) if counts is None else counts.double()
        rows, weights = rows[weights > 0], weights[weights > 0]  # others add nothing but rounding
        mean = weights @ rows / weights.sum()
        rows = (rows - mean) * (weights / (weights.sum() - 1)).sqrt()[:, None]
        reference = self._gaussian
        root = torch.linalg.eigvalsh(rows @ reference.covariance @ rows.T).clamp(min=0).sqrt().sum()
        traces = rows.square().sum() + reference.covariance.trace()
        return float((mean - reference.mean).square().sum() + traces - 2 * root)

    @functools.cached_property
    def _gaussian(self) -> Gaussian:
        if not isinstance(self._reference, Tensor):
            return self._reference
        rows = self._reference
        mean = sum((part.double().sum(0) for part in rows.split(CHUNK)), torch.zeros(self._width).double()) / len(rows)
        covariance = torch.zeros(self._width, self._width, dtype=torch.float64)
        for part in rows.split(CHUNK):
            centred = part.double() - mean
            covariance += centred.T @ centred
        return Gaussian(mean, covariance / (len(rows) - 1))

    def _add(self, features: Tensor, counts: Tensor | None, *, real: bool) -> None:
        for start in range(0, len(features), CHUNK):
            part = features[start : start + CHUNK].double()
            if counts is not None:
                part = part.repeat_interleave(counts[start : start + CHUNK], 0)
            self._metric.update(part, real=real)


class _Given(torch.nn.Module):
    """Passes features to torchmetrics where it expects images."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_features = width

    def forward(self, features: Tensor) -> Tensor:
        return features


def read(path: Path, width: int) -> Gaussian:
    """`mu` [D] and `sigma` [D, D] of an `.npz`, as MLPerf's val2014.npz holds them. Raises `FidStatisticsError`."""
    try:
        # Opened here: np.load leaves a file that is no archive open.
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            mean, covariance = (torch.from_numpy(np.asarray(arrays[name], np.float64)) for name in ("mu", "sigma"))
    except KeyError:
        raise FidStatisticsError(f"{path}: holds no mu and sigma") from None
    except (OSError, ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise FidStatisticsError(
            f"{path}: cannot be read as .npz ({getattr(error, 'strerror', None) or error})"
        ) from None
    if mean.shape != (width,) or covariance.shape != (width, width):
        shapes = f"mu {list(mean.shape)} and sigma {list(covariance.shape)}"
        raise FidStatisticsError(f"{path}: has {shapes}; these features are {width} wide")
    if not (mean.isfinite().all() and covariance.isfinite().all()):
        raise FidStatisticsError(f"{path}: holds NaN or infinite numbers")
    return Gaussian(mean, covariance)
