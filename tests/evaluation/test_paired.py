"""Paired tests: mean changes, their intervals, and the worst captions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evaluation import bootstrap, paired
from evaluation.paired import Pair
from evaluation.references import Features
from evaluation.scoring_networks import embedded
from tests.evaluation.conftest import CLIP

IDS = [f"caption {k}" for k in range(40)]


def rows(seed: int, count: int = 40) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(st.integers(0, 10_000), st.floats(-3, 3))
def test_a_change_is_the_mean_difference_and_its_worst_captions_lose_most(seed: int, shift: float) -> None:
    theirs = rows(seed)
    ours = theirs + 0.1 * rows(seed + 1) + shift
    found = paired.changes({"score": ours}, {"score": theirs}, IDS, bootstrap.resamples(40))["score"]
    gap = ours - theirs
    assert found["value"] == pytest.approx(float(gap.mean()))
    assert found["low"] <= found["value"] <= found["high"]
    assert [one["id"] for one in found["worst"]] == [IDS[k] for k in gap.argsort()[: paired.WORST]]
    for one in found["worst"]:
        assert one["value"] == pytest.approx(one["run"] - one["base"]) and one["base"] == theirs[IDS.index(one["id"])]


def test_what_runs_share_cancels_out() -> None:
    """Captions differ by 1 and the runs by 0.05: only a paired test tells that."""
    theirs, counts = rows(0), bootstrap.resamples(40)
    ours = theirs - 0.05 + 0.01 * rows(1)
    change = paired.changes({"score": ours}, {"score": theirs}, IDS, counts)["score"]
    assert change["high"] < 0
    alone = [bootstrap.mean(values, counts).interval for values in (ours, theirs)]
    assert alone[0].high > alone[1].low and alone[1].high > alone[0].low


def test_the_worst_images_are_the_lowest_psnr_and_the_greatest_distance() -> None:
    networks = embedded(CLIP)
    psnr, ssim = 30 + rows(0), 0.9 + 0.01 * rows(1)
    layers = rows(4).abs()
    every = [Pair(k, float(psnr[k]), float(ssim[k]), None, float(layers[k])) for k in range(40)]
    a, b = (torch.nn.functional.normalize(rows(seed, 40 * 8).view(40, 8), dim=1).float() for seed in (2, 3))
    found = paired.distances(every, Features(a, a, {}), Features(b, b, {}), networks, IDS, bootstrap.resamples(40))
    distances = {"emoji-clip-layers": layers, "emoji-clip-distance": 1 - (a.double() * b.double()).sum(1)}
    assert set(found) == {"psnr", "ssim", *distances}  # LPIPS has no weights here
    ordered = [("psnr", psnr, psnr), ("ssim", ssim, ssim), *((name, far, -far) for name, far in distances.items())]
    for name, values, order in ordered:
        assert found[name]["value"] == pytest.approx(float(values.mean()))
        assert [one["id"] for one in found[name]["worst"]] == [IDS[k] for k in order.argsort()[: paired.WORST]]
