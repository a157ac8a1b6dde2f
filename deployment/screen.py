"""What `diptych serve` says: a spinner with what happens now on a terminal, plain lines elsewhere.

Knows where words go; that nobody can read them any more is no reason to stop serving.
"""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status
from rich.text import Text


class Screen:
    """Lines and the spinner go to stderr; what others may read, to stdout. Used from one thread."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._status: Status | None = None
        self._now = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.settle()

    def now(self, text: str) -> None:
        """What happens at this moment, until something else does or `settle` is called."""
        if text == self._now:
            return
        self._now = text
        with contextlib.suppress(OSError):
            if not self._console.is_terminal:
                self._line(f"diptych: {text}")
            elif self._status is None:
                self._status = self._console.status(_plain(text))
                self._status.start()
            else:
                self._status.update(_plain(text))

    def settle(self) -> None:
        """Nothing in particular happens any more."""
        self._now = ""
        status, self._status = self._status, None
        if status is not None:
            with contextlib.suppress(OSError):
                status.stop()

    def line(self, text: str, style: str = "") -> None:
        """Something that happened, to stay."""
        with contextlib.suppress(OSError):
            self._line(text, style)

    def result(self, text: str) -> None:
        """To stdout."""
        with contextlib.suppress(OSError, ValueError):  # closed
            print(text, flush=True)

    def _line(self, text: str, style: str = "") -> None:
        self._console.print(_plain(text), style=style or None, soft_wrap=True, highlight=False)


def _plain(text: str) -> Text:
    """What comes from elsewhere is no markup."""
    return Text(text)
