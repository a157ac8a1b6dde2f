"""Translates batch lines: a line into a job of its endpoint, an ended job into the endpoint's response."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from typing import Any

from api import schemas
from api.batches.inputs import BatchInputs
from api.batches.lines import BatchLine
from api.batches.routes import EDITS, KEEP_S, queue_of
from api.cards import C
from api.errors import ApiError, invalid_field, job_error
from api.http import body
from api.jobs import admission, submission
from api.jobs.admission import ImageDraft
from api.jobs.presentation import results
from api.pictures import references
from api.pictures.images import generated
from api.pictures.inline_images import Inline, InlineDocument, verified_size
from api.pictures.uploads import NO_PICTURES, PictureUploads
from api.service import Service
from api.text import drafts as text_drafts
from contract.card import ImageCard, TextCard
from contract.image_request import ImageRequest
from core.artifacts import ArtifactError, fetch_result
from core.jobs.batches import BatchRecord
from core.jobs.record import Job, JobDraft, JobState, derived_id

_PRIORITY = 9  # interactive requests go first

# The stored form: the response's `status_code`, `request_id` and `body`, and image `keys`; or an `error`.
Result = dict[str, Any]


class BatchLineHandler:
    """A translator for the batches of one service. Thread-safe."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._inputs = BatchInputs(service)

    def draft(self, batch: BatchRecord, number: int, line: BatchLine) -> JobDraft[Any]:
        """The job of a line; its id is derived from the line's, so that a line submitted twice is one job, and cannot
        be guessed.

        Raises `ApiError` and, for an edit, `ArtifactError`.
        """
        id = derived_id(f"{batch.secret}{batch.id}/{number}")
        draft = (self._text if queue_of(batch.endpoint) == "text" else self._picture)(batch, line, id)
        return replace(draft, id=id, owner=batch.owner, digest=batch.id, keep_s=KEEP_S)

    def _text(self, batch: BatchRecord, line: BatchLine, id: str) -> JobDraft[Any]:
        if line["bytes"] > body.MAX_BYTES:
            raise body.too_large()
        request = text_drafts.read(batch.endpoint, line["body"], ignore_unknown=self._service.ignore_unknown)
        if request.fields.stream:
            raise invalid_field("stream", "must not be true in a batch")
        card = self._card(batch, name := request.fields.model, TextCard)
        adapter = self._service.cards.seen_by(batch.owner).adapter(card, name)
        draft = text_drafts.draft(request, card, batch.owner, adapter)
        return draft if request.fields.priority is not None else replace(draft, priority=_PRIORITY)

    def _picture(self, batch: BatchRecord, line: BatchLine, id: str) -> JobDraft[Any]:
        kind = schemas.EditBody if batch.endpoint == EDITS else ImageRequest
        given = {name: value for name, value in line["body"].items() if name != "stream"}
        fields = schemas.read(kind, given, ignore_unknown=self._service.ignore_unknown)
        card, service = self._card(batch, fields.model, ImageCard), self._service
        if references.any_named(fields):
            return self._inputs.draft(id, lambda: self._with_pictures(batch.owner, fields, card))
        draft = self._offered(batch.owner, fields, card)
        if draft.deadline_s is not None:
            backlog, now = service.store.backlog("image"), service.cards.now
            admission.check_deadline(
                draft, card, backlog, now.ready("image"), reliable_share=now.reliable_share(card.name)
            )
        return draft

    def _offered(
        self, owner: str, fields: ImageRequest, card: ImageCard, pictures: PictureUploads = NO_PICTURES
    ) -> ImageDraft:
        seen = self._service.cards.seen_by(owner)
        may_write = admission.may_write(seen, owner)
        return admission.offered_draft(fields, card, seen, pictures, _PRIORITY, may_write=may_write)

    async def _with_pictures(self, owner: str, fields: ImageRequest, card: ImageCard) -> JobDraft[Any]:
        """Build the draft as `_picture` does, on the event loop, in the owner's turns."""
        service = self._service
        pictures = await service.call(owner, references.Resolver(service, owner).uploads, fields)
        draft_for = partial(self._offered, owner, fields, card)
        draft_for(pictures)  # refused before anything is loaded
        check = partial(submission.check_deadline, service, card=card)
        return await submission.with_inputs(service, owner, draft_for, pictures, _counted, check)

    def _card(self, batch: BatchRecord, name: str | None, kind: type[C]) -> C:
        seen = self._service.cards.seen_by(batch.owner)
        card = seen.model(name, kind)
        if card is None:
            raise admission.no_such_model(seen, name, kind) or admission.no_model()
        return card

    def answer(self, batch: BatchRecord, job: Job) -> Result:
        """The endpoint's response for an ended job; images as links, with their keys. Raises `ArtifactError`."""
        if job.state is not JobState.SUCCEEDED:
            return refusal(job_error(job), job.id)
        result: Result = {"status_code": 200, "request_id": job.id}
        if queue_of(batch.endpoint) == "text":
            made = fetch_result(job.result, self._service.artifacts.get)
            return {**result, "body": text_drafts.answer(batch.endpoint, job, made)}
        kept_s = max(self._service.settings.retention_s, KEEP_S)  # as is its record
        links = self._service.links_from(batch.base, kept_s, batch.owner)
        return {**result, "body": generated(job, links), "keys": [image.get("key") for image in results(job)]}

    def written(self, batch: BatchRecord, number: int, line: BatchLine, result: Result) -> InlineDocument:
        """The line in the output or error file for this result. OpenAI's format, without a newline."""
        response: Result = {name: result[name] for name in ("status_code", "request_id", "body") if name in result}
        if line["body"].get("response_format") == "b64_json":
            self._put_inside(response, result.get("keys", []))
        entry = {
            "id": f"batch_req_{batch.id.removeprefix('batch_')}_{number}",
            "custom_id": line["custom_id"],
            "response": response or None,
            "error": result.get("error"),
        }
        return InlineDocument(self._service, batch.owner, entry)

    def _put_inside(self, response: Result, keys: list[str | None]) -> None:
        """Replace links by images; where one is gone by now the link stays."""
        for image, key in zip(response["body"]["data"] if keys else [], keys, strict=False):
            if key is None:  # refused
                continue
            with contextlib.suppress(ArtifactError):
                verified_size(self._service, key)
                image["b64_json"] = Inline(key)
                del image["url"]


async def _counted() -> None:
    """Do nothing: a line's images were charged when its batch was created."""


def refusal(error: ApiError, id: str | None) -> Result:
    """The result of a line that was not run, with or without a job id."""
    return {"status_code": error.status, "request_id": id, "body": error.content}


def given_up(status: str) -> Result:
    """The result of a line that was unfinished when the batch was `expired` or `cancelled`: no response, as OpenAI has
    it.
    """
    messages = {
        "expired": "This request could not be executed before the completion window expired.",
        "cancelled": "This request was not done before the batch was cancelled.",
    }[status]
    return {"error": {"code": f"batch_{status}", "message": messages}}
