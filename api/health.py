"""/healthz and /readyz: whether the process lives, and whether it can serve; and the same by KServe's protocol.

All use the newest snapshot and touch neither Redis nor a thread, so that they answer even if everything else hangs.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from fastapi import Response
from fastapi.responses import JSONResponse

from api.access import By
from api.errors import ApiError
from api.jobs import admission
from api.routers import new_router
from api.service import Given, Service
from core.jobs.cards import WorkerCard

router = new_router("health")

_FRESH = {"Cache-Control": "no-store"}


@router.get("/healthz", summary="Does the process live?")
async def healthz() -> Response:
    return JSONResponse({"status": "ok"}, headers=_FRESH)


@router.get("/readyz", summary="Can pictures be drawn?")
async def readyz(service: Given) -> Response:
    """Answer 200 if Redis answers and a worker is ready; else 503 that says what is missing."""
    workers = _workers(service)
    states = Counter(worker.state for worker in workers)
    body: dict[str, Any] = {
        "redis": service.cards.redis_answers,
        "workers": {state: states[state] for state in ("ready", "starting", "draining")},
        "loading": sorted(service.cards.now.loading) if service.cards.redis_answers else [],
        "messages": [{"worker": w.id, "state": w.state, "message": w.message} for w in workers if w.state != "ready"],
    }
    missing = unready_reason(service)
    return _readiness({"status": "not_ready" if missing else "ready", **body}, missing)


@router.get("/v2/health/live", summary="Does the process live? As KServe asks")
async def live() -> Response:
    """The answer of /healthz in the Open Inference Protocol."""
    return JSONResponse({"live": True}, headers=_FRESH)


@router.get("/v2/health/ready", summary="Can pictures be drawn? As KServe asks")
async def ready(service: Given) -> Response:
    """The answer of /readyz in the Open Inference Protocol."""
    missing = unready_reason(service)
    return _readiness({"ready": not missing}, missing)


@router.get("/v2/models/{name:path}/ready", summary="Is a model ready? As KServe asks")
async def model_ready(name: str, service: Given, caller: By) -> Response:
    """Answer 200 if a ready worker serves the model, 404 if no worker ever did, else 503."""
    card = service.cards.seen_by(caller.id).named(name)
    if card is None:
        raise admission.missing_model(service.cards.seen_by(caller.id), name)
    missing = unready_reason(service)
    if not missing and not any(
        worker.state == "ready" and any(model.name == card.name for model in worker.models)
        for worker in _workers(service)
    ):
        missing = "No ready worker serves this model."
    return _readiness({"name": name, "ready": not missing}, missing)


def _readiness(body: dict[str, Any], missing: str) -> Response:
    """200, or 503 with an error where something is missing."""
    if not missing:
        return JSONResponse(body, headers=_FRESH)
    error = ApiError(503, missing, code="not_ready")
    return JSONResponse({**body, **error.content}, 503, {**_FRESH, "Retry-After": "2"})


def _workers(service: Service) -> tuple[WorkerCard, ...]:
    """The live workers; none while Redis does not answer."""
    return service.cards.now.workers if service.cards.redis_answers else ()


def unready_reason(service: Service) -> str:
    """A sentence that says what keeps pictures from being drawn; empty: nothing."""
    cards, workers = service.cards, _workers(service)
    if service.closing.is_set():
        return "The server is stopping."
    if not cards.redis_answers:
        return f"Redis does not answer: {cards.trouble}." if cards.trouble else "Redis does not answer."
    if any(worker.state == "ready" for worker in workers):
        return ""
    starting = [worker.message for worker in workers if worker.state == "starting"]
    return f"No worker is ready; one is starting: {starting[0]}." if starting else "No worker is ready."
