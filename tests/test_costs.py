"""Tests the order of test files: every file in the table exists, processes run slow ones first, measurements add up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import costs, test_parallel


def test_files_of_the_table_are_there_and_in_its_order() -> None:
    table = json.loads(costs.TABLE.read_text("utf-8"))
    assert [file for file in table if not (costs.ROOT / file).is_file()] == []
    assert list(table.values()) == sorted(table.values(), reverse=True)
    assert min(table.values()) >= costs.LEAST_S


def run(folder: Path, *options: str, **variables: str) -> list[str]:
    """The tests in the order in which pytest ran them, with our hooks and a table of its own."""
    done = test_parallel.run(folder, "-v", *options, ".", **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return [word for line in done.stdout.splitlines() if "PASSED" in line for word in line.split() if "::" in word]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Three files of tests, of which the last but one is the dearest of the table."""
    table = tmp_path / "costs.json"
    table.write_text(json.dumps({"test_c.py": 9.0, "test_b.py": 3.0}))
    body = "def test_first(): pass\ndef test_second(): pass\n"
    for name in "abc":
        (tmp_path / f"test_{name}.py").write_text(body)
    (tmp_path / "conftest.py").write_text(
        f"from pathlib import Path\nfrom tests import costs\ncosts.TABLE = Path({str(table)!r})\n"
    )
    return tmp_path


def test_the_dearest_files_run_first_and_stay_whole(files: Path) -> None:
    alone = run(files, "--processes", "1")
    assert alone == [f"test_{file}.py::test_{test}" for file in "cba" for test in ("first", "second")]
    assert run(files) == sorted(alone), "a run of one process is in the order that was asked for"
