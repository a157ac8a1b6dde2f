"""Starts a command as a child that ends when its parent does, however the parent ends.

Run as a program, `launch.py PARENT_PID NICENESS COMMAND…`, it arranges that and then executes the command: Python's own
hook between fork and exec would run among copies of the parent's locks. Uses only the standard library.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def launched(command: Sequence[str], *, niceness: int = 0) -> list[str]:
    """The command line that runs `command` (an absolute path first) tied to the calling thread.

    On Linux the kernel sends it SIGTERM when that thread ends; elsewhere it may outlive a parent that is killed.
    """
    return [sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(os.getpid()), str(niceness), *command]


def main() -> None:
    parent, niceness, *command = sys.argv[1:]
    if sys.platform == "linux":
        import ctypes

        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM):
            sys.exit(f"launch: prctl: {os.strerror(ctypes.get_errno())}")
        if os.getppid() != int(parent):  # it ended before the prctl call
            sys.exit("launch: the parent is gone")
    # The command must not inherit signals that the parent ignored or blocked, due to `nohup` or a shell's `&`.
    for number in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGPIPE", "SIGXFSZ"):
        signal.signal(getattr(signal, number), signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.nice(int(niceness))
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
