"""Shared by all benchmarks: a lock per machine, printed tables, and JSON files with provenance."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import provenance

RESULTS = Path(__file__).resolve().parent / "results"
LOCK = Path(tempfile.gettempdir()) / "diptych-bench.lock"


class BenchError(RuntimeError):
    """A benchmark cannot run. The message has the reason."""


@contextmanager
def alone() -> Iterator[None]:
    """Lock the machine: a second benchmark waits for the first one, so that they do not disturb each other."""
    from filelock import FileLock, Timeout
    from rich.console import Console

    lock = FileLock(LOCK)
    try:
        lock.acquire(timeout=0.1)
    except Timeout:
        Console(stderr=True).print("another benchmark holds the machine; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def resident_mib() -> float:
    """Resident memory of this process."""
    import psutil

    return round(float(psutil.Process().memory_info().rss) / 2**20, 1)


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table with right-aligned numbers on stdout."""
    from rich.console import Console
    from rich.table import Table

    drawn = Table(title=title, title_justify="left")
    for index, name in enumerate(header):
        drawn.add_column(name, justify="left" if index == 0 else "right")
    for row in rows:
        drawn.add_row(*row)
    Console().print(drawn)


def publish(
    name: str, result: dict[str, Any], folder: Path | None = None, *, rooms: Sequence[str] = provenance.IMAGES,
    children: bool = False, imported: Iterable[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Store and return the result with its provenance, as `write` does, and print it as the last line of stdout."""
    whole = write(name, result, folder, rooms=rooms, children=children, imported=imported)
    print(json.dumps(whole), flush=True)
    return whole


def write(
    name: str, result: dict[str, Any], folder: Path | None = None, *, rooms: Sequence[str] = provenance.IMAGES,
    children: bool = False, imported: Iterable[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Store the result with its provenance as `name`.json, and return both.

    `rooms`, `children` and `imported` are as in `provenance.provenance`. Where the tree has uncommitted changes the
    file says so, and stderr too: docs cannot cite it.
    """
    about = provenance.provenance(rooms, children=children, imported=imported)
    whole = {**result, "provenance": about}
    (writable(folder or RESULTS) / f"{name}.json").write_text(json.dumps(whole, indent=1) + "\n")
    _warn(name, about["commit"])
    return whole


def _warn(name: str, commit: str | None) -> None:
    if commit is None:
        print(
            f"{name}: the commit is not known; set {provenance.COMMIT_VARIABLE} where there is no git", file=sys.stderr
        )
    elif commit.endswith(provenance.DIRTY):
        print(f"{name}: source files differ from {commit}; docs cannot cite these figures", file=sys.stderr)


def writable(folder: Path) -> Path:
    """The folder, created if it is missing. Raises `BenchError` if it is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise BenchError(f"--results: {folder} cannot be written ({error.strerror})") from error
