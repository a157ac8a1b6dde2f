"""/v1/queues: shows, pauses, resumes and empties queues. For keys with the scope admin."""

from __future__ import annotations

from typing import Any

from fastapi import Response
from fastapi.responses import JSONResponse

from api import schemas
from api.access import By, Caller
from api.errors import ApiError
from api.routers import new_router
from api.service import Given, Service
from core.jobs.broker import QUEUES

router = new_router("queues")

_PORTION = 500  # jobs cancelled per script: some 20 ms of Redis


@router.get("/v1/queues", summary="Look at the queues", response_model=schemas.QueueList)
async def queues(service: Given, caller: By) -> Response:
    caller.check("admin")
    await service.cards.renew_soon()
    data = [_object(service, name) for name in QUEUES]
    return JSONResponse({"object": "list", "data": data}, headers={"Cache-Control": "no-store"})


@router.post("/v1/queues/{name}/pause", summary="Pause a queue", response_model=schemas.QueueObject)
async def pause(name: str, service: Given, caller: By) -> Response:
    """Pause the queue: workers take nothing more from it, some seconds from now; running jobs continue. Jobs are still
    accepted.
    """
    return await _switch(service, caller, name, True)


@router.post("/v1/queues/{name}/resume", summary="Resume a queue", response_model=schemas.QueueObject)
async def resume(name: str, service: Given, caller: By) -> Response:
    return await _switch(service, caller, name, False)


@router.post("/v1/queues/{name}/cancel", summary="Cancel what waits in a queue", response_model=schemas.Emptied)
async def empty(name: str, service: Given, caller: By) -> Response:
    """Cancel every job that waited in the queue at the time of the request, of any owner. Running jobs continue."""
    caller.check("admin")
    _check(name)
    left = (
        await service.call(caller.id, service.store.backlog, name)
    ).queued  # jobs that arrive meanwhile do not prolong it
    cancelled = 0
    while left > 0:
        some = await service.call(caller.id, service.store.empty, name, min(left, _PORTION))
        cancelled, left = cancelled + some, left - some
        if some < _PORTION:
            break
    await service.cards.renew()
    return JSONResponse({**_object(service, name), "cancelled": cancelled})


async def _switch(service: Service, caller: Caller, name: str, on: bool) -> Response:
    caller.check("admin")
    _check(name)
    await service.call(caller.id, service.registry.pause, name, on)
    await service.cards.renew()
    return JSONResponse(_object(service, name))


def _check(name: str) -> None:
    if name not in QUEUES:
        raise ApiError(404, f"There are the queues {', '.join(QUEUES)}.", param="name", code="queue_not_found")


def _object(service: Service, name: str) -> dict[str, Any]:
    now = service.cards.now
    backlog = now.backlogs.get(name)
    return {
        "name": name,
        "object": "queue",
        "paused": name in now.paused,
        "queued": backlog.queued if backlog else 0,
        "queued_work_s": backlog.queued_ms / 1000 if backlog else 0.0,
        "running": backlog.running if backlog else 0,
        "running_work_s": backlog.running_ms / 1000 if backlog else 0.0,
        "workers": now.ready(name),
    }
