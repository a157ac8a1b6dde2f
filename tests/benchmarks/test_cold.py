"""A rehearsal of `benchmarks.cold`: a tiny model is loaded from its files while its twin draws."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import cold
from benchmarks.cold import Forward


def test_a_cold_model_is_measured_beside_one_that_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "cpu", "--tiny", "--plan", "half", "--turns", "2", "--before", "0.5", "--in-flight", "6"]
    assert cold.main([*words, "--work", str(tmp_path), "--results", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "cold.json").read_text())
    assert len(results["turns"]) == 2
    for turn in results["turns"]:
        assert 0 < turn["loaded_s"] <= turn["first_picture_s"] and turn["warm_s"] > 0
    assert "a cold model beside one that draws" in capsys.readouterr().out


def test_a_step_is_the_time_between_full_forwards_with_nothing_between() -> None:
    ends = [*[("deep", 16)] * 3, ("vae", 4), ("deep", 16), ("deep", 12), ("deep", 16), ("deep", 16)]
    forwards = [Forward(0.1 * k, "first", phase, rows) for k, (phase, rows) in enumerate(ends)]
    assert cold.step_ms(forwards, 16, 0.0, 1.0) == (pytest.approx(100.0), 3)
    assert cold.step_ms(forwards, 16, 0.1, 0.25) == (pytest.approx(100.0), 1)
    assert cold.step_ms([], 16, 0.0, 1.0)[1] == 0
