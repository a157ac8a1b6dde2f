"""A rehearsal of `benchmarks.single`: one client alone at a real service on the CPU, and the engine without it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gpu_tables, single


@pytest.mark.usefixtures("forked_parts")
def test_a_client_who_is_alone_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "cpu", "--tiny", "--plans", "half,4-steps-png", "--pictures", "2"]
    assert single.main([*words, "--qualities", "100,80", "--results", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "single.json").read_text())
    assert results["plans"].keys() == {"half", "half, quality 80", "4-steps-png"}
    for figures in results["plans"].values():
        assert figures["pictures"] == 2 and figures["file_bytes"] > 0
        assert figures["stages_ms"].keys() == {*single.STAGES} and min(figures["stages_ms"].values()) > -1
        assert figures["beyond_ms"] == pytest.approx(1e3 * (figures["p50_s"] - figures["engine_s"]), abs=0.1)
    assert "one client alone" in capsys.readouterr().out
    assert len(gpu_tables.TABLES["h200-single"].lines(results)) == 2 + 3 + 2
