"""Tests that docs/operations.md contains every setting with its default, and that every scenario has a description."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks import tables
from core.config import Settings
from tests.faults.chaos import Row
from tests.faults.rounds import Outcome
from tests.faults.scenarios import SCENARIOS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"


def shown(default: object) -> str:
    if default is None or default == "":
        return "–"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def test_every_setting_stands_in_the_page_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(DIPTYCH_\w+)` \| (\S.*?) \|", PAGE.read_text(), re.MULTILINE))
    assert rows == {f"DIPTYCH_{name.upper()}": shown(field.default) for name, field in Settings.model_fields.items()}


def test_every_scenario_says_what_it_does() -> None:
    assert all(
        (scenario.__doc__ or "").strip().count("\n") == 0 and scenario.__doc__ for scenario in SCENARIOS.values()
    )


def test_runs_of_one_scenario_are_summed_up() -> None:
    row = Row("poison")
    row.add(Outcome(jobs=3, lost=1, recovery_s=2.0, figures={"crashes": 3}))
    row.add(Outcome(jobs=4, twice=1, recovery_s=1.0, figures={"crashes": 2}))
    lines = tables.TABLES["chaos"].lines({"lease_s": 15.0, "workers": 2, "scenarios": [row.as_json()]})
    assert "| `poison` | 2 | 7 | 1 | 1 | 2.0 s | crashes 3 |" in lines
