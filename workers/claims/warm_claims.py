"""Leaves jobs to workers that have their files in memory, for a bounded time, and announces this worker's files.

A worker that takes a message for a job whose files it would have to read offers the job to workers that have them, and
claims it itself unless one of these does so in `wait_s`. Until then it keeps a place for the job: so nothing is
overtaken for longer, even if a worker dies meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from core.jobs.broker import Envelope
from core.jobs.holders import FileHolders
from core.jobs.leases import JobLeases
from workers.claims.store_retry import StoreRetry
from workers.metrics import METER

if TYPE_CHECKING:
    from workers.handlers import JobHandler

_OFFERED = 4  # workers at most
_LOOK_S = 0.05


class WarmClaims:
    """The claims of one worker. Thread-safe. Files are named as handlers name them, and known to others by their
    model's name, too.
    """

    def __init__(
        self,
        worker: str,
        leases: JobLeases,
        holders: FileHolders,
        store_retry: StoreRetry,
        message: Callable[[Envelope], str],
        handlers: Collection[JobHandler],
        *,
        wait_s: float,
        known_s: float,
    ) -> None:
        """`known_s`: so long after the last heartbeat others expect this worker to have its files; at least `wait_s`.

        `message` writes one to a worker. `handlers` may come to be more.
        """
        self._worker = worker
        self._leases = leases
        self._holders = holders
        self._store_retry = store_retry
        self._message = message
        self._handlers = handlers
        self._wait_s = wait_s
        self._known_s = known_s
        self._reading: Counter[str] = Counter()  # files of this worker's jobs, which are read or held for these
        self._announced: set[str] = set()
        self._lock = threading.Lock()

    def leave(self, envelope: Envelope, handler: JobHandler, stop: Callable[[], bool]) -> bool:
        """Return whether another worker has claimed a queued job, or will: waits while it is on offer, if it should be.

        Jobs with a deadline are not offered. An offer that comes when the files are gone from memory is left to the
        worker that made it.
        """
        if not self._wait_s or not handler.reads_files:
            return False
        unknown: tuple[dict[str, Any], bool] = {}, True
        parameters, urgent = self._store_retry.once(lambda: self._leases.asked(envelope.id), unknown)
        files = self._wanted(handler, parameters)
        if urgent or not files or files <= self._held():
            return False
        if envelope.to:
            self._store_retry.once(self.announce, None)
            return True
        until = time.monotonic() + self._wait_s
        other_claims = self._others(files)[:_OFFERED]
        if other_claims and not self._offer([replace(envelope, to=other) for other in other_claims]):
            return False
        while other_claims and not stop() and (left_s := until - time.monotonic()) > 0:
            time.sleep(min(left_s, _LOOK_S))
            if not self._store_retry.once(lambda: self._leases.glance(envelope.id)[0], True):
                return True
            other_claims = [*{*other_claims} & {*self._others(files)}]
        return False

    @staticmethod
    def _wanted(handler: JobHandler, parameters: dict[str, Any]) -> set[str]:
        """The files of a job; none of one that will be rejected or fail."""
        try:
            return _files(handler, handler.read(parameters)) if parameters else set()
        except Exception:  # also of a damaged record: its execution tells the error
            return set()

    def _others(self, files: Collection[str]) -> list[str]:
        """Workers that have these files; none while Redis is down."""
        nobody: list[str] = []
        holders = self._store_retry.once(lambda: self._holders.holders(files), nobody)
        return [holder for holder in holders if holder != self._worker]

    def _offer(self, envelopes: list[Envelope]) -> bool:
        messages = {envelope: self._message(envelope) for envelope in envelopes}
        return self._store_retry.once(lambda: self._leases.offer(messages, self._wait_s), False)

    @contextmanager
    def reading(self, job: Any, handler: JobHandler) -> Iterator[None]:
        """Context of a claimed job: counts the claim, and announces the files that it makes this worker read.

        Raises `Invalid` for files that cannot be named.
        """
        files = _files(handler, job)
        missing = files - self._held()
        if files:
            METER.claimed(warm=not missing)
        with self._lock:
            self._reading.update(files)
        if missing:
            self._store_retry.once(self.announce, None)
        try:
            yield
        finally:
            with self._lock:
                self._reading -= Counter(files)

    def announce(self, *, none: bool = False) -> None:
        """Announce all files in memory, or that there are none. Raises `StoreError`."""
        if self._wait_s:
            held_files = set() if none else self._held()
            with self._lock:
                gone, self._announced = self._announced - held_files, held_files
            self._holders.hold(self._worker, held_files, self._known_s, gone)

    def _held(self) -> set[str]:
        """Return the files in memory, and those of this worker's jobs."""
        with self._lock:
            reading = {*(+self._reading)}
        handlers = [*self._handlers]
        return {f"{handler.name}:{file}" for handler in handlers for file in handler.held_files()} | reading


def _files(handler: JobHandler, job: Any) -> set[str]:
    """Return the files that a job names."""
    return {f"{handler.name}:{file}" for file in handler.files(job)}
