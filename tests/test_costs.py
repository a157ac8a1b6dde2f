"""Tests the order of test files: every file in the table exists, processes run slow ones first, measurements add up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import costs, test_parallel


def test_files_of_the_table_are_there_and_in_its_order() -> None:
    table = json.loads(costs.TABLE.read_text("utf-8"))
    lab = "" if (costs.ROOT / "lab").is_dir() else "tests/lab/"  # whose tests are deleted with it
    missing = [file for file in table if not (costs.ROOT / file).is_file()]
    assert [file for file in missing if not lab or not file.startswith(lab)] == []
    assert list(table.values()) == sorted(table.values(), reverse=True)
    assert min(table.values()) >= costs.LEAST_S


def test_the_dearest_files_run_first_and_stay_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a table of their own; the report of the run says what each took."""
    table = tmp_path / "costs.json"
    table.write_text(json.dumps({"test_c.py": 9.0, "test_b.py": 3.0, "tests/costs.py": 6.0}))
    for name in "abc":
        (tmp_path / f"test_{name}.py").write_text("def test_first(): pass\ndef test_second(): pass\n")
    own = f"from pathlib import Path\nfrom tests import costs\ncosts.TABLE = Path({str(table)!r})\n"
    (tmp_path / "conftest.py").write_text(own)

    def run(*options: str) -> list[str]:
        done = test_parallel.run(tmp_path, "-v", *options, ".")
        assert done.returncode == 0, done.stdout + done.stderr
        return [word for line in done.stdout.splitlines() if "PASSED" in line for word in line.split() if "::" in word]

    alone = run("--processes", "1", "--junitxml", "report.xml", "-o", "junit_family=xunit1")
    assert alone == [f"test_{file}.py::test_{test}" for file in "cba" for test in ("first", "second")]
    assert run() == sorted(alone), "a run of one process is in the order that was asked for"
    measured = costs.read(tmp_path / "report.xml")
    assert measured.keys() == {f"test_{name}.py" for name in "abc"} and all(
        0 <= cost < 60 for cost in measured.values()
    )
    monkeypatch.setattr(costs, "TABLE", table)
    costs.write(measured)
    assert json.loads(table.read_text()) == {"tests/costs.py": 6.0}, "what is quick, or is not there, leaves"
