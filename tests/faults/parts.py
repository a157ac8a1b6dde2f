"""Manages one part of a running stack: a real process with a log that can be killed, paused and restarted."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deployment.launch import launched
from tests.faults.guard import Guard
from tests.forks import Fork, forker

ROOT = Path(__file__).resolve().parents[2]


@dataclass(eq=False)
class Part:
    """A process in a session of its own, tied to the thread that starts it.

    `environment` goes over this process's own, less its DIPTYCH_ variables. The command begins with an absolute path.
    `root` is the checkout whose code it runs. With `preload` it is forked from a process that has imported
    these modules, unless its code is another's.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    guard: Guard
    descriptors: tuple[int, ...] = ()
    starts: int = 0
    root: Path = ROOT
    preload: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | Fork | None = field(default=None, repr=False)

    def start(self) -> None:
        assert not self.running, f"{self.name} runs already"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("DIPTYCH_")}
        with self.log.open("ab") as output:
            output.write(f"--- start {self.starts + 1} of {self.name}\n".encode())
            output.flush()
            if self.preload and self.root == ROOT and "LD_PRELOAD" not in self.environment:
                self.process = forker(*self.preload).start(
                    self.command[1:], env=inherited | dict(self.environment), stderr=output.fileno(),
                    pass_fds=self.descriptors, start_new_session=True,
                )  # fmt: skip
            else:
                self.process = subprocess.Popen(
                    launched(self.command), cwd=self.root,
                    env=inherited | dict(self.environment), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                    start_new_session=True, pass_fds=self.descriptors,
                )  # fmt: skip
        self.starts += 1
        self.guard.watch(self.pid)

    @property
    def pid(self) -> int:
        assert self.process is not None, f"{self.name} was never started"
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """kill -9, as the kernel does when memory runs out. All of its session goes."""
        if self.process is not None:
            self._signal(signal.SIGKILL)
            self.process.wait()
            self.guard.forget(self.pid)

    def terminate(self, timeout_s: float = 60.0) -> int:
        """SIGTERM, and wait for the end. Returns the exit status; raises AssertionError if it never ends."""
        assert self.process is not None
        self.process.terminate()
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} still runs after {timeout_s:g} s") from None
        self.guard.forget(self.pid)
        return status

    def pause(self) -> None:
        """SIGSTOP: alive, silent, and unaware of it, like a machine that hangs."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)

    def tail(self, lines: int = 30) -> str:
        """The end of its log, under its name and what became of it."""
        state = "never started" if self.process is None else self.process.poll()
        try:
            text = self.log.read_text("utf-8", "replace").splitlines()[-lines:]
        except OSError:
            text = []
        return "\n".join((f"=== {self.name} ({'runs' if state is None else state})", *text))


def wait_for(what: str, condition: Callable[[], object], timeout_s: float, every_s: float = 0.05) -> None:
    """Ask `condition()` until it is true. Raises AssertionError naming `what`."""
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, f"not within {timeout_s:g} s: {what}"
        time.sleep(every_s)
