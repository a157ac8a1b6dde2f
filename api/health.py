"""/healthz and /readyz: whether the process lives, and whether it can serve.

Both use the newest snapshot and touch neither Redis nor a thread, so that they answer even if everything else hangs.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from api.errors import ApiError
from api.service import Given

router = APIRouter(tags=["health"])

_FRESH = {"Cache-Control": "no-store"}


@router.get("/healthz", summary="Does the process live?")
async def healthz() -> Response:
    return JSONResponse({"status": "ok"}, headers=_FRESH)


@router.get("/readyz", summary="Can pictures be drawn?")
async def readyz(service: Given) -> Response:
    """Answer 200 if Redis answers and a worker is ready; else 503 that says what is missing."""
    cards = service.cards
    workers = cards.now.workers if cards.redis_answers else ()
    states = Counter(worker.state for worker in workers)
    body: dict[str, Any] = {
        "redis": cards.redis_answers,
        "workers": {state: states[state] for state in ("ready", "starting", "draining")},
        "messages": [{"worker": w.id, "state": w.state, "message": w.message} for w in workers if w.state != "ready"],
    }
    missing = None
    if service.closing.is_set():
        missing = "The server is stopping."
    elif not cards.redis_answers:
        missing = f"Redis does not answer: {cards.trouble}." if cards.trouble else "Redis does not answer."
    elif not states["ready"]:
        starting = [worker.message for worker in workers if worker.state == "starting"]
        missing = f"No worker is ready; one is starting: {starting[0]}." if starting else "No worker is ready."
    if missing is None:
        return JSONResponse({"status": "ready", **body}, headers=_FRESH)
    error = ApiError(503, missing, code="not_ready")
    return JSONResponse({"status": "not_ready", **body, **error.content}, 503, {**_FRESH, "Retry-After": "2"})
