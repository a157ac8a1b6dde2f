"""Retries Redis calls through an outage, which is logged once when it begins and once when it ends."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from core.jobs.connection import StoreDown, StoreError, StoreFull

log = logging.getLogger(__name__)
T = TypeVar("T")

_SHORTEST_S, _LONGEST_S = 0.1, 1.0  # between two retries of one thread
_SAY_AGAIN_S = 60.0
_JITTER = random.SystemRandom()  # without a state that other threads, forks or a caller's seed share


class RetryAbandoned(RuntimeError):
    """The awaited Redis call is no longer needed."""


class StoreRetry:
    """Shared by all threads of a process that use the store."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._since: float | None = None
        self._said_full = -_SAY_AGAIN_S

    @property
    def lasts(self) -> bool:
        return self._since is not None

    def patiently(self, call: Callable[[], T], *, unless: Callable[[], bool] = lambda: False) -> T:
        """Call until the store succeeds. Raises `RetryAbandoned` once `unless` returns True after a failure.

        Errors that a retry cannot fix are raised.
        """
        wait_s = _SHORTEST_S
        while True:
            try:
                value = call()
            except (StoreDown, StoreFull) as error:
                self._refused(error)
                if unless():
                    raise RetryAbandoned(str(error)) from error
            else:
                self._answered()
                return value
            with self._changed:  # one success wakes all waiters; otherwise their retries are staggered
                self._changed.wait(wait_s * _JITTER.uniform(0.5, 1.0))
            wait_s = min(2 * wait_s, _LONGEST_S)

    def once(self, call: Callable[[], T], otherwise: T) -> T:
        """Call once, and return `otherwise` if the store fails: for calls that are repeated soon anyway."""
        try:
            value = call()
        except (StoreDown, StoreFull) as error:
            self._refused(error)
            return otherwise
        self._answered()
        return value

    def _refused(self, error: StoreError) -> None:
        now = time.monotonic()
        with self._changed:
            if isinstance(error, StoreFull):  # Redis replies, and writes that end a job still succeed
                if now - self._said_full >= _SAY_AGAIN_S:
                    self._said_full = now
                    log.warning("%s: progress events and new jobs are paused", error)
            elif self._since is None:
                self._since = now
                log.warning("%s: running jobs continue and are written when Redis is available", error)

    def _answered(self) -> None:
        if self._since is None:
            return
        with self._changed:
            if self._since is not None:
                log.info("Redis is available again after %.1f s", time.monotonic() - self._since)
                self._since = None
                self._changed.notify_all()
