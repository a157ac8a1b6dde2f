"""Asks an API's /healthz and reads the memory of its process, twenty and five times a second, in a process of its own.

What else the caller's process computes therefore does not show in the times. How late the monitor itself is woken up
by the machine is recorded beside them.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import select
import subprocess
import sys
import time
import urllib.parse
from typing import Any, Self

import psutil

_PERIOD_S = 0.05
_MEMORY_PERIODS = 4  # between two readings of the memory
_ANSWER_S = 120.0
_MIB = 2**20


def usage(pid: int) -> tuple[float, float]:
    """MiB in memory, and CPU seconds, of a process and its children, ended ones included."""
    rss, cpu_s = 0.0, 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(pid)
        for process in (top, *top.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                rss += process.memory_info().rss / _MIB
                cpu_s += times.user + times.system + times.children_user + times.children_system
    return rss, cpu_s


def own_mib(pid: int) -> float:
    """MiB in memory of a process without its children; 0 where it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return float(psutil.Process(pid).memory_info().rss / _MIB)
    return 0.0


class Monitor:
    """Monitors an API and its process. Use as a context manager; results are there at its end."""

    def __init__(self, url: str, pid: int) -> None:
        self._command = [sys.executable, "-m", "tests.faults.monitor", url, str(pid)]
        self.gaps_s: list[float] = []  # seconds of each answer of /healthz
        self.late_s: list[float] = []  # by which the monitor was woken up later than it asked for, before each of them
        self.failures: list[str] = []  # of /healthz: what was not answered, or not with 200
        self.rss_mib: list[float] = []  # at each reading, of the process with its children
        self.own_mib: list[float] = []  # and without

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None and self._process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *_: object) -> None:
        vars(self).update(json.loads(self._process.communicate()[0]))

    def peak_mib(self) -> float:
        """The most memory of the process with its children."""
        return max(self.rss_mib)

    def healthz_ms(self) -> dict[str, float]:
        """Milliseconds of /healthz, and how late the monitor was woken up at most."""
        gaps = sorted(self.gaps_s)
        return {
            "p50": round(1e3 * gaps[len(gaps) // 2], 1), "p99": round(1e3 * gaps[int(0.99 * len(gaps))], 1),
            "longest": round(1e3 * gaps[-1], 1), "monitor_late": round(1e3 * max(self.late_s), 1),
            "failures": len(self.failures),
        }  # fmt: skip


def main() -> None:
    """Monitor until the standard input ends, then print what was found as JSON."""
    url, pid = sys.argv[1], int(sys.argv[2])
    address = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port or 80, timeout=_ANSWER_S)
    found: dict[str, list[Any]] = {"gaps_s": [], "late_s": [], "failures": [], "rss_mib": [], "own_mib": []}
    print("ready", flush=True)
    while True:
        due = time.perf_counter() + _PERIOD_S
        if select.select([sys.stdin], [], [], _PERIOD_S)[0]:
            break
        started = time.perf_counter()
        found["late_s"].append(started - due)
        try:
            connection.request("GET", "/healthz")
            answer = connection.getresponse()
            answer.read()
            if answer.status != 200:
                found["failures"].append(str(answer.status))
        except (OSError, http.client.HTTPException) as error:
            found["failures"].append(repr(error))
            connection.close()
        found["gaps_s"].append(time.perf_counter() - started)
        if len(found["gaps_s"]) % _MEMORY_PERIODS == 1:
            found["rss_mib"].append(usage(pid)[0])
            found["own_mib"].append(own_mib(pid))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
