"""`make coverage` measures the coverage of a package by its own tests: `python -m tests.coverage core/jobs`.

A package's tests are those in its folder of tests/. Child processes (services, workers) are measured too. Each package
is a separate run and a row of docs/coverage.md, with the commit; other rows stay.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

from benchmarks import provenance
from tests.test_floors import FLOORS, ROOT

ROOMS = [name.replace(".", "/") for name in FLOORS if "." not in name and name not in ("core", "diptych")]
ROOMS += ["core/batching", "core/jobs", "core/quant"]
KEPT, PAGE = ROOT / "build" / "coverage", ROOT / "docs" / "coverage.md"
HEAD = """# Coverage

`make coverage` writes this page: the coverage of each package by its own tests, child processes included. Tests of
other packages, which cover more of it, do not count.

<!-- elsewhere: make coverage -->
| package | lines | branches | measured at |
|---|---|---|---|
"""
SOURCE = "\n<sub>Source: make coverage.</sub>\n<!-- end -->\n"


def measure(room: str) -> int:
    """Runs a package's tests under coverage and writes its row unless they fail; returns pytest's exit code."""
    data = KEPT / "data"
    for left in KEPT.glob("data*"):
        left.unlink()
    KEPT.mkdir(parents=True, exist_ok=True)
    program = [sys.executable, "-m", "coverage"]
    code = subprocess.run([*program, "run", "-m", "pytest", "-q", f"tests/{room}"], cwd=ROOT, check=False).returncode
    if code:
        return code
    told = KEPT / "told.json"
    environment = os.environ | {"COVERAGE_FILE": str(data)}
    subprocess.run([*program, "combine", "-q"], cwd=ROOT, env=environment, check=True)
    words = ["json", "-q", f"--include={room}/*", "-o", str(told)]
    subprocess.run([*program, *words], cwd=ROOT, env=environment, check=True)
    totals = json.loads(told.read_text("utf-8"))["totals"]
    lines = totals["covered_lines"] / totals["num_statements"]
    branches = totals["covered_branches"] / max(1, totals["num_branches"])
    row = f"| `{room}` | {lines:.1%} | {branches:.1%} | `{provenance.commit() or 'unknown'}` |"
    PAGE.write_text(page(rows(PAGE.read_text("utf-8")) | {room: row}), "utf-8")
    return 0


def rows(text: str) -> dict[str, str]:
    """Returns the rows of a page, by package."""
    return {found[1]: found[0] for found in re.finditer(r"^\| `([\w/]+)` .*$", text, re.MULTILINE)}


def page(told: dict[str, str]) -> str:
    missing = [f"`{room}`" for room in ROOMS if room not in told]
    last = f"\nNot measured yet: {', '.join(missing)}.\n" if missing else ""
    return HEAD + "".join(f"{told[room]}\n" for room in ROOMS if room in told) + f"{SOURCE}{last}"


def main(rooms: list[str]) -> int:
    unknown = [room for room in rooms if room not in ROOMS]
    if unknown:
        print(f"{', '.join(unknown)}: no such package; there are {', '.join(ROOMS)}", file=sys.stderr)
        return 2
    for room in rooms or ROOMS:
        if code := measure(room):
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
