"""Adds commands of other packages, which they declare as entry points of the group `diptych.commands`.

An entry point has the name of its command, or `evaluate.NAME` for a part of `diptych evaluate`. Its object is a
function that takes the subparsers of argparse and adds the command to them, with its function as the default `run`.
"""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, entry_points

from cli.arguments import Commands
from contract.printable import printable_lines

GROUP = "diptych.commands"


def names(parent: str = "") -> list[str]:
    """Return the names of the added commands, or of the added parts of a command."""
    return sorted(name for name in _points(parent) if "." not in name)


def add(commands: Commands, name: str, parent: str = "") -> None:
    """Add a command; one that its package cannot provide is named on stderr, and left out."""
    point = _points(parent)[name]
    try:
        point.load()(commands)
    except Exception as error:  # of another package
        reason = printable_lines(f"{type(error).__name__}: {error}")
        print(f"diptych: the command {point.name} ({point.value}) cannot be loaded: {reason}", file=sys.stderr)


def _points(parent: str) -> dict[str, EntryPoint]:
    prefix = f"{parent}." if parent else ""
    return {
        point.name.removeprefix(prefix): point for point in entry_points(group=GROUP) if point.name.startswith(prefix)
    }
