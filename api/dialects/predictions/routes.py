"""/predictions and /health-check as Cog has them, /v1/predictions and models as Replicate has them.

A prediction is an image job: it is made by `submission.submit`, and its id is the job's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Literal

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.sse import format_sse_event
from pydantic import BaseModel, ConfigDict, Field

from api import health, models, schemas
from api.access import By, Caller
from api.cards import RegistrySnapshot
from api.dialects.foreign import error_route, errors_at
from api.dialects.predictions import inputs, objects
from api.dialects.predictions.objects import COG, OWNER, REPLICATE, Dialect, prediction
from api.errors import ApiError, invalid_field
from api.http import body
from api.http.paging import missing, query
from api.jobs import admission, submission
from api.jobs import routes as jobs
from api.jobs.events import EventStream
from api.jobs.presentation import next_page
from api.pictures import images, references
from api.pictures.inline_images import InlineDocument
from api.pictures.links import ImageLinks
from api.pictures.references import GivenPictures
from api.rate_limits import charge_refusals, enforce_rate_limit
from api.routers import new_router
from api.service import Given, Service
from contract.card import MAX_PROMPT_CHARACTERS, ImageCard
from contract.strict import MAX_NAME, StrictModel
from core.jobs.broker import JOB_ID
from core.jobs.keyring import webhook_secret
from core.jobs.record import Job

_LONGEST_WAIT_S = 60
_ANSWER_S = 0.25  # before `Prefer: wait=n` has passed the answer begins: clients give up half a second after it
_WAIT = re.compile(r"wait(?:=([0-9]{1,4}))?")
_HASH = re.compile(r"[0-9a-f]{64}")
_PAGE = 100
_MOST_INPUTS = 100
_MAX_URL = 2048  # characters
_FRESH = {"Cache-Control": "no-store"}
_LUMINANCE = GivenPictures(mask_convention="luminance")  # of masks, as diffusers has it


class PredictionBody(StrictModel):
    """The body of a prediction."""

    model_config = ConfigDict(title="PredictionRequest")

    input: dict[str, Any] = Field(
        max_length=_MOST_INPUTS,
        description="prompt, negative_prompt, width and height or aspect_ratio, num_outputs, num_inference_steps, "
        "guidance_scale, scheduler, seed, image, mask, prompt_strength, output_format, output_quality; and other "
        "fields of /v1/images/generations and /v1/images/edits",
        json_schema_extra={
            "properties": {"prompt": {"type": "string", "maxLength": MAX_PROMPT_CHARACTERS}}, "required": ["prompt"]
        },
    )  # fmt: skip
    version: str | None = Field(
        default=None, max_length=MAX_NAME, description="a model's name, also as owner/name or owner/name:name"
    )
    id: str | None = Field(default=None, max_length=MAX_NAME, description="the id in the address, again")
    webhook: str | None = Field(default=None, max_length=_MAX_URL, description="an address that is told, signed")
    webhook_events_filter: list[Literal["start", "output", "logs", "completed"]] | None = Field(
        default=None, max_length=16, description="of what the webhook is told; default: all of them"
    )
    webhook_completed: str | None = Field(
        default=None, max_length=_MAX_URL, description="an address that is told of the end, in place of webhook"
    )
    stream: bool | None = Field(default=None, description="accepted and ignored: urls.stream is always there")
    created_at: str | None = Field(default=None, max_length=100, description="accepted and ignored")
    context: dict[str, Any] | None = Field(
        default=None, max_length=_MOST_INPUTS, description="accepted and ignored"
    )  # fmt: skip


class Problem(BaseModel):
    """An error as Replicate's clients show it (RFC 9457), and in this service's own form."""

    title: str
    detail: str
    status: int
    error: schemas.ErrorDetail


class Prediction(BaseModel):
    id: str
    model: str
    version: str
    status: Literal["starting", "processing", "succeeded", "failed", "canceled"]
    input: dict[str, Any]
    output: list[str] | None = Field(description="the pictures' URLs")
    error: str | None
    logs: str
    metrics: dict[str, float]
    created_at: str
    started_at: str | None
    completed_at: str | None
    source: Literal["api"]
    data_removed: bool
    urls: dict[str, str]


class PredictionPage(BaseModel):
    previous: str | None
    next: str | None = Field(description="the address of the next page")
    results: list[Prediction]


def _problem(error: ApiError) -> JSONResponse:
    """The error as a `Problem`; an invalid field is a 422, as Cog and Replicate answer it."""
    status = 422 if error.status == 400 else error.status
    titles: Mapping[int, str] = {401: "Unauthenticated", 404: "Not found", 422: "Input validation failed"}
    title = titles.get(status, "Too many requests" if status == 429 else "The request failed")
    content = {"title": title, "detail": str(error), "status": status, **error.content}
    return JSONResponse(content, status, dict(error.headers or {}))


router = new_router("predictions", error=Problem, route_class=error_route(_problem))

_PREFER = {
    "name": "Prefer",
    "in": "header",
    "required": False,
    "description": "respond-async: answer at once; wait or wait=n: after so many seconds at most (1 to 60)",
    "schema": {"type": "string"},
}
_CREATE: dict[str, Any] = {
    "response_model": Prediction,
    "openapi_extra": {**schemas.document(PredictionBody), "parameters": [schemas.IDEMPOTENCY_KEY, _PREFER]},
}
_UNFINISHED: dict[int | str, dict[str, Any]] = {202: {"model": Prediction, "description": "It has not ended yet."}}


@router.post("/predictions", summary="Make a prediction, as Cog does", responses=_UNFINISHED, **_CREATE)
async def predict(request: Request, service: Given, caller: By) -> Response:
    """Answer when the prediction has ended, with its pictures as data URLs; with `Prefer: respond-async` at once.

    A client that disconnects before the end cancels it, unless it sent an `Idempotency-Key` or `Prefer: respond-async`.
    """
    return await _create(request, service, caller, COG, submission.idempotency_id(request, caller))


@router.put("/predictions/{id}", summary="Make a prediction of a chosen id", responses=_UNFINISHED, **_CREATE)
async def put(id: str, request: Request, service: Given, caller: By) -> Response:
    """Make a prediction as POST does; may be repeated, and makes one. 422 if the id is that of another request."""
    return await _create(request, service, caller, COG, await submission.chosen_id(service, caller, id))


@router.get("/predictions/{id}", summary="Look at a prediction", response_model=Prediction)
async def look(id: str, request: Request, service: Given, caller: By) -> Response:
    """The prediction, with its pictures as data URLs."""
    return await _answer(service, service.links(request, caller.id), await _find(service, id, caller), COG)


@router.post("/predictions/{id}/cancel", summary="Cancel a prediction", response_model=Prediction)
async def cancel(id: str, request: Request, service: Given, caller: By) -> Response:
    """Cancel a prediction that has not ended, and answer with it."""
    return await _cancel(id, request, service, caller, COG)


@router.get("/health-check", summary="Can predictions be made? As Cog says")
async def health_check(service: Given) -> Response:
    """Always 200: `status` is READY, STARTING while no worker is ready, or UNHEALTHY without Redis."""
    if not service.cards.redis_answers:
        state = "UNHEALTHY"
    else:
        state = "STARTING" if health.unready_reason(service) else "READY"
    setup = "succeeded" if state == "READY" else "starting"
    return JSONResponse({"status": state, "setup": {"status": setup, "logs": ""}}, headers=_FRESH)


@router.post("/v1/predictions", status_code=201, summary="Make a prediction, as Replicate does", **_CREATE)
async def create(request: Request, service: Given, caller: By) -> Response:
    """Make a prediction of the model that `version` names, and answer at once; with `Prefer: wait`, when it has ended,
    or after a minute at most.
    """
    return await _create(request, service, caller, REPLICATE, submission.idempotency_id(request, caller))


@router.post(
    "/v1/models/{owner}/{name}/predictions", status_code=201, summary="Make a prediction of a model", **_CREATE
)
async def create_of_model(owner: str, name: str, request: Request, service: Given, caller: By) -> Response:
    """Make a prediction as POST /v1/predictions does. The model is that of this name, or of the name owner/name."""
    id, model = submission.idempotency_id(request, caller), _name(service.cards.seen_by(caller.id), owner, name)
    return await _create(request, service, caller, REPLICATE, id, model)


@router.get(
    "/v1/predictions",
    summary="List predictions",
    response_model=PredictionPage,
    openapi_extra=query(cursor=({"type": "string", "pattern": f"^{JOB_ID.pattern}$"}, "where the page begins")),
)
async def list_predictions(request: Request, service: Given, caller: By) -> Response:
    """The caller's predictions and other image jobs, newest first. A page may be short although others follow."""
    after = request.query_params.get("cursor", "")
    if after and JOB_ID.fullmatch(after) is None:
        raise invalid_field("cursor", "must be the id of a prediction")
    await enforce_rate_limit(request, service, caller)
    links = service.links(request, caller.id)

    def listed() -> Response:
        owner, record = None if caller.may("admin") else caller.id, jobs.locate(service, after, caller)
        listing = service.store.lists.page(owner, modality="image", after=record, limit=_PAGE)
        if listing is None:
            raise missing()
        following = f"{links.base}{REPLICATE.path}?cursor={next_page(listing, links)}" if listing.more else None
        results = [prediction(job, links) for job in listing.jobs]
        return JSONResponse({"previous": None, "next": following, "results": results}, headers=_FRESH)

    return await service.call(caller.id, listed)


@router.get("/v1/predictions/{id}", summary="Look at a prediction, as Replicate does", response_model=Prediction)
async def retrieve(id: str, request: Request, service: Given, caller: By) -> Response:
    """The prediction, with its pictures as links; as data URLs where links do not begin with https."""
    return await _answer(service, service.links(request, caller.id), await _find(service, id, caller), REPLICATE)


@router.post("/v1/predictions/{id}/cancel", summary="Cancel a prediction, as Replicate does", response_model=Prediction)
async def cancel_as_replicate(id: str, request: Request, service: Given, caller: By) -> Response:
    """Cancel a prediction that has not ended, and answer with it."""
    return await _cancel(id, request, service, caller, REPLICATE)


@router.get(
    "/v1/predictions/{id}/stream",
    summary="Stream a prediction",
    response_class=Response,
    responses={200: {"content": {"text/event-stream": {}}}},
)
async def stream(id: str, request: Request, service: Given, caller: By) -> Response:
    """Stream Replicate's events: `logs`, a line of progress; `output`, the link of a picture; `error`; `done`."""
    await enforce_rate_limit(request, service, caller)
    job = await _find(service, id, caller)
    return EventStream(_stream(service, job, service.links(request, caller.id)))


@router.get("/v1/models/{owner}/{name}", summary="Look at a model, as Replicate does")
async def model(owner: str, name: str, request: Request, service: Given, caller: By) -> Response:
    """OpenAI's object of the model; an image model's has the fields of Replicate's too, whose `latest_version` is the
    only one.
    """
    id = f"{owner}/{name}"
    seen = service.cards.seen_by(caller.id)
    named = seen.named(id)
    if not isinstance(named, ImageCard | None) or admission.loading_kind(seen, id) is not None:
        return await models.model(id, service, caller)
    card = named or _card(seen, owner, name)
    base = service.links(request, caller.id).base
    fields = objects.model_fields(card, owner, name, base, models.started(card, service))
    listed = models.model_object(card, service, id if named else card.name, caller)
    return JSONResponse({**listed, **fields}, headers=_FRESH)


@router.get("/v1/models/{owner}/{name}/versions", summary="List a model's versions")
async def versions(owner: str, name: str, service: Given, caller: By) -> Response:
    """A page with the one version that there is."""
    card = _card(service.cards.seen_by(caller.id), owner, name)
    page = {"previous": None, "next": None, "results": [objects.version(card, models.started(card, service))]}
    return JSONResponse(page, headers=_FRESH)


@router.get("/v1/models/{owner}/{name}/versions/{id}", summary="Look at a model's version")
async def model_version(owner: str, name: str, id: str, service: Given, caller: By) -> Response:
    """The version, whose id is the model's name, with its schemas of input and output."""
    card = _card(service.cards.seen_by(caller.id), owner, name)
    if id != card.name:
        raise ApiError(404, "id: the only version of a model is its name", param="id", code="version_not_found")
    return JSONResponse(objects.version(card, models.started(card, service)), headers=_FRESH)


@router.get("/v1/account", summary="Who calls, as Replicate says")
async def account(caller: By) -> Response:
    """An account with the name of the caller's key; clients check their token with it."""
    fields = {"type": "organization", "username": caller.id or OWNER, "name": caller.id or OWNER, "github_url": None}
    return JSONResponse(fields, headers=_FRESH)


@router.get("/v1/webhooks/default/secret", summary="The secret that the caller's webhooks are signed with")
async def secret(service: Given, caller: By) -> Response:
    """The secret of `replicate.webhooks.validate`, of this caller's webhooks alone."""
    return JSONResponse({"key": webhook_secret(service.cards.now.secret, caller.id)}, headers=_FRESH)


async def _create(
    request: Request,
    service: Service,
    caller: Caller,
    dialect: Dialect,
    id: submission.ChosenId | None,
    model: str | None = None,
) -> Response:
    """Make the prediction and answer as the request prefers. Raises `ApiError`, `StoreError` and `ArtifactError`."""
    caller.check("images")
    wait_s = _wait_s(request, dialect)
    stays = id is not None or wait_s is not None
    async with charge_refusals(request, service, caller):
        given = schemas.read(PredictionBody, await body.read(request, caller.id))
        if given.id is not None and given.id != request.path_params.get("id", given.id):
            raise invalid_field("id", "must be the id in the address")
        model = model or _version(service.cards.seen_by(caller.id), given.version)
        base = service.links(request, caller.id).base
        card = service.cards.seen_by(caller.id).model(model, ImageCard)
        fields, places = inputs.job_fields(given.input, base, card)
        if card is None and places["size"] == "input.aspect_ratio":  # the size is one of the card's
            with errors_at(places):
                card = await submission.served(service, model, ImageCard, caller.id)
            fields, places = inputs.job_fields(given.input, base, card)
        url, events = _webhook(given)
        with errors_at(places):
            fields |= {"model": model, "webhook_url": url}
            job_request = references.read_job(fields, ignore_unknown=False)
    with errors_at(places):
        receiver = objects.receiver(events)
        job, _ = await submission.submit(service, request, caller, job_request, id, _LUMINANCE, receiver=receiver)
    if wait_s == 0 or job.state.final:
        return await _answer(service, service.links(request, caller.id), job, dialect, created=True)

    async def end() -> Job | None:
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(service.follower.end(job), wait_s)
        return await service.follower.record(job)

    ended = await images.wait(service, job, request, end(), stays=stays)
    if ended is None:
        raise images.left()
    return await _answer(service, service.links(request, caller.id), ended, dialect, created=True)


async def _answer(
    service: Service, links: ImageLinks, job: Job, dialect: Dialect, *, created: bool = False
) -> Response:
    """The prediction. One that was just made has not left `starting` unless it has ended: Replicate's clients take
    anything else for the end.
    """
    status = 200
    if created:
        job = job if job.state.final else replace(job, progress=None)
        status = 201 if dialect is REPLICATE else 200 if job.state.final else 202
    document = InlineDocument(service, job.owner, prediction(job, links, dialect, inline=dialect.inlines(links)))
    headers = {**_FRESH, "Content-Length": str(await document.verify())}
    return StreamingResponse(document.stream(), status, headers, media_type="application/json")


async def _cancel(id: str, request: Request, service: Service, caller: Caller, dialect: Dialect) -> Response:
    record = await _find(service, id, caller)
    job = await service.call(caller.id, service.store.cancel, record.id, record.incarnation)
    if job is None:
        raise jobs.no_job()
    return await _answer(service, service.links(request, caller.id), job, dialect)


async def _find(service: Service, id: str, caller: Caller) -> Job:
    """The image job of this id. Raises `ApiError` (404) as `jobs.find`, and for a text's."""
    job = await jobs.find(service, id, caller)
    if job.modality != "image":
        raise jobs.no_job()
    return job


async def _stream(service: Service, job: Job, links: ImageLinks) -> AsyncGenerator[bytes]:
    """The prediction's events, until its end; of one that has ended only what follows its progress."""
    count, last = 0, ""

    def event(kind: str, data: str) -> bytes:
        nonlocal count
        count += 1
        return format_sse_event(id=str(count), event=kind, data_str=data)

    if not job.state.final:
        async with aclosing(service.follower.until_end(job)) as events:
            async for progress in events:
                done, steps = (progress.data.get(name, 0) for name in ("steps_done", "steps"))
                if steps and (line := objects.bar(done, steps)) != last:
                    last = line
                    yield event("logs", line + "\n")
    ended = await service.follower.final_record(job)
    if ended is None:
        yield event("error", json.dumps({"detail": "The server is stopping, or the prediction is gone."}))
        return
    outcome = prediction(ended, links)
    for url in outcome["output"] or ():
        yield event("output", url)
    if outcome["error"] is not None:
        yield event("error", json.dumps({"detail": outcome["error"]}))
    yield event("done", json.dumps({"reason": "canceled"} if outcome["status"] == "canceled" else {}))


def _wait_s(request: Request, dialect: Dialect) -> float | None:
    """How long the answer may wait for the end, by the `Prefer` header (RFC 7240); None: as long as it takes."""
    preferences = [word.strip() for header in request.headers.getlist("prefer") for word in header.lower().split(",")]
    if "respond-async" in preferences:
        return 0
    for match in filter(None, map(_WAIT.fullmatch, preferences)):
        return min(_LONGEST_WAIT_S, max(1, int(match[1] or _LONGEST_WAIT_S))) - _ANSWER_S
    return None if dialect is COG else 0


def _webhook(given: PredictionBody) -> tuple[str | None, tuple[str, ...]]:
    """The receiver, and the events that it is told of."""
    if given.webhook is None and given.webhook_completed is not None:
        return given.webhook_completed, ("completed",)
    return given.webhook, tuple(objects.EVENTS if given.webhook_events_filter is None else given.webhook_events_filter)


def _version(seen: RegistrySnapshot, version: str | None) -> str | None:
    """The model that a version names: by its name, or in the form owner/name or owner/name:version."""
    if version is None or seen.model(version, ImageCard) is not None:
        return version
    path, _, id = version.partition(":")
    owner, slash, name = path.partition("/")
    model = id or (_name(seen, owner, name) if slash else path)
    if _HASH.fullmatch(model) and seen.model(model, ImageCard) is None:
        words = "version: is one of another service; a version is a model's name here, such as diptych/NAME of "
        words += "GET /v1/models, and DIPTYCH_MODEL_ALIASES gives models further names"
        raise ApiError(404, words, param="version", code="model_not_found")
    return model


def _name(seen: RegistrySnapshot, owner: str, name: str) -> str:
    """The name of the model that is addressed by owner and name: both, if there is a model of that name."""
    both = f"{owner}/{name}"
    return name if seen.model(both, ImageCard) is None else both


def _card(seen: RegistrySnapshot, owner: str, name: str) -> ImageCard:
    card = seen.model(_name(seen, owner, name), ImageCard)
    if card is None:
        raise admission.missing_model(seen, name)
    return card
