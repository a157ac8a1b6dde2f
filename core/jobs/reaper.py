"""Two threads: one sweeps the store and sends the messages that the sweep found due, one deletes expired artifacts.

Runs in every process that can send. They are separate because an artifact store may never reply, and the sweep must not
wait for it.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable

from core.jobs.broker import Envelope
from core.jobs.connection import StoreError
from core.jobs.upkeep import JobUpkeep
from core.threads import VitalThread

log = logging.getLogger(__name__)

_LIMIT = 100
_MOMENT_S = 2.0
_JITTER = random.SystemRandom()  # without a state that other threads, forks or a caller's seed share


class Reaper:
    """Sweeps every `every_s` seconds, ±25%, until stopped. Survives exceptions of the store and of `send`.

    A message that cannot be sent is found again by a later sweep, in this process or another.
    """

    def __init__(
        self,
        upkeep: JobUpkeep,
        send: Callable[[Envelope], None],
        every_s: float = 2.0,
        delete: Callable[[str], None] | None = None,
    ) -> None:
        """`delete` deletes an artifact that no record references; without it another process must."""
        self._delete = delete
        self._upkeep = upkeep
        self._send = send
        self._every_s = every_s
        self._stop = threading.Event()
        self._failing: set[str] = set()  # failures logged already; removed once they work again
        self._thread = VitalThread(target=self._run, args=(self._pass,), name="reaper", daemon=True)
        self._clearer = VitalThread(target=self._run, args=(self._clear,), name="clearer", daemon=True)

    def start(self) -> None:
        """Start sweeping."""
        self._thread.start()
        if self._delete is not None:
            self._clearer.start()

    def stop(self) -> None:
        """Stop the threads; returns when the current sweep has ended. A deletion in progress gets a short grace
        period.
        """
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self._clearer.ident is not None:
            self._clearer.join(_MOMENT_S)

    def _run(self, work: Callable[[], bool]) -> None:
        while not self._stop.wait(self._every_s * _JITTER.uniform(0.75, 1.25)):  # keeps processes from sweeping in step
            while work() and not self._stop.is_set():
                pass

    def _pass(self) -> bool:
        """Run one sweep. Returns whether more may be due at once."""
        try:
            sweep = self._upkeep.sweep(_LIMIT)
        except StoreError as error:
            self._say("sweep", f"sweeps are paused: {error}")
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
            except Exception as error:  # of Celery, kombu or redis: this package does not import them all
                self._say("send", f"cannot resend messages, retrying in the next sweep: {type(error).__name__}")
                return False
            self._well("send")
        return max(len(sweep.send), len(sweep.expired), len(sweep.failed), sweep.over) >= _LIMIT

    def _clear(self) -> bool:
        """Delete due artifacts. Returns whether more may be due at once."""
        if self._delete is None:
            return False
        gone: list[str] = []
        try:
            due = self._upkeep.due(_LIMIT)
            for artifact in due:
                if self._stop.is_set():
                    break
                self._delete(artifact)
                gone.append(artifact)
            self._upkeep.gone(gone)
        except Exception as error:  # of the store or the artifact storage: undeleted ones are listed again
            self._say("clear", f"unreferenced artifacts are not deleted for now: {error}")
            return False
        self._well("clear")
        return len(due) >= _LIMIT

    def _say(self, name: str, message: str) -> None:
        if name not in self._failing:
            log.warning("reaper: %s", message)
        self._failing.add(name)

    def _well(self, name: str) -> None:
        if name in self._failing:
            log.info("reaper: recovered (%s)", name)
        self._failing.discard(name)
