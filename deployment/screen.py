"""Prints the progress of `diptych serve`: a spinner on a terminal, plain lines elsewhere.

A closed output does not stop the service.
"""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status
from rich.text import Text

from contract.printable import printable_lines


class StatusDisplay:
    """Lines and the spinner go to stderr; results, for other programs, to stdout. Used from one thread."""

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

    def show_activity(self, text: str) -> None:
        """Show the current activity, until the next one or `settle`."""
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
        """Clear the current activity."""
        self._now = ""
        status, self._status = self._status, None
        if status is not None:
            with contextlib.suppress(OSError):
                status.stop()

    def line(self, text: str, style: str = "") -> None:
        """Print a permanent line."""
        with contextlib.suppress(OSError):
            self._line(text, style)

    def result(self, text: str) -> None:
        """Print to stdout."""
        with contextlib.suppress(OSError, ValueError):  # closed
            print(printable_lines(text), flush=True)

    def _line(self, text: str, style: str = "") -> None:
        self._console.print(_plain(text), style=style or None, soft_wrap=True, highlight=False)


def _plain(text: str) -> Text:
    """Text from elsewhere, with markup and control characters escaped."""
    return Text(printable_lines(text))
