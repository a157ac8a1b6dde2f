"""Intervals of figures over captions: how much they would vary with other captions.

Bootstrap: captions are drawn with replacement (Efron, 1979), by one seed: runs over the same captions use the
same resamples, so that ratios between runs are paired.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

RESAMPLES = 200
_TAILS = (0.025, 0.975)


class Interval(NamedTuple):
    """A figure and its 95% interval."""

    value: float
    low: float
    high: float


class Estimate(NamedTuple):
    """A figure over all captions, and over each resample [R], fp64."""

    value: float
    resampled: Tensor

    @property
    def interval(self) -> Interval:
        """The percentile interval of the centred draws."""
        low, high = self.centred.quantile(torch.tensor(_TAILS, dtype=torch.float64)).tolist()
        return Interval(self.value, low, high)

    @property
    def centred(self) -> Tensor:
        """The draws, shifted so that their mean is the value.

        Distances between sets grow when captions are drawn twice and others not at all: a resample's FID is too high by
        about as much again as a sample's own is. Unshifted, the interval would often not contain the figure itself.
        """
        return self.resampled - self.resampled.mean() + self.value

    def over(self, other: Estimate) -> Estimate:
        """The ratio of two figures over the same captions."""
        if other.value == 0:
            raise ValueError("the figure to divide by is 0")
        return Estimate(self.value / other.value, self.centred / other.centred)


def resamples(rows: int, count: int = RESAMPLES, *, seed: int = 0) -> Tensor:
    """The number of times that each row is drawn, int64 [count, rows]; every row of it sums to `rows`."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(rows, (count, rows), generator=generator)
    return torch.zeros(count, rows, dtype=torch.int64).scatter_add_(1, indices, torch.ones_like(indices))


def mean(values: Tensor, counts: Tensor) -> Estimate:
    """The mean of a figure that each caption has, [N], over `counts` [R, N]."""
    doubles = values.double()
    return Estimate(float(doubles.mean()), counts.double() @ doubles / counts.sum(1))


def share(right: int, count: int) -> Interval:
    """The share `right / count` with Wilson's score interval (1927), which stays within 0 and 1.

    Of 300 right ones out of 300 it is 0.987 to 1, where resamples would all be 1. Raises `ValueError` without any.
    """
    if not 0 <= right <= count or count == 0:
        raise ValueError(f"{right} of {count} is no share")
    square = 1.959964**2
    middle = (right + square / 2) / (count + square)
    reach = math.sqrt(square * (right * (count - right) / count + square / 4)) / (count + square)
    value = right / count  # at 0 and 1 an end of the interval, but for rounding
    return Interval(value, max(0.0, min(value, middle - reach)), min(1.0, max(value, middle + reach)))


def interval_fields(figure: Estimate) -> dict[str, float]:
    """A figure as JSON."""
    return dict(figure.interval._asdict())
