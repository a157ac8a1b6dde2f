"""The command line of a question that is asked as `python -m lab.bench.NAME`, on a GPU or in a rehearsal on a CPU."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from lab.bench.harness import record


def parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser with the options that all have: where results go, the device, and whether this is a rehearsal."""
    command = argparse.ArgumentParser(
        prog=f"python -m lab.bench.{module}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_argument(
        "--results", "--out", type=Path, default=record.GPU_RESULTS, metavar="DIR",
        help="where the JSON goes; default: lab/bench/results/h200",
    )  # fmt: skip
    command.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    command.add_argument("--tiny", action="store_true", help="small shapes: a rehearsal, whose figures mean nothing")
    return command


def names(text: str, allowed: Iterable[str], option: str) -> list[str]:
    """The comma-separated names. Raises SystemExit for one that is not known."""
    selected, offered = [name for name in text.split(",") if name], list(allowed)
    if unknown := [name for name in selected if name not in offered]:
        raise SystemExit(f"{option}: there is no {', '.join(unknown)}; there are {', '.join(offered)}")
    return selected
