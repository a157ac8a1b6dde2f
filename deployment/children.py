"""Starts, watches and stops a child process that runs one part of a deployment, and reads its log."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from core.config import Settings
from deployment.launch import launched
from deployment.signals import StopSignals

ROOT = Path(__file__).resolve().parents[__name__.count(".")]  # start of module paths

_LOOK_S = 0.05
_LOG_BYTES = 16 * 2**20
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.5, 30.0
_LONG_LIFE_S = 60.0


def child_environment(settings: Settings) -> dict[str, str]:
    """The environment that gives a child these settings. The password in Redis's URL shows in no process list."""
    # Unknown DIPTYCH_ variables are removed: they were reported once.
    environment = {name: value for name, value in os.environ.items() if not name.upper().startswith("DIPTYCH_")}
    for name, names in Settings.model_fields.items():
        value = getattr(settings, name)
        if value != names.default:
            environment[f"DIPTYCH_{name.upper()}"] = str(value)
    path = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{path}" if path else str(ROOT)
    environment["PYTHONUNBUFFERED"] = "1"
    return environment


@dataclass(eq=False)
class ChildProcess:
    """A process in its own session, tied to the thread that starts it.

    It writes to `log` and not to a pipe: a pipe would break when this process is killed, and block the child when our
    terminal does not accept output.
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
        """Raises OSError if the log cannot be written or no process can be created."""
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
        """The exit code; None while it runs."""
        return self.process.poll() if self.process is not None else 0

    def lines(self) -> list[str]:
        """The complete lines that it has written since the last call; includes an incomplete last one after it has
        ended.
        """
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
        *complete, self._rest = self._rest.split(b"\n")
        if ended and self._rest:
            complete, self._rest = [*complete, self._rest], b""
        return [line.decode("utf-8", "replace") for line in complete]

    def _shorten(self) -> int:
        """Truncate a log that has grown long; returns its length. The child appends at the file's end, wherever that
        is.
        """
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
        """Kill it and its descendants now."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # a process held by a device driver
                self.process.wait(10)


@dataclass(eq=False)
class Backoff:
    """The delay before a part that ended is restarted: 0.5 s, doubling to 30 s; reset after a long run."""

    delay_s: float = _FIRST_DELAY_S
    started: float = field(default_factory=time.monotonic)
    due: float | None = None  # on time.monotonic's clock

    def ended(self, now: float) -> float:
        """Record that it ended; returns the seconds to wait."""
        if now - self.started >= _LONG_LIFE_S:
            self.delay_s = _FIRST_DELAY_S
        delay_s, self.delay_s = self.delay_s, min(2 * self.delay_s, _LONGEST_DELAY_S)
        self.due = now + delay_s
        return delay_s

    def begun(self, now: float) -> None:
        self.started, self.due = now, None


def reason(code: int) -> str:
    """Describe an exit code."""
    if code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    return f"exit code {code}"


def end_all(
    children: Sequence[ChildProcess],
    stop: StopSignals,
    hear: Callable[[], None],
    patience_s: float,
    *,
    urges: float = math.inf,
) -> None:
    """Send SIGTERM to all at once, and again at each of so many further stop signals; then, or after that time,
    SIGKILL. `hear` is called meanwhile.
    """
    until, passed_on = time.monotonic() + patience_s, 0
    for child in children:
        child.terminate()
    while any(child.code is None for child in children) and time.monotonic() < until and stop.urged <= urges:
        if stop.urged > passed_on:
            passed_on = stop.urged
            for child in children:
                child.terminate()
        hear()
        time.sleep(_LOOK_S)
    for child in children:
        child.kill()
    hear()
