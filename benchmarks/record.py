"""What every benchmark shares: one at a time on a machine, a table for people, one JSON object as the last line.

Knows files and machines; knows nothing of what is measured.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
_ROOT = Path(__file__).resolve().parent.parent


class BenchError(RuntimeError):
    """A benchmark that cannot run, and why."""


@contextmanager
def alone() -> Iterator[None]:
    """Hold the machine: a second benchmark waits for the first one instead of spoiling both."""
    from filelock import FileLock, Timeout
    from rich.console import Console

    lock = FileLock(Path(tempfile.gettempdir()) / "diptych-bench.lock")
    try:
        lock.acquire(timeout=0.1)
    except Timeout:
        Console(stderr=True).print("another benchmark holds the machine; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def machine() -> dict[str, Any]:
    """What figures depend on: processor, cores, memory, versions, load at the start, and the commit."""
    import psutil
    import torch

    return {
        "processor": _processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def resident_mib() -> float:
    """Resident memory of this process."""
    import psutil

    return round(float(psutil.Process().memory_info().rss) / 2**20, 1)


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table for people, numbers to the right, on stdout."""
    from rich.console import Console
    from rich.table import Table

    drawn = Table(title=title, title_justify="left")
    for index, name in enumerate(header):
        drawn.add_column(name, justify="left" if index == 0 else "right")
    for row in rows:
        drawn.add_row(*row)
    Console().print(drawn)


def publish(name: str, result: dict[str, Any], folder: Path | None = None) -> None:
    """Store the result as `name`.json and print it as the last line of stdout."""
    folder = writable(folder or RESULTS)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result), flush=True)


def writable(folder: Path) -> Path:
    """The folder, made where it is missing. Raises `BenchError` where nothing can be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise BenchError(f"--results: {folder} cannot be written ({error.strerror})") from error


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """What is checked out; None where that is not known."""
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
