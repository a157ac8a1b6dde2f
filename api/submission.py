"""Turns a request into a job: checks it, charges rate limits, creates it once. A repeated request returns the same job.

admission.py checks requests against model cards.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from fastapi import Request

from api import admission, references, uploads, webhooks
from api.access import (
    Caller,
    apply_rate_limit,
    count_pictures,
    enforce_rate_limit,
    picture_costs,
    request_costs,
    unknown_key,
)
from api.cards import C
from api.errors import ApiError, invalid_field
from api.service import Service
from api.uploads import NO_PICTURES, FittedInputs, PictureUploads, Upload
from contract.card import ImageCard
from contract.image import ImageJob
from contract.image_fields import ImageFields
from core import logs, traces
from core.jobs.connection import StoreDown
from core.jobs.rates import RateLimitCost
from core.jobs.record import Job, JobDraft, QueuePosition, new_id

_KEY = re.compile(r"[!-~]{1,255}")
_INPUT_S = 3600.0  # until the job's record sets its retention


def idempotency_id(request: Request, caller: Caller) -> str | None:
    """The job id for this caller's `Idempotency-Key`; None without one. Raises `ApiError` (400)."""
    key = request.headers.get("idempotency-key")
    if key is None:
        return None
    if _KEY.fullmatch(key) is None:
        raise invalid_field("idempotency-key", "must be 1 to 255 printable characters")
    return "job_" + hashlib.sha256(f"{caller.id}\0{key}".encode()).hexdigest()[:24]


async def submit(
    service: Service,
    request: Request,
    caller: Caller,
    fields: ImageFields,
    id: str | None = None,
    upload: Upload | None = None,
    pictures: PictureUploads = NO_PICTURES,
) -> tuple[Job, QueuePosition | None]:
    """Create a job of these fields, with its message. Raises `ApiError` and `StoreError`, and then there is no job.

    With an `id` chosen by the client the job may exist already: it is returned unchanged. `upload` is the source of an
    edit, `pictures` are those of controls and image prompts (default: those that the fields name): with any
    `ArtifactError` may be raised. Also returns the queue position of a job created now.
    """
    if not pictures.any:
        pictures = await references.read_pictures(service, caller, fields)
    digest = "" if id is None else _digest(fields, upload, pictures)

    def draft_for(card: ImageCard) -> JobDraft:
        admission.check_expansion(fields, service.cards.now.expands(card.name))
        return replace(
            admission.image_draft(fields, card, upload, pictures), id=id or new_id(), owner=caller.id, digest=digest,
            webhook=_webhook(service, request, fields),
        )  # fmt: skip

    card = service.cards.now.model(fields.model, ImageCard)
    draft, refusal = _attempt(draft_for, card)
    plain = upload is None and not pictures.any
    if draft is not None and plain and draft.deadline_s is None:
        # The common path: a single Redis call.
        requests, drawn = request_costs(caller), picture_costs(caller, ImageJob.read(draft.parameters).n)
        job, standing = await _create(service, draft, request, requests + drawn, len(requests))
        return _same(job, caller, digest), standing
    await enforce_rate_limit(request, service, caller)
    there = None if id is None else await service.call(service.store.get, id)
    if there is not None:
        return _same(there, caller, digest), None
    if refusal is not None:
        raise refusal
    if card is None or draft is None:
        card = await served(service, fields.model, ImageCard)
        draft = draft_for(card)
    await _check_deadline(service, draft, card)
    n = ImageJob.read(draft.parameters).n
    charges = picture_costs(caller, n)
    if not plain:
        fitted = await service.decoding.run(caller.id, fitted_to, upload, pictures, draft)
        await count_pictures(request, service, caller, n)  # before anything is stored
        charges, draft = [], await service.stored(store_inputs, service, draft, fitted)
    job, standing = await _create(service, draft, request, charges)
    return _same(job, caller, digest), standing


def _attempt(
    draft_for: Callable[[ImageCard], JobDraft], card: ImageCard | None
) -> tuple[JobDraft | None, ApiError | None]:
    """The draft, or why there is none; neither without a card."""
    try:
        return None if card is None else draft_for(card), None
    except ApiError as error:
        return None, error


async def resubmit(service: Service, request: Request, caller: Caller, job: Job) -> Job:
    """Create a new job with the request of an ended one. Raises as `submit`."""
    requests = request_costs(caller)
    pictures = picture_costs(caller, ImageJob.read(job.parameters).n) if job.modality == "image" else []
    draft = JobDraft(
        new_id(), job.modality, job.model, job.parameters, job.priority, None, job.work_ms, owner=job.owner,
        inputs=job.inputs, followed=False if job.modality == "text" else None,
    )  # fmt: skip
    return (await _create(service, draft, request, requests + pictures, len(requests)))[0]


async def served(service: Service, name: str | None, kind: type[C]) -> C:
    """The model of this name and kind; without a name, the first live one. Raises `ApiError` and `StoreError` if none
    can serve the request.
    """
    card = await service.cards.find(name, kind)
    if card is not None:
        return card
    refusal = admission.no_such_model(service.cards.now, name, kind)
    if refusal is not None:
        raise refusal
    raise admission.no_model() if service.cards.redis_answers else StoreDown("Redis has never answered")


async def _check_deadline(service: Service, draft: JobDraft, card: ImageCard) -> None:
    """Raises `ApiError` (400) for a deadline that the job cannot meet."""
    if draft.deadline_s is not None:
        # Read afresh: the queue may have emptied since the snapshot, and no request is rejected for old load.
        backlog = await service.call(service.store.backlog, draft.modality)
        admission.check_deadline(draft, card, backlog, service.cards.now.ready(draft.modality))


async def make(service: Service, draft: JobDraft) -> Job:
    """Create the record, with its message. Raises `ApiError` (429) if the queue is full."""
    return (await _create(service, draft))[0]


async def _create(
    service: Service,
    draft: JobDraft,
    request: Request | None = None,
    charges: Sequence[RateLimitCost] = (),
    always: int = 0,
) -> tuple[Job, QueuePosition | None]:
    """Charge the rate limits and create the record, with its message, in one step. Raises `ApiError` (429).

    The first `always` charges count even if no job is created.
    """
    draft = replace(draft, trace=traces.current(), request_id=logs.current_request_id())
    most = service.share(draft.owner)
    made = await service.submissions.make(draft, service.queue.message(draft.envelope), charges, always, most)
    for charge, standing in zip(charges, made.charges, strict=False):
        assert request is not None
        apply_rate_limit(request, charge, standing)
    if made.barred:
        raise unknown_key()
    if made.share:
        message = f"As many jobs of this key wait in the {draft.modality} queue as may ({most}); try again later."
        wait_s = service.cards.now.wait_s(draft.modality)
        headers = {"Retry-After": str(admission.retry_after_s(wait_s))}
        raise ApiError(429, message, code="queue_share_full", headers=headers)
    if made.job is None:
        after_s = admission.retry_after_s(service.cards.now.wait_s(draft.modality))
        message = f"The {draft.modality} queue is full; try again later."
        raise ApiError(429, message, code="queue_full", headers={"Retry-After": str(after_s)})
    return made.job, made.standing


def fitted_to(upload: Upload | None, pictures: PictureUploads, draft: JobDraft) -> FittedInputs:
    """The upload's image and mask, and the pictures of controls and image prompts, as the draft's job reads them.
    Raises `ApiError`, naming the field.
    """
    job = ImageJob.read(draft.parameters)
    return uploads.fitted(upload, pictures, job.size, soft=job.source is not None and bool(job.source.soft_mask))


def store_inputs(service: Service, draft: JobDraft, inputs: FittedInputs) -> JobDraft:
    """The draft with its source image and the pictures of its controls and image prompts, stored for it until its
    record references them. Raises `ArtifactError`.
    """

    def put(data: bytes) -> str:
        return service.artifacts.put_kept(data, "image/png", lambda key: service.store.keep(key, _INPUT_S, hold=True))

    keys = [None if data is None else put(data) for data in (inputs.image, inputs.mask)]
    others, prompts = ([put(data) for data in own] for own in (inputs.controls, inputs.image_prompts))
    asked = ImageJob.read(draft.parameters)
    source = None if asked.source is None else replace(asked.source, image=keys[0], mask=keys[1])
    controls = tuple(replace(one, image=key) for one, key in zip(asked.control, others, strict=True))
    prompted = tuple(replace(one, image=key) for one, key in zip(asked.image_prompts, prompts, strict=True))
    whole = replace(asked, source=source, control=controls, image_prompts=prompted)
    stored = dict.fromkeys(filter(None, [*keys, *others, *prompts]))
    return replace(draft, parameters=whole.to_dict(), inputs=tuple(stored))


def _webhook(service: Service, request: Request, fields: ImageFields) -> dict[str, str] | None:
    """The webhook receiver. Raises `ApiError` (400) for an address that may not be called."""
    url = getattr(fields, "webhook_url", None)
    if url is None:
        return None
    webhooks.check(url, private=service.settings.webhook_private)
    return {"url": url, "base": service.links(request).base}


def _digest(fields: ImageFields, upload: Upload | None, pictures: PictureUploads) -> str:
    """Digest of the request before defaults are filled in: a seed may be random."""
    given = fields.model_dump(mode="json", exclude_none=True)
    if upload is not None:
        given["upload"] = upload.digest
    for name, digests in pictures.digests.items():
        given[f"uploads of {name}" if name in given else name] = digests
    return hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:32]


def _same(job: Job, caller: Caller, digest: str) -> Job:
    """The job, if this caller made the same request. Raises `ApiError`: 409 for another owner's, 422 for another
    request.
    """
    if job.owner != caller.id:
        raise ApiError(409, "This id is taken.", param="id", code="id_taken")
    if job.digest != digest:
        message = "There is a job of this id, or of this Idempotency-Key, and it asks for something else."
        raise ApiError(422, message, code="idempotency_conflict")
    return job
