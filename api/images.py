"""POST /v1/images/generations: OpenAI's endpoint. A job is made, waited for, and answered with its pictures.

Knows this one shape of request and answer; the job itself is made and followed in service.py.
"""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import anyio
from fastapi import APIRouter, Request, Response

from api import body, schemas
from api.errors import NO_RETRY, ApiError
from api.presentation import image_url, results
from api.service import Given, Service
from core.jobs.record import Job, JobState

router = APIRouter(tags=["images"])

_CLOSED = 499  # nobody reads it


@router.post(
    "/v1/images/generations",
    summary="Draw pictures and wait for them",
    response_model=schemas.Generated,
    openapi_extra=schemas.document(schemas.ImageFields),
)
async def generate(request: Request, service: Given) -> Response:
    """Answers when all pictures are drawn. A client that leaves before cancels the job."""
    fields = schemas.read(schemas.ImageFields, await body.read(request))
    job = await service.accept(fields)
    ended = await _wait(service, job.id, request)
    if ended is None:
        raise ApiError(_CLOSED, "The client went away.", code="client_closed_request")
    if ended.state is not JobState.SUCCEEDED:
        raise _unsuccessful(ended)
    as_url = fields.response_format == "url"
    content = await service.call(_content, service, ended, str(request.base_url) if as_url else None)
    return Response(content, media_type="application/json")


async def _wait(service: Service, id: str, request: Request) -> Job | None:
    """The job as it ended; None if the client left. However this is left, the job is over. Raises `ApiError`."""
    waiting = asyncio.create_task(service.end(id))
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
            if ended is None:
                stopped = await service.cancel(id)
    if ended is None and service.closing.is_set():
        again = {"Retry-After": "2"} if stopped else NO_RETRY
        raise ApiError(503, "The server is stopping, and the job was cancelled.", code="stopping", headers=again)
    return ended


async def _left(request: Request) -> None:
    """Returns when the client has closed the connection. The body has been read, so nothing else can come."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _unsuccessful(job: Job) -> ApiError:
    error = job.error or {}
    if job.state is JobState.CANCELLED:
        return ApiError(409, "The job was cancelled.", code="cancelled", headers=NO_RETRY)
    if job.state is JobState.EXPIRED:
        return ApiError(504, "The deadline passed before the job was done.", code="expired", headers=NO_RETRY)
    message = str(error.get("message") or "The job failed.")
    return ApiError(500, message, code=str(error.get("code") or "failed"), headers=NO_RETRY)


def _content(service: Service, job: Job, base_url: str | None) -> bytes:
    """The answer's JSON, tens of megabytes of it where pictures are inside: made on a thread.

    Raises `core.artifacts.ArtifactError`.
    """
    data: list[dict[str, Any]] = []
    for k, image in enumerate(results(job)):
        if base_url is None:
            made = {"b64_json": base64.b64encode(service.artifacts.get(image["key"])).decode("ascii")}
        else:
            made = {"url": image_url(job, k, base_url)}
        data.append({**made, "seed": image["seed"], "warnings": image.get("warnings", [])})
    answer = {
        "created": int(job.created),
        "data": data,
        "size": f"{job.parameters['width']}x{job.parameters['height']}",
        "output_format": "png",
        "background": "opaque",
        "model": job.model,
        "job_id": job.id,
    }
    return json.dumps(answer, separators=(",", ":"), allow_nan=False).encode("ascii")
