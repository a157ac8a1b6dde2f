"""The benchmark of two tenants, on a real service with the tiny model: every phase has its figures."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from benchmarks import serve, tenants
from benchmarks.harness import record


def test_every_phase_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_IDLE", float("inf"))
    monkeypatch.setattr(serve, "_LOOK_S", 0.1)
    monkeypatch.setattr(tenants, "_WARM", 2)
    monkeypatch.setattr(tenants, "_WARM_PICTURES", 1)
    monkeypatch.setattr(record, "alone", contextlib.nullcontext)  # no figure of this is kept
    words = ["--device", "cpu", "--tiny", "--jobs", "100", "--pictures", "1", "--steps", "80"]
    assert tenants.main([*words, "--results", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "tenants.json").read_text("utf-8"))
    assert [result[phase]["pictures"] for phase in ("alone", "peer", "flood")] == [2, 1, 1]
    assert all(result[phase]["p99_s"] >= result[phase]["p50_s"] > 0 for phase in ("alone", "peer", "flood"))
    for phase in ("alone", "peer", "flood"):
        assert 0 < result[phase]["in_engine_p50_s"] <= result[phase]["p99_s"]
        assert result[phase]["rows"]["deep"] >= 1 and result[phase]["rows"]["vae"] >= 1
    assert 0 < result["waiting_at_end"] < 100
    assert result["flood_p50_ratio"] > 0
