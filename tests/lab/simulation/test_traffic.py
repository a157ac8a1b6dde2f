"""Arrivals and mixes: rates hold in the long run, bursts burst, and a seed means the same jobs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.simulation.traffic import Bursts, Mix, WeightedChoice, always, arrivals, jobs, parse

MIX = Mix(
    size=always((64, 64)), steps=WeightedChoice((4, 8), (3.0, 1.0)), guided=WeightedChoice((True, False), (1.0, 1.0))
)


@pytest.mark.parametrize("bursts", [None, Bursts(5, 15), Bursts(0.2, 0.1)])
def test_the_rate_holds_in_the_long_run(bursts: Bursts | None) -> None:
    times = arrivals(np.random.default_rng(1), 200_000, 2.0, bursts)
    assert (np.diff(times) >= 0).all() and times[0] >= 0
    assert len(times) / times[-1] == pytest.approx(2.0, rel=0.05)


def test_poisson_counts_vary_as_their_mean_and_bursts_more() -> None:
    """A Poisson count's variance is its mean; a switched one's is higher, by its on and off times (here about 16×)."""

    def dispersion(bursts: Bursts | None) -> float:
        times = arrivals(np.random.default_rng(2), 400_000, 2.0, bursts)
        counts = np.bincount((times // 40).astype(int))[:-1]
        return float(counts.var() / counts.mean())

    assert dispersion(None) == pytest.approx(1.0, rel=0.05)
    on_s, off_s = 5.0, 15.0
    share, ease = on_s / (on_s + off_s), 1 / on_s + 1 / off_s
    # Fischer and Meier-Hellstern (1993): index of dispersion of counts of an interrupted Poisson process over 40 s
    peak = 2.0 / share
    expected = 1 + 2 * peak * (1 - share) / ease * (1 - (1 - math.exp(-ease * 40)) / (ease * 40))
    assert dispersion(Bursts(on_s, off_s)) == pytest.approx(expected, rel=0.08)


def test_gaps_of_poisson_arrivals_are_exponential() -> None:
    from scipy.stats import kstest

    gaps = np.diff(arrivals(np.random.default_rng(3), 50_000, 4.0))
    assert kstest(gaps, "expon", args=(0, 0.25)).pvalue > 0.01


def test_a_mix_has_its_shares_whatever_the_rate() -> None:
    slow, fast = (jobs(7, 20_000, rate, MIX) for rate in (1.0, 10.0))
    assert [job.parameters for job in slow] == [job.parameters for job in fast]
    assert [job.arrival for job in slow] == pytest.approx([10 * job.arrival for job in fast])
    assert np.mean([job.parameters.steps == 4 for job in slow]) == pytest.approx(0.75, abs=0.02)
    assert np.mean([job.parameters.guidance_scale > 1 for job in slow]) == pytest.approx(0.5, abs=0.02)
    assert sum(share for _, share in MIX.kinds()) == pytest.approx(1.0) and len(MIX.kinds()) == 4


@given(st.integers(0, 2**32), st.integers(1, 50))
def test_a_seed_means_the_same_jobs(seed: int, count: int) -> None:
    for bursts in (None, Bursts(1, 1)):
        first = jobs(seed, count, 3.0, MIX, bursts)
        assert jobs(seed, count, 3.0, MIX, bursts) == first and len(first) == count
        assert [job.index for job in first] == list(range(count))
        assert all(math.isinf(job.deadline) for job in first)


def test_deadlines_count_from_the_arrival() -> None:
    mix = Mix(size=always((64, 64)), deadline_s=always(5.0))
    assert all(job.deadline == job.arrival + 5.0 for job in jobs(0, 100, 1.0, mix))


@pytest.mark.parametrize(
    ("text", "values", "shares"),
    [("20", (20,), [1.0]), ("20=3, 30=1", (20, 30), [0.75, 0.25]), ("1,2", (1, 2), [0.5, 0.5])],
)
def test_mixes_are_read(text: str, values: tuple[int, ...], shares: list[float]) -> None:
    found = parse(text, int)
    assert found.values == values and found.shares() == shares


@pytest.mark.parametrize(
    ("text", "said"),
    [("20=x", "20=x: the weight must be a number"), ("20=0", "weight must be above 0"), ("20=nan", "above 0"),
     ("20=inf", "above 0"), ("20,20", "twice"), ("", "invalid")],
)  # fmt: skip
def test_bad_mixes_are_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse(text, int)


@pytest.mark.parametrize("bad", [(0, 1), (1, 0), (-1, 1), (math.nan, 1), (math.inf, 1)])
def test_bad_bursts_are_refused(bad: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="bursts"):
        Bursts(*bad)
