"""/v1/jobs: create, get, list, cancel, requeue and delete jobs.

events.py streams their events, pictures/downloads.py serves their images.
"""

from __future__ import annotations

import asyncio
import contextlib

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from api import schemas
from api.access import By, Caller
from api.errors import ApiError, invalid_field
from api.http import body
from api.http.paging import Pagination, missing, page, query
from api.jobs import admission, submission
from api.jobs.presentation import job_object, next_page, retrieved, running_forecast
from api.pictures import references
from api.rate_limits import charge_refusals, enforce_rate_limit
from api.routers import new_router
from api.service import Given, Service
from contract.card import KINDS
from core.jobs.broker import JOB_ID
from core.jobs.record import Job, JobState
from core.jobs.unreadable import UnreadableRecord

router = new_router("jobs")

_LONGEST_WAIT_S = 60.0
_PAGES = Pagination(default=20, maximum=100, id=JOB_ID.pattern, kind="a job")
_KINDS = (schemas.JobFields, schemas.EditJobFields)
_FRESH = {"Cache-Control": "no-store"}


@router.post(
    "/v1/jobs",
    status_code=202,
    summary="Make a job",
    response_model=schemas.JobObject,
    openapi_extra={**schemas.document(*_KINDS), "parameters": [schemas.IDEMPOTENCY_KEY]},
)
async def create(request: Request, service: Given, caller: By) -> Response:
    """Create a job, and answer at once. It runs whether or not anybody waits for it.

    With an `Idempotency-Key` a repeated request returns the job that the first one made.
    """
    caller.check("images")
    return await _make(request, service, caller, submission.idempotency_id(request, caller))


@router.put(
    "/v1/jobs/{id}",
    status_code=202,
    summary="Make a job of a chosen id",
    response_model=schemas.JobObject,
    openapi_extra=schemas.document(*_KINDS),
)
async def put(id: str, request: Request, service: Given, caller: By) -> Response:
    """Create a job of this id as POST does; may be repeated, and makes one job. 422 if the id is that of a job with
    other fields.
    """
    caller.check("images")
    return await _make(request, service, caller, await submission.chosen_id(service, caller, id))


async def _make(request: Request, service: Service, caller: Caller, id: submission.ChosenId | None) -> Response:
    async with charge_refusals(request, service, caller):
        fields = references.read_job(await body.read(request, caller.id), ignore_unknown=service.ignore_unknown)
    job, standing = await submission.submit(service, request, caller, fields, id)
    content = job_object(job, service.links(request, caller.id), await service.forecast(job, standing=standing))
    return JSONResponse(content, 202, {"Location": f"/v1/jobs/{content['id']}"})


@router.get(
    "/v1/jobs",
    summary="List jobs",
    response_model=schemas.JobList,
    openapi_extra=_PAGES.document(
        status=({"type": "string", "enum": [state.value for state in JobState]}, "only those in this state"),
        model=({"type": "string"}, "only those of this model, by its name or another one"),
    ),
)
async def list_jobs(request: Request, service: Given, caller: By) -> Response:
    """The caller's jobs, newest first; with the scope admin, everybody's.

    A page may be short although others follow.
    """
    await enforce_rate_limit(request, service, caller)
    limit, after = _PAGES.read(request)
    query = request.query_params
    state = query.get("status")
    if state is not None and state not in list(JobState):
        raise invalid_field("status", f"must be one of {', '.join(JobState)}")
    model = service.cards.seen_by(caller.id).served_name(query.get("model")) or ""
    links = service.links(request, caller.id)

    def listed() -> Response:
        jobs = service.store.lists.page(
            None if caller.may("admin") else caller.id,
            state=JobState(state) if state else None, model=model, after=locate(service, after, caller), limit=limit,
        )  # fmt: skip
        if jobs is None:
            raise missing()
        data = [job_object(job, links, running_forecast(job)) for job in jobs.jobs]
        return JSONResponse(page(data, more=jobs.more, last=next_page(jobs, links)), headers=_FRESH)

    return await service.call(caller.id, listed)


@router.get(
    "/v1/jobs/{id}",
    summary="Look at a job",
    operation_id="look_v1_jobs__id__get",
    response_model=schemas.RetrievedJob,
    openapi_extra=query(
        wait_s=(
            {"type": "number", "minimum": 0, "maximum": _LONGEST_WAIT_S},
            "answer when the job has ended, or after so many seconds",
        )
    ),
)
async def retrieve(id: str, request: Request, service: Given, caller: By) -> Response:
    wait_s = _wait_s(request.query_params.get("wait_s", "0"))
    job = await find(service, id, caller)
    if wait_s and not job.state.final:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(service.follower.summary_at_end(job), wait_s)
        job = await find(service, id, caller)
    content = job_object(job, service.links(request, caller.id), await service.forecast(job))
    return JSONResponse(retrieved(job, content), headers=_FRESH)


@router.post("/v1/jobs/{id}/cancel", summary="Cancel a job", response_model=schemas.JobObject)
async def cancel(id: str, request: Request, service: Given, caller: By) -> Response:
    """Cancel a job that waits or runs. An ended job is returned unchanged."""
    record = await find(service, id, caller)
    job = await service.call(caller.id, service.store.cancel, record.id, record.incarnation)
    if job is None:
        raise no_job()
    return JSONResponse(job_object(job, service.links(request, caller.id)))


@router.post("/v1/jobs/{id}/requeue", status_code=202, summary="Try a job again", response_model=schemas.JobObject)
async def requeue(id: str, request: Request, service: Given, caller: By) -> Response:
    """Make a new job with the fields of this one, including the seed. 409 while it is live, and if it succeeded."""
    job = await find(service, id, caller, whole=True)
    caller.check("images" if job.modality == "image" else "text")
    if not job.state.final or job.state is JobState.SUCCEEDED:
        raise ApiError(409, "Only a job that ended without success is tried again.", code="job_not_failed")
    if job.dropped:
        message = f"The request of this job had {job.dropped} bytes, which are not kept once a job has ended."
        raise ApiError(409, message, code="request_not_kept")
    if await service.cards.find(job.model, KINDS[job.modality], caller.id) is None and service.cards.redis_answers:
        raise admission.unknown_model()
    again = await submission.resubmit(service, request, caller, job)
    content = job_object(again, service.links(request, caller.id), await service.forecast(again))
    return JSONResponse(content, 202, {"Location": f"/v1/jobs/{again.id}"})


@router.delete("/v1/jobs/{id}", summary="Erase a job", response_model=schemas.Deleted)
async def delete(id: str, request: Request, service: Given, caller: By) -> Response:
    """Cancel the job if it is live, and delete it: record, events, and the pictures that no other job has made too."""
    await enforce_rate_limit(request, service, caller)
    try:
        job = await find(service, id, caller)
        record, incarnation = job.id, job.incarnation
    except UnreadableRecord as error:  # is deleted, too
        record, incarnation = error.id, ""
    await service.call(caller.id, service.store.erase, record, incarnation)
    return JSONResponse({"id": id, "object": "job", "deleted": True})


async def find(service: Service, id: str, caller: Caller, *, whole: bool = False) -> Job:
    """The job of this id, or its summary (`JobLists`) unless `whole`.

    Raises `ApiError` (404), also for malformed ids, and for others' jobs.
    Raises `UnreadableRecord` for a job of this caller that a newer version wrote, or that is damaged.
    """
    check_id(id)
    read = service.store.get if whole else service.store.lists.summary
    try:
        job = await service.call(caller.id, lambda: read(locate(service, id, caller)))
    except UnreadableRecord as error:
        if error.owner != caller.id and not caller.may("admin"):
            raise no_job() from None
        raise
    if job is None or not caller.sees(job):
        raise no_job()
    return job


def locate(service: Service, id: str, caller: Caller) -> str:
    """The id of the record of the job that the caller calls by this id; "" stays. Reads Redis: see `Service.call`."""
    return id and service.store.lists.locate(id, caller.id, others=caller.may("admin"))


def check_id(id: str) -> None:
    if JOB_ID.fullmatch(id) is None:
        raise no_job()


def no_job() -> ApiError:
    return ApiError(404, "There is no such job, or it has expired.", param="id", code="job_not_found")


def _wait_s(text: str) -> float:
    wait_s = body.number(text)
    if wait_s is not None and 0 <= wait_s <= _LONGEST_WAIT_S:
        return wait_s
    raise invalid_field("wait_s", f"must be a number between 0 and {_LONGEST_WAIT_S:g}")
