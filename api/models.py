"""/v1/models: lists models in OpenAI's format with their cards, and deletes models that no worker serves."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from api import schemas
from api.access import By, Caller
from api.cards import RegistrySnapshot
from api.dialects.predictions import objects
from api.errors import ApiError
from api.jobs import admission
from api.routers import new_router
from api.service import Given, Service
from contract.bounds import MAX_EXACT
from contract.card import ImageCard, ModelCard, TextCard
from core.jobs.cards import WorkerCard
from core.jobs.record import JobState
from core.jobs.registry import READY

router = new_router("models")

_HEARD_S = 2.0  # cards are polled once a second


@router.get("/v1/models", summary="List models")
async def models(request: Request, service: Given, caller: By) -> Response:
    """List every model that a worker ever announced, text models with their adapters, those that are loaded for the
    first time, and then their aliases; `diptych.live` says whether a worker serves it now. `results` are the image
    models as Replicate lists them.
    """
    now = service.cards.seen_by(caller.id)
    names = [name for card in now.models for name in (card.name, *_adapters(card))]
    # Models may share an adapter's name, or one may have it.
    names += [name for name in now.loading if admission.loading_kind(now, name) is not None]
    names = [*dict.fromkeys(names), *(alias for alias in now.names.aliases if now.served_name(alias) != alias)]
    data = [listed for name in names if (listed := _listed(now, service, name, caller)) is not None]
    base = service.links(request, caller.id).base
    images = [card.name for card in now.models if isinstance(card, ImageCard)]
    images += [name for name in now.loading if admission.loading_kind(now, name) is ImageCard]
    page = {"previous": None, "next": None, "results": [objects.listed_model(name, base) for name in images]}
    return JSONResponse({"object": "list", "data": data, **page}, headers={"Cache-Control": "no-store"})


@router.get("/v1/models/{name:path}", summary="Look at a model")
async def model(name: str, service: Given, caller: By) -> Response:
    now = service.cards.seen_by(caller.id)
    listed = _listed(now, service, name, caller)
    if listed is None:
        raise admission.unknown_model()
    return JSONResponse(listed, headers={"Cache-Control": "no-store"})


@router.delete("/v1/models/{name:path}", summary="Forget a model", response_model=schemas.Forgotten)
async def forget(name: str, service: Given, caller: By) -> Response:
    """Remove a model that no worker serves from the list, and cancel the jobs that wait for it. For keys with the scope
    admin.

    409 while a worker serves it, or a job of it runs. A worker that announces it later brings it back.
    """
    caller.check("admin")
    await service.cards.renew()
    if not await service.call(caller.id, service.registry.has_model, name):  # includes unreadable cards
        raise admission.unknown_model()
    served = any(model.name == name for worker in service.cards.now.workers for model in worker.models)
    if served or await _first(service, caller, name, JobState.RUNNING):
        raise ApiError(409, "A worker serves this model, or a running job uses it.", param="name", code="model_served")
    await service.call(caller.id, service.registry.forget_model, name)
    await asyncio.sleep(_HEARD_S)  # until every API process has polled the change and rejects jobs for it
    cancelled = 0
    while waiting := await _first(service, caller, name, JobState.QUEUED):
        before = cancelled
        for id in waiting:
            job = await service.call(caller.id, service.store.cancel, id)
            cancelled += job is not None and job.state is JobState.CANCELLED
        if cancelled == before:
            break
    await service.cards.renew()
    return JSONResponse({"id": name, "object": "model", "deleted": True, "cancelled": cancelled})


def _listed(now: RegistrySnapshot, service: Service, name: str, caller: Caller) -> dict[str, Any] | None:
    """The object of a model under one of its names; of one that loads for the first time its kind alone is known."""
    if (card := now.named(name)) is not None:
        return model_object(card, service, name, caller)
    if admission.loading_kind(now, name) is None:
        return None
    served = now.served_name(name) or name
    fields = {
        "modality": now.loading[served],
        "live": False,
        "loaded": False,
        "loading": True,
        "workers": 0,
        "loaded_workers": 0,
    }
    if name != served:
        fields["alias_of"] = served
    return {"id": name, "object": "model", "created": 0, "owned_by": "diptych", "diptych": fields}


async def _first(service: Service, caller: Caller, model: str, state: JobState) -> list[str]:
    """Some jobs of all owners with this model and state, newest first; [] if there are none."""
    after = ""
    while True:
        page = await service.call(
            caller.id, service.store.lists.ids, None, state=state, model=model, after=after, limit=100
        )
        if page is None:  # the position to continue from is gone
            after = ""
        elif page.ids or not page.more:
            return page.ids
        else:
            after = page.after


def _adapters(card: ModelCard) -> tuple[str, ...]:
    return card.adapters if isinstance(card, TextCard) else ()


def started(card: ModelCard, service: Service) -> float:
    """When the first of the workers that serve the model started; 0 without any."""
    return min((worker.started for worker, _ in _serving(card, service)), default=0.0)


def _serving(card: ModelCard, service: Service) -> list[tuple[WorkerCard, ModelCard]]:
    """The workers that serve the model, each with its own card of it."""
    pairs = [(worker, model) for worker in service.cards.now.workers for model in worker.models]
    return [(worker, model) for worker, model in pairs if model.name == card.name]


def model_object(card: ModelCard, service: Service, name: str, caller: Caller) -> dict[str, Any]:
    """OpenAI's object of a model, with its card, under one of its names, and the limits that the caller has of it."""
    serving = _serving(card, service)
    fields = asdict(card)
    del fields["name"]
    fields["limits"]["max_seed"] = min(fields["limits"]["max_seed"], MAX_EXACT)  # a number that clients can hold
    fields["loading"] = card.name in service.cards.now.loading
    fields["workers"] = sum(worker.state == READY for worker, _ in serving)
    fields["loaded_workers"] = sum(worker.state == READY and model.loaded for worker, model in serving)
    if isinstance(card, ImageCard):
        side = fields.pop("native")
        fields |= {"native_size": f"{side}x{side}", "sizes": [f"{width}x{height}" for width, height in card.sizes]}
    adapter = isinstance(card, TextCard) and service.cards.seen_by(caller.id).adapter(card, name) is not None
    if name != card.name and not adapter:
        fields["alias_of"] = card.name
    if key_limits := caller.limits.of_model(card.name):
        fields["key_limits"] = key_limits
    return {
        "id": name,
        "object": "model",
        "created": int(started(card, service)),
        "owned_by": "diptych",
        **({"root": name, "parent": card.name} if adapter else {}),
        "diptych": fields,
    }
