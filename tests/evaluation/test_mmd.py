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


def written_out(x: Tensor, y: Tensor) -> float:
    """The unbiased estimator, pair by pair."""
    n, m, width = len(x), len(y), x.shape[1]

    def k(a: Tensor, b: Tensor) -> float:
        return float((a.double() @ b.double() / width + 1) ** 3)

    xx = sum(k(x[i], x[j]) for i in range(n) for j in range(n) if i != j) / (n * (n - 1))
    yy = sum(k(y[i], y[j]) for i in range(m) for j in range(m) if i != j) / (m * (m - 1))
    return xx + yy - 2 * sum(k(a, b) for a in x for b in y) / (n * m)


@given(st.integers(2, 9), st.integers(2, 9), st.integers(0, 1000), st.integers(1, 9))
def test_kid_is_the_sum_over_pairs_whatever_the_blocks(n: int, m: int, seed: int, block: int) -> None:
    x, y = rows(n, seed), rows(m, seed + 1, shift=0.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mmd, "_BLOCK", block)
        assert float(mmd.kid(x, y, torch.ones(1, n))[0]) == pytest.approx(written_out(x, y), rel=1e-9, abs=1e-9)


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
    together = mmd.cmmd(x, y, counts)
    for one, found in zip(counts, together, strict=True):
        drawn = x.repeat_interleave(one, 0)
        assert float(found) == pytest.approx(float(mmd.cmmd(drawn, y, torch.ones(1, 12))[0]), rel=1e-6, abs=1e-9)
    # KID's resamples leave out pairs of a row with itself, which would count as pictures that are alike by chance
    for one, found in zip(counts, mmd.kid(x, y, counts), strict=True):
        pairs = [(i, j) for i in range(12) for j in range(12) if i != j]
        weights = {(i, j): float(one[i] * one[j]) for i, j in pairs}
        k = (x.double() @ x.double().T / 6 + 1) ** 3
        xx = sum(weights[p] * float(k[p]) for p in pairs) / sum(weights.values())
        yy_xy = written_out(x, y) - float((k.sum() - k.diag().sum()) / (12 * 11))
        cross = (x.double() @ y.double().T / 6 + 1) ** 3
        shift = -2 * float((one.double() @ cross).sum()) / (12 * 9) + 2 * float(cross.mean())
        assert float(found) == pytest.approx(xx + yy_xy + shift, rel=1e-6, abs=1e-7)


def test_one_picture_is_no_set() -> None:
    with pytest.raises(ValueError, match="at least 2 pictures"):
        mmd.kid(rows(1, 0), rows(5, 1), torch.ones(1, 1))
