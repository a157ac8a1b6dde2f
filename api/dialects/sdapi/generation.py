"""/sdapi/v1/txt2img and img2img: a job of the request, whose pictures are answered in base64."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from api import schemas
from api.access import Caller
from api.dialects.foreign import errors_at
from api.dialects.sdapi import infotext, requests
from api.dialects.sdapi.options import chosen_model, find_model
from api.dialects.sdapi.requests import Generation, Img2Img, Txt2Img
from api.dialects.sdapi.routing import By, new_router
from api.dialects.sdapi.translation import PLACES, Translation, options_of, stored_options, translate
from api.errors import job_error
from api.jobs import submission
from api.jobs.presentation import results, shown, warnings
from api.pictures import body as picture_body
from api.pictures import images, inline_images
from api.pictures.body import PictureBody
from api.pictures.inline_images import Inline
from api.rate_limits import enforce_rate_limit
from api.service import Given, Service
from contract.image import ImageJob, ImageParameters
from contract.image_request import EditRequest, ImageRequest
from contract.sampler_labels import label
from core.jobs.connection import StoreError
from core.jobs.record import Job, JobState

router: APIRouter = new_router()

_LEFT_OUT = ("init_images", "mask", "alwayson_scripts")  # of `parameters`: they hold pictures
_TEXTS_BYTES = 128 * 1024  # of a picture's file, in which its text is: before its pixels


class GeneratedBySdapi(BaseModel):
    """The pictures of a request."""

    images: list[str]
    parameters: dict[str, Any]
    info: str


@router.post(
    "/sdapi/v1/txt2img",
    summary="Draw pictures as AUTOMATIC1111's API does",
    response_model=GeneratedBySdapi,
    openapi_extra=schemas.document(Txt2Img),
)
async def txt2img(request: Request, service: Given, caller: By) -> Response:
    """Answer when all pictures are drawn. A client that disconnects before cancels the job.

    `info` is JSON with AUTOMATIC1111's fields, `warnings` and `job_id`. A request that was interrupted is answered
    without pictures.
    """
    return await _generate(request, service, caller, Txt2Img)


@router.post(
    "/sdapi/v1/img2img",
    summary="Draw pictures from one as AUTOMATIC1111's API does",
    response_model=GeneratedBySdapi,
    openapi_extra=schemas.document(Img2Img),
)
async def img2img(request: Request, service: Given, caller: By) -> Response:
    """Answer as txt2img, for pictures that begin with `init_images`."""
    return await _generate(request, service, caller, Img2Img)


async def _generate(request: Request, service: Service, caller: Caller, kind: type[Generation]) -> Response:
    caller.check("images")
    await enforce_rate_limit(request, service, caller)
    async with picture_body.read(request, caller.id) as (fields, pictures):
        body = requests.parse(kind, fields)
        places = PLACES | ({"scheduler": "sampler_index"} if body.sampler_index and not body.sampler_name else {})
        with errors_at(places):
            job, translation = await _submit(request, service, caller, body, pictures)
        translation.warnings += requests.unread(kind, fields)
    async with _open(service, caller, job, body.force_task_id):
        ended = await images.wait(service, job, request, service.follower.end(job), stays=False)
    if ended is None:
        raise images.left()
    if ended.state is JobState.CANCELLED:
        translation.warnings.append("the request was interrupted")
    elif ended.state is not JobState.SUCCEEDED:
        with errors_at(places):
            raise job_error(ended)
    drawn = [] if body.send_images is False else filter(shown, results(ended))
    document = {
        "images": [Inline(image["key"], image.get("size_bytes")) for image in drawn],
        "parameters": {name: value for name, value in body.given.items() if name not in _LEFT_OUT},
        "info": json.dumps(await _info(service, ended, body, translation)),
    }
    return await inline_images.respond(service, caller.id, document)


async def _submit(
    request: Request, service: Service, caller: Caller, body: Generation, pictures: PictureBody
) -> tuple[Job, Translation]:
    """The job of a body, and its translation. Raises as `submission.submit`."""
    stored, dropped = stored_options(await service.call(caller.id, service.sdapi.options, caller.id))
    options = options_of(stored, body)
    named = (body.override_settings or {}).get("sd_model_checkpoint")
    card = await chosen_model(service, options.sd_model_checkpoint, caller.id, required=bool(named))
    if find_model(service.cards.seen_by(caller.id), options.sd_model_checkpoint) is None:
        dropped.append("sd_model_checkpoint: the model that was set is not there; another one is used")
    translation = translate(body, options, card, pictures.source)
    translation.warnings += dropped
    kind = ImageRequest if translation.pictures.image is None else EditRequest
    request_fields = schemas.read(kind, translation.fields)
    job, _ = await submission.submit(service, request, caller, request_fields, None, translation.pictures, charged=True)
    return job, translation


@asynccontextmanager
async def _open(service: Service, caller: Caller, job: Job, task: str | None) -> AsyncIterator[None]:
    """Keep the job among the caller's open requests, which `progress` reports and `interrupt` cancels."""
    try:
        await service.call(caller.id, service.sdapi.open, caller.id, job.id, task)
    except BaseException:
        with anyio.CancelScope(shield=True):
            await service.follower.cancel(job)
        raise
    try:
        yield
    finally:
        with anyio.CancelScope(shield=True):
            await _close(service, caller, job)


async def _close(service: Service, caller: Caller, job: Job) -> None:
    try:
        await service.call(caller.id, service.sdapi.close_requests, caller.id, job.id)
    except StoreError:
        return  # it expires


async def _info(service: Service, job: Job, body: Generation, translation: Translation) -> dict[str, Any]:
    """The web UI's fields of `info`, and ours."""
    request = ImageJob.read(job.parameters)
    picture, drawn = request.picture, [*filter(shown, results(job))]
    image_warnings = (text for image in results(job) for text in warnings(job, image))
    all_warnings = [*dict.fromkeys([*translation.warnings, *image_warnings])]
    texts = [await _infotext(service, job.owner, image) for image in drawn]
    fingerprint: Mapping[str, Any] = drawn[0].get("fingerprint") or {} if drawn else {}
    seeds = [image["seed"] for image in drawn]
    negative = picture.negative_prompt or ""
    return {
        "prompt": translation.prompt, "all_prompts": [translation.prompt] * len(drawn),
        "negative_prompt": negative, "all_negative_prompts": [negative] * len(drawn),
        "seed": picture.seed, "all_seeds": seeds, "subseed": picture.seed, "all_subseeds": seeds, "subseed_strength": 0,
        **_sizes(picture, drawn),
        "sampler_name": label(picture.scheduler or translation.card.default_scheduler),
        "cfg_scale": picture.guidance_scale, "steps": picture.steps,
        "batch_size": body.batch_size or 1, "restore_faces": False, "face_restoration_model": None,
        "sd_model_name": job.model, "sd_model_hash": str(fingerprint.get("weights", ""))[:10],
        "sd_vae_name": picture.vae, "sd_vae_hash": None, "seed_resize_from_w": -1, "seed_resize_from_h": -1,
        "denoising_strength": None if picture.edit is None else picture.edit.strength,
        "extra_generation_params": {}, "index_of_first_image": 0, "infotexts": texts, "styles": [],
        "job_timestamp": time.strftime("%Y%m%d%H%M%S", time.gmtime(job.created)),
        "clip_skip": (picture.clip_skip or 0) + 1, "is_using_inpainting_conditioning": False,
        "version": f"Diptych {fingerprint.get('version', '')}".strip(),
        "warnings": all_warnings, "job_id": job.id,
    }  # fmt: skip


def _sizes(picture: ImageParameters, drawn: list[dict[str, Any]]) -> dict[str, int]:
    width, height = next(((image["width"], image["height"]) for image in drawn), picture.size)
    return {"width": width, "height": height}


async def _infotext(service: Service, tenant: str, image: Mapping[str, Any]) -> str:
    """The infotext in the picture's file, if it is a PNG with metadata; else ""."""
    if image["media_type"] != "image/png":
        return ""
    size = min(image.get("size_bytes") or _TEXTS_BYTES, _TEXTS_BYTES)
    head = await service.stored(tenant, lambda: service.artifacts.read_part(image["key"], 0, size))
    return infotext.texts(head).get(infotext.PARAMETERS, "")
