"""Stores the results of a batch's lines whose jobs have ended."""

from __future__ import annotations

import json
import logging

from api.batches.line_handler import BatchLineHandler, given_up, refusal
from api.batches.output import LAID_S, failure
from api.errors import ApiError
from api.http.json_parts import dumps
from api.service import Service
from core.artifacts import ArtifactError
from core.jobs.batches import BatchProgress, BatchRecord
from core.jobs.connection import StoreError
from core.jobs.record import Job, JobState

log = logging.getLogger(__name__)

LARGE = 4096  # characters of a result stored outside Redis: a thousand tokens' top log probabilities are megabytes


class BatchCollector:
    """A collector for the batches of one service. Thread-safe. Every method raises `StoreError`."""

    def __init__(self, service: Service, lines: BatchLineHandler) -> None:
        self._service = service
        self._store = service.batches
        self._lines = lines

    def collect(self, look: BatchProgress) -> int:
        """Store the results of ended jobs; returns how many are still in progress."""
        left = len(look.under_way)
        for line in look.lost:
            left -= self._note_lost(look.batch, line, look.under_way[line])
        for line in look.ended:
            job = self._service.store.get(look.under_way[line])
            if job is None or job.digest != look.batch.id:
                left -= self._note_lost(look.batch, line, look.under_way[line])
            else:
                left -= self._note(look.batch, line, job)
        return left

    def end_early(self, batch: BatchRecord, status: str) -> bool:
        """Cancel the jobs in progress. False: one line has ended and cannot be stored yet."""
        for line, id in self._store.under_way(batch.id).items():
            job = self._service.store.get(id)
            if job is not None and job.digest == batch.id:
                job = self._service.store.cancel(id, job.incarnation)
            if job is None or job.digest != batch.id or job.state is not JobState.SUCCEEDED:
                self._store.note(batch.id, line, given_up(status), "")
            elif not self._note(batch, line, job):
                return False
        return True

    def _note_lost(self, batch: BatchRecord, line: int, id: str) -> bool:
        """Record that the line's job was erased, and that its id may have been reused."""
        lost = ApiError(500, "The job's record is gone.", code="job_lost")
        self._store.note(batch.id, line, refusal(lost, id), "failed")
        return True

    def _note(self, batch: BatchRecord, line: int, job: Job) -> bool:
        """Store the result of a line whose job has ended. False: its artifact cannot be stored; retry."""
        well = job.state is JobState.SUCCEEDED
        try:
            result = self._lines.answer(batch, job)
            text = dumps(result)
        except (StoreError, ArtifactError):
            raise
        except Exception:
            log.exception("result of line %d of batch %s cannot be recorded", line + 1, batch.id)
            result, text, well = failure("The answer was made and cannot be told.", job.id), "", False
        if len(text) > LARGE:
            try:
                result = {"laid": self._lay(text)}
            except ArtifactError as error:
                log.warning("batch %s is paused at line %d: %s", batch.id, line + 1, error)
                return False
        elif text:
            result = json.loads(text)  # nothing of it is deferred any more
        self._store.note(batch.id, line, result, "completed" if well else "failed")
        return True

    def _lay(self, text: str) -> str:
        """Store a large result as an artifact until the batch has ended; returns its key."""
        keep = self._service.store.upkeep.keep
        return self._service.artifacts.put_kept(
            text.encode("ascii"), "application/jsonl", lambda key: keep(key, LAID_S)
        )
