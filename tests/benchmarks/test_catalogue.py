"""A rehearsal of `benchmarks.catalogue`: four fine-tunes of a tiny model on one engine, beside one."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import catalogue


def test_fine_tunes_are_measured_beside_one_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "cpu", "--tiny", "--models", "4", "--plans", "half", "--window", "0.5"]
    assert catalogue.main([*words, "--in-flight", "6", "--results", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "catalogue.json").read_text())
    assert results["swap_ms"] > 0 and results["join_s"] > 0
    figures = results["plans"]["half"]
    assert figures["share"] == pytest.approx(figures["zipf"]["images_s"] / figures["one"]["images_s"], abs=1e-3)
    assert figures["one"]["changes"] <= 1 < figures["zipf"]["changes"]
    assert "4 fine-tunes of" in capsys.readouterr().out


def test_requests_follow_zipfs_law() -> None:
    model_of = catalogue.popular(["a", "b", "c", "d"], 1.0)
    drawn = Counter(model_of(number) for number in range(5000))
    shares = [1 / rank / (1 + 1 / 2 + 1 / 3 + 1 / 4) for rank in (1, 2, 3, 4)]
    assert [drawn[name] / 5000 for name in "abcd"] == pytest.approx(shares, abs=0.03)
    assert [model_of(number) for number in range(9)] == [model_of(number) for number in range(9)]
