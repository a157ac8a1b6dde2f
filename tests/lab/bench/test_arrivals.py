"""The benchmark of arrivals on the tiny model: every figure is there and follows from the others; what loops count."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from core.config import Settings
from lab.bench import arrivals
from lab.bench.harness import record

TINY = Settings(model="random:tiny", compile=False, kernels=False, threads=1)


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")
def test_every_figure_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"_TURNS": 1, "_IN_FLIGHT": 4, "_COUNTED": 4, "WINDOW_S": 0.2}.items():
        monkeypatch.setattr(arrivals, name, value)
    made = arrivals.run(TINY, steps=3, pictures=4, results=tmp_path)
    assert made["rate_per_s"] == pytest.approx(0.7 * made["capacity_per_s"], rel=1e-2)
    assert made["saturated_ratio"] > 0 and made["saturated_per_s"] > 0
    for server in ("engine", "window_free", "window_3s"):
        assert 0 < made[server]["p50_s"] <= made[server]["p99_s"]
    assert made["p99_ratio"] == pytest.approx(made["engine"]["p99_s"] / made["window_free"]["p99_s"], rel=1e-2)
    assert json.loads((tmp_path / "arrivals.json").read_text()) == made
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == made


def test_no_arrivals_are_refused() -> None:
    with pytest.raises(record.BenchError, match="--pictures"):
        arrivals.run(TINY, steps=1, pictures=0, results=None)
