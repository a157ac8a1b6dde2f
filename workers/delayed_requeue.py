"""Delays and requeues messages for jobs whose model is not served by this worker.

This lets workers of several models share one queue while one replaces another. A held message is in no Redis list; if
this process dies with it, the store's sweep sends it again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from core.jobs.broker import Envelope
from core.threads import VitalThread

HOLD_S = 1.0  # lets a worker of that model take another message before this one returns
_EVERY_S = 0.01  # between sends: keeps thousands of messages without a worker from saturating this one


class DelayedRequeue:
    """A holder of delayed messages. Thread-safe."""

    def __init__(self, send: Callable[[Envelope], None], hold_s: float = HOLD_S) -> None:
        """`send` must not raise."""
        self._send = send
        self._hold_s = hold_s
        self._held: dict[str, tuple[float, Envelope]] = {}  # by job, in order of due time
        self._due = 0.0  # of the last one
        self._closed = False
        self._change = threading.Condition()
        self._thread = VitalThread(target=self._run, name="aside", daemon=True)
        self._thread.start()  # not with the first message, for which memory may be short

    def put(self, envelope: Envelope) -> None:
        """Hold the message; a second one for the same job is dropped. After `close` it is sent at once."""
        with self._change:
            if not self._closed:
                if envelope.id not in self._held:
                    self._due = max(time.monotonic() + self._hold_s, self._due + _EVERY_S)
                    self._held[envelope.id] = self._due, envelope
                self._change.notify()
                return
        self._send(envelope)

    def close(self) -> None:
        """Send all held messages at once, and hold no more. Idempotent."""
        with self._change:
            self._closed = True
            self._change.notify()
        self._thread.join()
        while self._held:
            self._send(self._held.pop(next(iter(self._held)))[1])

    def _run(self) -> None:
        while True:
            with self._change:
                while not self._closed and self._wait_s() > 0:
                    self._change.wait(min(self._wait_s(), threading.TIMEOUT_MAX))
                if self._closed:
                    return
                _, envelope = self._held.pop(next(iter(self._held)))
            self._send(envelope)

    def _wait_s(self) -> float:
        """Seconds until the first one is due."""
        first = next(iter(self._held.values()), None)
        return float("inf") if first is None else first[0] - time.monotonic()
