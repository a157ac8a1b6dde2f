"""/v1/jobs: make a job, ask for it, cancel it, fetch its pictures.

Knows addresses and statuses; what happens to a job meanwhile is streamed by events.py.
"""

from __future__ import annotations

import re

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from api import body, schemas
from api.errors import ApiError
from api.presentation import job_object, results
from api.service import Given, Service
from core.artifacts import NoArtifact
from core.jobs.record import Job, JobState

router = APIRouter(tags=["jobs"])

_ID = re.compile(r"job_[0-9a-f]{24}")
_NUMBER = re.compile(r"[0-9]{1,3}")
_FOR_EVER = "private, max-age=31536000, immutable"


@router.post(
    "/v1/jobs",
    status_code=202,
    summary="Make a job",
    response_model=schemas.JobObject,
    openapi_extra=schemas.document(schemas.JobFields),
)
async def create(request: Request, service: Given) -> Response:
    """Answers at once. The job goes on whether or not anybody asks for it."""
    fields = schemas.read(schemas.JobFields, await body.read(request))
    job = await service.accept(fields)
    return JSONResponse(job_object(job, str(request.base_url)), 202, {"Location": f"/v1/jobs/{job.id}"})


@router.get("/v1/jobs/{id}", summary="Look at a job", response_model=schemas.JobObject)
async def look(id: str, request: Request, service: Given) -> Response:
    job = await find(service, id)
    return JSONResponse(job_object(job, str(request.base_url)), headers={"Cache-Control": "no-store"})


@router.post("/v1/jobs/{id}/cancel", summary="Cancel a job", response_model=schemas.JobObject)
async def cancel(id: str, request: Request, service: Given) -> Response:
    """Ends a job that waits or runs. One that has ended stays as it is, and is answered."""
    _check_id(id)
    job = await service.call(service.store.cancel, id)
    if job is None:
        raise _no_job()
    return JSONResponse(job_object(job, str(request.base_url)))


@router.get(
    "/v1/jobs/{id}/images/{k}",
    summary="Fetch a picture",
    response_class=Response,
    responses={200: {"content": {"image/png": {}}}, 304: {"description": "The client has it."}},
)
async def image(id: str, k: str, request: Request, service: Given) -> Response:
    """The k-th picture, from 0. 409 while the job is not done; 404 if it ended without pictures, or has fewer."""
    job = await find(service, id)
    if not job.state.final:
        raise ApiError(409, "The job is not done yet.", code="job_not_done", headers={"Retry-After": "1"})
    pictures = results(job) if job.state is JobState.SUCCEEDED else []
    if _NUMBER.fullmatch(k) is None or int(k) >= len(pictures):
        raise _no_image()
    picture = pictures[int(k)]
    headers = {
        "Cache-Control": _FOR_EVER,
        "ETag": f'"{picture["key"]}"',  # the key is made of the content
        "X-Content-Type-Options": "nosniff",
        "Content-Disposition": f'inline; filename="{job.id}-{int(k)}.png"',
    }
    if _has(request, headers["ETag"]):
        return Response(status_code=304, headers={name: headers[name] for name in ("Cache-Control", "ETag")})
    try:
        data = await service.call(service.artifacts.get, picture["key"])
    except NoArtifact:
        raise _no_image() from None
    return Response(data, media_type=picture["media_type"], headers=headers)


async def find(service: Service, id: str) -> Job:
    """The job of this id. Raises `ApiError` (404), also for what is no id at all."""
    _check_id(id)
    job = await service.call(service.store.get, id)
    if job is None:
        raise _no_job()
    return job


def _check_id(id: str) -> None:
    if _ID.fullmatch(id) is None:
        raise _no_job()


def _no_job() -> ApiError:
    return ApiError(404, "There is no such job, or no longer.", param="id", code="job_not_found")


def _no_image() -> ApiError:
    return ApiError(404, "The job has no such picture, or no longer.", param="k", code="image_not_found")


def _has(request: Request, tag: str) -> bool:
    known = [part.strip().removeprefix("W/") for part in request.headers.get("if-none-match", "").split(",")]
    return tag in known or "*" in known
