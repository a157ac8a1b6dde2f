"""Works at batches: hands their lines to the queue, so many of one key at once, and gathers what came of them.

One process of all that answer does so at a time, on a thread of its own; whoever takes over goes on where that stood.
Knows cursors, counts and turns; what a line asks for, and what is answered to it, lines.py knows.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections import Counter

from api import batches, files
from api.batches import WINDOW_S, queue_of
from api.errors import ApiError
from api.lines import Lines, Result, given_up, refusal
from api.poller import Poller
from api.service import Service
from core.artifacts import ArtifactError, NoArtifact
from core.jobs.batches import Batch
from core.jobs.connection import StoreError
from core.jobs.record import Job, JobState, to_json
from core.jobs.store import QueueFull

log = logging.getLogger(__name__)

_TURN_S = 10.0  # after so long another takes over
_KNOWN = 8  # files whose lines are remembered
_LARGE = 16_384  # characters of a result that is laid beside Redis: a thousand tokens' likeliest ones are megabytes
_LAID_S = 2 * WINDOW_S  # for which it lies there


class Trickle:
    """Started and closed with the service. Survives Redis: it tries again."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._store = service.batches
        self._shares = {"image": service.settings.batch_jobs, "text": service.settings.batch_texts}
        self._lines = Lines(service)
        self._parsed: dict[str, list[batches.Line]] = {}
        self._poller = Poller("trickle", "batches", self._look)

    def start(self) -> None:
        self._poller.start()

    def stop(self) -> None:
        self._poller.stop()
        with contextlib.suppress(StoreError):
            self._store.my_turn(0.001)  # whose it was: another need not wait for its end

    def _look(self) -> None:
        if self._store.my_turn(_TURN_S):
            self.work()

    def work(self) -> None:
        """One look at every batch: what has ended is noted, what there is room for is begun."""
        active = self._store.active()
        under_way = {batch.id: self._gather(batch) for batch in active}
        busy: Counter[tuple[str, str]] = Counter()  # by key and queue
        for batch in active:
            busy[_share(batch)] += under_way[batch.id]
        for batch in active:  # the oldest of a key first
            if self._poller.stopping:
                return
            try:
                busy[_share(batch)] += self._advance(batch, under_way[batch.id], busy[_share(batch)])
            except ArtifactError as error:
                log.warning("%s waits: %s", batch.id, error)

    def _advance(self, batch: Batch, under_way: int, busy: int) -> int:
        """Begin what there is room for, or end the batch. Returns how many lines were begun. Raises `ArtifactError`."""
        try:
            self._lines_of(batch)
        except NoArtifact:  # somebody cleared the store by hand
            log.warning("%s has failed: its input is gone", batch.id)
            self._store.turn(batch, "failed", ended=int(time.time()))
            return 0
        over = time.time() > batch.created + WINDOW_S
        if batch.status == "cancelling" or over:
            self._end_early(batch, "expired" if over else "cancelled")
        elif batch.next < batch.total:
            return self._begin(batch, self._shares[queue_of(batch.endpoint)] - busy)
        elif not under_way:
            self._finish(batch, "completed")
        return 0

    # -- lines -------------------------------------------------------------------------------------------------------

    def _gather(self, batch: Batch) -> int:
        """Note what has ended; returns how many are still under way."""
        left = 0
        for line, id in self._store.under_way(batch.id).items():
            job = self._service.store.get(id)
            if job is None:
                lost = ApiError(500, "The job's record is gone.", code="job_lost")
                self._store.note(batch.id, line, refusal(lost, id), "failed")
            elif not job.state.final or not self._note(batch, line, job):
                left += 1
        return left

    def _note(self, batch: Batch, line: int, job: Job) -> bool:
        """Note what came of a line whose job has ended. False: it cannot be laid where it belongs; try again."""
        result = self._lines.answer(batch, job)
        text = to_json(result)
        if len(text) > _LARGE:
            try:
                result = {"laid": self._lay(text)}
            except ArtifactError as error:
                log.warning("%s waits with line %d: %s", batch.id, line + 1, error)
                return False
        self._store.note(batch.id, line, result, "completed" if job.state is JobState.SUCCEEDED else "failed")
        return True

    def _lay(self, text: str) -> str:
        """Keep a large result as an artifact until the batch has ended; returns its key."""
        keep = self._service.store.keep
        return self._service.artifacts.put_kept(
            text.encode("ascii"), "application/jsonl", lambda key: keep(key, _LAID_S)
        )

    def _begin(self, batch: Batch, room: int) -> int:
        """Hand the next lines to the queue; returns how many."""
        lines, begun = self._lines_of(batch), 0
        for number in range(batch.next, batch.total):
            if begun >= room or self._poller.stopping:
                break
            try:
                draft = self._lines.draft(batch, number, lines[number])
            except ApiError as error:
                if error.status >= 500:  # no worker has said what it offers: later
                    break
                if not self._store.refuse(batch.id, number, refusal(error, None)):
                    break
                continue
            except ArtifactError as error:
                log.warning("%s waits: %s", batch.id, error)
                break
            try:
                job, _ = self._service.store.make(draft, self._service.queue.message(draft.envelope))
            except QueueFull:
                break
            if not self._store.begin(batch.id, number, job.id):
                found = self._store.batch(batch.id)
                if found is not None and found.next == number and found.status != "in_progress":
                    self._service.store.cancel(job.id)  # it has ended meanwhile: nobody waits for this one
                break  # or another works at it
            begun += 1
        return begun

    def _lines_of(self, batch: Batch) -> list[batches.Line]:
        if batch.key not in self._parsed:
            while len(self._parsed) >= _KNOWN:
                del self._parsed[next(iter(self._parsed))]
            self._parsed[batch.key] = batches.parse(self._service.artifacts.get(batch.key), batch.endpoint)[0]
        return self._parsed[batch.key]

    # -- ends --------------------------------------------------------------------------------------------------------

    def _end_early(self, batch: Batch, status: str) -> None:
        for line, id in self._store.under_way(batch.id).items():
            job = self._service.store.cancel(id)
            if job is None or job.state is not JobState.SUCCEEDED:
                self._store.note(batch.id, line, given_up(status), "")
            elif not self._note(batch, line, job):
                return  # it ends when that can be done
        self._finish(batch, status)

    def _finish(self, batch: Batch, status: str) -> None:
        """Write what came of it. Done twice, by two who take turns, it ends once. Raises `ArtifactError`."""
        lines, done = self._lines_of(batch), set()
        well: list[bytes] = []
        ill: list[bytes] = []
        unmade = 0  # ended with the batch, before they were done: neither completed nor failed

        def tell(number: int, result: Result) -> None:
            nonlocal unmade
            unmade += "error" in result
            told = well if result.get("status_code") == 200 else ill
            told.append(self._lines.written(batch, number, lines[number], result))

        for number, result in self._store.results(batch.id):
            done.add(number)
            tell(number, self._fetched(batch, result) if "laid" in result else result)
        if status != "completed":
            for number in range(batch.total):
                if number not in done:
                    tell(number, given_up(status))
        made: dict[str, str | int] = {"ended": int(time.time()), "completed": len(well), "failed": len(ill) - unmade}
        for name, told in (("output_file", well), ("error_file", ill)):
            if told:
                title = f"{batch.id}_{name.removesuffix('_file')}.jsonl"
                made[name] = files.keep(self._service, batch.owner, title, "batch_output", b"".join(told)).id
        if self._store.turn(batch, status, **made):
            failed = len(ill) - unmade
            log.info("%s is %s: %d lines well, %d failed, %d not made", batch.id, status, len(well), failed, unmade)

    def _fetched(self, batch: Batch, result: Result) -> Result:
        """A result that was laid aside. Raises `ArtifactError` where it may be had later."""
        try:
            fetched: Result = json.loads(self._service.artifacts.get(result["laid"]))
        except ArtifactError as error:
            if not isinstance(error, NoArtifact) and time.time() < batch.created + _LAID_S:
                raise
            log.error("%s has lost a result: %s", batch.id, error)
            return refusal(ApiError(500, "The answer was made and cannot be read.", code="artifact_unreadable"), None)
        return fetched


def _share(batch: Batch) -> tuple[str, str]:
    """Whose share of which queue its jobs take."""
    return batch.owner, queue_of(batch.endpoint)
