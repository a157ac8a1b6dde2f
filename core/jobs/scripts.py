"""Loads the Lua scripts of `lua/`, in which every change of a job's state is made.

Each file begins with a comment: what the script does, its arguments (`ARGV[1]` is the prefix of all keys), its answer.
A line `-- include: shared/…` names a file whose functions it uses.
"""

from __future__ import annotations

from functools import cache
from importlib import resources

from core.jobs.broker import PRIORITY_STEPS, SEPARATOR
from core.jobs.record import FIELDS
from core.jobs.unreadable import VERSION

_INCLUDE = "-- include: "
# Constants shared by Lua and Python.
_FIELDS = ", ".join(f"'{name}'" for name in FIELDS)
_CONSTANTS = (
    f"local VERSION, PRIORITY_STEPS, SEPARATOR = {VERSION}, {{{', '.join(map(str, PRIORITY_STEPS))}}}, '{SEPARATOR}'\n"
    f"local FIELDS = {{{_FIELDS}}}\n"
)


@cache
def load(name: str, functions: str = "") -> str:
    """The text of `lua/{name}.lua`, preceded by its includes, each once. `functions`: Lua source that precedes all of
    it.
    """
    parts: dict[str, str] = {}
    _collect(name, parts)
    return _CONSTANTS + functions + "".join(parts.values())


def _collect(name: str, parts: dict[str, str]) -> None:
    text = resources.files(__package__).joinpath("lua", f"{name}.lua").read_text("utf-8")
    for line in text.splitlines():
        if line.startswith(_INCLUDE):
            for included in line.removeprefix(_INCLUDE).split():
                if included not in parts:
                    _collect(included, parts)
    parts[name] = text
