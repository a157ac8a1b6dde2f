"""Writes a benchmark's result: a table on the terminal, and a JSON file with provenance; and locks the machine."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab.bench.harness import provenance
from lab.bench.harness.markdown import Table, Text

RESULTS = provenance.ROOT / "lab" / "bench" / "results"
GPU_RESULTS = RESULTS / "h200"
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


def progress(text: str) -> None:
    """Print a line on stderr, unwrapped."""
    print(text, file=sys.stderr, flush=True)


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table with right-aligned numbers on stdout; None is an empty cell."""
    from rich.console import Console
    from rich.table import Table

    rendered = Table(title=title, title_justify="left")
    for index, name in enumerate(header):
        rendered.add_column(name, justify="left" if index == 0 else "right")
    for row in rows:
        rendered.add_row(*("" if cell is None else str(cell) for cell in row))
    Console().print(rendered)


def publish(
    name: str, result: dict[str, Any], folder: Path | None = None, *, artifacts: Iterable[str] = (),
    imported: Iterable[str] = (), verbose: bool = True, table: Table | Text | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Store the result with its provenance as `name`.json, return both, and print them as the last line of stdout.

    `artifacts` and `imported` are as in `provenance.provenance`. Not `verbose`: a result so far; the last is printed,
    and before it its `table`.
    Where the tree has uncommitted changes the file says so, and stderr too: docs cannot cite it.
    """
    measured = provenance.provenance(artifacts, imported)
    complete = {**result, "provenance": measured}
    (writable(folder or RESULTS) / f"{name}.json").write_text(json.dumps(complete, indent=1) + "\n")
    if not verbose:
        return complete
    if table is not None:
        table.show(complete)
    commit = measured["commit"]
    if commit is None:
        progress(f"{name}: the commit is not known; set {provenance.COMMIT_VARIABLE} where there is no git")
    elif commit.endswith(provenance.DIRTY):
        progress(f"{name}: source files differ from {commit}; docs cannot cite these figures")
    print(json.dumps(complete), flush=True)
    return complete


def writable(folder: Path) -> Path:
    """The folder, created if it is missing. Raises `BenchError` if it is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise BenchError(f"--results: {folder} cannot be written ({error.strerror})") from error
