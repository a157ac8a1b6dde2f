"""Declared tables: formats of rows and results, scaled values, and what is missing."""

from __future__ import annotations

from lab.bench.harness.markdown import NONE, Table, cell


def test_a_cell_is_a_format_whose_missing_values_are_a_dash() -> None:
    row = {"p99_s": 0.0125, "stages": {"serve": [{"rate": 2}]}, "none": None}
    assert cell("{p99_s:1000*.1f} ms, {stages[serve][0][rate]:.2f}", row) == "12.5 ms, 2.00"
    for missing in ("absent", "none:.2f", "stages[warm]", "stages[serve][3]", "none[key]:.1f"):
        assert cell(f"{{p99_s}} {{{missing}}}", row) == NONE, missing


def test_a_table_has_a_header_of_the_result_and_a_note() -> None:
    columns = (("of {steps}", "`{name}`"), ("rate", "{rate:.1f}"))
    table = Table(("any",), columns, lambda result: result["rungs"], "{steps} steps.")
    assert table.lines({"steps": 4, "rungs": [{"name": "a", "rate": 1.25}, {"name": "b"}]}) == [
        "| of 4 | rate |", "| --- | --- |", "| `a` | 1.2 |", f"| `b` | {NONE} |", "", "4 steps.",
    ]  # fmt: skip
