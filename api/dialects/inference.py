"""Endpoint for huggingface_hub's InferenceClient: `inputs` and `parameters` in, an image's bytes out.

`InferenceClient(base_url="http://host:8000")`, or `model="http://host:8000/v1/models/NAME"` for one of several models:
`text_to_image` and `image_to_image` post to that very address, in the format of Hugging Face's Inference Endpoints.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from api import schemas
from api.access import By, Caller
from api.dialects.foreign import FieldNames, Places, error_route, errors_at
from api.errors import ApiError, invalid_field
from api.http import stored_bytes
from api.jobs import submission
from api.jobs.presentation import results
from api.pictures import body as picture_body
from api.pictures import images, inline_images, uploads
from api.pictures.references import GivenPictures
from api.pictures.uploads import PictureSource
from api.rate_limits import enforce_rate_limit
from api.routers import new_router
from api.service import Given, Service
from contract.field_names import SIDES
from contract.image_request import EditRequest, ImageRequest
from contract.strict import StrictModel

_MOST_CHARACTERS = uploads.MAX_BYTES * 4 // 3  # of an image in base64
_MOST_PARAMETERS = 100
_PICTURE = re.compile(
    r"\s*(?:iVBORw0KGgo|[/_]9j[/_]|UklGR).{90}", re.DOTALL
)  # start of PNG, JPEG and WebP (RIFF) in base64
_FORMATS = {"image/webp": "webp", "image/jpeg": "jpeg"}
_JSON = "application/json"
_NAMES = FieldNames(
    "parameters.",
    {"num_inference_steps": "steps"},
    passed=(*SIDES, "cfg_scale", "sampler_name"),
    excluded=(  # size and steps have one name; the rest is not supported
        "size", "steps", "preview_every", "outpaint", "complexity", "safety_identifier", "frame_count",
        "frame_duration_ms", "svg",
    ),
)  # fmt: skip


class InferenceBody(StrictModel):
    """The body that the client posts."""

    model_config = ConfigDict(title="InferenceRequest")

    inputs: str = Field(
        max_length=_MOST_CHARACTERS, description="the prompt; or a picture in base64, with parameters.prompt"
    )
    parameters: dict[str, Any] | None = Field(
        default=None,
        max_length=_MOST_PARAMETERS,
        description="width and height, or target_size; num_inference_steps; "
        + ", ".join(_NAMES.shared)
        + ": as in /v1/images/generations and /v1/images/edits",
    )
    options: dict[str, Any] | None = Field(
        default=None, max_length=_MOST_PARAMETERS, description="accepted and ignored"
    )


class InferenceError(BaseModel):
    """The error format that the client shows to its user."""

    error: str
    param: str | None
    code: str | None


def _respond(error: ApiError) -> JSONResponse:
    content = {"error": str(error), "param": error.param, "code": error.code}
    return JSONResponse(content, error.status, dict(error.headers or {}))


router = new_router("images", error=InferenceError, route_class=error_route(_respond))
_DOCUMENTED: dict[str, Any] = {
    "response_class": Response,
    "responses": {200: {"content": {"image/png": {}, "image/webp": {}, "image/jpeg": {}}}},
    "openapi_extra": schemas.document(InferenceBody),
}


@router.post("/", summary="Draw a picture, as InferenceClient asks", **_DOCUMENTED)
@router.post("/v1", include_in_schema=False)  # for clients configured with OpenAI's address
async def draw(request: Request, service: Given, caller: By) -> Response:
    """Draw with the first image model that is live."""
    return await _answer(request, service, caller, None)


@router.post("/v1/models/{name:path}", summary="Draw a picture with a model, as InferenceClient asks", **_DOCUMENTED)
async def draw_with(name: str, request: Request, service: Given, caller: By) -> Response:
    """Draw with this model. A client that disconnects before the end cancels the job."""
    return await _answer(request, service, caller, name)


async def _answer(request: Request, service: Service, caller: Caller, model: str | None) -> Response:
    caller.check("images")
    await enforce_rate_limit(request, service, caller)
    _check_task(request)
    places: Places = {}
    with errors_at(places):
        async with _request(request, service, caller.id, places) as (form, ignored, image):
            form["model"] = model
            kind = ImageRequest if image is None else EditRequest
            fields = schemas.read(kind, form, ignore_unknown=service.ignore_unknown, ignored=ignored)
            id = submission.idempotency_id(request, caller)
            pictures = GivenPictures(image)
            job, _ = await submission.submit(service, request, caller, fields, id, pictures, charged=True)
        ended = await images.finished(service, request, job, stays=id is not None)
    if _accepts(request, _JSON) and not _accepts(request, "image/", "*/*"):
        return await inline_images.respond(service, caller.id, images.generated(ended, None))
    picture = results(ended)[0]
    headers = {"X-Content-Type-Options": "nosniff"}
    return await stored_bytes.respond(service, caller.id, request, picture["key"], headers, picture.get("size_bytes"))


def _accepts(request: Request, *kinds: str) -> bool:
    """Return whether the request's `Accept` names a media type of one of these kinds."""
    ranges = request.headers.get("accept", "").lower().split(",")
    return any(item.strip().startswith(kinds) for item in ranges)


def _check_task(request: Request) -> None:
    """Raise `ApiError` for a task without pictures. The client sends all tasks to one address, with like bodies, and
    asks for a picture where it expects one; other clients need not.
    """
    client = "hf_hub/" in request.headers.get("user-agent", "")
    if client and not _accepts(request, "image/", _JSON):
        message = (
            "text_to_image and image_to_image are offered here, and chat_completion at /v1/chat/completions; this task "
            "is not"
        )
        raise ApiError(400, message, code="task_not_offered")


@asynccontextmanager
async def _request(
    request: Request, service: Service, tenant: str, places: Places
) -> AsyncIterator[tuple[dict[str, Any], list[str], PictureSource | None]]:
    """Our fields, the warnings of unknown ones, and the source image, if there is one, which can be read as long as the
    context is open. `places` gets where the fields are. Raises `ApiError`.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind.startswith("image/") or kind in ("", "application/octet-stream"):  # image_to_image without parameters
        raise _no_prompt()
    async with picture_body.read(request, tenant, "inputs") as (values, pictures):
        source = None
        if isinstance(inputs := values.get("inputs"), dict):  # kept apart for its size
            source, values["inputs"] = pictures.source("inputs", inputs), ""
        inference = schemas.read(InferenceBody, values, ignore_unknown=service.ignore_unknown)
        fields, ignored = _split(inference, request, places, ignore_unknown=service.ignore_unknown)
        is_picture = source is not None or _PICTURE.match(inference.inputs) is not None
        if "prompt" not in fields:
            if is_picture:
                raise _no_prompt()
            yield {"prompt": inference.inputs, **fields}, ignored, None
        elif not is_picture:
            words = "must be a PNG, JPEG or WebP image in base64, since there is a parameters.prompt"
            raise invalid_field("inputs", words)
        else:  # the client has no masks: what is transparent in its picture is none
            source = source or pictures.source("inputs", inference.inputs)
            yield fields, ignored, replace(source, alpha=False)


def _split(
    inference: InferenceBody, request: Request, places: Places, *, ignore_unknown: bool
) -> tuple[dict[str, Any], list[str]]:
    """Our fields of the parameters, and the warnings of unknown ones. The format of the `Accept` header is the default.
    Raises `ApiError` (400).
    """
    parameters = {name: value for name, value in (inference.parameters or {}).items() if value is not None}
    accepted = _FORMATS.get(request.headers.get("accept", "").strip().lower())
    if accepted is not None:
        parameters.setdefault("output_format", accepted)
    target = parameters.pop("target_size", None)
    if target is not None and not (isinstance(target, dict) and target.keys() == {*SIDES}):
        raise invalid_field("parameters.target_size", "must be an object of width and height", "invalid_type")
    fields, given, ignored = _NAMES.read(
        {**(target or {}), **parameters}, ignore_unknown=ignore_unknown, warnings=inference.warnings
    )
    places |= given | {"prompt": "parameters.prompt" if "prompt" in fields else "inputs"}
    return fields, ignored


def _no_prompt() -> ApiError:
    words = "must say what the picture is to become: image_to_image(image, prompt=…)"
    return invalid_field("parameters.prompt", words, "missing_required_parameter")
