"""Records a model's phases as CUDA graphs in priority order, in the background of live requests."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from core.batching.runner import Lane
from core.cuda_graphs import GraphCache
from core.graphs import ExecutableKey
from core.threads import started

log = logging.getLogger(__name__)

Record = Callable[[ExecutableKey, Callable[..., Any]], None]

_SHARE = 0.1  # of the device's time that recording may take under load
_POLL_S = 0.02  # interval of checks whether the load has ended


class GraphSet:
    """The graphs of one model: possible widths, recorded graphs, and the queue of those to record.

    Graphs that live requests missed come first, in order; then planned ones. Graph functions and `record_next` run on
    one thread, the lane's; everything else may be called on any.
    """

    def __init__(
        self, graphs: GraphCache, widths: Mapping[str, Sequence[int]], record: Record, *, settles: bool = True
    ) -> None:
        """`widths` are the numbers of rows that each phase is recorded at, ascending. `record(key, run)` calls `run`
        with arguments of that shape, within `torch.inference_mode`: that records them. `settles`: the device is settled
        after the last one too, not only after one that failed.
        """
        self._settles = settles
        self._graphs = graphs
        self._widths = widths
        self._record = record
        self._chosen: dict[ExecutableKey, list[int]] = {}  # other widths, by their keys at no rows
        self._missed: dict[ExecutableKey, None] = {}
        self._planned: dict[ExecutableKey, None] = {}
        self._lock = threading.Lock()
        self.failed: dict[ExecutableKey, str] = {}  # failed recordings, and why; not retried
        self.spent_s = 0.0  # on all recordings so far
        self._tried = 0

    def width(self, phase: str, rows: int) -> int:
        """Return the width that so many rows are padded to: the next one, or the rows themselves beyond the widest."""
        return next((width for width in self._widths[phase] if width >= rows), rows)

    @property
    def recording_s(self) -> float:
        """Return the mean seconds of one recording so far."""
        return self.spent_s / self._tried if self._tried else math.inf

    @property
    def room(self) -> int:
        """Return how many more can be kept, with all that are wanted."""
        return max(0, self._graphs.capacity - self.counts[1])

    def recorded(self, key: ExecutableKey, widest: int) -> list[int]:
        """Return the recorded widths from the key's rows to the widest."""
        widths = {*self._chosen.get(replace(key, rows=0), ()), widest}
        return [width for width in sorted(widths) if key.rows <= width <= widest and self.has(replace(key, rows=width))]

    def choose(self, key: ExecutableKey) -> None:
        """Record this one too, beside the phase's own widths, because it pays."""
        if key not in self.failed:
            widths = self._chosen.setdefault(replace(key, rows=0), [])
            widths[:] = sorted({width for width in widths if self.has(replace(key, rows=width))} | {key.rows})
            self.missed(key)

    @property
    def records(self) -> bool:
        """Return whether it records at all. If not, everything counts as recorded."""
        return self._graphs.records

    def has(self, key: ExecutableKey) -> bool:
        return not self.records or self._graphs.has(key.phase, key.shape)

    def wider(self, key: ExecutableKey) -> ExecutableKey | None:
        """Return the narrowest recorded graph of this phase and size that is wider."""
        wider = (replace(key, rows=width) for width in self._widths[key.phase] if width > key.rows)
        return next((candidate for candidate in wider if self.has(candidate)), None)

    def function(self, key: ExecutableKey) -> Callable[..., Any]:
        """Return the phase at this shape: replayed once it is recorded, launched kernel by kernel until then."""
        return partial(self._graphs.run, key.phase, key.shape)

    def plan(self, keys: Iterable[ExecutableKey]) -> None:
        """Queue these for recording, in this order, after earlier ones; none of phases that are never recorded."""
        candidates = (key for key in keys if key.phase in self._widths)
        with self._lock:
            self._planned |= dict.fromkeys(key for key in candidates if not self.has(key) and key not in self.failed)

    def missed(self, key: ExecutableKey) -> None:
        """Queue a graph that a live request needs: it is recorded before planned ones.

        Of more than can be kept the ones that were missed first are given up: their requests are likely over.
        """
        if not self.has(key) and key not in self._missed and key not in self.failed:
            with self._lock:
                self._missed[key] = None
                while len(self._missed) > self._graphs.capacity:
                    del self._missed[next(iter(self._missed))]

    @property
    def pending(self) -> bool:
        """Return whether anything is still to be recorded."""
        return bool(self._missed or self._planned)

    @property
    def counts(self) -> tuple[int, int]:
        """Return how many graphs are recorded, and how many are wanted: recorded, queued and failed ones."""
        with self._lock:
            waiting = len(self._missed.keys() | self._planned.keys())
        recorded = len(self._graphs)
        return recorded, recorded + waiting + len(self.failed)

    def record_next(self) -> bool:
        """Record the next one; False if none is left. A failed one is logged and runs without a graph.

        Raises only if the device itself is lost.
        """
        with self._lock:
            key = next(iter(self._missed or self._planned), None)
        if key is None:
            return False
        self.record_now(key)
        return True

    def record_now(self, key: ExecutableKey) -> None:
        """Record this one, as `record_next` does, unless it is recorded or has failed."""
        if self.has(key) or key in self.failed:
            return
        started = time.monotonic()
        try:
            self._record(key, partial(self._graphs.record, key.phase, key.shape))
        except Exception as error:
            self._graphs.settle()
            reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"
            if not self.has(key):
                self.failed[key] = reason
                log.warning("%s at %d rows, %s, runs without a graph (%s)", key.phase, key.rows, key.size, reason)
        took_s = time.monotonic() - started
        self.spent_s += took_s
        self._tried += 1
        with self._lock:
            self._missed.pop(key, None)
            self._planned.pop(key, None)
        log.debug("recording %s at %d rows, %s, took %.2f s", key.phase, key.rows, key.size, took_s)
        if self._settles and not self.pending:
            self._graphs.settle()
            log.info("recorded %d of %d graphs in %.1f s", *self.counts, self.spent_s)


class BackgroundRecorder:
    """Records on the lane between iterations, from a thread that ends when nothing is left to record.

    Under load, recording takes at most `share` of the time: it pauses after each one accordingly. Without load it does
    not pause; a request that comes meanwhile waits for one recording at most.
    """

    def __init__(
        self,
        lane: Lane,
        record_next: Callable[[], bool],
        busy: Callable[[], bool],
        *,
        share: float = _SHARE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`record_next` records one graph, on the lane's thread, and returns whether there was one; `busy` returns
        whether requests are running.
        """
        self._lane = lane
        self._record_next = record_next
        self._busy = busy
        self._pause = 1 / share - 1
        self._clock = clock
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._again = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start recording, unless it is running. On any thread, the lane's too."""
        with self._lock:
            self._again = True
            if self._thread is None and not self._closing.is_set():
                thread = threading.Thread(target=self._run, name="record", daemon=True)
                self._thread = thread if started(thread) else None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until there is nothing left to record; False after `timeout_s`. Not on the lane's thread."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def close(self) -> None:
        """End after the recording in progress. Not on the lane's thread."""
        with self._lock:
            self._closing.set()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._again = False
                recorded, took_s = self._record_one()
                if not recorded:
                    with self._lock:
                        if not self._again:  # nothing was queued since
                            self._thread = None
                            return
                    continue
                until = self._clock() + self._pause * took_s
                while self._busy() and self._clock() < until:
                    if self._closing.wait(_POLL_S):
                        return
        except Exception:
            # After a failure each iteration falls back to single kernels; a lost device ends the engine itself.
            log.exception("no more graphs are recorded")

    def _record_one(self) -> tuple[bool, float]:
        """Record one on the lane; returns whether there was one, and its seconds of the lane's time."""

        def record() -> tuple[bool, float]:
            started = self._clock()
            return self._record_next(), self._clock() - started

        return self._lane.call(record)
