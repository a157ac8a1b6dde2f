"""Catches stop signals: Ctrl-C, SIGTERM, a closed terminal."""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType
from typing import Any, Self

_ECHO_S = 0.5  # one Ctrl-C may arrive twice: from the terminal, and from the parent process


class StopSignals:
    """Catches the signals while it is open; in the main thread only.

    Ctrl-C counts even if SIGINT was ignored at the start, as behind a shell's `&`: then it was sent deliberately. An
    ignored SIGHUP stays ignored: that is what `nohup` asks for.
    """

    def __init__(self) -> None:
        self.signal: int | None = None  # the first one
        self.urged = 0  # how many came after it
        self._last = 0.0
        self._before: dict[int, Any] = {}

    @property
    def asked(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """130 for Ctrl-C, as in shells; 0 for a requested stop."""
        return 130 if self.signal == signal.SIGINT else 0

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            self._before[number] = signal.signal(number, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._before)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal = number
        elif now - self._last >= _ECHO_S:
            self.urged += 1
        else:
            return
        self._last = now
