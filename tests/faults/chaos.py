"""Injects faults into a running service many times and counts lost jobs: `python -m tests.faults.chaos --times 20`.

Runs the scenarios of the tests with the real lease, prints a table, and stores it as benchmarks/results/chaos.json,
which `make figures` writes into docs/operations.md. The exit code is 1 if a job was lost, ended twice, or had a wrong
result.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.harness import record
from tests.faults.play import play
from tests.faults.rounds import Gallery, Outcome
from tests.faults.scenarios import PICTURES, SCENARIOS
from tests.faults.stack import Stack

# What pictures are drawn with: a model of noise on torch's kernels, or what `diptych serve` takes by default.
MODELS = {"tiny": {"model": "random:tiny", "kernels": "false"}, "default": {"model": ""}}


@dataclass
class Row:
    """What all runs of one scenario came to."""

    name: str
    runs: int = 0
    outcome: Outcome = field(default_factory=Outcome)  # sums, and the longest recovery

    def add(self, outcome: Outcome) -> None:
        total = self.outcome
        self.runs += 1
        total.jobs += outcome.jobs
        total.lost += outcome.lost
        total.twice += outcome.twice
        total.problems += outcome.problems
        recoveries = [s for s in (total.recovery_s, outcome.recovery_s) if s is not None]
        total.recovery_s = max(recoveries, default=None)
        for name, value in outcome.figures.items():
            total.figures[name] = max(value, total.figures.get(name, value))

    def as_json(self) -> dict[str, Any]:
        total = self.outcome
        return {
            "name": self.name, "runs": self.runs, "jobs": total.jobs, "lost": total.lost, "twice": total.twice,
            "problems": len(total.problems), "recovery_s": total.recovery_s, "most": total.figures,
        }  # fmt: skip


class Shop:
    """Keeps a stack of the kind that was asked for last."""

    def __init__(self, lease_s: float, model: str = "tiny") -> None:
        self._settings = {"lease_s": str(lease_s), "drain_s": "0.1", **MODELS[model]}
        self._open = ExitStack()
        self._kind = ""
        self._stack: Stack | None = None
        self.gallery = Gallery()

    def stack(self, name: str) -> Stack:
        """A running stack for this scenario."""
        kind = "pictures" if name in PICTURES else "stand-ins"
        if self._stack is None or kind != self._kind:
            self.close()
            folder = Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="diptych-chaos-")))
            switches = ("--real", "--text") if kind == "pictures" else ()
            self._stack = self._open.enter_context(Stack(folder, switches=switches, settings=self._settings))
            self._kind, self.gallery = kind, Gallery()
        return self._stack

    def close(self) -> None:
        """End the stack; the next one is new, so that nothing that went wrong is carried over."""
        self._stack = None
        self._open.close()


def run(names: Sequence[str], times: int, shop: Shop, jobs: int, seconds: float) -> Iterator[Row]:
    for name in names:
        row = Row(name)
        for number in range(times):
            started = time.monotonic()
            try:
                outcome = play(name, shop.stack(name), shop.gallery, jobs, seconds)
            except Exception as error:
                outcome = Outcome(
                    problems=["\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])]
                )
            row.add(outcome)
            told = "well" if not outcome.problems else "\n".join(outcome.problems)
            took_s = time.monotonic() - started
            recovery = "" if outcome.recovery_s is None else f", recovery {outcome.recovery_s:.1f} s"
            figures = "".join(f", {text}" for text in _figures(outcome))
            print(f"{name} {number + 1}/{times} in {took_s:.0f} s{recovery}{figures}: {told}", flush=True)
            if outcome.problems:
                shop.close()
        yield row


def _figures(outcome: Outcome) -> list[str]:
    return [f"{name.replace('_', ' ')} {value:.4g}" for name, value in outcome.figures.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description="Break a running service, many times.")
    parser.add_argument("--times", type=int, default=20, metavar="N", help="runs of each; default: %(default)s")
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, metavar="NAME", help=f"of {', '.join(SCENARIOS)}")
    parser.add_argument("--lease", type=float, default=15.0, metavar="S", help="of the workers; default: %(default)s")
    parser.add_argument("--jobs", type=int, default=12, metavar="N", help="of one run; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=1.5, metavar="S", help="of one job; default: %(default)s")
    parser.add_argument(
        "--model", choices=MODELS, default="tiny",
        help="default: emoji-xl in INT8 on our own kernels, as served by default; its table is printed and not written",
    )  # fmt: skip
    options = parser.parse_args()
    shop = Shop(options.lease, options.model)
    try:
        rows = list(run(options.only or list(SCENARIOS), options.times, shop, options.jobs, options.seconds))
    finally:
        shop.close()
    result = {"lease_s": options.lease, "workers": 2, "scenarios": [row.as_json() for row in rows]}
    print("\n" + "\n".join(tables.TABLES["chaos"].lines(result)))
    if not options.only and options.model == "tiny":
        whole = ("core/batching", "contract", "core/jobs", "api", "workers", "deployment", "tests/faults")
        record.publish("chaos", result, artifacts=whole, verbose=False)
    return int(any(row.outcome.problems for row in rows))


if __name__ == "__main__":
    sys.exit(main())
