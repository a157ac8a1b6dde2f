"""Orders test files by cost for `tests.parallel`, slowest first; `make costs` measures the costs.

A file runs in one process, so a slow one that starts last leaves the other cores idle. `costs.json` contains the
wall-clock seconds of slow files: wall clock, since many tests wait for services that they start.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_name("costs.json")
LEAST_S = 5.0  # for a file to be listed
_VARIABLE = "TEST_COSTS"  # a folder to which measures go
_dumps = json.dumps  # a test may replace it
_NAMED = 25  # files and tests in the report


class Measure(NamedTuple):
    """Of a setup, a call or a teardown: seconds by the clock, of CPU in this process, and of CPU in ended children."""

    test: str
    phase: str
    wall_s: float
    own_s: float
    children_s: float

    @property
    def file(self) -> str:
        return self.test.partition("::")[0]

    @property
    def cpu_s(self) -> float:
        return self.own_s + self.children_s


def by_cost(tests: Sequence[str]) -> list[list[int]]:
    """The positions of each file's tests, given by node id, in their order; the dearest file of the table first."""
    files: dict[str, list[int]] = defaultdict(list)
    for position, test in enumerate(tests):
        files[test.partition("::")[0]].append(position)
    table: dict[str, float] = json.loads(TABLE.read_text("utf-8"))
    return [files[file] for file in sorted(files, key=lambda file: -table.get(file, 0.0))]


@contextlib.contextmanager
def measured(test: str, phase: str) -> Iterator[None]:
    """Appends what the body cost to the folder of `TEST_COSTS`, if there is one."""
    before = _spent()
    yield
    if folder := os.environ.get(_VARIABLE):
        spent = [round(after - then, 3) for after, then in zip(_spent(), before, strict=True)]
        with Path(folder, f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as stream:
            print(_dumps([test, phase, *spent]), file=stream)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    with measured(item.nodeid, "setup"):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with measured(item.nodeid, "call"):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    with measured(item.nodeid, "teardown"):
        yield


def _spent() -> tuple[float, float, float]:
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return time.monotonic(), own.ru_utime + own.ru_stime, children.ru_utime + children.ru_stime


def read(folder: Path) -> list[Measure]:
    """All measures that a run left in this folder."""
    lines = (line for path in sorted(folder.glob("*.jsonl")) for line in path.read_text("utf-8").splitlines())
    return [Measure(*json.loads(line)) for line in lines]


def by_file(measures: list[Measure]) -> dict[str, float]:
    """Seconds by the clock of each file, falling."""
    costs: dict[str, float] = defaultdict(float)
    for one in measures:
        costs[one.file] += one.wall_s
    return dict(sorted(costs.items(), key=lambda cost: -cost[1]))


def by_room(measures: list[Measure]) -> dict[str, tuple[float, float]]:
    """Seconds of CPU (own and of ended children) and by the clock of each folder of tests, falling."""
    costs: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for one in measures:
        room = one.file.rpartition("/")[0]
        cpu_s, wall_s = costs[room]
        costs[room] = cpu_s + one.cpu_s, wall_s + one.wall_s
    return dict(sorted(costs.items(), key=lambda cost: -cost[1][0]))


def report(measures: list[Measure]) -> str:
    """Costs by room, and the dearest files and single steps: where the clock runs on without the CPU, something is
    waited for.

    The CPU is that of the tests' process and of children that have ended; of services that were killed it is unknown.
    """
    tests = len({one.test for one in measures})
    own, children = sum(one.own_s for one in measures), sum(one.children_s for one in measures)
    lines = [f"{tests} tests took {own:.0f} s of CPU, and processes that they started {children:.0f} s"]
    lines += ["", "   clock      CPU"]
    lines += [f"{wall_s:8.1f} {cpu_s:8.1f} s  {room or '.'}" for room, (cpu_s, wall_s) in by_room(measures).items()]
    lines += ["", "   clock"]
    lines += [f"{cost:8.1f} s  {file}" for file, cost in list(by_file(measures).items())[:_NAMED]]
    lines += ["", "   clock      CPU"]
    for one in sorted(measures, key=lambda one: -one.wall_s)[:_NAMED]:
        lines += [f"{one.wall_s:8.1f} {one.cpu_s:8.1f} s  {one.test} ({one.phase})"]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.costs", description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the files' costs into tests/costs.json")
    options, given = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="costs-") as folder:
        command = [sys.executable, "-m", "pytest", "-q", *given]
        code = subprocess.run(command, cwd=ROOT, env=os.environ | {_VARIABLE: folder}).returncode
        measures = read(Path(folder))
    print(report(measures))
    if options.write:
        write(measures)
    return code


def write(measures: list[Measure]) -> None:
    """Put these files' costs into the table, and keep those of files that are there and were not run."""
    kept: dict[str, float] = json.loads(TABLE.read_text("utf-8")) if TABLE.exists() else {}
    costs = {file: round(cost, 1) for file, cost in (kept | by_file(measures)).items()}
    costs = {file: cost for file, cost in costs.items() if cost >= LEAST_S and (ROOT / file).is_file()}
    ordered = dict(sorted(costs.items(), key=lambda cost: (-cost[1], cost[0])))
    TABLE.write_text(json.dumps(ordered, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
