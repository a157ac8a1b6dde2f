"""Heartbeat thread: renews the leases of active jobs and announces the worker's card.

It does so only while the engine makes progress; if the engine hangs, the process exits, and its jobs go to other
workers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from core import threads
from core.batching.engine import Engine
from core.jobs.cards import WorkerCard
from core.jobs.leases import JobLeases
from core.jobs.registry import Registry
from workers.claims.active_jobs import ActiveJobs
from workers.claims.store_retry import StoreRetry

log = logging.getLogger(__name__)

STUCK = 71  # exit code
_TICKING_S = 1.5  # the engine's thread ticks twice a second, even while its device is busy
_LOOK_S = 1.0
_SHOWN_S = 3.0  # minimum validity of a card: a busy machine may send the next one late


def end_process(reason: str) -> None:
    """Default action for a hung engine: log it, and exit without another call to the device."""
    threads.end_process(STUCK, "exiting; other workers take over the jobs: %s", reason)


class StallDetector:
    """Detects a hung engine by sampling its counters.

    Only time in which this process ran counts: a process resumed by SIGCONT is not yet stuck.
    """

    def __init__(self, engine: Engine, stuck_s: float, look_s: float, now: float) -> None:
        self._engine = engine
        self._stuck_s = stuck_s
        self._longest_s = 2 * look_s
        self._looked = now
        self._ticks = engine.ticks
        self._still_s = 0.0  # since the thread ticked
        self._since: float | None = None
        self._busy_s = 0.0  # in the oldest iteration

    def look(self, now: float) -> None:
        """Sample the counters. `now` is seconds on a monotonic clock."""
        passed_s = min(now - self._looked, self._longest_s)
        self._looked = now
        ticks, since = self._engine.ticks, self._engine.busy_since
        self._still_s = 0.0 if ticks != self._ticks else self._still_s + passed_s
        self._busy_s = 0.0 if since is None or since != self._since else self._busy_s + passed_s
        self._ticks, self._since = ticks, since

    @property
    def ticks(self) -> bool:
        """Return whether the engine's thread has ticked recently."""
        return self._still_s < _TICKING_S

    @property
    def stuck(self) -> str:
        """The reason why this engine counts as hung; empty if it does not."""
        if not self._engine.alive:
            return "the engine's thread has ended"
        if self._still_s > self._stuck_s:
            return f"the engine's thread has not moved for {self._still_s:.1f} s"
        if self._busy_s > self._stuck_s:
            return f"one iteration takes longer than {self._stuck_s:g} s: the device hangs"
        return ""


class Heartbeat:
    """Beats three times per lease. Retries as soon as Redis is back."""

    def __init__(
        self,
        leases: JobLeases,
        registry: Registry,
        store_retry: StoreRetry,
        active_jobs: ActiveJobs,
        worker: str,
        card: Callable[[], WorkerCard],
        paused: Callable[[frozenset[str]], object] = lambda queues: None,
        *,
        lease_s: float,
        stuck_s: float,
        end: Callable[[str], None] = end_process,
    ) -> None:
        """`paused` is called at each beat with the paused queues."""
        self._leases = leases
        self._registry = registry
        self._store_retry = store_retry
        self._active_jobs = active_jobs
        self._worker = worker
        self._card = card
        self._paused = paused
        self._lease_s = lease_s
        self._stuck_s = stuck_s
        self._end = end
        self._look_s = min(_LOOK_S, lease_s / 3, stuck_s / 4)
        self._stall_detector: StallDetector | None = None
        self._poked = threading.Event()
        self._stopping = False
        self._thread = threads.VitalThread(target=self._run, name="heart", daemon=True)

    def start(self) -> None:
        """Start announcing the card. There are no leases to renew before `watch`."""
        self._thread.start()

    def watch(self, engine: Engine) -> None:
        """Beat from now on only while this engine makes progress."""
        self._stall_detector = StallDetector(engine, self._stuck_s, self._look_s, time.monotonic())

    def poke(self) -> None:
        """Beat now: the card has changed."""
        self._poked.set()

    def stop(self) -> None:
        """Stop the thread; returns when it has ended. Call before the engine is closed."""
        self._stopping = True
        self._poked.set()
        self._thread.join()

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stopping:
            now = time.monotonic()
            if self._stall_detector is not None:
                self._stall_detector.look(now)
                if self._stall_detector.stuck:
                    self._end(self._stall_detector.stuck)
                    return
            if now >= due and (self._stall_detector is None or self._stall_detector.ticks):
                try:
                    if self._beat():
                        due = now + self._lease_s / 3
                except Exception:  # an ended thread would cost all jobs their leases
                    log.exception("a heartbeat failed")
            if self._poked.wait(self._look_s):
                self._poked.clear()
                due = now

    def _beat(self) -> bool:
        """Send a heartbeat; return whether Redis has accepted it."""
        leases = self._active_jobs.leases()
        lost = self._store_retry.once(lambda: self._leases.renew(self._worker, leases), None)
        for id in lost or ():
            if self._active_jobs.abandon(id, leases[id]):
                log.info("this worker lost the lease of job %s", id)
        return self._store_retry.once(self._show, False) and lost is not None

    def _show(self) -> bool:
        self._paused(self._registry.announce(self._card(), max(self._lease_s, _SHOWN_S)))
        return True
