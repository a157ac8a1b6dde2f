"""Endpoint for huggingface_hub's InferenceClient: `inputs` and `parameters` in, an image's bytes out.

`InferenceClient(base_url="http://host:8000")`, or `model="http://host:8000/v1/models/NAME"` for one of several models:
`text_to_image` and `image_to_image` post to that very address, in the format of Hugging Face's Inference Endpoints.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from tempfile import SpooledTemporaryFile
from typing import IO, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from api import body, images, inline_images, picture_urls, schemas, stored_bytes, submission, uploads
from api.access import BEARER, identify
from api.errors import ApiError, invalid_field, store_error
from api.presentation import results
from api.rate_limits import enforce_rate_limit
from api.references import GivenPictures
from api.service import Given, Service
from api.uploads import PictureSource
from contract.field_names import OTHER_NAMES
from contract.image_request import EditRequest, ImageRequest
from contract.strict import StrictModel
from core.artifacts import ArtifactError
from core.jobs.connection import StoreError

router = APIRouter(tags=["images"])

_MOST_BYTES = uploads.MAX_BYTES * 4 // 3 + body.MAX_BYTES  # an image in base64, and the rest
_SPOOLED = 64 * 1024  # bytes in memory
_COPIES = 3  # of a body while it is parsed: as a whole, its image as text and as bytes
_BEGINNING = 200  # characters of `inputs` that tell a picture from a prompt
_MOST_PARAMETERS = 100
_PICTURE = re.compile("iVBORw0KGgo|/9j/|UklGR")  # start of PNG, JPEG and WebP (RIFF) in base64
_FORMATS = {"image/webp": "webp", "image/jpeg": "jpeg"}
# The client's names in errors; the others are the same as in /v1/images/generations and /v1/images/edits.
_NAMES = {"num_inference_steps": "steps"}
_JSON = "application/json"
_OTHERWISE = {  # fields that this endpoint expresses in another way, or does not support
    "model", "n", "size", "steps", "response_format", "stream", "partial_images", "preview_every", "user", "quality",
    "style", "background", "moderation", "input_fidelity", "outpaint", "complexity", "safety_identifier",
    "frame_count", "frame_duration_ms", "svg",
}  # fmt: skip
_SHARED = tuple(name for name in EditRequest.model_fields if name not in _OTHERWISE)
_OTHER_NAMES = tuple(name for name, field in OTHER_NAMES.items() if field in (*_SHARED, "steps"))


class InferenceBody(StrictModel):
    """The body that the client posts."""

    model_config = ConfigDict(title="InferenceRequest")

    inputs: str = Field(
        max_length=_MOST_BYTES, description="the prompt; or a picture in base64, with parameters.prompt"
    )
    parameters: dict[str, Any] | None = Field(
        default=None,
        max_length=_MOST_PARAMETERS,
        description="width and height, or target_size; num_inference_steps; "
        + ", ".join(_SHARED)
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


_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"image/png": {}, "image/webp": {}, "image/jpeg": {}}},
    "4XX": {"model": InferenceError},
    "5XX": {"model": InferenceError},
}
_DOCUMENTED: dict[str, Any] = {
    "response_class": Response,
    "responses": _ANSWERS,
    "dependencies": [Depends(BEARER)],  # for the documentation
    "openapi_extra": schemas.document(InferenceBody),
}


@router.post("/", summary="Draw a picture, as InferenceClient asks", **_DOCUMENTED)
@router.post("/v1", include_in_schema=False)  # for clients configured with OpenAI's address
async def draw(request: Request, service: Given) -> Response:
    """Draw with the first image model that is live."""
    return await _answer(request, service, None)


@router.post("/v1/models/{name:path}", summary="Draw a picture with a model, as InferenceClient asks", **_DOCUMENTED)
async def draw_with(name: str, request: Request, service: Given) -> Response:
    """Draw with this model. A client that disconnects before the end cancels the job."""
    return await _answer(request, service, name)


async def _answer(request: Request, service: Service, model: str | None) -> Response:
    edited = False
    try:
        caller = await identify(request)
        caller.check("images")
        await enforce_rate_limit(request, service, caller)
        _check_task(request)
        async with _request(request, service, caller.id) as (form, ignored, image):
            edited = image is not None
            kind = EditRequest if edited else ImageRequest
            form["model"] = model
            fields = schemas.read(kind, form, ignore_unknown=service.ignore_unknown, ignored=ignored)
            id = submission.idempotency_id(request, caller)
            pictures = GivenPictures(image)
            job, _ = await submission.submit(service, request, caller, fields, id, pictures, charged=True)
        ended = await images.finished(service, request, job, stays=id is not None)
        if _accepts(request, _JSON) and not _accepts(request, "image/", "*/*"):
            return await inline_images.respond(service, images.generated(ended, None))
        picture = results(ended)[0]
        headers = {"X-Content-Type-Options": "nosniff"}
        return await stored_bytes.respond(service, request, picture["key"], headers, picture.get("size_bytes"))
    except (ApiError, StoreError, ArtifactError) as error:
        api_error = error if isinstance(error, ApiError) else store_error(error)
        return _told(api_error, "parameters.prompt" if edited else "inputs")


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
    request: Request, service: Service, tenant: str
) -> AsyncIterator[tuple[dict[str, Any], list[str], PictureSource | None]]:
    """Our fields, the warnings of unknown ones, and the source image, if there is one, which can be read as long as the
    context is open.

    A body of more than 1 MiB and its image are on disk, and in memory only in the tenant's turn. Raises `ApiError`.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind.startswith("image/") or kind in ("", "application/octet-stream"):  # image_to_image without parameters
        raise _no_prompt()
    with SpooledTemporaryFile(_SPOOLED) as raw, SpooledTemporaryFile(_SPOOLED) as picture:
        size = await body.spool(request, tenant, raw, _MOST_BYTES)

        def parse() -> tuple[dict[str, Any], list[str], int | None]:
            """The fields, the warnings, and the length of the image."""
            rest, inputs = raw.read(), b""
            if size > body.MAX_BYTES:
                rest, inputs = _cut(rest)
            inference = schemas.read(InferenceBody, body.parse(rest), ignore_unknown=service.ignore_unknown)
            fields, ignored, image = _split(inference, request, ignore_unknown=service.ignore_unknown)
            if image is None and inputs:
                raise invalid_field("inputs", "is too long")
            if inputs and not inputs.startswith((image or "").encode()):
                raise body.too_large()
            return fields, ignored, None if image is None else _decode(inputs or image.encode(), picture)

        def read() -> bytes:
            picture.seek(0)
            return picture.read()

        if size > body.MAX_BYTES:
            fields, ignored, length = await service.pictures.run(tenant, _COPIES * size, parse)
        else:  # a prompt, or a small picture: as in other JSON
            fields, ignored, length = await body.run_parser(tenant, size, parse)
        # The client has no masks: what is transparent in its picture is none.
        yield fields, ignored, None if length is None else PictureSource("inputs", length, read, alpha=False)


def _cut(raw: bytes) -> tuple[bytes, bytes]:
    """A large body with the beginning of its `inputs` only, and all of these. No call takes long: each holds the GIL.

    Raises `ApiError` (413) for a body that is large otherwise.
    """
    key = raw.find(b'"inputs"')
    start = raw.find(b'"', key + 8) + 1
    end = raw.find(b'"', start)
    if key < 0 or start < 1 or end < 0 or raw[key + 8 : start - 1].strip() != b":":
        raise body.too_large()
    inputs = raw[start:end]
    for escape, character in ((b"\\/", b"/"), (b"\\n", b""), (b"\\r", b"")):  # as encoders write base64
        inputs = inputs.replace(escape, character)
    rest = raw[:start] + inputs[:_BEGINNING] + raw[end:]
    if len(rest) > body.MAX_BYTES or inputs.find(b"\\", 0, _BEGINNING) >= 0:
        raise body.too_large()
    return rest, inputs


def _decode(inputs: bytes, file: IO[bytes]) -> int:
    """Write the bytes of a base64 text, piece by piece; return their number. Raises `ApiError` (400)."""
    message = "must be an image in base64, since there is a parameters.prompt"
    return sum(map(file.write, picture_urls.decoded("inputs", message, inputs)))


def _split(
    inference: InferenceBody, request: Request, *, ignore_unknown: bool
) -> tuple[dict[str, Any], list[str], str | None]:
    """Our fields, the warnings of unknown ones, and the source image in base64; None: there is none. The format of the
    `Accept` header is the default. Raises `ApiError` (400).
    """
    parameters = {name: value for name, value in (inference.parameters or {}).items() if value is not None}
    accepted = _FORMATS.get(request.headers.get("accept", "").strip().lower())
    if accepted is not None:
        parameters.setdefault("output_format", accepted)
    size = _size(parameters)
    fields = {name: parameters.pop(name) for name in (*_OTHER_NAMES, *_SHARED) if name in parameters}
    ignored = [*inference.warnings]
    for name in parameters:
        plain = body.plain(name)
        field = plain and f"parameters.{plain}"
        if not ignore_unknown or len(ignored) >= schemas.MAX_UNKNOWN:
            raise invalid_field(field, "is not known", "unknown_parameter")
        ignored.append(schemas.is_ignored(field))
    if size is not None:
        fields["size"] = size
    if "prompt" in fields:
        return fields, ignored, inference.inputs
    if len(inference.inputs) > 100 and _PICTURE.match(inference.inputs):
        raise _no_prompt()
    return {**fields, "prompt": inference.inputs}, ignored, None


def _size(parameters: dict[str, Any]) -> str | None:
    """Remove the size from the parameters. Raises `ApiError` (400)."""
    target = parameters.pop("target_size", None)
    if target is not None and not (isinstance(target, dict) and target.keys() == {"width", "height"}):
        raise invalid_field("parameters.target_size", "must be an object of width and height", "invalid_type")
    sizes = {name: parameters.pop(name, (target or {}).get(name)) for name in ("width", "height")}
    for name, value in sizes.items():
        if value is None and set(sizes.values()) != {None}:
            raise invalid_field(f"parameters.{name}", "must be given too", "missing_required_parameter")
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 100_000):
            raise invalid_field(f"parameters.{name}", "must be a whole number of pixels", "invalid_type")
    return None if sizes["width"] is None else f"{sizes['width']}x{sizes['height']}"


def _no_prompt() -> ApiError:
    words = "must say what the picture is to become: image_to_image(image, prompt=…)"
    return invalid_field("parameters.prompt", words, "missing_required_parameter")


def _told(error: ApiError, prompt: str) -> JSONResponse:
    """The error in the client's format, its field under the client's name. `prompt`: the field that gave the prompt."""
    fields = {value: name for name, value in _NAMES.items()}
    names = {name: f"parameters.{name}" for name in _SHARED}
    names |= {name: f"parameters.{field}" for name, field in fields.items()}
    names |= {"prompt": prompt, "size": "parameters.width"}
    message, param = str(error), error.param
    if param in names:
        param = names[param]
        message = message if error.detail is None else f"{param}: {error.detail}"
    return JSONResponse({"error": message, "param": param, "code": error.code}, error.status, dict(error.headers or {}))
