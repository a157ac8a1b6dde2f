"""/sdapi/v1/options: the options that an API key has set, of those that are read; and the model that they name.

An option holds for the key that set it; without keys, for all callers, as in AUTOMATIC1111.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from api import schemas
from api.cards import RegistrySnapshot
from api.dialects.foreign import errors_at
from api.dialects.sdapi import names, requests
from api.dialects.sdapi.requests import OptionsBody
from api.dialects.sdapi.routing import By, new_router
from api.dialects.sdapi.translation import PREVIEW_EVERY
from api.errors import invalid_field
from api.http import body
from api.jobs import admission, submission
from api.rate_limits import enforce_rate_limit
from api.service import Given, Service
from contract.card import ImageCard

router: APIRouter = new_router()

FRESH = {"Cache-Control": "no-store"}


@router.get("/sdapi/v1/options", summary="The options of this key")
async def get_options(service: Given, caller: By) -> Response:
    """The options that are read, and others that clients look for, whose values are fixed."""
    stored = await service.call(caller.id, service.sdapi.options, caller.id)
    name = stored.get("sd_model_checkpoint")
    seen = service.cards.seen_by(caller.id)
    card = find_model(seen, name) or find_model(seen, None)
    fixed = {
        "sd_checkpoint_hash": "", "sd_vae": "Automatic", "CLIP_stop_at_last_layers": 1, "samples_format": "png",
        "show_progress_every_n_steps": PREVIEW_EVERY, "live_previews_enable": True, "enable_pnginfo": True,
        "img2img_color_correction": False, "inpainting_mask_weight": 1.0, "initial_noise_multiplier": 1.0,
        "face_restoration_model": None, "sd_lora": "None", "sd_hypernetwork": "None", "eta_noise_seed_delta": 0,
        "control_net_unit_count": 4,
    }  # fmt: skip
    values: dict[str, Any] = {**fixed, **stored, "sd_model_checkpoint": "" if card is None else card.name}
    return JSONResponse(values, headers=FRESH)


@router.post(
    "/sdapi/v1/options",
    summary="Set options of this key",
    openapi_extra=schemas.document(OptionsBody),
)
async def set_options(request: Request, service: Given, caller: By) -> Response:
    """Set those of these options that are read; others are ignored. 422 for a model that is not there."""
    caller.check("images")
    await enforce_rate_limit(request, service, caller)
    given = requests.parse(OptionsBody, await body.read(request, caller.id)).given
    if given.get("sd_model_checkpoint"):
        with errors_at({"model": "sd_model_checkpoint"}):
            card = await chosen_model(service, given["sd_model_checkpoint"], caller.id, required=True)
        given["sd_model_checkpoint"] = card.name
    if given:
        await service.call(caller.id, service.sdapi.set_options, caller.id, given)
    return JSONResponse(None)


def find_model(seen: RegistrySnapshot, title: str | None) -> ImageCard | None:
    """The image model of this title, as sd-models lists it, or of an alias; without a title, the first live one."""
    if not title:
        return seen.model(None, ImageCard)
    for name in names.model_names(title):
        if name and (card := seen.declared(name, ImageCard)) is not None:
            return card
    return None


async def chosen_model(service: Service, title: str | None, owner: str, *, required: bool) -> ImageCard:
    """The owner's model of this title. Unless it is `required`, the first live one where it is there no more.

    Raises `ApiError`: 400 for an unknown title, 503 if no model was announced yet.
    """
    card = find_model(service.cards.seen_by(owner), title)
    if card is None and title:
        await service.cards.renew_soon()  # a worker may have just started
        card = find_model(service.cards.seen_by(owner), title)
    if card is not None:
        return card
    seen = service.cards.seen_by(owner)
    for name in filter(None, names.model_names(title) if title else ()):
        if admission.loading_kind(seen, name) is ImageCard:
            return await submission.served(service, name, ImageCard, owner)
    default = await submission.served(service, None, ImageCard, owner)
    if title and required:
        raise invalid_field("model", "is not known; /sdapi/v1/sd-models lists those there are", "model_not_found")
    return default
