"""Measures an API under thousands of hostile requests: `python -m tests.lab.faults.hostile --bodies 10000`.

The exit code is 1 if a request got a 5xx other than 503 or no answer, or if the API exited. The result is
lab/bench/results/hostile.json.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from lab.bench.harness import record
from lab.bench.harness.record import table
from tests.faults.hostile import attack, summary


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.faults.hostile", description=__doc__)
    parser.add_argument("--bodies", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with record.alone(), tempfile.TemporaryDirectory() as folder:
        found = attack(options.bodies, options.seed, Path(folder))
    result = summary(found)
    header = ("kind", "requests", "answers: count")
    rows = [
        (kind, str(one.total()), ", ".join(f"{status}: {n}" for status, n in sorted(one.items())))
        for kind, one in sorted(found.statuses.items())
    ]
    table("hostile requests", header, rows)
    record.publish("hostile", result, artifacts=("api", "core/jobs", "tests/faults"))
    for fault in found.faults:
        print(f"wrong: {fault}", file=sys.stderr)
    return int(bool(found.faults))


if __name__ == "__main__":
    sys.exit(main())
