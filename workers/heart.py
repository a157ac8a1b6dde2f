"""One thread that keeps a worker alive in the eyes of others: it renews leases and shows the worker's card.

It does so only while the engine makes headway; where that stands still, the process ends, and its jobs go to others.
Knows the engine's pulse, leases and cards; knows nothing of what is computed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from core.batching.engine import Engine
from core.jobs.cards import WorkerCard
from core.jobs.registry import Registry
from core.jobs.store import JobStore
from workers.hand import Hand
from workers.outage import Outage

log = logging.getLogger(__name__)

STUCK = 71  # the exit code
_TICKING_S = 1.5  # the engine's thread ticks twice a second, whatever its device does
_LOOK_S = 1.0
_SHOWN_S = 3.0  # the least that a card is shown for: a busy machine may be late with the next


def end_process(reason: str) -> None:
    """The default answer to an engine that stands still: say so, and end without another word to the device."""
    log.critical("the process ends, its jobs are left to others: %s", reason)
    logging.shutdown()
    os._exit(STUCK)


class Pulse:
    """Whether an engine makes headway, by looking at it now and then.

    Only time in which this process was running counts: after SIGSTOP and SIGCONT nothing is stuck yet.
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
        """Take note of what has moved since the last look. `now` is seconds on a clock that never goes back."""
        passed_s = min(now - self._looked, self._longest_s)
        self._looked = now
        ticks, since = self._engine.ticks, self._engine.busy_since
        self._still_s = 0.0 if ticks != self._ticks else self._still_s + passed_s
        self._busy_s = 0.0 if since is None or since != self._since else self._busy_s + passed_s
        self._ticks, self._since = ticks, since

    @property
    def ticks(self) -> bool:
        """Whether the engine's thread has ticked lately."""
        return self._still_s < _TICKING_S

    @property
    def stuck(self) -> str:
        """Why nothing can be expected of this engine any more; empty if something can."""
        if not self._engine.alive:
            return "the engine's thread has ended"
        if self._still_s > self._stuck_s:
            return f"the engine's thread has not moved for {self._still_s:.1f} s"
        if self._busy_s > self._stuck_s:
            return f"one iteration takes longer than {self._stuck_s:g} s: the device hangs"
        return ""


class Heart:
    """Beats three times a lease. Survives Redis: it beats again as soon as that is back."""

    def __init__(
        self,
        store: JobStore,
        registry: Registry,
        outage: Outage,
        hand: Hand,
        worker: str,
        card: Callable[[], WorkerCard],
        paused: Callable[[frozenset[str]], object] = lambda queues: None,
        *,
        lease_s: float,
        stuck_s: float,
        end: Callable[[str], None] = end_process,
    ) -> None:
        """`paused` is told with each beat which queues are."""
        self._store = store
        self._registry = registry
        self._outage = outage
        self._hand = hand
        self._worker = worker
        self._card = card
        self._paused = paused
        self._lease_s = lease_s
        self._stuck_s = stuck_s
        self._end = end
        self._look_s = min(_LOOK_S, lease_s / 3, stuck_s / 4)
        self._pulse: Pulse | None = None
        self._poked = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)

    def start(self) -> None:
        """Begin to show the card. There are no leases to renew before `watch`."""
        self._thread.start()

    def watch(self, engine: Engine) -> None:
        """Make everything depend on this engine's headway from now on."""
        self._pulse = Pulse(engine, self._stuck_s, self._look_s, time.monotonic())

    def poke(self) -> None:
        """Beat now: the card says something new."""
        self._poked.set()

    def stop(self) -> None:
        """End the thread; returns when it has ended. To be called before the engine is closed."""
        self._stopping = True
        self._poked.set()
        self._thread.join()

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stopping:
            now = time.monotonic()
            if self._pulse is not None:
                self._pulse.look(now)
                if self._pulse.stuck:
                    self._end(self._pulse.stuck)
                    return
            if now >= due and (self._pulse is None or self._pulse.ticks):
                try:
                    if self._beat():
                        due = now + self._lease_s / 3
                except Exception:  # whatever it was: a thread that ended would cost all jobs their leases
                    log.exception("a heartbeat failed")
            if self._poked.wait(self._look_s):
                self._poked.clear()
                due = now

    def _beat(self) -> bool:
        """Whether Redis has taken it."""
        held = self._hand.leases()
        lost = self._outage.once(lambda: self._store.renew(self._worker, held), None)
        for id in lost or ():
            if self._hand.drop(id, held[id]):
                log.info("%s is no longer this worker's", id)
        return self._outage.once(self._show, False) and lost is not None

    def _show(self) -> bool:
        self._paused(self._registry.announce(self._card(), max(self._lease_s, _SHOWN_S)))
        return True
