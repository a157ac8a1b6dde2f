"""Runs batches: submits their lines as jobs, a limited number per key, and stores the results.

One API process does so at a time; the next one continues from the stored position. Each key's batches of a queue are
one item of a pool, so that keys do not delay each other. batch_line_handler.py translates lines, batch_output.py writes
files.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial

from api import batch_lines
from api.batch_line_handler import BatchLineHandler, given_up, refusal
from api.batch_lines import RawLine
from api.batch_output import LAID_S, BatchOutput, failure
from api.batches import WINDOW_S, queue_of
from api.errors import ApiError
from api.poller import Poller
from api.service import Service
from api.tenant_pool import Deadline, TenantPool
from core.artifacts import ArtifactError, NoArtifact
from core.jobs.batches import BatchProgress, BatchRecord
from core.jobs.connection import StoreError
from core.jobs.record import Job, JobState, to_json
from core.jobs.store import QueueFull

log = logging.getLogger(__name__)

_TURN_S = 10.0  # after which another process may take over
_THREADS = 8
_STEP_S = 1.0  # of work on one key's batches, before the next key's turn
_ITEM_S = 60.0  # time limit of a hanging step, after which its thread is abandoned
_OUTPUTS = 4  # batches of one key and queue whose files are being written
_LARGE = 16_384  # characters of a result stored outside Redis: a thousand tokens' top log probabilities are megabytes
_PAUSES_S = (1.0, 2.0, 5.0, 15.0, 30.0)  # between retries after a batch-wide error
_LINE_S = 120.0  # how long a line waits for an image that cannot be read


class BatchFeeder:
    """Started and closed with the service. Retries through Redis outages."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._store = service.batches
        self._shares = {"image": service.settings.batch_jobs, "text": service.settings.batch_texts}
        self._lines = BatchLineHandler(service)
        self._outputs: dict[str, BatchOutput] = {}
        self._waits: dict[str, tuple[int, float]] = {}  # time limit of a step, after which its thread is abandoned
        self._unread: dict[str, tuple[int, float]] = {}  # batch → line whose image cannot be read, and since when
        self._pool = TenantPool("batches", _THREADS, of_tenant=2, of_lane=1, item_s=_ITEM_S)
        self._poller = Poller("batches", "batches", self._look)

    def start(self) -> None:
        self._poller.start()

    def stop(self) -> None:
        self._poller.stop()
        self._pool.stop()
        with contextlib.suppress(StoreError):
            self._store.my_turn(0.001)  # release it: others need not wait for it to expire

    def _look(self) -> None:
        if self._store.my_turn(_TURN_S):
            for owner, queue, ids in self._lanes():
                self._pool.submit(owner, queue, f"{owner}|{queue}", partial(self._step, ids))
        elif self._outputs and self._pool.room == _THREADS:  # other threads continue with them
            for id in list(self._outputs):
                self._outputs.pop(id).close()

    def work(self) -> None:
        """Run one step of every key's batches, on this thread."""
        for _, _, ids in self._lanes():
            self._step(ids, Deadline(_ITEM_S))

    def _lanes(self) -> list[tuple[str, str, list[str]]]:
        """Owner, queue and batches, oldest first."""
        lanes: dict[tuple[str, str], list[str]] = {}
        active = self._store.active()
        for id, owner, endpoint in active:
            if endpoint:
                lanes.setdefault((owner, queue_of(endpoint)), []).append(id)
            else:
                self._store.drop(id)
        known = {id for id, _, _ in active}
        for remembered in (self._waits, self._unread):
            for id in [id for id in remembered if id not in known]:
                remembered.pop(id, None)
        return [(owner, queue, ids) for (owner, queue), ids in lanes.items()]

    # -- one key's batches of one queue --------------------------------------------------------------------------------

    def _step(self, ids: Sequence[str], bound: Deadline) -> None:
        """Store ended results, submit lines while there is room, and write files, for the duration of one step."""
        until = min(time.monotonic() + _STEP_S, bound.until)
        try:
            if self._advance_all(self._store.progress(ids), until):
                self._poller.wake()
        except StoreError as error:
            log.warning("batches wait: %s", error)

    def _advance_all(self, looks: Sequence[BatchProgress], until: float) -> bool:
        """Whether there is more to do at once."""
        busy = sum(len(look.under_way) for look in looks)
        ending: deque[tuple[BatchRecord, str]] = deque()
        for look in looks:  # oldest first
            batch = look.batch
            if self._poller.stopping:
                return False
            if self._waits.get(batch.id, (0, 0.0))[1] > time.monotonic():
                continue
            try:
                left = self._gather(look)
                busy += left - len(look.under_way)
                over = time.time() > batch.created + WINDOW_S
                if batch.status == "cancelling" or over:
                    status = "expired" if over else "cancelled"
                    if self._end_early(batch, status):
                        ending.append((batch, status))
                elif batch.next < batch.total:
                    busy += self._begin(batch, self._shares[queue_of(batch.endpoint)] - busy, until)
                elif not left:
                    ending.append((batch, "completed"))
            except StoreError:
                raise
            except Exception as error:
                self._failed(batch, error)
        turns = deque(list(ending)[:_OUTPUTS])
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
        times = self._waits.get(batch.id, (0, 0.0))[0]
        self._waits[batch.id] = times + 1, time.monotonic() + _PAUSES_S[min(times, len(_PAUSES_S) - 1)]
        if isinstance(error, NoArtifact):  # the artifact was deleted by hand
            log.warning("%s has failed: its input is gone", batch.id)
            self._store.turn(batch, "failed", ended=int(time.time()))
        elif isinstance(error, ArtifactError):
            log.warning("%s waits: %s", batch.id, error)
        else:
            log.error("%s cannot be worked at", batch.id, exc_info=error)
            if times + 1 >= len(_PAUSES_S):
                wrong = {"code": "internal_error", "line": None, "message": "It cannot be worked at.", "param": None}
                self._store.turn(batch, "failed", ended=int(time.time()), errors=to_json([wrong]))

    # -- lines -------------------------------------------------------------------------------------------------------

    def _gather(self, look: BatchProgress) -> int:
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

    def _note_lost(self, batch: BatchRecord, line: int, id: str) -> bool:
        """The line's job was erased, and its id may have been reused."""
        lost = ApiError(500, "The job's record is gone.", code="job_lost")
        self._store.note(batch.id, line, refusal(lost, id), "failed")
        return True

    def _note(self, batch: BatchRecord, line: int, job: Job) -> bool:
        """Store the result of a line whose job has ended. False: its artifact cannot be stored; retry."""
        well = job.state is JobState.SUCCEEDED
        try:
            result = self._lines.answer(batch, job)
            text = to_json(result)
        except (StoreError, ArtifactError):
            raise
        except Exception:
            log.exception("line %d of %s cannot be answered", line + 1, batch.id)
            result, text, well = failure("The answer was made and cannot be told.", job.id), "", False
        if len(text) > _LARGE:
            try:
                result = {"laid": self._lay(text)}
            except ArtifactError as error:
                log.warning("%s waits with line %d: %s", batch.id, line + 1, error)
                return False
        self._store.note(batch.id, line, result, "completed" if well else "failed")
        return True

    def _lay(self, text: str) -> str:
        """Store a large result as an artifact until the batch has ended; returns its key."""
        keep = self._service.store.keep
        return self._service.artifacts.put_kept(
            text.encode("ascii"), "application/jsonl", lambda key: keep(key, LAID_S)
        )

    def _begin(self, batch: BatchRecord, room: int, until: float) -> int:
        """Submit the next lines to the queue; returns how many."""
        queue = queue_of(batch.endpoint)
        if room <= 0 or self._service.store.backlog(queue).queued >= self._service.settings.max_queued:
            return 0
        begun = 0
        raws = self._raws(batch)
        for number in range(batch.next, batch.total):
            if begun >= room or self._poller.stopping or time.monotonic() >= until:
                break
            raw = next(raws, None)
            try:
                made = self._make(batch, number, raw)
            except QueueFull:
                break
            except ArtifactError as error:
                if not self._waited_enough(batch, number):
                    log.warning("%s waits with line %d: %s", batch.id, number + 1, error)
                    break
                made = ApiError(500, "A picture that this line names cannot be read.", code="artifact_unreadable")
            if made is None:
                break  # no worker has announced the model yet: retry later
            end = raw.end if raw is not None else None
            if isinstance(made, ApiError):
                if not self._store.refuse(batch.id, number, refusal(made, None), end):
                    break  # another process works on it
                continue
            if not self._store.begin(batch.id, number, made.id, end):
                found = self._store.batch(batch.id)
                if found is not None and found.next == number and found.status != "in_progress":
                    # The batch has ended meanwhile: this job is not needed.
                    self._service.store.cancel(made.id, made.incarnation)
                break
            begun += 1
        return begun

    def _make(self, batch: BatchRecord, number: int, raw: RawLine | None) -> Job | ApiError | None:
        """The line's job, or the reason why there is none; None: not known yet. Raises `ArtifactError`, `QueueFull`."""
        try:
            if raw is None:
                return ApiError(500, "This line cannot be read any more.", code="artifact_unreadable")
            draft = self._lines.draft(batch, number, batch_lines.read(raw.data, batch.endpoint))
            job, _ = self._service.store.make(draft, self._service.queue.message(draft.envelope))
        except ApiError as error:
            return None if error.status >= 500 else error
        except (StoreError, ArtifactError, QueueFull):
            raise
        except Exception:
            log.exception("line %d of %s cannot be begun", number + 1, batch.id)
            return ApiError(500, "Something unexpected went wrong with this line.", code="internal_error")
        if (job.owner, job.digest) != (batch.owner, batch.id):
            return ApiError(409, "The id of this line's job is taken.", code="id_taken")
        return job

    def _waited_enough(self, batch: BatchRecord, number: int) -> bool:
        """Whether this line has waited long enough for the image it names."""
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

    # -- ends --------------------------------------------------------------------------------------------------------

    def _end_early(self, batch: BatchRecord, status: str) -> bool:
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
        self._waits.pop(batch.id, None)
        return True
