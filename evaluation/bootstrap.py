"""Paired bootstrap: how far a figure that compares two runs on the same prompts could be off.

Knows rows and figures only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Interval(NamedTuple):
    """A figure and the 95% interval of it over resampled rows."""

    value: float
    low: float
    high: float


def paired(figure: Callable[[Tensor], float], rows: int, *, resamples: int = 200, seed: int = 0) -> Interval:
    """`figure(indices)` over all rows, and over rows drawn with replacement (Efron, 1979)."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [figure(torch.randint(rows, (rows,), generator=generator)) for _ in range(resamples)]
    low, high = torch.tensor(drawn, dtype=torch.float64).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    return Interval(figure(torch.arange(rows)), float(low), float(high))
