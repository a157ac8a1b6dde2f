"""The comparison with other runtimes at small scale; OpenVINO's need an environment that tests do not have."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.config import EMBEDDED_MODEL, Settings
from lab.bench import rivals, rungs
from lab.bench.harness import record
from lab.bench.harness.processes import ProcessGroup
from lab.bench.rivals import Rival, latencies, rows
from pipeline.checkpoints import tiny
from pipeline.checkpoints.tiny_zimage import TINY_Z
from tests.core.quant.stage import CACHE


@given(seconds=st.lists(st.floats(0.01, 10.0), min_size=1, max_size=40), places=st.integers(1, 8))
def test_latencies_are_those_of_a_closed_loop(seconds: list[float], places: int) -> None:
    """As in a simulation where each end admits the next request, and requests end in the order of admission."""
    ends, now = [], 0.0
    for gap in seconds:
        now += gap
        ends.append(now)
    admitted = [0.0] * min(places, len(ends)) + ends[: max(0, len(ends) - places)]
    assert latencies(ends, places) == pytest.approx([end - start for end, start in zip(ends, admitted, strict=True)])


def test_ratios_are_to_the_best_of_the_others() -> None:
    idle = ProcessGroup([], {})
    measured = {
        "diffusers": Rival(idle, idle, {}, rates=[2.0, 3.0, 4.0], latencies=[5.0], singles=[1.0]),
        "openvino-genai": Rival(idle, idle, {}, rates=[4.0, 4.0, 9.0], latencies=[4.0], singles=[0.5]),
        "+int8": Rival(idle, idle, {}, rates=[8.0, 8.0, 1.0], latencies=[2.0], singles=[0.25]),
    }
    table = {row["name"]: row for row in rows(measured)}
    assert {name: row["ratio"] for name, row in table.items()} == {
        "diffusers": 0.75,
        "openvino-genai": 1.0,
        "+int8": 2.0,
    }
    assert table["+int8"]["alone_ratio"] == 2.0 and table["diffusers"]["alone_ratio"] == 0.5
    assert table["+int8"]["spread"] == [1.0, 8.0]


@pytest.mark.long
def test_what_cannot_run_is_left_out_and_the_rest_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With real processes: this interpreter has no OpenVINO, and the random model is no folder."""
    monkeypatch.setattr(rivals, "_TOGETHER", 4)
    monkeypatch.setattr(rivals, "_ALONE", 2)
    monkeypatch.setattr(rungs, "MEASURE_S", 0.1)
    settings = Settings(model=tiny.TINY, cache_dir=CACHE.parent, threads=1)

    def run(names: list[str], openvino: Path | None, settings: Settings = settings) -> dict[str, Any]:
        return rivals.run(
            settings, steps=1, results=tmp_path, openvino=openvino, names=names, work=tmp_path / "work", turns=1
        )

    result = run(["openvino-genai", "step-batching"], Path(sys.executable))
    assert [row["name"] for row in result["rivals"]] == ["step-batching"]
    assert "is no folder of an SDXL model" in result["left_out"]["openvino-genai"]
    assert result["rivals"][0]["p50_s"] > 0 and result["rivals"][0]["alone_p50_s"] > 0
    assert json.loads((tmp_path / "rivals.json").read_text())["rivals"] == result["rivals"]
    embedded = settings.model_copy(update={"model": str(EMBEDDED_MODEL)})
    with pytest.raises(record.BenchError, match="--openvino names no interpreter"):
        run(["optimum-intel"], None, embedded)
    with pytest.raises(record.BenchError, match="draws without guidance"):
        run(["step-batching"], None, settings.model_copy(update={"model": TINY_Z}))
    with pytest.raises(record.BenchError, match="ModuleNotFoundError: No module named 'openvino"):
        run(["openvino-genai"], Path(sys.executable), embedded)


def test_other_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        rivals.main(["--only", "diffusers,comfy"])
    assert "there is no comfy" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        rivals.main([])
    assert "--openvino: whom it compares with" in capsys.readouterr().err
