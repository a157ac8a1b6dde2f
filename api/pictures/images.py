"""POST /v1/images/generations: OpenAI's endpoint. Creates a job, waits for it, and responds with its images."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import anyio
from fastapi import Request, Response

from api import schemas
from api.access import By
from api.errors import NO_RETRY, ApiError, job_error
from api.http import body
from api.jobs import submission
from api.jobs.events import EventStream
from api.jobs.presentation import results, size
from api.pictures import forms as picture_forms
from api.pictures import inline_images, streaming
from api.pictures.links import ImageLinks
from api.rate_limits import charge_refusals, enforce_rate_limit
from api.routers import new_router
from api.service import Given, Service
from contract.image import ImageJob
from contract.image_request import EditRequest, ImageRequest
from core.jobs.record import Job, JobState

router = new_router("images")

_CLOSED = 499  # nobody reads it


@router.post(
    "/v1/images/generations",
    summary="Draw pictures and wait for them",
    response_model=schemas.Generated,
    responses={200: {"content": {"text/event-stream": {}}}},
    openapi_extra={
        **schemas.document(ImageRequest, ImageRequest, form=picture_forms.FILES[ImageRequest]),
        "parameters": [schemas.IDEMPOTENCY_KEY],
    },
)
async def generate(request: Request, service: Given, caller: By) -> Response:
    """Answer when all pictures are drawn; with `stream`, send events as they come.

    A client that disconnects before the end cancels the job, unless it sent an `Idempotency-Key`: then it may repeat
    the request. A form's files are the pictures of its controls and image prompts.
    """
    caller.check("images")
    if picture_forms.is_form(request):
        await enforce_rate_limit(request, service, caller)
        async with picture_forms.read(request, service, caller, ImageRequest) as (fields, pictures):
            id = submission.idempotency_id(request, caller)
            job, _ = await submission.submit(service, request, caller, fields, id, pictures, charged=True)
        return await answer(service, request, job, fields, stays=id is not None)
    async with charge_refusals(request, service, caller):
        fields = schemas.read(ImageRequest, await body.read(request, caller.id), ignore_unknown=service.ignore_unknown)
    id = submission.idempotency_id(request, caller)
    job, _ = await submission.submit(service, request, caller, fields, id)
    return await answer(service, request, job, fields, stays=id is not None)


async def answer(service: Service, request: Request, job: Job, fields: ImageRequest, *, stays: bool) -> Response:
    """The job's images when all are finished, or with `stream` its events. Raises `ApiError`."""
    links = service.links(request, job.owner) if fields.response_format == "url" else None
    if fields.stream:
        kind = "image_edit" if isinstance(fields, EditRequest) else "image_generation"
        source = streaming.stream_images(service, job, kind, links, fields.partial_images or 0, stays=stays)
        return EventStream(source, None if stays else lambda: service.follower.cancel(job))
    ended = await finished(service, request, job, stays=stays)
    return await inline_images.respond(service, job.owner, generated(ended, links))


async def finished(service: Service, request: Request, job: Job, *, stays: bool) -> Job:
    """The job after a success. Raises `ApiError` for any other end, and as `wait`."""
    ended = await wait(service, job, request, service.follower.end(job), stays=stays)
    if ended is None:
        raise left()
    if ended.state is not JobState.SUCCEEDED:
        raise job_error(ended)
    return ended


def left() -> ApiError:
    return ApiError(_CLOSED, "The client went away.", code="client_closed_request")


async def wait(
    service: Service, job: Job, request: Request, work: Coroutine[Any, Any, Job | None], *, stays: bool
) -> Job | None:
    """The result of `work`, if the client stays connected; None if it left. Without a result the job is cancelled,
    unless it `stays`, however this is left.

    Raises `ApiError`.
    """
    waiting = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(request))
    ended: Job | None = None
    stopped = True
    try:
        await asyncio.wait({waiting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            ended = waiting.result()
    finally:
        with anyio.CancelScope(shield=True):
            for task in (waiting, leaving):
                task.cancel()
            await asyncio.gather(waiting, leaving, return_exceptions=True)
            if ended is None and not stays:
                stopped = await service.follower.cancel(job)
    if ended is None and service.closing.is_set():
        again = {"Retry-After": "2"} if stopped else NO_RETRY
        consequence = "goes on" if stays else "was cancelled"
        raise ApiError(503, f"The server is stopping, and the job {consequence}.", code="stopping", headers=again)
    return ended


async def _left(request: Request) -> None:
    """Return when the client has disconnected. The body has been read, so nothing else can come."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def generated(job: Job, links: ImageLinks | None) -> dict[str, Any]:
    """The response's JSON; without `links` its images are `Inline`."""
    request = ImageJob.read(job.parameters)
    return {
        "created": int(job.created),
        "data": [streaming.content(job, k, links) for k, _ in enumerate(results(job))],
        "size": size(job, request),
        "output_format": request.output_format,
        "background": "opaque",
        "model": job.model,
        "job_id": job.id,
    }
