"""Runs batches: submits their lines as jobs, a limited number per key, and stores the results.

One API process does so at a time; the next one continues from the stored position. Each key's batches of a queue are
one item of a pool, so that keys do not delay each other. submitter.py submits lines, collector.py stores
their results, output.py writes files.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Sequence
from functools import partial

from api.batches.collector import BatchCollector
from api.batches.line_handler import BatchLineHandler
from api.batches.output import BatchOutput
from api.batches.routes import WINDOW_S, queue_of
from api.batches.submitter import BatchSubmitter
from api.concurrency.poller import Poller
from api.concurrency.tenant_pool import Deadline, TenantPool
from api.errors import ApiError
from api.service import Service
from core.artifacts import ArtifactError, NoArtifact
from core.jobs.batches import BatchProgress, BatchRecord, FeederLease
from core.jobs.connection import StoreError
from core.jobs.record import to_json

log = logging.getLogger(__name__)

_LEASE_S = 10.0  # after which another process may take over
_THREADS = 8
_STEP_S = 1.0  # of work on one key's batches, before the next key's turn
_ITEM_S = 60.0  # time limit of a hanging step, after which its thread is abandoned
_OUTPUTS = 4  # batches of one key and queue whose files are being written
_PAUSES_S = (1.0, 2.0, 5.0, 15.0, 30.0)  # between retries after a batch-wide error


class BatchFeeder:
    """A background service, started and closed with the API. Retries through Redis outages."""

    def __init__(self, service: Service) -> None:
        self._store = service.batches
        self._service = service
        self._lease = FeederLease(service.redis)
        self._shares = {"image": service.settings.batch_jobs, "text": service.settings.batch_texts}
        self._lines = BatchLineHandler(service)
        self._submitter = BatchSubmitter(service, self._lines)
        self._collector = BatchCollector(service, self._lines)
        self._outputs: dict[str, BatchOutput] = {}
        self._retries: dict[str, tuple[int, float]] = {}  # batch → its failures in a row, and the time of its next try
        self._pool = TenantPool("batches", _THREADS, of_tenant=2, of_lane=1, item_s=_ITEM_S)
        self._poller = Poller("batches", "batches", self._look)

    def start(self) -> None:
        self._poller.start()

    def stop(self) -> None:
        self._poller.stop()
        self._pool.stop()
        with contextlib.suppress(StoreError):
            self._lease.release()

    def _look(self) -> None:
        if self._lease.acquire(_LEASE_S):
            for owner, queue, ids in self._lanes():
                self._pool.submit(owner, queue, f"{owner}|{queue}", partial(self._step, ids))
        elif self._outputs and self._pool.room == _THREADS:  # another process writes these files now
            for id in list(self._outputs):
                self._outputs.pop(id).close()

    def work(self) -> None:
        """Run one step of every key's batches, on this thread."""
        for _, _, ids in self._lanes():
            self._step(ids, Deadline(_ITEM_S))

    def _lanes(self) -> list[tuple[str, str, list[str]]]:
        """Return owner, queue and batches, oldest first."""
        lanes: dict[tuple[str, str], list[str]] = {}
        active = self._store.active()
        for id, owner, endpoint in active:
            if endpoint:
                lanes.setdefault((owner, queue_of(endpoint)), []).append(id)
            else:
                self._store.drop(id)
        active_ids = {id for id, _, _ in active}
        for id in self._retries.keys() - active_ids:
            self._retries.pop(id, None)
        self._submitter.forget_others(active_ids)
        return [(owner, queue, ids) for (owner, queue), ids in lanes.items()]

    # -- one key's batches of one queue --------------------------------------------------------------------------------

    def _step(self, ids: Sequence[str], bound: Deadline) -> None:
        """Store ended results, submit lines while there is room, and write files, for the duration of one step."""
        until = min(time.monotonic() + _STEP_S, bound.until)
        try:
            if self._advance_all(self._store.progress(ids), until):
                self._poller.wake()
        except StoreError as error:
            log.warning("batches are paused: %s", error)

    def _advance_all(self, looks: Sequence[BatchProgress], until: float) -> bool:
        """Advance each batch; return whether there is more to do at once."""
        busy = sum(len(look.under_way) for look in looks)
        ending: list[tuple[BatchRecord, str]] = []
        for look in looks:  # oldest first
            if self._poller.stopping:
                return False
            if self._retries.get(look.batch.id, (0, 0.0))[1] > time.monotonic():
                continue
            try:
                left = self._collector.collect(look)
                busy += left - len(look.under_way)
                begun, status = self._advance(look.batch, left, busy, until)
                busy += begun
                if begun:
                    self._retries.pop(look.batch.id, None)
                if status:
                    ending.append((look.batch, status))
            except StoreError:
                raise
            except Exception as error:
                self._failed(look.batch, error)
        return self._finish_some(ending, until)

    def _advance(self, batch: BatchRecord, left: int, busy: int, until: float) -> tuple[int, str]:
        """Submit lines of a batch; returns how many, and the status that it ends with now ("": it goes on).

        `left` are its jobs in progress, `busy` those of all the key's batches of this queue.
        """
        over = time.time() > batch.created + WINDOW_S
        if batch.status == "cancelling" or over:
            status = "expired" if over else "cancelled"
            return 0, status if self._collector.end_early(batch, status) else ""
        if batch.next < batch.total:
            room = self._shares[queue_of(batch.endpoint)] - busy
            go_on = lambda: time.monotonic() < until and not self._poller.stopping  # noqa: E731
            return self._submitter.submit(batch, room, go_on), ""
        return 0, "" if left else "completed"

    def _finish_some(self, ending: Sequence[tuple[BatchRecord, str]], until: float) -> bool:
        """Write the files of the oldest batches that end, in turn. Whether there is more to do at once."""
        turns = deque(ending[:_OUTPUTS])
        while turns and time.monotonic() < until and not self._poller.stopping:
            batch, status = turns.popleft()
            try:
                if not self._finish(batch, status, until):
                    turns.append((batch, status))
            except StoreError:
                raise
            except Exception as error:
                self._failed(batch, error)
        return bool(turns) or len(ending) > _OUTPUTS

    def _failed(self, batch: BatchRecord, error: Exception) -> None:
        """Skip a batch for a while; one that keeps failing with an unexpected error fails."""
        if (output := self._outputs.pop(batch.id, None)) is not None:
            output.close()
        times = self._retries.get(batch.id, (0, 0.0))[0]
        self._retries[batch.id] = times + 1, time.monotonic() + _PAUSES_S[min(times, len(_PAUSES_S) - 1)]
        if isinstance(error, NoArtifact):  # the artifact was deleted by hand
            log.warning("batch %s failed: its input file is missing", batch.id)
            self._store.turn(batch, "failed", ended=int(time.time()))
        elif isinstance(error, ArtifactError | ApiError):
            log.warning("batch %s is paused: %s", batch.id, error)
        else:
            log.error("batch %s cannot be processed", batch.id, exc_info=error)
            if times + 1 >= len(_PAUSES_S):
                wrong = {
                    "code": "internal_error",
                    "line": None,
                    "message": "The batch cannot be processed.",
                    "param": None,
                }
                self._store.turn(batch, "failed", ended=int(time.time()), errors=to_json([wrong]))

    def _finish(self, batch: BatchRecord, status: str, until: float) -> bool:
        """Write results for a limited time. Returns whether the batch has ended. Raises `ArtifactError`."""
        output = self._outputs.get(batch.id)
        if output is None or output.status != status:
            if output is not None:
                output.close()
            output = self._outputs[batch.id] = BatchOutput(self._service, self._lines, batch, status)
        portion = time.monotonic() + _STEP_S / _OUTPUTS
        if not output.write(lambda: time.monotonic() < min(portion, until) and not self._poller.stopping):
            return False
        output.end()
        self._outputs.pop(batch.id).close()
        self._retries.pop(batch.id, None)
        return True
