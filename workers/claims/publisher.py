"""Publishes progress: one thread collects the engine thread's reports and writes them in one round trip per tick, at
most twenty a second.

While the thread is busy, only a job's newest progress, and its images' newest previews, are kept. Text is never
dropped: unsent pieces go with the next progress, if anybody follows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from core.jobs.leases import JobLeases
from core.jobs.record import ProgressReport
from core.threads import VitalThread
from workers.claims.store_retry import StoreRetry
from workers.images.formats import preview
from workers.text.stream_buffer import StreamBuffer

log = logging.getLogger(__name__)

_TICK_S = 0.02  # longest wait for the end of the tick that a report came from
_PAUSE_S = 0.05  # between round trips: faster updates would be invisible, and only fill the stream


class ProgressPublisher:
    """`say` never blocks. Progress that Redis does not accept is dropped: the next report supersedes it."""

    def __init__(
        self, leases: JobLeases, store_retry: StoreRetry, ticks: Callable[[], int], stale: Callable[[str, Any], object]
    ) -> None:
        """`ticks` counts the engine's ticks. `stale` is called with id and fencing token of attempts this worker has
        lost.
        """
        self._leases = leases
        self._store_retry = store_retry
        self._ticks = ticks
        self._stale = stale
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._said: dict[str, tuple[ProgressReport, StreamBuffer | None]] = {}
        self._looks: dict[str, dict[int, Any]] = {}
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self.flushes = 0
        self._thread = VitalThread(target=self._run, name="publisher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Write what is left, and end the thread. Must follow `start`."""
        self._stopping.set()
        self._wake.set()
        self._thread.join()

    def say(
        self, id: str, attempt: int | str, data: dict[str, Any], look: Any = None, written: StreamBuffer | None = None
    ) -> None:
        """Queue a job's progress, on the engine's thread; `attempt` is its fencing token.

        `look` is a preview of its image `data["image"]`, as pixels; `written` holds its texts so far.
        """
        with self._lock:
            if look is not None:
                self._looks.setdefault(id, {})[data["image"]] = look
            self._said[id] = ProgressReport(id, attempt, data), written
        self._wake.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake.wait()
            self._wake.clear()
            # The engine reports all requests of a batch in turn; they are written together.
            tick, until = self._ticks(), time.monotonic() + _TICK_S
            while self._ticks() == tick and time.monotonic() < until and not self._stopping.is_set():
                time.sleep(0.001)
            self.flush()
            self._stopping.wait(_PAUSE_S)

    def flush(self) -> None:
        """Write all queued reports, so that a job's last progress precedes its end."""
        with self._writing:  # serialized, so that progress stays in order
            with self._lock:
                pending, self._said = self._said, {}
                looks, self._looks = self._looks, {}
            if pending:
                self.flushes += 1
                self._write({id: (_with(pending[id][0], looks.get(id, {})), pending[id][1]) for id in pending})

    def _write(self, pending: dict[str, tuple[ProgressReport, StreamBuffer | None]]) -> None:
        news = {id: written.news() for id, (_, written) in pending.items() if written is not None and written.followed}
        reports = []
        for id, (report, written) in pending.items():
            if id in news:
                report = replace(report, pieces=news[id].pieces, complete=news[id].complete)
            elif written is not None and written.cumulative:
                report = replace(report, data={**report.data, **written.so_far()})
            reports.append(report)
        try:
            replies = self._store_retry.once(lambda: self._leases.report(reports), None)
        except Exception:  # a failed write must not end the thread
            log.exception("progress could not be published")
            return
        if replies is None:
            return
        for id, (report, written) in pending.items():
            if id in replies.stale:
                self._stale(id, report.attempt)
            elif written is not None:
                if id in news:
                    written.told(news[id])
                written.followed |= id in replies.followed


def _with(report: ProgressReport, looks: Mapping[int, Any]) -> ProgressReport:
    """The report with previews, encoded here to spare the engine's thread."""
    if not looks:
        return report
    encoded = {image: preview(pixels) for image, pixels in looks.items()}
    return replace(report, data={**report.data, "previews": list(encoded)}, previews=encoded)
