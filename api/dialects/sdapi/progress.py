"""/sdapi/v1/progress, interrupt and skip, for the caller's own requests of this API that are open."""

from __future__ import annotations

import base64
import time
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from api import schemas
from api.access import Caller
from api.dialects.sdapi import requests
from api.dialects.sdapi.options import FRESH
from api.dialects.sdapi.requests import TaskProgress
from api.dialects.sdapi.routing import By, new_router
from api.http import body
from api.service import Given, Service
from core.jobs.record import Job, JobState
from core.jobs.unreadable import UnreadableRecord

router: APIRouter = new_router()


class Progress(BaseModel):
    """The progress of a request."""

    progress: float
    eta_relative: float
    state: dict[str, Any]
    current_image: str | None
    textinfo: str | None


@router.get("/sdapi/v1/progress", summary="The progress of this key's requests", response_model=Progress)
async def progress(service: Given, caller: By, skip_current_image: bool = False) -> Response:
    """The progress of the request that runs, or else waits first; 0 and no jobs if none is open."""
    jobs = await service.call(caller.id, service.sdapi.open_jobs, caller.id)
    first = next((job for job in jobs if job.state is JobState.RUNNING), jobs[0] if jobs else None)
    job = None if first is None else await _job(service, caller, first.id)
    done, eta_s = (0.0, 0.0) if job is None else await _share(service, job)
    preview = None if job is None or skip_current_image else await _preview(service, job)
    content = {
        "progress": done, "eta_relative": eta_s, "state": _state(job, len(jobs)), "current_image": preview,
        "textinfo": "Waiting..." if job is not None and job.state is JobState.QUEUED else None,
    }  # fmt: skip
    return JSONResponse(content, headers=FRESH)


@router.post(
    "/internal/progress",
    summary="The progress of a task",
    openapi_extra=schemas.document(TaskProgress),
)
async def task_progress(request: Request, service: Given, caller: By) -> Response:
    """The progress of the request whose `force_task_id` this is."""
    fields = requests.parse(TaskProgress, await body.read(request, caller.id))
    job = None
    if fields.id_task:
        id = await service.call(caller.id, service.sdapi.job_of_task, caller.id, fields.id_task)
        job = None if id is None else await _job(service, caller, id)
    running, queued = (job is not None and job.state is state for state in (JobState.RUNNING, JobState.QUEUED))
    done, eta_s = (0.0, 0.0) if job is None else await _share(service, job)
    preview, preview_id = None, -1
    if job is not None and running and fields.live_preview is not False:
        preview_id = _steps_done(job)
        if preview_id != fields.id_live_preview:  # else the client has it
            preview = await _preview(service, job)
            preview_id = -1 if preview is None else preview_id
    content = {
        "active": running, "queued": queued, "completed": job is not None and job.state.final,
        "progress": done, "eta": eta_s, "live_preview": None if preview is None else f"data:image/png;base64,{preview}",
        "id_live_preview": preview_id, "textinfo": None,
    }  # fmt: skip
    return JSONResponse(content, headers=FRESH)


@router.post("/sdapi/v1/interrupt", summary="End this key's requests that run")
async def interrupt(service: Given, caller: By) -> Response:
    """Cancel the requests of this key and of this API that run; if none does, the one that waits first."""
    await _interrupt(service, caller)
    return JSONResponse({})


@router.post("/sdapi/v1/skip", summary="End this key's requests that run")
async def skip(service: Given, caller: By) -> Response:
    """Do as interrupt: the pictures of a request are drawn together, and none of them is skipped alone."""
    await _interrupt(service, caller)
    return JSONResponse(None)


async def _interrupt(service: Service, caller: Caller) -> None:
    caller.check("images")
    jobs = await service.call(caller.id, service.sdapi.open_jobs, caller.id)
    for job in [job for job in jobs if job.state is JobState.RUNNING] or jobs[:1]:
        await service.call(caller.id, service.store.cancel, job.id, job.incarnation)


async def _job(service: Service, caller: Caller, id: str) -> Job | None:
    try:
        job = await service.call(caller.id, service.store.lists.summary, id)
    except UnreadableRecord:
        return None
    return job if job is not None and job.owner == caller.id else None


async def _share(service: Service, job: Job) -> tuple[float, float]:
    """The share of the job that is done, and the seconds that are left."""
    if job.state.final:
        return 1.0, 0.0
    forecast = await service.forecast(job)
    left_s = 0.0 if forecast is None or forecast.end_s is None else max(0.0, forecast.end_s)
    steps = (job.progress or {}).get("steps") or 1
    return _steps_done(job) / steps, round(left_s, 2)


def _steps_done(job: Job | None) -> int:
    return int(((job.progress if job else None) or {}).get("steps_done", 0))


async def _preview(service: Service, job: Job) -> str | None:
    """The newest preview of the picture that is being drawn, a PNG in base64."""
    image = int((job.progress or {}).get("image", 0))
    preview = await service.call(job.owner, service.store.preview, job.id, image, job.incarnation)
    return None if preview is None else base64.b64encode(preview).decode("ascii")


def _state(job: Job | None, count: int) -> dict[str, Any]:
    began = time.gmtime(job.created) if job else time.gmtime(0)
    n = int(job.parameters.get("n", 1)) if job else 1
    return {
        "skipped": False, "interrupted": False, "stopping_generation": False,
        "job": "" if job is None else job.id, "job_count": count, "job_no": 0,
        "job_timestamp": time.strftime("%Y%m%d%H%M%S", began) if job else "0",
        "sampling_step": _steps_done(job) // n, "sampling_steps": int(job.parameters.get("steps", 0)) if job else 0,
    }  # fmt: skip
