"""Says at the end of a run what was not run, by what is missing, and what brings it; `-rs` names each test.

The reason of a skip says what is missing; a row of `NEEDS` matches it. A reason without a row is printed itself.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest

MOST = 12  # lines; the rest is counted
# What is missing, what matches reasons for it, and what brings it.
NEEDS = (
    ("NVRTC", r"NVRTC", "`make .venv/.nvrtc`, a download of 90 MB"),
    ("a GPU", r"GPU|CUDA|Hopper|on a CPU", "`make test-gpu` on a machine with one"),
    ("helm", r"\bhelm\b", "`make build/helm/.installed`"),
    ("Chromium", r"Chromium", "`apt install chromium`"),
    ("a C++ compiler", r"\bg\+\+|C\+\+|C compiler", "`apt install g++`"),
    ("nginx", r"nginx", "`apt install nginx-light`"),
    ("a Redis of the system, with TLS", r"\bRedis|redis-|openssl|second server", "`apt install redis-server openssl`"),
    ("the tools of `make pins` and `make audit`", r"build/tools", "`make build/tools/.installed`"),
    ("MLPerf's files", r"MLPerf", "docs/evaluation.md says from where"),
    ("clients of other projects", r"make clients|COMFYUI|OPEN_WEBUI|node on the PATH|pip install", "`make clients`"),
    ("containers or a cluster", r"TEST_COMPOSE|TEST_CLUSTER|Docker", "`make test-compose`"),
    ("a package", r"could not import|is not installed", "`make .venv/.installed`"),
    ("the history", r"history", "a clone of all of it: `git fetch --unshallow`"),
    (
        "what this system lacks",
        r"/proc|IPv6|kernel|mounted|priorit|namespace|strace|curl|wheels|core",
        "another system",
    ),
)


@pytest.hookimpl(trylast=True)  # below the failures
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    stats = terminalreporter.stats
    lines = summary(
        [_reason(report) for report in stats.get("skipped", [])],
        sum(item.get_closest_marker("long") is not None for item in stats.get("deselected", [])),
    )
    if lines:
        terminalreporter.section("not run", sep="-")
        for line in lines:
            terminalreporter.line(line)


def summary(reasons: list[str], long: int) -> list[str]:
    """The lines of the summary, the largest count first; `long` tests are counted in a line of their own."""
    counts = Counter(map(_need, reasons)).most_common()
    shown = counts if len(counts) <= MOST else counts[: MOST - 1]
    lines = [f"{count:5}  {need}" for need, count in shown]
    if rest := sum(count for _, count in counts[len(shown) :]):
        lines.append(f"{rest:5}  for other reasons: `-rs` prints them all")
    if long:
        lines.append(f"{long:5}  long tests and further cases: `make test-long`")
    return lines


def _need(reason: str) -> str:
    """What the tests skipped for this reason need, and what brings it."""
    return next((f"{need}: {remedy}" for need, pattern, remedy in NEEDS if re.search(pattern, reason)), reason)


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple | list) else str(report.longrepr)
    return text.removeprefix("Skipped: ")
