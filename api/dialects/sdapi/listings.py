"""The lists of AUTOMATIC1111's API and of its ControlNet extension: what the models here have, by its names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from api.cards import RegistrySnapshot
from api.dialects.sdapi import controlnet
from api.dialects.sdapi.options import FRESH, find_model
from api.dialects.sdapi.routing import By, new_router
from api.service import Given, Service
from contract.card import ImageCard
from contract.control import MAX_CONTROLS
from contract.sampler_labels import SCHEDULES, label

router: APIRouter = new_router()

_NONE = "None"


def _models(seen: RegistrySnapshot) -> list[ImageCard]:
    """The image models, live ones first."""
    cards = [card for card in seen.models if isinstance(card, ImageCard)]
    return sorted(cards, key=lambda card: not card.live)


async def _model(service: Service, owner: str) -> ImageCard | None:
    """The model that the caller's options name."""
    stored = await service.call(owner, service.sdapi.options, owner)
    seen = service.cards.seen_by(owner)
    return find_model(seen, stored.get("sd_model_checkpoint")) or find_model(seen, None)


def _answer(content: Any) -> Response:
    return JSONResponse(content, headers=FRESH)


@router.get("/sdapi/v1/sd-models", summary="List image models")
async def sd_models(service: Given, caller: By) -> Response:
    fields = {"hash": None, "sha256": None, "config": None}
    cards = _models(service.cards.seen_by(caller.id))
    return _answer([{"title": c.name, "model_name": c.name, "filename": c.name, **fields} for c in cards])


@router.get("/sdapi/v1/schedulers", summary="List noise schedules")
async def schedulers(service: Given, caller: By) -> Response:
    fields = {"aliases": None, "default_rho": -1.0, "need_inner_model": False}
    return _answer([{"name": name, "label": shown, **fields} for name, (shown, _) in SCHEDULES.items()])


@router.get("/sdapi/v1/scripts", summary="List scripts")
async def scripts(service: Given, caller: By) -> Response:
    has_control = any(card.controls or card.image_prompts for card in _models(service.cards.seen_by(caller.id)))
    # webuiapi knows the extension by its second script; else it repeats the units of a call in all later ones.
    listed = ["controlnet", "controlnet m2m"] if has_control else []
    return _answer({"txt2img": listed, "img2img": listed})


@router.get("/queue/status", summary="The queue, as a web UI's client asks at connect")
async def queue_status(service: Given, caller: By) -> Response:
    queued = service.cards.now.backlogs.get("image")
    size, wait_s = (0 if queued is None else queued.queued), service.cards.now.wait_s("image")
    return _answer({"msg": "estimation", "rank": 0, "queue_size": size, "avg_event_process_time": None,
                    "avg_event_concurrent_process_time": None, "rank_eta": None, "queue_eta": wait_s})  # fmt: skip


def _units(card: ImageCard | None) -> list[str]:
    return [] if card is None else [*card.controls, *card.image_prompts]


def _upscalers(card: ImageCard | None) -> list[str]:
    return [] if card is None else [*map(str.capitalize, card.upscale_filters), *card.upscalers]


def _titled(card: ImageCard | None) -> list[tuple[str, str]]:
    """The model's LoRAs, each with the name that it was trained as, or ""."""
    aliases = {} if card is None else {name: alias for alias, name in card.lora_aliases.items()}
    return [(name, aliases.get(name, "")) for name in (() if card is None else card.loras)]


def _modules(card: ImageCard | None) -> list[str]:
    return [name for name in controlnet.MODULES if card is not None and name in ("none", *card.preprocessors)]


def _control_types(card: ImageCard | None) -> dict[str, Any]:
    every = {
        "module_list": _modules(card) or ["none"], "model_list": [_NONE, *_units(card)], "default_option": "none",
        "default_model": _NONE,
    }  # fmt: skip
    types = {"All": every}
    if card is not None and card.image_prompts:
        adapters = [_NONE, *card.image_prompts]
        types["IP-Adapter"] = {**every, "module_list": ["none"], "model_list": adapters}
    return {"control_types": types}


_UPSCALER = {"model_name": None, "model_path": None, "model_url": None, "scale": None}
# The sizes of inversions are not known here: 0.
_EMBEDDING = {"step": None, "sd_checkpoint": None, "sd_checkpoint_name": None, "shape": 0, "vectors": 0}
_OF_MODEL: dict[str, tuple[str, str, Callable[[ImageCard | None], Any]]] = {
    "/sdapi/v1/sd-vae": ("sd_vae", "List a model's decoders", lambda card: [
        {"model_name": name, "filename": name} for name in (card.vaes if card else ())
    ]),
    "/sdapi/v1/samplers": ("samplers", "List a model's samplers", lambda card: [
        {"name": label(name), "aliases": [name], "options": {}} for name in (card.schedulers if card else ())
    ]),
    "/sdapi/v1/upscalers": ("upscalers", "List a model's upscalers", lambda card: [
        {"name": name, **_UPSCALER} for name in (_NONE, *_upscalers(card))
    ]),
    "/sdapi/v1/loras": ("loras", "List a model's LoRAs", lambda card: [
        {"name": name, "alias": alias or name, "path": name, "metadata": {"ss_output_name": alias} if alias else {}}
        for name, alias in _titled(card)
    ]),
    "/sdapi/v1/embeddings": ("embeddings", "List a model's textual inversions", lambda card: {
        "loaded": dict.fromkeys(card.embeddings if card else (), _EMBEDDING), "skipped": {}
    }),
    "/controlnet/model_list": (
        "controlnet_models", "List a model's control networks and IP-Adapters",
        lambda card: {"model_list": _units(card)},
    ),
    "/controlnet/module_list": ("controlnet_modules", "List a model's preprocessors", lambda card: {
        "module_list": _modules(card),
        "module_detail": {name: {"model_free": False, "sliders": []} for name in _modules(card)},
    }),
    "/controlnet/control_types": ("controlnet_types", "List preprocessors and networks by type", _control_types),
}  # fmt: skip
"""What the model of the caller's options has: the name of the route, its summary, and its answer."""
_FIXED: dict[str, tuple[str, str, Any]] = {
    "/sdapi/v1/cmd-flags": ("cmd_flags", "Flags of the command", {"api": True, "nowebui": True}),
    "/sdapi/v1/memory": (  # it is the workers', whose GET /metrics has it
        "memory", "Memory", {"ram": {"error": "unavailable"}, "cuda": {"error": "unavailable"}}
    ),
    "/internal/ping": ("ping", "Does the service answer?", {}),
    "/controlnet/version": ("controlnet_version", "The version of the ControlNet extension's API", {"version": 2}),
    "/controlnet/settings": (
        "controlnet_settings", "Settings of ControlNet units", {"control_net_unit_count": MAX_CONTROLS}
    ),
}  # fmt: skip
_NOTHING = {
    "latent-upscale-modes": "latent upscalers", "hypernetworks": "hypernetworks", "face-restorers": "face restorers",
    "realesrgan-models": "Real-ESRGAN models", "prompt-styles": "styles", "script-info": "scripts' arguments",
    "extensions": "extensions",
}  # fmt: skip
_REFRESHES = ("refresh-checkpoints", "refresh-vae", "refresh-loras", "unload-checkpoint", "reload-checkpoint")


def _add(path: str, name: str, summary: str, content: Callable[[ImageCard | None], Any]) -> None:
    async def of_model(service: Given, caller: By) -> Response:
        return _answer(content(await _model(service, caller.id)))

    router.add_api_route(path, of_model, methods=["GET"], summary=summary, name=name)


def _add_fixed(path: str, name: str, summary: str, content: Any, method: str = "GET", id: str | None = None) -> None:
    async def fixed(caller: By) -> Response:
        return _answer(content)

    router.add_api_route(path, fixed, methods=[method], summary=summary, name=name, operation_id=id)


for _path, _row in _OF_MODEL.items():
    _add(_path, *_row)
for _path, _fixed_row in _FIXED.items():
    _add_fixed(_path, *_fixed_row)
for _name, _what in _NOTHING.items():
    _add_fixed(f"/sdapi/v1/{_name}", _name, f"List {_what}: none", [], id=f"sdapi_{_name.replace('-', '_')}")
for _name in _REFRESHES:
    _add_fixed(
        f"/sdapi/v1/{_name}", _name, "Do nothing: workers see to their models", None, "POST",
        f"sdapi_{_name.replace('-', '_')}",
    )  # fmt: skip
