"""Limits the memory in which all of a service's answers hold what they send."""

from __future__ import annotations

import threading


class HeldBytes:
    """Counts bytes. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit, self._count, self._lock = limit, 0, threading.Lock()

    def claim(self, most: int) -> int:
        """Claim up to so many bytes; return how many."""
        with self._lock:
            claimed = max(0, min(most, self._limit - self._count))
            self._count += claimed
            return claimed

    def give(self, count: int) -> None:
        with self._lock:
            self._count -= count

    @property
    def count(self) -> int:
        return self._count
