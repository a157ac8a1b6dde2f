"""A child process that is one part of a deployment: started, watched, heard and stopped.

Knows processes, their log files and when to start one again; knows nothing of what the part does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deployment.launch import launched

_LOG_BYTES = 16 * 2**20
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.5, 30.0
_LONG_LIFE_S = 60.0


@dataclass(eq=False)
class Child:
    """A process of its own session, tied to the thread that starts it.

    It writes to `log` and not through us: a pipe would break under it when we are killed, and would hold it up when
    our terminal does not take what it says.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    niceness: int = 0
    descriptors: tuple[int, ...] = ()
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _read: int = 0  # how far the log was read
    _rest: bytes = b""

    def start(self) -> None:
        """Raises OSError where the log cannot be written or no process can be made."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._read = self._shorten()
        self._rest = b""
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                launched(self.command, niceness=self.niceness), env=self.environment, pass_fds=self.descriptors,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self.process.pid if self.process is not None else 0

    @property
    def code(self) -> int | None:
        """None while it runs."""
        return self.process.poll() if self.process is not None else 0

    def lines(self) -> list[str]:
        """The whole lines that it has written since it was asked last; all of the last one when it has ended."""
        ended = self.code is not None
        with contextlib.suppress(OSError):
            if self.log.stat().st_size > self._read:
                with self.log.open("rb") as log:
                    log.seek(self._read)
                    new = log.read(_LOG_BYTES)
                self._read += len(new)
                self._rest += new
        if self._read > _LOG_BYTES:
            self._read = self._shorten()
        *whole, self._rest = self._rest.split(b"\n")
        if ended and self._rest:
            whole, self._rest = [*whole, self._rest], b""
        return [line.decode("utf-8", "replace") for line in whole]

    def _shorten(self) -> int:
        """Empty a log that has grown long; returns its length. The child appends, wherever the end is."""
        try:
            if self.log.stat().st_size > _LOG_BYTES:
                os.truncate(self.log, 0)
            return self.log.stat().st_size
        except OSError:
            return 0

    def terminate(self) -> None:
        if self.code is None:
            assert self.process is not None
            self.process.terminate()

    def kill(self) -> None:
        """End it and what it may have started, now."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # a process that a device's driver holds
                self.process.wait(10)


@dataclass(eq=False)
class Backoff:
    """How long to wait before a part that ended is started again: 0.5 s, doubling to 30 s; anew after a long life."""

    delay_s: float = _FIRST_DELAY_S
    started: float = field(default_factory=time.monotonic)
    due: float | None = None  # on time.monotonic's clock

    def ended(self, now: float) -> float:
        """Note the end; returns the seconds to wait."""
        if now - self.started >= _LONG_LIFE_S:
            self.delay_s = _FIRST_DELAY_S
        delay_s, self.delay_s = self.delay_s, min(2 * self.delay_s, _LONGEST_DELAY_S)
        self.due = now + delay_s
        return delay_s

    def begun(self, now: float) -> None:
        self.started, self.due = now, None


def reason(code: int) -> str:
    """An exit code in words."""
    if code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    return f"exit code {code}"
