"""The benchmark through HTTP, on a real service with the tiny model: every figure is there, and is possible."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from benchmarks import flood, serve
from benchmarks.harness import record
from core.config import Settings


def test_every_figure_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"_CLIENTS": 3, "_IDLE": float("inf"), "_LOOK_S": 0.1}.items():
        monkeypatch.setattr(serve, name, value)
    for name in ("_HEALTH_EVERY_S", "_REFUSED_EVERY_S"):
        monkeypatch.setattr(serve, name, 0.01)
    monkeypatch.setattr(flood, "RATE_PER_S", 20.0)
    monkeypatch.setattr(flood, "SECONDS", 2.0)
    monkeypatch.setattr(record, "alone", contextlib.nullcontext)  # no figure of this is kept
    settings = Settings(model="random:tiny", text_model="off", compile=False, kernels=False, threads=1)
    result = serve.run(settings, steps=1, pictures=6, results=tmp_path)
    assert result["ready_s"] > 0
    assert result["arrivals"] == 6 and result["steps"] == 1 and result["model"] == "random:tiny"
    assert result["precision"] == "fp32" and result["deepcache"] == "off"
    assert "api" in result["provenance"]["rooms"]
    assert 0 < result["p50_s"] <= result["p99_s"] and 0 < result["overhead_s"] < result["p99_s"]
    assert result["rate_per_s"] == pytest.approx(0.7 * result["capacity_per_s"], rel=1e-2)
    assert all(result[name] > 0 for name in ("images_per_s", "healthz_p99_s", "rejected_p99_s"))
    # Redis stamps whole milliseconds, so that a part may come out a little below nothing.
    assert all(seconds > -0.01 for seconds in result["overhead_parts_s"].values())
    assert result["submitted"] == 40 and result["left"] == 0
    assert 0 < result["submit_p50_s"] <= result["submit_p99_s"] and result["cancelled"] <= result["queued"] <= 40
    assert all(result[f"flood_{name}_p99_s"] > 0 for name in ("healthz", "metrics"))
    assert 10 < result["api_mib"]["before"] <= result["api_mib"]["most"]
    assert json.loads((tmp_path / "serve.json").read_text()) == result
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result


def test_no_arrivals_are_refused() -> None:
    with pytest.raises(record.BenchError, match="--pictures"):
        serve.run(Settings(), steps=1, pictures=0, results=None)
