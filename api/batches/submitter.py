"""Submits the lines of batches as jobs, in order."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Set

from api.batches import lines as batch_lines
from api.batches.line_handler import BatchLineHandler, refusal
from api.batches.lines import RawLine
from api.batches.routes import queue_of
from api.errors import ApiError
from api.rate_limits import too_large
from api.service import Service
from core.artifacts import ArtifactError
from core.jobs.batches import BatchRecord
from core.jobs.connection import StoreError
from core.jobs.record import Job
from core.jobs.store import QueueFull

log = logging.getLogger(__name__)

_LINE_S = 120.0  # how long a line waits for an image that cannot be read


class BatchSubmitter:
    """Submits each line once, whichever processes do so. Remembers which lines wait for an image."""

    def __init__(self, service: Service, lines: BatchLineHandler) -> None:
        self._service = service
        self._store = service.batches
        self._lines = lines
        self._unread: dict[str, tuple[int, float]] = {}  # batch → line whose image cannot be read, and since when

    def forget_others(self, batches: Set[str]) -> None:
        """Forget the waiting lines of all batches but these."""
        for id in self._unread.keys() - batches:
            self._unread.pop(id, None)

    def submit(self, batch: BatchRecord, room: int, go_on: Callable[[], bool]) -> int:
        """Submit the next lines, up to `room`, while `go_on`; returns how many jobs were made.

        Stops early where the queue is full, a limit of the key is reached, or no worker has announced the model. Raises
        `StoreError`, `ArtifactError`, and `ApiError` where the next line's pictures cannot be fetched for now.
        """
        queue = queue_of(batch.endpoint)
        service = self._service
        if room <= 0 or service.cards.now.memory.nearly_full:
            return 0
        if service.store.backlog(queue).queued >= service.settings.max_queued:
            return 0
        begun = 0
        raws = self._raws(batch)
        for number in range(batch.next, batch.total):
            if begun >= room or not go_on():
                break
            raw = next(raws, None)
            try:
                outcome = self._make(batch, number, raw)
            except ApiError:
                if begun:
                    break
                raise
            if outcome is None or not self._record(batch, number, outcome, raw):
                break
            begun += isinstance(outcome, Job)
        return begun

    def _make(self, batch: BatchRecord, number: int, raw: RawLine | None) -> Job | ApiError | None:
        """The line's job, or the error that its result becomes; None: retry soon. Raises `ApiError`: retry later."""
        try:
            return self._create(batch, number, raw)
        except QueueFull:
            return None
        except ArtifactError as error:
            if self._waited_enough(batch, number):
                return ApiError(500, "An image that this line names cannot be read.", code="artifact_unreadable")
            log.warning("batch %s is paused at line %d: %s", batch.id, number + 1, error)
            return None

    def _create(self, batch: BatchRecord, number: int, raw: RawLine | None) -> Job | ApiError | None:
        """Create the job as `_make` says. Raises `ApiError`, `ArtifactError`, `QueueFull`, `StoreError`."""
        try:
            if raw is None:
                return ApiError(500, "This line can no longer be read.", code="artifact_unreadable")
            draft = self._lines.draft(batch, number, batch_lines.read(raw.data, batch.endpoint))
            limits = self._service.limits(batch.owner)
            costs = limits.job_costs(draft.model, tokens=draft.tokens, text_model=draft.text_model)
            if excess := [cost for cost in costs if cost.cost > cost.limit]:
                return too_large(excess[0])
            job = self._service.store.create(
                draft, self._service.queue.message(draft.envelope), costs, limits.of_batches(draft.model)
            )
        except ApiError as error:
            if error.code == "fetch_overloaded":  # each try fetches the pictures again
                raise
            return None if error.status >= 500 else error  # 503: no worker has announced the model yet
        except (StoreError, ArtifactError, QueueFull):
            raise
        except Exception:
            log.exception("line %d of batch %s cannot be submitted", number + 1, batch.id)
            return ApiError(500, "Something unexpected went wrong with this line.", code="internal_error")
        if (job.owner, job.digest) != (batch.owner, batch.id):
            return ApiError(409, "The id of this line's job is taken.", code="id_taken")
        return job

    def _record(self, batch: BatchRecord, number: int, outcome: Job | ApiError, raw: RawLine | None) -> bool:
        """Record the line's job or error in the batch. False: another process works on it, or it has ended."""
        end = raw.end if raw is not None else None
        if isinstance(outcome, ApiError):
            return self._store.refuse(batch.id, number, refusal(outcome, None), end)
        if self._store.begin(batch.id, number, outcome.id, end):
            return True
        stored = self._store.batch(batch.id)
        if stored is not None and stored.next == number and stored.status != "in_progress":
            # The batch has ended meanwhile: this job is not needed.
            self._service.store.cancel(outcome.id, outcome.incarnation)
        return False

    def _waited_enough(self, batch: BatchRecord, number: int) -> bool:
        """Return whether this line has waited long enough for the image it names."""
        line, since = self._unread.setdefault(batch.id, (number, time.monotonic()))
        if line != number:
            self._unread[batch.id] = number, time.monotonic()
            return False
        return time.monotonic() - since > _LINE_S

    def _raws(self, batch: BatchRecord) -> Iterator[RawLine]:
        """The batch's remaining lines."""
        raws = batch_lines.raw_lines(self._service.artifacts, batch.key, batch.place or 0)
        if batch.place is None:
            for _ in range(batch.next):
                next(raws, None)
        return raws
