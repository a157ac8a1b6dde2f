"""Limits the memory in which all of a service's answers hold what they send."""

from __future__ import annotations

import threading


class HeldBytes:
    """Counts bytes. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self.limit, self._count = limit, 0
        self._lock = threading.RLock()  # a finalizer that gives may run in the midst of a claim

    def claim(self, count: int) -> bool:
        """Claim so many bytes, if there are."""
        with self._lock:
            if self._count + count > self.limit:
                return False
            self._count += count
            return True

    def give(self, count: int) -> None:
        with self._lock:
            self._count -= count

    @property
    def count(self) -> int:
        return self._count
