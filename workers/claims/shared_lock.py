"""Admits many jobs to the engine at once, or one alone: a job suspected of crashing workers runs by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable


class SharedLock:
    """A shared/exclusive lock, thread-safe. Waiters for exclusive access go first."""

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        """`on_change` is called when `narrow` has changed, on the thread that changed it."""
        self._on_change = on_change
        self._condition = threading.Condition()
        self._many = 0
        self._alone = False
        self._waiting = 0  # for exclusive access
        self._closed = False

    @property
    def narrow(self) -> bool:
        """Whether a job holds or waits for exclusive access: no other is admitted meanwhile."""
        return self._alone or self._waiting > 0

    def enter(self, *, alone: bool) -> bool:
        """Wait for admission. False: the gate was closed first, and `leave` must not be called."""
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
        """Release. Call once for each `enter` that returned True."""
        with self._condition:
            was_alone, self._alone = self._alone, False
            if not was_alone:
                self._many -= 1
            self._condition.notify_all()
        if was_alone:
            self._on_change()

    def close(self) -> None:
        """Reject all further entries, and release all waiters."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
