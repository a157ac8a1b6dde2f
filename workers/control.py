"""Listens for what a worker is told while it works: which jobs nobody wants any more.

Knows the worker's control stream; leaves what a message means for the engine to its caller.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from core.jobs.registry import Registry
from workers.outage import Outage

log = logging.getLogger(__name__)

_BLOCK_S = 0.5
_PAUSE_S = 0.5  # after Redis did not answer


class Control:
    """A thread that blocks in Redis. It survives Redis; whom it misses, the next renewal of leases finds."""

    def __init__(
        self, registry: Registry, outage: Outage, worker: str, cancel: Callable[[str, str | None], object]
    ) -> None:
        """`cancel` is called on the thread, with a job's id and the fencing token of the attempt that nobody wants."""
        self._registry = registry
        self._outage = outage
        self._worker = worker
        self._cancel = cancel
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; returns when it has ended, after a second or so."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        after = "0"
        while not self._stopped.is_set():
            heard = self._listen(after)
            if heard is None:
                self._stopped.wait(_PAUSE_S)
            else:
                after = heard

    def _listen(self, after: str) -> str | None:
        """Obey what has come after this message, and return the last one's id. None: Redis did not answer."""
        try:
            messages = self._outage.once(lambda: self._registry.control(self._worker, after, _BLOCK_S), None)
            for id, message in messages or ():
                after = id
                if "cancel" in message:
                    self._cancel(message["cancel"], _fence(message))
        except Exception:  # whatever a message holds: the next one must be heard too
            log.exception("the control stream could not be read")
            return None
        return after if messages is not None else None


def _fence(message: Mapping[str, str]) -> str | None:
    """None in a message of a version that named the job alone."""
    if not message.get("of"):
        return None
    return f"{message['attempt']}@{message['of']}"
