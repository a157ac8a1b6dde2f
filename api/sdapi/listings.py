"""The lists of AUTOMATIC1111's API and of its ControlNet extension: what the models here have, by its names."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from api.sdapi import controlnet
from api.sdapi.options import FRESH, find_model
from api.sdapi.routing import By, new_router
from api.service import Given, Service
from contract.card import ImageCard
from contract.control import MAX_CONTROLS
from contract.sampler_labels import SCHEDULES, label

router: APIRouter = new_router()

_VERSION = 2  # of the extension's API
_NONE = "None"


def _models(service: Service) -> list[ImageCard]:
    """The image models, live ones first."""
    cards = [card for card in service.cards.now.models if isinstance(card, ImageCard)]
    return sorted(cards, key=lambda card: not card.live)


async def _model(service: Service, owner: str) -> ImageCard | None:
    """The model that the caller's options name."""
    stored = await service.call(service.sdapi.options, owner)
    return find_model(service, stored.get("sd_model_checkpoint")) or find_model(service, None)


def _answer(content: Any) -> Response:
    return JSONResponse(content, headers=FRESH)


@router.get("/sdapi/v1/sd-models", summary="List image models")
async def sd_models(service: Given, caller: By) -> Response:
    fields = {"hash": None, "sha256": None, "config": None}
    return _answer([{"title": c.name, "model_name": c.name, "filename": c.name, **fields} for c in _models(service)])


@router.get("/sdapi/v1/sd-vae", summary="List a model's decoders")
async def sd_vae(service: Given, caller: By) -> Response:
    card = await _model(service, caller.id)
    return _answer([{"model_name": name, "filename": name} for name in (card.vaes if card else ())])


@router.get("/sdapi/v1/samplers", summary="List a model's samplers")
async def samplers(service: Given, caller: By) -> Response:
    card = await _model(service, caller.id)
    return _answer([
        {"name": label(name), "aliases": [name], "options": {}} for name in (card.schedulers if card else ())
    ])  # fmt: skip


@router.get("/sdapi/v1/schedulers", summary="List noise schedules")
async def schedulers(service: Given, caller: By) -> Response:
    fields = {"aliases": None, "default_rho": -1.0, "need_inner_model": False}
    return _answer([{"name": name, "label": shown, **fields} for name, (shown, _) in SCHEDULES.items()])


@router.get("/sdapi/v1/upscalers", summary="List a model's upscalers")
async def upscalers(service: Given, caller: By) -> Response:
    card = await _model(service, caller.id)
    fields = {"model_name": None, "model_path": None, "model_url": None, "scale": None}
    return _answer([{"name": name, **fields} for name in (_NONE, *(card.upscalers if card else ()))])


@router.get("/sdapi/v1/loras", summary="List a model's LoRAs")
async def loras(service: Given, caller: By) -> Response:
    card = await _model(service, caller.id)
    return _answer([
        {"name": name, "alias": name, "path": name, "metadata": {}} for name in (card.loras if card else ())
    ])  # fmt: skip


@router.get("/sdapi/v1/embeddings", summary="List a model's textual inversions")
async def embeddings(service: Given, caller: By) -> Response:
    """The sizes of the inversions are not known here: 0."""
    card = await _model(service, caller.id)
    unknown = {"step": None, "sd_checkpoint": None, "sd_checkpoint_name": None, "shape": 0, "vectors": 0}
    return _answer({"loaded": dict.fromkeys(card.embeddings if card else (), unknown), "skipped": {}})


@router.get("/sdapi/v1/scripts", summary="List scripts")
async def scripts(service: Given, caller: By) -> Response:
    has_control = any(card.controls or card.image_prompts for card in _models(service))
    # webuiapi knows the extension by its second script; else it repeats the units of a call in all later ones.
    listed = ["controlnet", "controlnet m2m"] if has_control else []
    return _answer({"txt2img": listed, "img2img": listed})


async def _nothing(caller: By) -> Response:
    return _answer([])


for _name, _what in {
    "latent-upscale-modes": "latent upscalers", "hypernetworks": "hypernetworks", "face-restorers": "face restorers",
    "realesrgan-models": "Real-ESRGAN models", "prompt-styles": "styles", "script-info": "scripts' arguments",
    "extensions": "extensions",
}.items():  # fmt: skip
    router.add_api_route(
        f"/sdapi/v1/{_name}", _nothing, methods=["GET"], summary=f"List {_what}: none", name=_name,
        operation_id=f"sdapi_{_name.replace('-', '_')}",
    )  # fmt: skip


async def _done(caller: By) -> Response:
    return _answer(None)


for _name in ("refresh-checkpoints", "refresh-vae", "refresh-loras", "unload-checkpoint", "reload-checkpoint"):
    router.add_api_route(
        f"/sdapi/v1/{_name}", _done, methods=["POST"], summary="Do nothing: workers see to their models", name=_name,
        operation_id=f"sdapi_{_name.replace('-', '_')}",
    )  # fmt: skip


@router.get("/sdapi/v1/cmd-flags", summary="Flags of the command")
async def cmd_flags(caller: By) -> Response:
    return _answer({"api": True, "nowebui": True})


@router.get("/sdapi/v1/memory", summary="Memory")
async def memory(caller: By) -> Response:
    """Memory is the workers' and not told here; GET /metrics of a worker has it."""
    return _answer({"ram": {"error": "unavailable"}, "cuda": {"error": "unavailable"}})


@router.get("/internal/ping", summary="Does the service answer?")
async def ping(caller: By) -> Response:
    return _answer({})


@router.get("/queue/status", summary="The queue, as a web UI's client asks at connect")
async def queue_status(service: Given, caller: By) -> Response:
    queued = service.cards.now.backlogs.get("image")
    size, wait_s = (0 if queued is None else queued.queued), service.cards.now.wait_s("image")
    return _answer({"msg": "estimation", "rank": 0, "queue_size": size, "avg_event_process_time": None,
                    "avg_event_concurrent_process_time": None, "rank_eta": None, "queue_eta": wait_s})  # fmt: skip


# -- the ControlNet extension ----------------------------------------------------------------------------------------


def _units(card: ImageCard | None) -> list[str]:
    return [] if card is None else [*card.controls, *card.image_prompts]


def _modules(card: ImageCard | None) -> list[str]:
    return [name for name in controlnet.MODULES if card is not None and name in ("none", *card.preprocessors)]


@router.get("/controlnet/version", summary="The version of the ControlNet extension's API")
async def controlnet_version(caller: By) -> Response:
    return _answer({"version": _VERSION})


@router.get("/controlnet/settings", summary="Settings of ControlNet units")
async def controlnet_settings(caller: By) -> Response:
    return _answer({"control_net_unit_count": MAX_CONTROLS})


@router.get("/controlnet/model_list", summary="List a model's control networks and IP-Adapters")
async def controlnet_models(service: Given, caller: By) -> Response:
    return _answer({"model_list": _units(await _model(service, caller.id))})


@router.get("/controlnet/module_list", summary="List a model's preprocessors")
async def controlnet_modules(service: Given, caller: By) -> Response:
    modules = _modules(await _model(service, caller.id))
    details = {name: {"model_free": False, "sliders": []} for name in modules}
    return _answer({"module_list": modules, "module_detail": details})


@router.get("/controlnet/control_types", summary="List preprocessors and networks by type")
async def controlnet_types(service: Given, caller: By) -> Response:
    card = await _model(service, caller.id)
    every = {
        "module_list": _modules(card) or ["none"], "model_list": [_NONE, *_units(card)], "default_option": "none",
        "default_model": _NONE,
    }  # fmt: skip
    types = {"All": every}
    if card is not None and card.image_prompts:
        adapters = [_NONE, *card.image_prompts]
        types["IP-Adapter"] = {**every, "module_list": ["none"], "model_list": adapters}
    return _answer({"control_types": types})
