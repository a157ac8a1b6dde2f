"""A rehearsal of `lab.bench.fleet`: a real Redis, two APIs, a worker on the CPU, and clients in processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.bench import fleet
from lab.bench.harness.record import BenchError


@pytest.mark.long
@pytest.mark.usefixtures("forked_parts")
def test_a_host_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "cpu", "--tiny", "--plans", "half,4-steps-png", "--warm", "0.5", "--in-flight", "4"]
    for window in (2, 8, 32):  # on a loaded machine no image may end in 2 s
        try:
            assert fleet.main([*words, "--window", f"{window}", "--apis", "2", "--results", str(tmp_path)]) == 0
            break
        except BenchError as error:
            assert "no image ended" in str(error)
    results = json.loads((tmp_path / "fleet.json").read_text())
    assert results["apis"] == 2 and results["gpus"].keys() == {"1"}
    for figures in results["gpus"]["1"].values():
        assert figures["pictures"] > 0 and figures["in_flight"] == 4
        assert figures["images_s"] == pytest.approx(figures["pictures"] / window, abs=1e-3)
        assert 0 < figures["p50_s"] <= figures["p99_s"] and figures["single_s"] > 0
        assert all(seconds > 0 for seconds in figures["cpu_s_an_image"].values())
    assert " images/s " in capsys.readouterr().out


def test_a_plan_that_is_not_known_is_named() -> None:
    with pytest.raises(SystemExit, match="--plans: there is no quarter"):
        fleet.main(["--plans", "quarter"])
