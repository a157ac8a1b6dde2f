"""A rehearsal of `benchmarks.cold`: a tiny model is loaded from its files while its twin draws."""

from __future__ import annotations

import itertools
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


def test_steps_cost_the_time_between_forwards_of_one_width_with_nothing_between() -> None:
    kinds = [*[("deep", 16)] * 4, ("vae", 4), *[("deep", 12)] * 2, *[("deep", 16)] * 4]
    moments = itertools.accumulate([0.1] * 7 + [0.2] * 4)
    forwards = [Forward(end, "first", *kind) for end, kind in zip(moments, kinds, strict=True)]
    usual = cold.step_times(forwards, [(0.0, 0.75)])
    assert {rows: len(times) for rows, times in usual.items()} == {16: 3, 12: 1}
    found = cold.cost(forwards, [(0.75, 1.55)])
    assert found["rows"] == 16 and found["steps"] == 3 and found["ratio"] == pytest.approx(2.0)
    assert found["step_ms"] == pytest.approx(100.0) and found["while_loading_ms"] == pytest.approx(200.0)
    assert cold.cost(forwards[:2], [(0.0, 0.01)])["ratio"] is None
