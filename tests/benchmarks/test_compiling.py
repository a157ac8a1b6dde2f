"""Work in a process of its own: it is done, or fails with its words, or is ended with all that it started."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.compiling import CompileError, ahead


def test_it_is_done_when_the_call_returns(tmp_path: Path) -> None:
    ahead(os.mkdir, tmp_path / "made")
    assert (tmp_path / "made").is_dir()


def test_what_it_raises_is_told() -> None:
    with pytest.raises(CompileError, match="invalid literal"):
        ahead(int, "x")  # type: ignore[arg-type]


def test_a_process_that_dies_is_told() -> None:
    with pytest.raises(CompileError, match="exit code 3"):
        ahead(os._exit, 3)


def test_what_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    script = f"import os, time; open({str(noted)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    with pytest.raises(CompileError, match="more than 5 s"):
        ahead(subprocess.run, [sys.executable, "-S", "-c", script], limit_s=5)  # type: ignore[arg-type]
    with contextlib.suppress(psutil.NoSuchProcess):
        started = psutil.Process(int(noted.read_text()))
        until = time.monotonic() + 60  # a signal is delivered when the process is next scheduled
        while started.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < until
            time.sleep(0.01)
