"""The scheduler's benchmark decides over requests of all kinds of plans, and its figures are of its iterations."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from contract.plan import rows_and_depths
from lab.bench import scheduling
from lab.bench.harness import record
from lab.simulation.runner import phases_of
from pipeline.sampling import samplers


def test_requests_are_of_all_kinds_of_plans() -> None:
    rng = random.Random(0)
    drawn = [scheduling.draw(rng) for _ in range(500)]
    steps = [rows_and_depths(one.deepcache, one.guidance, one.steps, 2) for one in drawn]
    widths = [{rows for rows, _ in one} for one in steps]
    assert {1, 2} in widths and {2} in widths, "some narrow, or widen, on their way"
    assert any(one.guidance_scale <= 1 for one in drawn)
    assert len({phase for one in drawn for (phase, _), _ in phases_of(one)}) == 5
    assert {one.scheduler for one in drawn} == set(scheduling.SAMPLERS) <= set(samplers.SAMPLERS)


def test_an_iteration_is_timed_with_so_many_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = scheduling.measure
    monkeypatch.setattr(scheduling, "measure", lambda waiting: few(waiting, 200))
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    scheduling.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["waiting"]
    assert set(found) == {"0", "1000", "10000"}
    for waiting, one in found.items():
        assert one["waiting"] == int(waiting) and one["iterations"] == 200
        assert 0 < one["median_ms"] <= one["p99_ms"] <= one["max_ms"]
