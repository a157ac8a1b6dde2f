"""Listens on the worker's control stream for cancelled jobs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from core.jobs.record import fence
from core.jobs.registry import Registry
from core.threads import VitalThread
from workers.claims.store_retry import StoreRetry

log = logging.getLogger(__name__)

_BLOCK_S = 0.5
_PAUSE_S = 0.5  # after Redis did not reply


class ControlListener:
    """A thread that blocks on Redis, and retries through outages; missed cancellations are found at the next lease
    renewal.
    """

    def __init__(
        self, registry: Registry, store_retry: StoreRetry, worker: str, cancel: Callable[[str, str | None], object]
    ) -> None:
        """`cancel` is called on the thread, with a job's id and the fencing token of the cancelled attempt."""
        self._registry = registry
        self._store_retry = store_retry
        self._worker = worker
        self._cancel = cancel
        self._stopped = threading.Event()
        self._thread = VitalThread(target=self._run, name="control", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; returns when it has ended, after about a second."""
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
        """Handle the messages after this one, and return the last id. None: Redis did not reply."""
        try:
            messages = self._store_retry.once(lambda: self._registry.control(self._worker, after, _BLOCK_S), None)
            for id, message in messages or ():
                after = id
                if "cancel" in message:
                    # A version that sends only the job's id means any attempt.
                    of = message.get("of")
                    self._cancel(message["cancel"], fence(message["attempt"], of) if of else None)
        except Exception:  # whatever a message contains, later ones must still be read
            log.exception("the control stream could not be read")
            return None
        return after if messages is not None else None
