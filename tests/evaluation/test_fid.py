"""FID: against scipy's matrix root, in all ranks, from features and from statistics; and what refuses statistics."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from evaluation import fid
from evaluation.fid import FrechetDistance, Gaussian


def distance(a: Tensor, b: Tensor | Gaussian) -> float:
    return FrechetDistance(b)(a)


def statistics(rows: Tensor) -> Gaussian:
    """numpy's, which a file holds."""
    x = rows.double().numpy()
    return Gaussian(torch.tensor(x.mean(0)), torch.tensor(np.cov(x, rowvar=False)))


def save(path: Path, made: Gaussian) -> None:
    np.savez(path, mu=made.mean.numpy(), sigma=made.covariance.numpy())


def features(rows: int, width: int, seed: int, *, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(width, width, generator=generator)
    return (torch.randn(rows, width, generator=generator) @ mixed * scale + shift).float()


def by_definition(a: Tensor, b: Tensor) -> float:
    """MLPerf's own lines: np.cov, scipy's sqrtm, 1e-6 on the diagonal where that is not finite."""
    import scipy.linalg

    x, y = (one.double().numpy() for one in (a, b))
    m1, m2, s1, s2 = x.mean(0), y.mean(0), np.cov(x, rowvar=False), np.cov(y, rowvar=False)
    root = scipy.linalg.sqrtm(s1 @ s2)
    if not np.isfinite(root).all():
        offset = np.eye(len(s1)) * 1e-6
        root = scipy.linalg.sqrtm((s1 + offset) @ (s2 + offset))
    return float(((m1 - m2) ** 2).sum() + np.trace(s1) + np.trace(s2) - 2 * np.trace(np.real(root)))


def by_singular_values(a: Tensor, b: Tensor) -> float:
    """For any rank, also where sqrtm loses its digits: with Σ = XᵀX/(n − 1), tr (Σ₁Σ₂)^½ is the nuclear norm of
    X₁X₂ᵀ, over √((n₁ − 1)(n₂ − 1))."""
    x, y = (one.double().numpy() for one in (a, b))
    m1, m2 = x.mean(0), y.mean(0)
    x, y = (x - m1) / np.sqrt(len(x) - 1), (y - m2) / np.sqrt(len(y) - 1)
    cross = np.linalg.svd(x @ y.T, compute_uv=False).sum()
    return float(((m1 - m2) ** 2).sum() + (x**2).sum() + (y**2).sum() - 2 * cross)


@given(st.integers(40, 90), st.integers(1, 24), st.integers(0, 10_000), st.floats(0.1, 10.0), st.floats(-2.0, 2.0))
def test_it_is_the_definition(rows: int, width: int, seed: int, scale: float, shift: float) -> None:
    a, b = features(rows, width, seed), features(rows + 7, width, seed + 1, scale=scale, shift=shift)
    found = distance(a, b)
    assert found == pytest.approx(by_singular_values(a, b), rel=1e-6, abs=1e-7)
    if width > 1:
        assert found == pytest.approx(by_definition(a, b), rel=1e-6, abs=1e-6)
        assert distance(a, statistics(b)) == pytest.approx(found, rel=1e-9, abs=1e-9)


@given(st.integers(2, 30), st.integers(2, 30), st.integers(0, 10_000))
def test_fewer_pictures_than_features_keep_their_digits(n: int, m: int, seed: int) -> None:
    a, b = features(n, 64, seed), features(m, 64, seed + 1, shift=0.3)
    assert distance(a, b) == pytest.approx(by_singular_values(a, b), rel=1e-7)


def test_it_has_the_digits_of_fp64() -> None:
    """Of rows that are only moved: the square of how far, which fp32 rounds by 6e-8."""
    rows = features(50, 2, 0).round()
    moved = rows + torch.tensor([0.5, 2.0**-13])
    assert distance(rows, moved) == pytest.approx(0.25 + 2.0**-26, rel=1e-9)


def test_pictures_that_are_all_the_same_have_a_distance_too() -> None:
    same, others = torch.full((3, 4), 0.5), features(30, 4, 5)
    for a, b in ((same, others), (others, same), (same, same)):
        assert distance(a, b) == pytest.approx(by_singular_values(a, b), rel=1e-9, abs=1e-12)


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.sampled_from((7, 1024)), st.sampled_from((5, 36)))
def test_counts_are_rows_that_many_times_whatever_the_chunks(seed: int, chunk: int, width: int) -> None:
    """Of more rows than features, and of fewer. One reference serves all: what it was asked before leaves no trace."""
    rows, others = features(30, width, seed), features(40, width, seed + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fid, "CHUNK", chunk)
        real = FrechetDistance(others)
        first = real(rows)
        for once in torch.randint(0, 3, (3, 30), generator=torch.Generator().manual_seed(seed)):
            once[:2] += 1
            expected = by_singular_values(rows.repeat_interleave(once, 0), others)
            assert real(rows, once) == pytest.approx(expected, rel=1e-6)
        assert real(rows) == first


def test_statistics_come_back(tmp_path: Path) -> None:
    made = statistics(features(30, 4, 5))
    save(tmp_path / "s.npz", made)
    found = fid.read(tmp_path / "s.npz", 4)
    assert torch.equal(found.mean, made.mean) and torch.equal(found.covariance, made.covariance)


def test_statistics_of_other_features_are_not_compared() -> None:
    with pytest.raises(ValueError, match="3 features cannot be compared with 4"):
        FrechetDistance(statistics(features(30, 4, 5)))(features(30, 3, 5))


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ({"mu": np.zeros(3), "sigma": np.eye(4)}, r"mu \[3\] and sigma \[4, 4\]; these features are 4 wide"),
        ({"mu": np.zeros(4), "sigma": np.eye(4)[:3]}, r"mu \[4\] and sigma \[3, 4\]; these features are 4 wide"),
        ({"mu": np.zeros(5), "sigma": np.eye(5)}, r"mu \[5\] and sigma \[5, 5\]; these features are 4 wide"),
        ({"mu": np.zeros(4), "sigma": np.full((4, 4), np.inf)}, "holds NaN or infinite numbers"),
        ({"mu": np.full(4, np.nan), "sigma": np.eye(4)}, "holds NaN or infinite numbers"),
        ({"mean": np.zeros(4)}, "holds no mu and sigma"),
        (b"mu sigma", "cannot be read as .npz"),
        (b"PK\x03\x04", "cannot be read as .npz"),
        (None, "No such file"),
    ],
)
def test_statistics_that_are_none_are_refused(
    held: dict[str, np.ndarray] | bytes | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "s.npz"
    if isinstance(held, bytes):
        path.write_bytes(held)
    elif held is not None:
        np.savez(path, **held)  # type: ignore[arg-type]
    with pytest.raises(fid.FidStatisticsError, match=message) as refused:
        fid.read(path, 4)
    assert str(path) in str(refused.value)
