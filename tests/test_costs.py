"""Tests the order of test files: every file in the table exists, processes run slow ones first, measurements add up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import costs, test_parallel
from tests.costs import Measure


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


def test_measures_are_of_every_step_and_add_up(files: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("measures")
    child = "import subprocess, sys\ndef test_child(): subprocess.run([sys.executable, '-c', 'sum(range(10**7))'])\n"
    (files / "test_a.py").write_text(child)
    run(files, "--processes", "2", TEST_COSTS=str(folder))
    measures = [one for one in costs.read(folder) if one.test != "services of all processes"]
    tests = ["test_a.py::test_child", *(f"test_{name}.py::test_{one}" for name in "bc" for one in ("first", "second"))]
    phases = ("setup", "call", "teardown")
    assert {(one.test, one.phase) for one in measures} == {(test, phase) for test in tests for phase in phases}
    (spawned,) = (one for one in measures if one.test == "test_a.py::test_child" and one.phase == "call")
    assert spawned.children_s > spawned.own_s
    assert next(iter(costs.by_file(measures))) == "test_a.py"
    assert "test_a.py::test_child (call)" in costs.report(measures)


def test_rooms_are_told_by_the_cpu_of_their_tests_and_children() -> None:
    measures = [
        Measure("tests/test_a.py::x", "call", 9.0, 1.0, 0.0),
        Measure("tests/core/jobs/test_b.py::y", "setup", 1.0, 2.0, 3.0),
        Measure("tests/core/jobs/test_c.py::z", "call", 1.0, 0.5, 0.0),
        Measure("tests/api/test_d.py::z", "call", 1.0, 2.0, 0.0),
    ]
    rooms = {"tests/core/jobs": (5.5, 2.0), "tests/api": (2.0, 1.0), "tests": (1.0, 9.0)}
    assert costs.by_room(measures) == rooms and [*costs.by_room(measures)] == [*rooms]
    assert "     2.0      5.5 s  tests/core/jobs\n" in costs.report(measures)


def test_writing_keeps_what_was_not_run_and_drops_what_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "ROOT", tmp_path)
    monkeypatch.setattr(costs, "TABLE", tmp_path / "costs.json")
    for name in ("run.py", "kept.py", "cheap.py"):
        (tmp_path / name).touch()
    costs.TABLE.write_text(json.dumps({"run.py": 50.0, "kept.py": 30.0, "cheap.py": 20.0, "gone.py": 10.0}))
    costs.write([
        Measure("run.py::a", "setup", 5.0, 2.0, 3.0), Measure("run.py::a", "call", 60.0, 20.0, 40.0),
        Measure("cheap.py::b", "call", 0.5, 60.0, 0.0),
    ])  # fmt: skip
    assert list(json.loads(costs.TABLE.read_text()).items()) == [("run.py", 65.0), ("kept.py", 30.0)]
