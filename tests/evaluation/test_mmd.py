"""KID and CMMD: against sums over pairs written out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from evaluation import bootstrap, mmd


def rows(count: int, seed: int, width: int = 6, shift: float = 0.0) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) + shift


def written_out(x: Tensor, y: Tensor, counts: Tensor) -> float:
    """The unbiased estimator, pair by pair, of rows of x that many times each.

    Pairs of a row with itself are left out, which would count as pictures that are alike by chance.
    """

    def mean(a: Tensor, b: Tensor, weights: Tensor) -> float:
        kernel = (a.double() @ b.double().T / a.shape[1] + 1) ** 3
        return float((weights * kernel).sum() / weights.sum())

    n, m = counts.double(), torch.ones(len(y)).double()
    xx, yy = (mean(a, a, each[:, None] * each * (1 - torch.eye(len(a)))) for a, each in ((x, n), (y, m)))
    return xx + yy - 2 * mean(x, y, n[:, None] * m)


@given(st.integers(2, 9), st.integers(2, 9), st.integers(0, 1000), st.integers(1, 9))
def test_kid_is_the_sum_over_pairs_whatever_the_blocks(n: int, m: int, seed: int, block: int) -> None:
    x, y = rows(n, seed), rows(m, seed + 1, shift=0.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mmd, "_BLOCK", block)
        expected = written_out(x, y, torch.ones(n))
        assert float(mmd.kid(x, y, torch.ones(1, n))[0]) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_cmmd_is_its_published_lines() -> None:
    x, y = (F.normalize(rows(count, seed, 16), dim=-1) for count, seed in ((50, 1), (70, 2)))
    a, b = x.double(), y.double()
    gamma = 1 / (2 * 10**2)
    xx, xy, yy = (torch.exp(-gamma * torch.cdist(p, q).square()).mean() for p, q in ((a, a), (a, b), (b, b)))
    assert float(mmd.cmmd(x, y, torch.ones(1, 50))[0]) == pytest.approx(float(1000 * (xx + yy - 2 * xy)), rel=1e-6)


@settings(max_examples=20)
@given(st.integers(0, 1000))
def test_a_resample_is_the_rows_drawn_but_for_pairs_of_one_row(seed: int) -> None:
    x, y = rows(12, seed), rows(9, seed + 1)
    counts = bootstrap.resamples(12, 3, seed=seed)
    for one, cmmd, kid in zip(counts, mmd.cmmd(x, y, counts), mmd.kid(x, y, counts), strict=True):
        drawn = x.repeat_interleave(one, 0)
        assert float(cmmd) == pytest.approx(float(mmd.cmmd(drawn, y, torch.ones(1, 12))[0]), rel=1e-6, abs=1e-9)
        assert float(kid) == pytest.approx(written_out(x, y, one), rel=1e-6, abs=1e-7)


def test_one_picture_is_no_set() -> None:
    with pytest.raises(ValueError, match="at least 2 pictures"):
        mmd.kid(rows(1, 0), rows(5, 1), torch.ones(1, 1))
