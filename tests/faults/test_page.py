"""docs/operations.md names every setting with its default, and holds the place for the table that chaos writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from core.config import Settings
from tests.faults.chaos import BEGIN, END, PAGE, Row, table, write
from tests.faults.rounds import Outcome
from tests.faults.scenarios import SCENARIOS


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


def test_the_table_is_put_between_the_markers_and_nowhere_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    row = Row("poison")
    row.add(Outcome(jobs=3, lost=1, recovery_s=2.0, figures={"crashes": 3}))
    row.add(Outcome(jobs=4, twice=1, recovery_s=1.0, figures={"crashes": 2}))
    for _ in range(2):  # the second time over the first
        write(page, table([row], 15))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    text = page.read_text()
    assert text.startswith(before) and text.endswith(rest.partition(END)[2])
    assert text.count("| `poison` | 2 | 7 | 1 | 1 | 2.0 |") == 1
    assert "crashes 3" in text


def test_a_page_without_markers_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing")
    with pytest.raises(ValueError, match="chaos: begin"):
        write(page, "a table")
    assert page.read_text() == "nothing"
