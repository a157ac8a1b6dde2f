"""No kernel reads or writes one byte outside of what it was given."""

from __future__ import annotations

import signal
import subprocess
import sys

from tests.core.quant.stage import CACHE, ROOT, kernels


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.core.kernels.cpu.walls", str(CACHE), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_no_kernel_touches_what_is_not_its_own() -> None:
    kernels()
    done = run()
    assert done.returncode == 0, f"{signal.Signals(-done.returncode).name if done.returncode < 0 else ''} {done.stderr}"
    assert "nothing was touched" in done.stdout


def test_the_walls_stand() -> None:
    kernels()
    assert run("--touch").returncode == -signal.SIGSEGV
