"""Maximum mean discrepancy between two sets of features: KID and CMMD.

Pairs are processed in blocks, so memory does not grow with their number, and all resamples of one set are computed in
the same pass. torchmetrics' KID averages over random subsets of equal sizes, with all features in memory, and cannot
weigh pictures for an interval: only its kernel is used. It has no CMMD.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_BLOCK = 512
_SIGMA, _SCALE = 10.0, 1000.0

Kernel = Callable[[Tensor, Tensor], Tensor]  # ([N, D], [M, D]) -> [N, M]


def kid(x: Tensor, y: Tensor, counts: Tensor) -> Tensor:
    """Unbiased MMD² with the kernel (x·y / D + 1)³ (Bińkowski et al., 2018, section 4) over whole sets, no subsets.

    Args:
        x, y: features [N, D] and [M, D].
        counts: how often each of x counts, [R, N]: ones for the figure, draws with replacement for its spread.

    Returns: [R] fp64. A pair of one picture with itself counts in no resample: that is what "unbiased" leaves out.
    """
    from torchmetrics.image.kid import poly_kernel  # which imports slowly

    return _mmd(poly_kernel, x, y, counts, diagonal=False)


def cmmd(x: Tensor, y: Tensor, counts: Tensor) -> Tensor:
    """1000 × MMD² with a Gaussian kernel of σ = 10 over unit CLIP features (Jayasumana et al., 2024), pairs of one
    picture with itself included, as published. Arguments as in `kid`."""
    gamma = 1 / (2 * _SIGMA**2)

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        squares = a.square().sum(1)[:, None] + b.square().sum(1)[None] - 2 * a @ b.T
        return torch.exp(-gamma * squares.clamp_min(0))

    return _SCALE * _mmd(kernel, x, y, counts, diagonal=True)


def _mmd(kernel: Kernel, x: Tensor, y: Tensor, counts: Tensor, *, diagonal: bool) -> Tensor:
    if len(x) < 2 or len(y) < 2:
        raise ValueError(f"each side must have at least 2 pictures, not {len(x)} and {len(y)}")
    weights = counts.double()  # [R, N]
    within = torch.zeros(len(weights), dtype=torch.float64)
    across = torch.zeros_like(within)
    for rows in _blocks(len(x)):
        row_weights = weights[:, rows]
        for columns in _blocks(len(x)):
            block = kernel(x[rows].double(), x[columns].double())
            if not diagonal and rows == columns:
                block.fill_diagonal_(0)
            within += ((row_weights @ block) * weights[:, columns]).sum(1)
        for columns in _blocks(len(y)):
            across += row_weights @ kernel(x[rows].double(), y[columns].double()).sum(1)
    totals = weights.sum(1)
    pairs = totals.square() if diagonal else totals.square() - weights.square().sum(1)
    return within / pairs + _spread(kernel, y, diagonal) - 2 * across / (totals * len(y))


def _spread(kernel: Kernel, y: Tensor, diagonal: bool) -> float:
    """The mean kernel over pairs within the other set."""
    total = 0.0
    for rows in _blocks(len(y)):
        for columns in _blocks(len(y)):
            block = kernel(y[rows].double(), y[columns].double())
            if not diagonal and rows == columns:
                block.fill_diagonal_(0)
            total += float(block.sum())
    return total / (len(y) ** 2 if diagonal else len(y) * (len(y) - 1))


def _blocks(count: int) -> list[slice]:
    return [slice(start, start + _BLOCK) for start in range(0, count, _BLOCK)]
