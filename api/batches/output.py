"""Writes a batch's results into its output files line by line, in portions, never holding them all in memory."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Callable

from api import files
from api.batches import lines as batch_lines
from api.batches.line_handler import BatchLineHandler, Result, given_up, refusal
from api.batches.lines import BatchLine
from api.batches.routes import WINDOW_S, by_model
from api.errors import ApiError
from api.service import Service
from core.artifacts import ArtifactError, NoArtifact, Spool
from core.jobs.batches import BatchRecord
from core.jobs.connection import StoreError

log = logging.getLogger(__name__)

LAID_S = 2 * WINDOW_S  # how long a large result is stored outside Redis


class BatchOutput:
    """The files of one batch that ends with this status. Close it; after an exception it must not be used again."""

    def __init__(self, service: Service, lines: BatchLineHandler, batch: BatchRecord, status: str) -> None:
        self.batch = batch
        self.status = status
        self._service = service
        self._lines = lines
        self._raws = batch_lines.raw_lines(service.artifacts, batch.key)
        self._results = service.batches.results(batch.id)
        self._coming = next(self._results, None)
        self._number = 0
        self._spools: dict[str, Spool] = {}
        self._told = {"output": 0, "error": 0}
        self._unmade = 0  # unfinished when the batch ended: neither completed nor failed
        self._refunds: Counter[str | None] = Counter()  # images of lines that never were jobs, by the model's name

    def write(self, go_on: Callable[[], bool]) -> bool:
        """Write lines while `go_on`. Returns whether all are written. Raises `ArtifactError` and `StoreError`."""
        while self._number < self.batch.total:
            if not go_on():
                return False
            self._write_next()
        return True

    def end(self) -> bool:
        """Store the files, and end the batch. If two processes do so, it ends once, with one pair of files. The images
        of lines that never were jobs, which the batch was charged for, are given back.

        Returns whether this call ended it. Raises `ArtifactError` and `StoreError`.
        """
        failed = self._told["error"] - self._unmade
        fields: dict[str, str | int] = {"ended": int(time.time()), "completed": self._told["output"], "failed": failed}
        for name, spool in self._spools.items():
            id = "file-" + hashlib.sha256(f"{self.batch.secret}{self.batch.id}/{name}".encode()).hexdigest()[:24]
            title = f"{self.batch.id}_{name}.jsonl"
            fields[f"{name}_file"] = files.keep_spool(
                self._service, self.batch.owner, title, "batch_output", spool, id=id
            ).id
        ended = self._service.batches.turn(self.batch, self.status, **fields)
        if ended:
            self._refund()
            log.info(
                "batch %s is %s: %d lines completed, %d failed, %d not run",
                self.batch.id, self.status, self._told["output"], failed, self._unmade,
            )  # fmt: skip
        return ended

    def _refund(self) -> None:
        service, owner = self._service, self.batch.owner
        images = by_model(service, owner, self.batch.endpoint, self._refunds)
        age_s = time.time() - self.batch.created
        # What was charged in a window that is over is in no counter.
        costs = [c for c in service.limits(owner).picture_costs(images) if age_s < 2 * c.window_s]
        try:
            if costs:
                service.rates.refund(*costs)
        except StoreError as error:  # the batch has ended, and is not looked at again
            log.warning("images of batch %s were not given back: %s", self.batch.id, error)

    def close(self) -> None:
        for spool in self._spools.values():
            spool.close()

    def _write_next(self) -> None:
        raw = next(self._raws, None)
        result, was_job = self._result()
        try:
            line = batch_lines.read(raw.data, self.batch.endpoint) if raw is not None else _unread()
        except ApiError:
            line = _unread()  # damaged since it was checked
        if not was_job:
            name, n = batch_lines.images_of(line)
            self._refunds[name] += n
        try:
            written = self._lines.written(self.batch, self._number, line, result)
        except (StoreError, ArtifactError):
            raise
        except Exception:
            log.exception("line %d of %s cannot be written", self._number + 1, self.batch.id)
            result = failure("The answer was made and cannot be written; the server's log says why.")
            written = self._lines.written(self.batch, self._number, line, result)
        self._unmade += "error" in result
        name = "output" if result.get("status_code") == 200 else "error"
        if name not in self._spools:
            self._spools[name] = self._service.artifacts.spool()
        try:
            written.write(self._spools[name].write)
        except NoArtifact as error:  # of a picture, not of the input file: the next attempt keeps its link
            raise ArtifactError("a picture was deleted while it was being written") from error
        self._spools[name].write(b"\n")
        self._told[name] += 1
        self._number += 1

    def _result(self) -> tuple[Result, bool]:
        """The next line's result, and whether it was a job."""
        if self._coming is None or self._coming[0] != self._number:
            if self.status == "completed":
                return failure("The result of this line is lost."), True
            return given_up(self.status), self._number < self.batch.next
        result = self._coming[1]
        was_job = (
            result.get("request_id", "") is not None
        )  # what is stored elsewhere, or was cancelled, has no such field
        if "laid" in result:
            result = self._fetched(result["laid"])
        self._coming = next(self._results, None)
        return result, was_job

    def _fetched(self, key: str) -> Result:
        """Read a result stored outside Redis. Raises `ArtifactError` if a retry may succeed."""
        try:
            fetched: Result = json.loads(self._service.artifacts.get(key))
        except ArtifactError as error:
            if not isinstance(error, NoArtifact) and time.time() < self.batch.created + LAID_S:
                raise
            log.error("a result of batch %s is lost: %s", self.batch.id, error)
            return refusal(ApiError(500, "The answer was made and cannot be read.", code="artifact_unreadable"), None)
        return fetched


def failure(message: str, id: str | None = None) -> Result:
    """The result of a line that failed with an unexpected error."""
    return refusal(ApiError(500, message, code="internal_error"), id)


def _unread() -> BatchLine:
    return {"custom_id": "", "body": {}, "bytes": 0}
