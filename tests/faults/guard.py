"""Cleans up a stack when the process that built it is gone, for any reason.

Runs in a separate process and reads lines from that process: `+ pid`, `- pid`, `mount path`, `unmount path`. When the
pipe closes, it kills every session and unmounts every path that is still registered.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path


class Guard:
    """The watched side. Registered processes must lead their own session."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).absolute())], stdin=subprocess.PIPE, start_new_session=True
        )

    def watch(self, pid: int) -> None:
        self._say(f"+ {pid}")

    def forget(self, pid: int) -> None:
        self._say(f"- {pid}")

    def mounted(self, path: Path) -> None:
        self._say(f"mount {path}")

    def unmounted(self, path: Path) -> None:
        self._say(f"unmount {path}")

    def close(self) -> None:
        """Let the guard clean up everything registered, and wait for it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()


def main() -> None:
    """Listen until the pipe ends, then clear up."""
    pids: dict[int, None] = {}
    mounts: dict[str, None] = {}
    for line in sys.stdin:
        word, _, value = line.rstrip("\n").partition(" ")
        match word:
            case "+":
                pids[int(value)] = None
            case "-":
                pids.pop(int(value), None)
            case "mount":
                mounts[value] = None
            case "unmount":
                mounts.pop(value, None)
    for pid in pids:
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
    for mount in mounts:
        subprocess.run(["umount", "-l", mount], check=False, capture_output=True)


if __name__ == "__main__":
    main()
