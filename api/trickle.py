"""Works at batches: hands their lines to the queue, so many of one key at once, and gathers what came of them.

One process of all that answer does so at a time, on a thread of its own; whoever takes over goes on where that stood.
Knows lines, jobs and results; what a line may ask for, admission.py knows.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import logging
import threading
import time
from collections import Counter
from dataclasses import replace
from typing import Any

from api import admission, files, intake, references, schemas
from api.batches import EDITS, WINDOW_S, as_lines, parse
from api.errors import ApiError, unsuccessful
from api.images import generated
from api.links import Links
from api.presentation import results
from api.service import Service
from core.artifacts import ArtifactError, NoArtifact
from core.jobs.batches import Batch
from core.jobs.connection import StoreError
from core.jobs.record import Draft, Job, JobState
from core.jobs.store import QueueFull

log = logging.getLogger(__name__)

_EVERY_S = 0.5
_TURN_S = 10.0  # after so long another takes over
_PRIORITY = 9  # who waits goes first
_KNOWN = 8  # files whose lines are remembered


class Trickle:
    """Started and closed with the service. Survives Redis: it tries again."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._store = service.batches
        self._share = service.settings.batch_jobs
        self._lines: dict[str, list[dict[str, Any]]] = {}
        self._fitted: tuple[str, tuple[bytes, bytes | None]] | None = None  # of the line that was looked at last
        self._stop = threading.Event()
        self._well = True
        self._thread = threading.Thread(target=self._run, name="trickle", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_EVERY_S):
            try:
                if self._store.my_turn(_TURN_S):
                    self.work()
                self._well = True
            except StoreError as error:
                if self._well:
                    log.warning("batches wait: %s", error)
                self._well = False
            except Exception:
                log.exception("a batch cannot be worked at")
        with contextlib.suppress(StoreError):
            self._store.my_turn(0.001)  # whose it was: another need not wait for its end

    def work(self) -> None:
        """One look at every batch: what has ended is noted, what there is room for is begun."""
        batches = self._store.active()
        under_way = {batch.id: self._gather(batch) for batch in batches}
        busy = Counter(dict.fromkeys({batch.owner for batch in batches}, 0))
        for batch in batches:
            busy[batch.owner] += under_way[batch.id]
        for batch in batches:  # the oldest of a key first
            if self._stop.is_set():
                return
            try:
                self._lines_of(batch)
            except NoArtifact:  # somebody cleared the store by hand
                log.warning("%s has failed: its input is gone", batch.id)
                self._store.turn(batch, "failed", ended=int(time.time()))
                continue
            over = time.time() > batch.created + WINDOW_S
            if batch.status == "cancelling" or over:
                self._end_early(batch, "expired" if over else "cancelled")
            elif batch.next < batch.total:
                busy[batch.owner] += self._begin(batch, self._share - busy[batch.owner])
            elif not under_way[batch.id]:
                self._finish(batch, "completed")

    # -- lines -------------------------------------------------------------------------------------------------------

    def _gather(self, batch: Batch) -> int:
        """Note what has ended; returns how many are still under way."""
        left = 0
        for line, id in self._store.under_way(batch.id).items():
            job = self._service.store.get(id)
            if job is not None and not job.state.final:
                left += 1
            elif job is not None and job.state is JobState.SUCCEEDED:
                self._store.note(batch.id, line, self._answer(batch, job), well=True)
            else:
                error = (
                    ApiError(500, "The job's record is gone.", code="job_lost") if job is None else unsuccessful(job)
                )
                self._store.note(batch.id, line, _refusal(error, id), well=False)
        return left

    def _begin(self, batch: Batch, room: int) -> int:
        """Hand the next lines to the queue; returns how many."""
        lines, begun = self._lines_of(batch), 0
        for number in range(batch.next, batch.total):
            if begun >= room or self._stop.is_set():
                break
            try:
                draft = self._draft(batch, number, lines[number]["body"])
            except ApiError as error:
                if error.status >= 500:  # no worker has said what it offers: later
                    break
                if not self._store.refuse(batch.id, number, _refusal(error, None)):
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
                break  # another works at it
            begun += 1
        return begun

    def _draft(self, batch: Batch, number: int, asked: dict[str, Any]) -> Draft:
        """The job of a line; its id is the line's, so that one that is begun twice is one job.

        Raises `ApiError` and, of an edit, `ArtifactError`.
        """
        kind = schemas.EditBody if batch.endpoint == EDITS else schemas.ImageFields
        fields = schemas.read(kind, {name: value for name, value in asked.items() if name != "stream"})
        now = self._service.cards.now
        card = now.model(fields.model, "image")
        if card is None:
            raise admission.unknown_model() if now.model(None, "image") is not None else admission.no_model()
        admission.check_expansion(fields, now.expands(card.name))
        upload = None
        if isinstance(fields, schemas.EditBody):
            upload = references.fetch(self._service, batch.owner, fields)
        draft = admission.image_draft(fields, card, upload)
        id = "job_" + hashlib.sha256(f"{batch.id}/{number}".encode()).hexdigest()[:24]
        priority = _PRIORITY if fields.priority is None else draft.priority
        draft = replace(draft, id=id, owner=batch.owner, digest=batch.id, priority=priority)
        if upload is None:
            return draft
        if self._fitted is None or self._fitted[0] != id:  # while the queue is full a line is looked at again and again
            self._fitted = id, upload.fitted((draft.parameters["width"], draft.parameters["height"]))
        return intake.handed_in(self._service, draft, *self._fitted[1])

    def _lines_of(self, batch: Batch) -> list[dict[str, Any]]:
        if batch.key not in self._lines:
            while len(self._lines) >= _KNOWN:
                del self._lines[next(iter(self._lines))]
            self._lines[batch.key] = parse(self._service.artifacts.get(batch.key), batch.endpoint)[0]
        return self._lines[batch.key]

    # -- ends --------------------------------------------------------------------------------------------------------

    def _end_early(self, batch: Batch, status: str) -> None:
        for line, id in self._store.under_way(batch.id).items():
            job = self._service.store.cancel(id)
            if job is not None and job.state is JobState.SUCCEEDED:
                self._store.note(batch.id, line, self._answer(batch, job), well=True)
            else:
                error = ApiError(409, f"The batch was {status} before this was done.", code=f"batch_{status}")
                self._store.note(batch.id, line, _refusal(error, id), well=False)
        self._finish(batch, status)

    def _finish(self, batch: Batch, status: str) -> None:
        """Write what came of it. Done twice, by two who take turns, it ends once."""
        lines, found = self._lines_of(batch), self._store.results(batch.id)
        well: list[dict[str, Any]] = []
        ill: list[dict[str, Any]] = []
        for number in sorted(found):
            result = found[number]
            keys = result.pop("keys", [])
            if lines[number]["body"].get("response_format") == "b64_json":
                self._put_inside(result["body"], keys)
            line = {
                "id": f"batch_req_{batch.id.removeprefix('batch_')}_{number}",
                "custom_id": lines[number]["custom_id"],
            }
            (well if result["status_code"] == 200 else ill).append({**line, "response": result, "error": None})
        made: dict[str, str | int] = {"ended": int(time.time())}
        for name, told in (("output_file", well), ("error_file", ill)):
            if told:
                title = f"{batch.id}_{name.removesuffix('_file')}.jsonl"
                made[name] = files.keep(self._service, batch.owner, title, "batch_output", as_lines(told)).id
        if self._store.turn(batch, status, **made):
            log.info("%s is %s: %d lines well, %d not", batch.id, status, len(well), len(ill))

    def _answer(self, batch: Batch, job: Job) -> dict[str, Any]:
        """What the endpoint would have answered, with links; and the keys of its pictures."""
        secret = self._service.cards.now.secret if self._service.cards.now.keys else None
        links = Links(batch.base, secret, self._service.settings.retention_s)
        body = json.loads(generated(self._service, job, links))
        return {"status_code": 200, "request_id": job.id, "body": body, "keys": [made["key"] for made in results(job)]}

    def _put_inside(self, body: dict[str, Any], keys: list[str]) -> None:
        """Pictures in place of links; of one that is gone by now the link stays."""
        for image, key in zip(body.get("data", []), keys, strict=False):
            with contextlib.suppress(ArtifactError):
                image["b64_json"] = base64.b64encode(self._service.artifacts.get(key)).decode("ascii")
                del image["url"]


def _refusal(error: ApiError, id: str | None) -> dict[str, Any]:
    return {"status_code": error.status, "request_id": id, "body": error.content}
