"""Counts records and cards that this version cannot read, and logs each of them once.

A newer version running beside this one may have written them, or a person: they are skipped, and never stop a reader.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter

log = logging.getLogger(__name__)

VERSION = 1  # of the records, cards and events written here; older versions, and entries without one, are read too
_REMEMBERED = 10_000  # logged ones; beyond that some are logged and counted again


class UnreadableRecord(ValueError):
    """Data in Redis cannot be read. `reason` contains none of it; `owner` is its owner, where known."""

    def __init__(self, kind: str, id: str, reason: str, owner: str | None = None) -> None:
        super().__init__(f"the {kind} {id!r:.80} cannot be read: {reason}")
        self.kind = kind
        self.id = id
        self.reason = reason
        self.owner = owner


class UnreadableCounter:
    """Number of unreadable records and cards, by kind, each counted once. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: set[tuple[str, str]] = set()
        self._counts: Counter[str] = Counter()

    def note(self, error: UnreadableRecord) -> None:
        """Count and log it, unless it was seen before."""
        with self._lock:
            if (error.kind, error.id) in self._seen:
                return
            if len(self._seen) >= _REMEMBERED:
                self._seen.clear()
            self._seen.add((error.kind, error.id))
            self._counts[error.kind] += 1
        log.warning("%s; it is skipped", error)

    def counts(self) -> dict[str, int]:
        """Return the counts by kind: "record", "model card", "worker card"."""
        with self._lock:
            return {kind: self._counts[kind] for kind in ("record", "model card", "worker card")}


TALLY = UnreadableCounter()  # per process


def check_version(kind: str, id: str, version: object) -> None:
    """Raise `UnreadableRecord` for data of a newer version. None: written before versions existed."""
    if version is None:
        return
    if not str(version).isdecimal():
        raise UnreadableRecord(kind, id, "its version is not a number")
    if int(str(version)) > VERSION:
        raise UnreadableRecord(kind, id, f"it is of version {int(str(version))}, newer than {VERSION}")
