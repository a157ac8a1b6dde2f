"""Counts records and cards that this version cannot read, and logs each of them once.

A newer version may have written them beside this one, or somebody by hand: they are skipped, and never end what reads.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter

log = logging.getLogger(__name__)

VERSION = 1  # of the records, cards and events that this code writes; it reads those before, and those without one, too
_REMEMBERED = 10_000  # that were logged; beyond that some are logged and counted again


class Unreadable(ValueError):
    """What lies in Redis cannot be read. `why` holds nothing of its content; `owner` is whose it is, where known."""

    def __init__(self, kind: str, id: str, why: str, owner: str | None = None) -> None:
        super().__init__(f"the {kind} {id!r:.80} cannot be read: {why}")
        self.kind = kind
        self.id = id
        self.why = why
        self.owner = owner


class Tally:
    """How many records and cards could not be read, by kind: each counts once. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: set[tuple[str, str]] = set()
        self._counts: Counter[str] = Counter()

    def note(self, error: Unreadable) -> None:
        """Count it and log it, unless it was seen before."""
        with self._lock:
            if (error.kind, error.id) in self._seen:
                return
            if len(self._seen) >= _REMEMBERED:
                self._seen.clear()
            self._seen.add((error.kind, error.id))
            self._counts[error.kind] += 1
        log.warning("%s; it is skipped", error)

    def counts(self) -> dict[str, int]:
        """By kind: "record", "model card", "worker card"."""
        with self._lock:
            return {kind: self._counts[kind] for kind in ("record", "model card", "worker card")}


TALLY = Tally()  # of this process


def check_version(kind: str, id: str, version: object) -> None:
    """Raises `Unreadable` for what a newer version wrote. None, or none given, is of the time before versions."""
    if version is None:
        return
    if not str(version).isdecimal():
        raise Unreadable(kind, id, "its version is no number")
    if int(str(version)) > VERSION:
        raise Unreadable(kind, id, f"it is of version {int(str(version))}, newer than {VERSION}")
