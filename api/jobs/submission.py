"""Turns a request into a job: checks it, charges rate limits, creates it once. A repeated request returns the same job.

admission.py checks requests against model cards.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from fastapi import Request

from api.access import Caller, key_required, unknown_key
from api.cards import C
from api.errors import ApiError, invalid_field
from api.jobs import admission, webhooks
from api.jobs.admission import ImageDraft
from api.pictures import references
from api.pictures.references import NONE_GIVEN, GivenPictures
from api.pictures.uploads import PictureUploads, Upload
from api.rate_limits import apply_rate_limits, charge, enforce_rate_limit, refund, store_share_full, stored_limit
from api.service import Service
from api.text import drafts as text_drafts
from contract.card import ImageCard, Size, TextCard
from contract.control import Control
from contract.estimates import work_s
from contract.image import PICTURES, ImageJob
from contract.image_request import ImageRequest
from contract.picture_input import PictureInput
from contract.text import TextJob
from core import logs, traces
from core.jobs.broker import JOB_ID
from core.jobs.connection import StoreDown, StoreFull
from core.jobs.creation import JobCreation, OwnerLimits
from core.jobs.rates import RateLimitCost
from core.jobs.record import Job, JobDraft, QueuePosition, Webhook, derived_id, new_id

DraftFor = Callable[[PictureUploads, ImageCard], ImageDraft]

_KEY = re.compile(r"[!-~]{1,255}")
_LOADING_S, _LOOK_S = 60.0, 0.25  # that a request waits for a model that is being loaded
_INPUT_S = 3600.0  # until the job's record sets its retention


class ChosenId(NamedTuple):
    """The id of the record of a job that its client chose, and the client's `name` for it where that is another."""

    id: str
    name: str = ""


async def chosen_id(service: Service, caller: Caller, id: str) -> ChosenId:
    """The caller's job of this id. Raises `ApiError` (400) and `StoreError`."""
    if JOB_ID.fullmatch(id) is None:
        raise invalid_field("id", "must be 1 to 64 letters, digits, - or _")
    record = await service.call(caller.id, service.store.lists.locate, id, caller.id)
    return ChosenId(record, "" if record == id else id)


def idempotency_id(request: Request, caller: Caller) -> ChosenId | None:
    """The job id for this caller's `Idempotency-Key`; None without one. Raises `ApiError` (400)."""
    key = request.headers.get("idempotency-key")
    if key is None:
        return None
    if _KEY.fullmatch(key) is None:
        raise invalid_field("idempotency-key", "must be 1 to 255 printable characters")
    return ChosenId(derived_id(f"{caller.id}\0{key}"))


async def submit(
    service: Service,
    request: Request,
    caller: Caller,
    fields: ImageRequest,
    chosen: ChosenId | None = None,
    given_pictures: GivenPictures = NONE_GIVEN,
    *,
    charged: bool = False,
    receiver: Mapping[str, Any] | None = None,
) -> tuple[Job, QueuePosition | None]:
    """Create a job of these fields, with its message. Raises `ApiError` and `StoreError`, and then there is no job.

    With an id `chosen` by the client the job may exist already: it is returned unchanged. `given_pictures` are pictures
    that are not among the fields; with any picture `ArtifactError` may be raised. Pictures are measured after the rate
    limit (unless it is `charged` already) and the check against the card, and decoded last, after the quota; those with
    a URL are fetched after the quota. `receiver` is what the webhook has beside its address: `events` and `moments`
    that it is told of, and `form`. Also returns the queue position of a job created now.
    """
    pictured = references.any_named(fields, given_pictures)
    if pictured and not charged:
        await enforce_rate_limit(request, service, caller)
        charged = True
    pictures = await references.resolve(service, caller, fields, given_pictures)
    digest = "" if chosen is None else await _digest(service, caller, fields, pictures, receiver)
    webhook = _webhook(service, request, caller, fields, receiver)
    draft_for = partial(_draft, service, caller, fields, chosen, digest, webhook)
    card = service.cards.seen_by(caller.id).model(fields.model, ImageCard)
    draft, refusal = _attempt(draft_for, pictures, card)
    requests = [] if charged else caller.limits.request_costs()
    if draft is not None and not pictured and draft.deadline_s is None:
        # The common path: a single Redis call.
        costs = requests + caller.limits.job_costs(draft.model, draft.request.n, draft.tokens, draft.text_model)
        job, standing = await create(service, draft, request, costs, keyless=not caller.id)
        return _same(job, caller, digest), standing
    if not charged:
        await enforce_rate_limit(request, service, caller)
    existing = None if chosen is None else await service.call(caller.id, service.store.lists.summary, chosen.id)
    if existing is not None:
        return _same(existing, caller, digest), None
    if refusal is not None:
        raise refusal
    if card is None or draft is None:
        card = await served(service, fields.model, ImageCard, caller.id)
        draft = draft_for(pictures, card)
    costs = caller.limits.job_costs(draft.model, draft.request.n, draft.tokens, draft.text_model)
    if pictured:
        count = partial(charge, request, service, costs)
        check = partial(check_deadline, service, card=card)
        draft = await with_inputs(service, caller.id, partial(draft_for, card=card), pictures, count, check)
    else:
        await check_deadline(service, draft, card)
    try:
        job, standing = await create(service, draft, request, [] if pictured else costs, keyless=not caller.id)
    except (ApiError, StoreFull):
        if pictured:
            await refund(request, service, costs)
        raise
    if pictured and chosen is not None and standing is None:  # an equal request, at the same time, has created it
        await refund(request, service, costs)
    return _same(job, caller, digest), standing


def _draft(
    service: Service, caller: Caller, fields: ImageRequest, chosen: ChosenId | None, digest: str,
    webhook: Webhook | None, pictures: PictureUploads, card: ImageCard,
) -> ImageDraft:  # fmt: skip
    seen, may_write = service.cards.seen_by(caller.id), caller.may("text")
    draft = admission.offered_draft(fields, card, seen, pictures, may_write=may_write)
    id, name = chosen or ChosenId(new_id())
    return replace(draft, id=id, name=name, owner=caller.id, digest=digest, webhook=webhook)


def _attempt(
    draft_for: DraftFor, pictures: PictureUploads, card: ImageCard | None
) -> tuple[ImageDraft | None, ApiError | None]:
    """The draft, or why there is none; neither without a card."""
    try:
        return None if card is None else draft_for(pictures, card), None
    except ApiError as error:
        return None, error


async def resubmit(service: Service, request: Request, caller: Caller, job: Job) -> Job:
    """Create a new job with the request of an ended one. Raises as `submit`."""
    seen, pictures, tokens, text_model = service.cards.seen_by(caller.id), 0, 0, ""
    work_ms = job.work_ms
    if job.modality == "image":
        request_again = ImageJob.read(job.parameters)
        pictures = request_again.n
        if (drawn_by := seen.model(job.model, ImageCard)) is not None:
            work_ms = round(1000 * work_s(drawn_by, request_again))  # what it costs now
        tokens, text_model = admission.expansion(request_again, job.model, seen, may_write=caller.may("text"))
    elif (card := seen.model(job.model, TextCard)) is not None:
        tokens = math.ceil(text_drafts.estimated_tokens(TextJob.read(job.parameters), card))
        work_ms = round(1000 * tokens * card.costs.token_s)
    draft = JobDraft(
        new_id(), job.modality, job.model, job.parameters, job.priority, None, work_ms, owner=job.owner,
        inputs=job.inputs, followed=False if job.modality == "text" else None,
    )  # fmt: skip
    costs = caller.limits.request_costs() + caller.limits.job_costs(job.model, pictures, tokens, text_model)
    return (await create(service, draft, request, costs, keyless=not caller.id))[0]


async def served(service: Service, name: str | None, kind: type[C], owner: str) -> C:
    """The model of this name and kind that the owner may use; without a name, the first live one. Waits for one that is
    being loaded. Raises `ApiError` and `StoreError` if none can serve the request.
    """
    card = await service.cards.find(name, kind, owner)
    until = time.monotonic() + _LOADING_S
    while card is None and time.monotonic() < until and not service.closing.is_set():
        if admission.loading_kind(service.cards.seen_by(owner), name) is not kind:
            break
        await asyncio.sleep(_LOOK_S)
        card = service.cards.seen_by(owner).model(name, kind)
    if card is not None:
        return card
    refusal = admission.no_such_model(service.cards.seen_by(owner), name, kind)
    if refusal is not None:
        raise refusal
    raise admission.no_model() if service.cards.redis_answers else StoreDown("Redis has never answered")


async def check_deadline(service: Service, draft: ImageDraft, card: ImageCard) -> None:
    """Raise `ApiError` (400) for a deadline that the job cannot meet."""
    if draft.deadline_s is not None:
        # Read afresh: the queue may have emptied since the snapshot, and no request is rejected for old load.
        backlog = await service.call(draft.owner, service.store.backlog, draft.modality)
        now = service.cards.now
        admission.check_deadline(
            draft, card, backlog, now.ready(draft.modality), reliable_share=now.reliable_share(card.name)
        )


async def create(
    service: Service,
    draft: JobDraft[Any],
    request: Request,
    costs: Sequence[RateLimitCost] = (),
    *,
    keyless: bool,
) -> tuple[Job, QueuePosition | None]:
    """Charge the rate limits and create the record, with its message, in one step. Raises `ApiError` (429).

    Costs of requests, which are the first, count even if no job is created. `keyless`: the caller has no key.
    """
    draft = replace(draft, trace=traces.current(), request_id=logs.current_request_id())
    limits = replace(service.limits(draft.owner).of_jobs(draft.model), stored=stored_limit(service, draft.owner))
    always = sum(cost.unit == "requests" for cost in costs)
    creation = await service.submissions.make(
        draft, service.queue.message(draft.envelope), costs, always, limits, keyless=keyless
    )
    apply_rate_limits(request, costs, creation.charges)
    if creation.barred:
        raise key_required() if keyless else unknown_key()
    if creation.stored:
        raise store_share_full()
    if creation.job is None:
        raise _no_room(service, draft, creation, limits)
    return creation.job, creation.standing


def _no_room(service: Service, draft: JobDraft[Any], creation: JobCreation, limits: OwnerLimits) -> ApiError:
    """The 429 for a job for which the queue, or its owner, has no room."""
    queue, now = draft.modality, service.cards.now
    wait_s, param = now.wait_s(queue), None
    code, message = "queue_full", f"The {queue} queue is full"
    if creation.share:
        code = "queue_share_full"
        message = f"As many jobs of this key wait in the {queue} queue as may ({limits.waiting})"
    elif creation.jobs_of:
        of_model = creation.jobs_of == "model"
        most, model = (limits.of_model, draft.model) if of_model else (limits.live, "")
        code, param = "too_many_jobs", "model" if of_model else None
        where = f"of {model}" if model else f"in the {queue} queue"
        message = f"This key's limit of {most} jobs at once {where} is reached"
        wait_s = now.next_end_s(queue, model, most or 1)
    headers = {"Retry-After": str(admission.retry_after_s(wait_s))}
    return ApiError(429, f"{message}; try again later.", param=param, code=code, headers=headers)


async def with_inputs(
    service: Service,
    tenant: str,
    draft_for: Callable[[PictureUploads], ImageDraft],
    pictures: PictureUploads,
    count: Callable[[], Awaitable[None]],
    check: Callable[[ImageDraft], Awaitable[None]],
) -> ImageDraft:
    """The draft for these pictures, which are fetched, measured, decoded and stored.

    `count` charges the quota, before anything is fetched or decoded; `check` is called with each draft whose sizes are
    known. Raises what they raise, `ApiError` naming the field, and `ArtifactError`.
    """
    remote = any(source.url for source in pictures.sources)
    if remote:
        await count()
    async with service.fetcher.fetched(tenant, pictures) as local:
        measured = await service.pictures.measured(tenant, local)
        draft = draft_for(measured)
        await check(draft)
        if not remote:
            await count()
        edit = draft.request.picture.edit
        decided = await service.pictures.decided(tenant, measured, soft=edit is not None and edit.soft_mask)
        if decided != measured:
            draft = draft_for(decided)
            await check(draft)
        return await store_inputs(service, tenant, draft, decided)


async def store_inputs(service: Service, tenant: str, draft: ImageDraft, pictures: PictureUploads) -> ImageDraft:
    """The draft with its pictures as its job reads them, decoded one after the other and stored until its record
    references them. All sizes must be known. Equal pictures are decoded once.

    Raises `ApiError`, naming the field, and `ArtifactError`.
    """
    job, picture = draft.request, draft.request.picture
    keys: dict[Hashable, str] = {}

    async def put(identity: Hashable, decode: Callable[[], Awaitable[bytes]]) -> str:
        if identity not in keys:
            data = await decode()
            keep = lambda key: service.store.upkeep.keep(key, _INPUT_S, hold=True)  # noqa: E731
            keys[identity] = await service.stored(tenant, lambda: service.artifacts.put_kept(data, "image/png", keep))
        return keys[identity]

    async def fitted(upload: Upload, size: Size) -> str:
        fit = "stretch" if upload.size == size else upload.fit
        identity = upload.image.identity, upload.margins, fit, size
        return await put(identity, partial(service.pictures.fit_picture, tenant, replace(upload, fit=fit), size))

    edit = picture.edit
    if pictures.source is not None and edit is not None:
        upload = pictures.source
        edit = replace(edit, image=await fitted(upload, picture.size))
        if upload.masked:
            decode = partial(service.pictures.fit_mask, tenant, upload, picture.size, soft=edit.soft_mask)
            mask = await put("mask", decode)
            edit = replace(edit, mask=mask)
    inputs: dict[str, Any] = {}
    for name in PICTURES:
        entries: list[PictureInput] = []
        for entry, upload in zip(getattr(picture, name), pictures.of(name), strict=True):
            size = entry.kept_size(upload.size or (1, 1), picture.size)
            entries.append(replace(entry, image=await fitted(upload, size)))
        inputs[name] = tuple(entries)
    picture = replace(picture, edit=edit, **inputs)
    return replace(draft, request=replace(job, picture=picture), inputs=tuple(dict.fromkeys(keys.values())))


def _webhook(
    service: Service, request: Request, caller: Caller, fields: ImageRequest, receiver: Mapping[str, Any] | None
) -> Webhook | None:
    """The webhook receiver. Raises `ApiError` (400) for an address that may not be called."""
    url = getattr(fields, "webhook_url", None)
    if url is None:
        return None
    webhooks.check(url, private=service.settings.webhook_private)
    return {"url": url, "base": service.links(request, caller.id).base, **(receiver or {})}


async def _digest(
    service: Service, caller: Caller, fields: ImageRequest, pictures: PictureUploads, receiver: Mapping[str, Any] | None
) -> str:
    """Digest of the request before defaults are filled in: a seed may be random."""
    digests = {source.identity: await service.pictures.digested(caller.id, source) for source in pictures.sources}
    pictures = pictures.map(lambda source: digests[source.identity])
    document = fields.model_dump(mode="json", exclude_none=True)
    if pictures.source is not None:
        document["upload"] = pictures.source.digest
    for field in PICTURES:
        if uploads := pictures.inputs.get(field):
            name = "controls" if field == Control.FIELD else f"uploads of {field}"
            document[name] = [upload.digest for upload in uploads]
    if receiver is not None:
        document["webhook events"] = sorted({*receiver["events"]})
    if pictures.further:
        document["further images"] = [upload.digest for upload in pictures.further]
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:32]


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
