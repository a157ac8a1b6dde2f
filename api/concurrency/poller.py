"""A thread that calls a function periodically until it is stopped, and logs Redis outages once.

Used by batches/feeder.py and jobs/webhook_sender.py.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from core.jobs.connection import StoreError

log = logging.getLogger(__name__)

_EVERY_S = 0.5


class Poller:
    """Calls `look` every half second, one call after the other. Survives Redis outages and any exception of `look`."""

    def __init__(self, name: str, subject: str, look: Callable[[], None]) -> None:
        """`name` is the thread's; `subject` describes the delayed work in the log line about Redis."""
        self._what = subject
        self._look = look
        self._stopping = False
        self._wake = threading.Event()
        self._well = True
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def stopping(self) -> bool:
        """Whether `look` should return soon."""
        return self._stopping

    def wake(self) -> None:
        """Call `look` at once."""
        self._wake.set()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; return when the last call has ended."""
        self._stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._wake.wait(_EVERY_S)
            self._wake.clear()
            if self._stopping:
                return
            try:
                self._look()
                self._well = True
            except StoreError as error:
                if self._well:
                    log.warning("%s are paused: %s", self._what, error)
                self._well = False
            except Exception:
                log.exception("%s cannot be processed", self._what)
