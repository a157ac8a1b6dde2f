"""Lets many jobs into the engine at once, or one alone: what was there when a worker crashed runs by itself.

Knows threads and who waits; knows nothing of jobs, queues or engines.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Gate:
    """A lock for many or for one, thread-safe. Whoever must be alone goes before all that wait."""

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        """`on_change` is called when `narrow` has changed, on the thread that changed it."""
        self._on_change = on_change
        self._condition = threading.Condition()
        self._many = 0
        self._alone = False
        self._waiting = 0  # to be alone
        self._closed = False

    @property
    def narrow(self) -> bool:
        """Whether someone is alone inside or waits for that: nobody else gets in meanwhile."""
        return self._alone or self._waiting > 0

    def enter(self, *, alone: bool) -> bool:
        """Wait for one's turn, and take it. False: the gate was closed first, and there is nothing to leave."""
        if not alone:
            with self._condition:
                self._condition.wait_for(lambda: self._closed or not self.narrow)
                if self._closed:
                    return False
                self._many += 1
                return True
        with self._condition:
            self._waiting += 1
        self._on_change()
        with self._condition:
            self._condition.wait_for(lambda: self._closed or not (self._alone or self._many))
            self._waiting -= 1
            if not self._closed:
                self._alone = True
                return True
            self._condition.notify_all()
        self._on_change()
        return False

    def leave(self) -> None:
        """Give the turn back. To be called once for each `enter` that returned True."""
        with self._condition:
            was_alone, self._alone = self._alone, False
            if not was_alone:
                self._many -= 1
            self._condition.notify_all()
        if was_alone:
            self._on_change()

    def close(self) -> None:
        """Let nobody in any more, and let all that wait go."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
