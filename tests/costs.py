"""Orders test files by cost for `tests.parallel`, slowest first; `make costs` measures the costs.

A file runs in one process, so a slow one that starts last leaves the other cores idle. `costs.json` contains the
wall-clock seconds of slow files: wall clock, since many tests wait for services that they start.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_name("costs.json")
LEAST_S = 5.0  # for a file to be listed
_NAMED = 25  # files and phases of tests in the report


def by_cost(tests: Sequence[str]) -> list[list[int]]:
    """The positions of each file's tests, given by node id, in their order; the dearest file of the table first."""
    files: dict[str, list[int]] = {}
    for position, test in enumerate(tests):
        files.setdefault(test.partition("::")[0], []).append(position)
    table = _table()
    return [files[file] for file in sorted(files, key=lambda file: -table.get(file, 0.0))]


def read(report: Path) -> dict[str, float]:
    """The seconds of each file, from a report of pytest's in JUnit's format that names files."""
    costs: defaultdict[str, float] = defaultdict(float)
    for case in ElementTree.parse(report).iter("testcase"):
        costs[case.attrib["file"]] += float(case.attrib["time"])
    return costs


def write(measured: Mapping[str, float]) -> None:
    """Put these files' costs into the table, and keep those of files that are there and were not run."""
    costs = {file: round(cost, 1) for file, cost in {**_table(), **measured}.items()}
    kept = [(file, cost) for file, cost in costs.items() if cost >= LEAST_S and (ROOT / file).is_file()]
    TABLE.write_text(json.dumps(dict(sorted(kept, key=lambda cost: (-cost[1], cost[0]))), indent=1) + "\n", "utf-8")


def _table() -> dict[str, float]:
    return dict(json.loads(TABLE.read_text("utf-8")))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.costs", description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the files' costs into tests/costs.json")
    options, given = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="costs-") as folder:
        report = Path(folder, "report.xml")
        reports = [f"--durations={_NAMED}", f"--junitxml={report}", "-o", "junit_family=xunit1"]
        code = subprocess.run([sys.executable, "-m", "pytest", "-q", *reports, *given], cwd=ROOT).returncode
        measured = read(report)
    rooms: defaultdict[str, float] = defaultdict(float)
    for file, cost in measured.items():
        rooms[file.rpartition("/")[0]] += cost
    for table in (rooms, measured):
        dearest = sorted(table.items(), key=lambda cost: -cost[1])[:_NAMED]
        print("\n   clock", *(f"{cost:8.1f} s  {name or '.'}" for name, cost in dearest), sep="\n")
    if options.write:
        write(measured)
    return code


if __name__ == "__main__":
    sys.exit(main())
