"""Translates batch lines: a line into a job of its endpoint, an ended job into the endpoint's response."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from dataclasses import replace
from typing import Any

from api import admission, body, references, schemas, submission, text_drafts
from api.batch_lines import BatchLine
from api.batches import EDITS, KEEP_S, queue_of
from api.cards import C
from api.errors import ApiError, invalid_field, job_error
from api.images import generated
from api.presentation import results
from api.service import Service
from api.uploads import FittedInputs
from contract.card import ImageCard, TextCard
from contract.image_fields import ImageFields
from core.artifacts import ArtifactError
from core.jobs.batches import BatchRecord
from core.jobs.record import Job, JobDraft, JobState

_PRIORITY = 9  # interactive requests go first

# The stored form: the response's `status_code`, `request_id` and `body`, and image `keys`; or an `error`.
Result = dict[str, Any]


class BatchLineHandler:
    """For the batches of one service. Thread-safe."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._fitting = threading.Lock()  # one at a time: each may need some 200 MiB
        self._fitted: tuple[str, FittedInputs] | None = None  # of the last line checked

    def draft(self, batch: BatchRecord, number: int, line: BatchLine) -> JobDraft:
        """The job of a line; its id is derived from the line's, so that a line submitted twice is one job, and cannot
        be guessed.

        Raises `ApiError` and, for an edit, `ArtifactError`.
        """
        id = "job_" + hashlib.sha256(f"{batch.secret}{batch.id}/{number}".encode()).hexdigest()[:24]
        draft = (self._text if queue_of(batch.endpoint) == "text" else self._picture)(batch, line, id)
        return replace(draft, id=id, owner=batch.owner, digest=batch.id, keep_s=KEEP_S)

    def _text(self, batch: BatchRecord, line: BatchLine, id: str) -> JobDraft:
        if line["bytes"] > body.MAX_BYTES:
            raise body.too_large()
        ask = text_drafts.READ[batch.endpoint](line["body"])
        if ask.fields.stream:
            raise invalid_field("stream", "must not be true in a batch")
        draft = text_drafts.draft(ask, self._card(ask.fields.model, TextCard), batch.owner)
        return draft if ask.fields.priority is not None else replace(draft, priority=_PRIORITY)

    def _picture(self, batch: BatchRecord, line: BatchLine, id: str) -> JobDraft:
        kind = schemas.EditBody if batch.endpoint == EDITS else ImageFields
        fields = schemas.read(kind, {name: value for name, value in line["body"].items() if name != "stream"})
        card = self._card(fields.model, ImageCard)
        admission.check_expansion(fields, self._service.cards.now.expands(card.name))
        upload = None
        if isinstance(fields, schemas.EditBody):
            upload = references.fetch(self._service, batch.owner, fields)
        pictures = references.fetch_pictures(self._service, batch.owner, fields)
        draft = admission.image_draft(fields, card, upload, pictures)
        if fields.priority is None:
            draft = replace(draft, priority=_PRIORITY)
        if upload is None and not pictures.any:
            return draft
        with self._fitting:
            if self._fitted is None or self._fitted[0] != id:  # while the queue is full a line is retried
                self._fitted = id, submission.fitted_to(upload, pictures, draft)
            fitted = self._fitted[1]
        return submission.store_inputs(self._service, draft, fitted)

    def _card(self, name: str | None, kind: type[C]) -> C:
        now = self._service.cards.now
        card = now.model(name, kind)
        if card is None:
            raise admission.no_such_model(now, name, kind) or admission.no_model()
        return card

    def answer(self, batch: BatchRecord, job: Job) -> Result:
        """The endpoint's response for an ended job; images as links, with their keys."""
        if job.state is not JobState.SUCCEEDED:
            return refusal(job_error(job), job.id)
        told: Result = {"status_code": 200, "request_id": job.id}
        if queue_of(batch.endpoint) == "text":
            return {**told, "body": text_drafts.ANSWERS[batch.endpoint](job).whole(job.result or {})}
        kept_s = max(self._service.settings.retention_s, KEEP_S)  # as is its record
        links = self._service.links_from(batch.base, kept_s)
        content = json.loads(generated(self._service, job, links))
        return {**told, "body": content, "keys": [made["key"] for made in results(job)]}

    def written(self, batch: BatchRecord, number: int, line: BatchLine, result: Result) -> bytes:
        """The line in the output or error file for this result. OpenAI's format, with a newline."""
        response: Result = {name: result[name] for name in ("status_code", "request_id", "body") if name in result}
        if line["body"].get("response_format") == "b64_json":
            self._put_inside(response, result.get("keys", []))
        told = {
            "id": f"batch_req_{batch.id.removeprefix('batch_')}_{number}",
            "custom_id": line["custom_id"],
            "response": response or None,
            "error": result.get("error"),
        }
        return json.dumps(told, separators=(",", ":")).encode() + b"\n"

    def _put_inside(self, response: Result, keys: list[str]) -> None:
        """Replace links by images; where one is gone by now the link stays."""
        for image, key in zip(response["body"]["data"] if keys else [], keys, strict=False):
            with contextlib.suppress(ArtifactError):
                image["b64_json"] = base64.b64encode(self._service.artifacts.get(key)).decode("ascii")
                del image["url"]


def refusal(error: ApiError, id: str | None) -> Result:
    """The result of a line that was not run, with or without a job id."""
    return {"status_code": error.status, "request_id": id, "body": error.content}


def given_up(status: str) -> Result:
    """The result of a line that was unfinished when the batch was `expired` or `cancelled`: no response, as OpenAI has
    it.
    """
    why = {
        "expired": "This request could not be executed before the completion window expired.",
        "cancelled": "This request was not done before the batch was cancelled.",
    }[status]
    return {"error": {"code": f"batch_{status}", "message": why}}
