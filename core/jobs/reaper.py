"""A thread that sweeps the store and sends what the sweep finds, and one that deletes what is due.

Runs in every process that can send. Where artifacts are kept nobody may ever answer: the sweep waits for none of it.

Knows when; the store knows what, `send` and `delete` know how.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable

from core.jobs.broker import Envelope
from core.jobs.connection import StoreError
from core.jobs.store import JobStore

log = logging.getLogger(__name__)

_LIMIT = 100
_MOMENT_S = 2.0


class Reaper:
    """Sweeps every `every_s` seconds, give or take a quarter, until stopped. Survives what the store and `send` raise.

    What cannot be sent is found again by a later sweep, here or elsewhere.
    """

    def __init__(
        self,
        store: JobStore,
        send: Callable[[Envelope], None],
        every_s: float = 2.0,
        delete: Callable[[str], None] | None = None,
    ) -> None:
        """`delete` takes an artifact away that no record names any more; without it others must do that."""
        self._delete = delete
        self._store = store
        self._send = send
        self._every_s = every_s
        self._stop = threading.Event()
        self._failing: set[str] = set()  # what went wrong and was said, until it goes well again
        self._thread = threading.Thread(target=self._run, args=(self._pass,), name="reaper", daemon=True)
        self._clearer = threading.Thread(target=self._run, args=(self._clear,), name="clearer", daemon=True)

    def start(self) -> None:
        """Begin to sweep."""
        self._thread.start()
        if self._delete is not None:
            self._clearer.start()

    def stop(self) -> None:
        """End the threads; returns when the sweep has ended. A deletion under way gets a moment."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self._clearer.ident is not None:
            self._clearer.join(_MOMENT_S)

    def _run(self, work: Callable[[], bool]) -> None:
        while not self._stop.wait(self._every_s * random.uniform(0.75, 1.25)):  # many processes, not in step
            while work() and not self._stop.is_set():
                pass

    def _pass(self) -> bool:
        """One sweep. Whether there may be more at once."""
        try:
            sweep = self._store.sweep(_LIMIT)
        except StoreError as error:
            self._say("sweep", f"no sweep until it is better: {error}")
            return False
        except Exception:
            log.exception("the sweep failed")
            return False
        self._well("sweep")
        if sweep.expired or sweep.failed:
            log.info("swept: %d jobs expired, %d failed with their workers", len(sweep.expired), len(sweep.failed))
        for envelope in sweep.send:
            if self._stop.is_set():
                return False
            try:
                self._send(envelope)
            except Exception as error:  # of Celery, kombu or redis: this room does not know them
                self._say("send", f"cannot send jobs again, the next sweeps try: {type(error).__name__}")
                return False
            self._well("send")
        return max(len(sweep.send), len(sweep.expired), len(sweep.failed), sweep.over) >= _LIMIT

    def _clear(self) -> bool:
        """Delete what is due. Whether there may be more at once."""
        if self._delete is None:
            return False
        gone: list[str] = []
        try:
            due = self._store.due(_LIMIT)
            for artifact in due:
                if self._stop.is_set():
                    break
                self._delete(artifact)
                gone.append(artifact)
            self._store.gone(gone)
        except Exception as error:  # of the store, or of where artifacts lie: what is not gone is told again
            self._say("clear", f"what nobody names any more stays for now: {error}")
            return False
        self._well("clear")
        return len(due) >= _LIMIT

    def _say(self, what: str, message: str) -> None:
        if what not in self._failing:
            log.warning("reaper: %s", message)
        self._failing.add(what)

    def _well(self, what: str) -> None:
        if what in self._failing:
            log.info("reaper: well again (%s)", what)
        self._failing.discard(what)
