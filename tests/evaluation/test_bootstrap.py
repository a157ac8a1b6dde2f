"""The bootstrap: its intervals hold what they should as often as they say, and ratios are paired."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evaluation import bootstrap, fid
from evaluation.bootstrap import Estimate


@given(st.integers(1, 300), st.integers(1, 20), st.integers(0, 1000))
def test_a_resample_draws_as_many_as_there_are(rows: int, count: int, seed: int) -> None:
    counts = bootstrap.resamples(rows, count, seed=seed)
    assert counts.shape == (count, rows) and bool((counts.sum(1) == rows).all()) and bool((counts >= 0).all())
    assert torch.equal(counts, bootstrap.resamples(rows, count, seed=seed))


def test_the_interval_of_a_mean_covers_it_nineteen_times_in_twenty() -> None:
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for trial in range(300):
        interval = bootstrap.mean(
            torch.randn(100, generator=generator, dtype=torch.float64) + 3, bootstrap.resamples(100, seed=trial)
        ).interval
        covered += interval.low <= 3 <= interval.high
    assert 0.90 <= covered / 300 <= 0.99


def test_an_interval_of_fid_holds_its_figure() -> None:
    """Resamples alone are all too high: 60 pictures drawn with replacement are some 40 pictures."""
    rows = torch.randn(60, 20, generator=torch.Generator().manual_seed(1))
    far = fid.FrechetDistance(torch.randn(500, 20, generator=torch.Generator().manual_seed(2)))
    drawn = torch.tensor([far(rows, one) for one in bootstrap.resamples(60, 50)], dtype=torch.float64)
    figure = Estimate(far(rows), drawn)
    assert float(drawn.min()) > figure.value
    assert figure.interval.low < figure.value < figure.interval.high


def test_a_ratio_is_of_draws_about_the_figures_themselves() -> None:
    """Draws of a distance between sets are too high, of both figures by another share: that is no change."""
    figure, base = (Estimate(value, torch.tensor(draws)) for value, draws in ((10.0, [12.0, 14.0]), (5.0, [9.0, 11.0])))
    ratio = figure.over(base)
    assert ratio.value == 2 and torch.allclose(ratio.resampled, torch.tensor([9 / 4, 11 / 6]))


def test_ratios_are_paired() -> None:
    """What both runs share, here all but a little, cancels out: unpaired the interval would be wide."""
    generator = torch.Generator().manual_seed(3)
    base = 10 + 5 * torch.randn(200, generator=generator, dtype=torch.float64)
    other = 1.01 * base + 0.01 * torch.randn(200, generator=generator, dtype=torch.float64)
    counts = bootstrap.resamples(200)
    ratio = bootstrap.mean(other, counts).over(bootstrap.mean(base, counts)).interval
    unpaired = bootstrap.mean(other, bootstrap.resamples(200, seed=1)).over(bootstrap.mean(base, counts)).interval
    assert ratio.value == pytest.approx(1.01, abs=1e-3) and ratio.low <= ratio.value <= ratio.high
    assert ratio.high - ratio.low < 0.02 * (unpaired.high - unpaired.low)
    zero = bootstrap.mean(torch.zeros(200), counts)
    with pytest.raises(ValueError, match="is 0"):
        zero.over(zero)


@given(st.integers(1, 2000).flatmap(lambda count: st.tuples(st.integers(0, count), st.just(count))))
def test_a_shares_interval_holds_it_and_stays_a_share(found: tuple[int, int]) -> None:
    right, count = found
    one, other = bootstrap.share(right, count), bootstrap.share(count - right, count)
    assert 0 <= one.low <= one.value <= one.high <= 1 and one.low < one.high
    assert one.low == pytest.approx(1 - other.high)


def test_a_share_of_all_is_not_certain() -> None:
    low, high = bootstrap.share(300, 300)[1:]
    assert low == pytest.approx(0.98736, abs=1e-5) and high == pytest.approx(1)
    for right, count in ((0, 0), (3, 2), (-1, 2)):
        with pytest.raises(ValueError, match="no share"):
            bootstrap.share(right, count)
