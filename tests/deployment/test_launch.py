"""What a child is before its command begins: tied to its parent, nice, and free of what the parent did to signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from deployment.launch import launched
from tests.children import ROOT

_TELL = (
    "import os, signal; print([signal.getsignal(n) == signal.SIG_DFL for n in (1, 3, 15)],"
    " signal.getsignal(2) == signal.default_int_handler, signal.pthread_sigmask(signal.SIG_BLOCK, []), os.nice(0))"
)
_ONLY_ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="no other kernel has it")


def test_ignored_and_blocked_signals_are_not_inherited(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "for number in (1, 2, 3, 15): signal.signal(number, signal.SIG_IGN)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [2, 15])\n"
        "from deployment.launch import launched\n"
        "command = launched([sys.executable, '-c', sys.argv[1]], niceness=3)\n"
        "os.waitpid(os.spawnv(os.P_NOWAIT, command[0], command), 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, _TELL], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"[True, True, True] True set() {min(os.nice(0) + 3, 19)}\n", done.stderr


def test_the_command_keeps_the_process_and_its_exit_code() -> None:
    program = [sys.executable, "-c", "import os, sys; print(os.getpid()); sys.exit(7)"]
    child = subprocess.Popen(launched(program), stdout=subprocess.PIPE, text=True)
    out, _ = child.communicate(timeout=60)
    assert int(out) == child.pid and child.returncode == 7


@_ONLY_ON_LINUX
def test_it_is_told_to_end_when_the_thread_that_started_it_is_gone() -> None:
    children: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        children.append(subprocess.Popen(launched(["/bin/sleep", "600"])))
        started = psutil.Process(children[0].pid)
        while started.name() != "sleep":
            time.sleep(0.01)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join(60)
    try:
        assert children[0].wait(60) == -signal.SIGTERM
    finally:
        children[0].kill()


@_ONLY_ON_LINUX
def test_one_whose_parent_is_gone_before_it_begins_does_not_begin() -> None:
    command = launched(["/bin/sleep", "600"])
    position = command.index(str(os.getpid()))
    command[position] = str(psutil.Process().ppid())  # as if another process had asked for it
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr == "launch: the parent is gone\n"
