"""Declared tables: formats of rows and results, scaled values, and what is missing."""

from __future__ import annotations

import pytest

from lab.bench.harness.markdown import NONE, Result, Table, Text, cell


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


def test_a_benchmark_prints_its_table_of_its_own_result(capsys: pytest.CaptureFixture[str]) -> None:
    """Columns of what other results have are left out, and so are the marks of pages."""
    columns = (("", "`{name}`"), ("rate", "{rate:.1f} **/s**"), ("gates", "{gates}"))

    def rows(result: Result, scored: Result) -> list[Result]:
        return [{**row, "gates": scored.get(row["name"])} for row in result["rungs"]]

    table = Table(("any", "scored"), columns, rows, lambda result, scored: f"`{len(result)}` results, {len(scored)}.")
    result = {"rungs": [{"name": "a", "rate": 1.25}, {"name": "b"}]}
    assert "gates" in table.lines(result, {"a": "holds"})[0]
    table.show(result)
    shown = capsys.readouterr().out
    assert "1.2 /s" in shown and NONE in shown and "gates" not in shown and shown.endswith("\n1 results, 0.\n")
    assert "`" not in shown and "*" not in shown
    Text(("any",), lambda result: [f"`{result['count']}` bodies"]).show({"count": 3})
    assert capsys.readouterr().out == "3 bodies\n"
