"""GET /v1/models: what can be asked for, in OpenAI's shape with our card beside it.

Knows cards; asks nobody, since they are read in the background.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from api import admission
from api.access import By
from api.service import Given, Service
from core.jobs.registry import ModelCard

router = APIRouter(tags=["models"])


@router.get("/v1/models", summary="List models")
async def models(service: Given, caller: By) -> Response:
    """Every model that a worker ever announced; `diptych.live` says whether one offers it now."""
    data = [_object(card, service) for card in service.cards.now.models]
    return JSONResponse({"object": "list", "data": data}, headers={"Cache-Control": "no-store"})


@router.get("/v1/models/{name:path}", summary="Look at a model")
async def model(name: str, service: Given, caller: By) -> Response:
    card = next((card for card in service.cards.now.models if card.name == name), None)
    if card is None:
        raise admission.unknown_model()
    return JSONResponse(_object(card, service), headers={"Cache-Control": "no-store"})


def _object(card: ModelCard, service: Service) -> dict[str, Any]:
    started = [w.started for w in service.cards.now.workers if any(m.name == card.name for m in w.models)]
    return {
        "id": card.name,
        "object": "model",
        "created": int(min(started, default=0)),
        "owned_by": "diptych",
        "diptych": {
            "modality": card.modality,
            "live": card.live,
            "precision": card.precision,
            "device": card.device,
            **_drawing(card),
            "limits": card.limits,
            "costs": card.costs,
            "capacity_per_s": card.capacity_per_s,
        },
    }


def _drawing(card: ModelCard) -> dict[str, Any]:
    """What only a model that draws has."""
    if card.modality != "image":
        return {}
    return {
        "native_size": f"{card.native}x{card.native}",
        "sizes": [f"{width}x{height}" for width, height in card.sizes],
        "schedulers": card.schedulers,
        "default_scheduler": card.default_scheduler,
    }
