"""POST /v1/images/edits: OpenAI's endpoint. As images.py, from a source image and an optional mask.

uploads.py checks and decodes the image.
"""

from __future__ import annotations

import re
from typing import Any, get_args

from fastapi import APIRouter, Request, Response
from starlette.datastructures import FormData, UploadFile

from api import body, images, references, schemas, submission
from api.access import By, Caller
from api.errors import ApiError, invalid_field
from api.forms import form
from api.references import CONTROL, IMAGE_PROMPT
from api.service import Given, Service
from api.uploads import MAX_BYTES, PictureUploads, Upload
from contract.card import MAX_STEPS
from contract.control import ControlChoice
from contract.image_fields import EditFields
from contract.image_prompt import ImagePromptChoice

router = APIRouter(tags=["images"])

_ENVELOPE = 2 * 2**20  # of a form around its files
_FILES = ("image", "mask")
_SEVERAL = (CONTROL, IMAGE_PROMPT)
_LISTS = ("image[]", *(f"{name}[]" for name in _SEVERAL))  # as clients send lists
_MOST = len(_FILES) + ControlChoice.MOST + ImagePromptChoice.MOST
_JSON = {
    "deepcache": "{",
    "outpaint": "{",
    "upscale": "{",
    "refiner": "{",
    ControlChoice.FIELD: "[",
    ImagePromptChoice.FIELD: "[",
}  # fields that are JSON in a form too, and how that begins
_WHOLE = re.compile(r"-?[0-9]{1,20}")
_FILE = {"type": "string", "format": "binary"}


@router.post(
    "/v1/images/edits",
    summary="Draw pictures from one, and wait for them",
    response_model=schemas.Generated,
    responses={200: {"content": {"text/event-stream": {}}}},
    openapi_extra=schemas.document(
        EditFields, schemas.EditBody,
        form={
            "image": {**_FILE, "description": "PNG, JPEG or WebP"},
            "mask": {**_FILE, "description": "of the same size: what is transparent in it is drawn anew"},
            CONTROL: {"type": "array", "items": _FILE, "description": "of the controls without an image, in order"},
            IMAGE_PROMPT: {"type": "array", "items": _FILE, "description": "of image_prompts without one, in order"},
        },
    ) | {"parameters": [schemas.IDEMPOTENCY_KEY]},
)  # fmt: skip
async def edit(request: Request, service: Given, caller: By) -> Response:
    """Responses, streams and disconnects are as in /v1/images/generations."""
    caller.check("images")
    fields, upload, pictures = await _read(request, service, caller)
    id = submission.idempotency_id(request, caller)
    job, _ = await submission.submit(service, request, caller, fields, id, upload, pictures)
    return await images.answer(service, request, job, fields, stays=id is not None)


async def _read(request: Request, service: Service, caller: Caller) -> tuple[EditFields, Upload, PictureUploads]:
    """The request, as a form or as JSON, its source image, and its other pictures. Raises `ApiError`."""
    if request.headers.get("content-type", "").lower().startswith("application/json"):
        named = schemas.read(schemas.EditBody, await body.read(request, caller.id))
        read = await references.read(service, caller, named)
        return named, read, await references.read_pictures(service, caller, named)
    async with form(request, max_bytes=_MOST * MAX_BYTES + _ENVELOPE, max_files=_MOST + 2, max_fields=100) as parts:
        texts, files, several = await _parts(parts)
    fields = schemas.read(EditFields, _typed(texts))
    if "image" not in files:
        raise invalid_field("image", "is required, as a file", "missing_required_parameter")
    given = files["image"], files.get("mask"), "image", fields.outpaint
    upload = await service.decoding.run(caller.id, Upload.of, *given)
    return fields, upload, await references.read_pictures(service, caller, fields, several)


async def _parts(parts: FormData) -> tuple[dict[str, str], dict[str, bytes], dict[str, list[bytes]]]:
    """Texts and files by name, and those that may come several times. Raises `ApiError` (400, 413) for duplicates, and
    for the wrong kind.
    """
    texts: dict[str, str] = {}
    files: dict[str, bytes] = {}
    several: dict[str, list[bytes]] = {name: [] for name in _SEVERAL}
    for given, value in parts.multi_items():
        name = given.removesuffix("[]") if given in _LISTS else given
        if name in texts or name in files:
            if name == "image":
                raise invalid_field(name, "only one image can be edited at a time")
            raise invalid_field(
                body.plain(name), "appears twice" if body.plain(name) else "A field appears twice.", "repeated_field"
            )
        if isinstance(value, UploadFile):
            if name not in (*_FILES, *_SEVERAL):
                raise invalid_field(body.plain(name), "must not be a file", "invalid_type")
            if (value.size or 0) > MAX_BYTES:
                raise ApiError(413, f"{name}: is larger than {MAX_BYTES} bytes", param=name, code="body_too_large")
            if name in several:
                several[name].append(await value.read())
            else:
                files[name] = await value.read()
        elif name in (*_FILES, *_SEVERAL):
            raise invalid_field(name, "must be a file", "invalid_type")
        else:
            texts[name] = value
    return texts, files, several


def _numbers(text: str, *, whole: bool) -> list[Any] | None:
    """Numbers with commas between them, in brackets or not; None if it is anything else."""
    if text.count(",") > MAX_STEPS + 1:
        return None
    parts = [part.strip() for part in text.removeprefix("[").removesuffix("]").split(",")]
    if whole:
        return [int(part) for part in parts] if all(map(_WHOLE.fullmatch, parts)) else None
    numbers = [body.number(part) for part in parts]
    return None if None in numbers else numbers


def _is_json(name: str, text: str) -> bool:
    return name in _JSON and text.startswith(_JSON[name])


def _typed(texts: dict[str, str]) -> dict[str, Any]:
    """Convert form text that stands for a number or a boolean. Anything else is left for validation to reject."""
    fields: dict[str, Any] = dict(texts)
    for name, text in texts.items():
        known = EditFields.model_fields.get(name)
        kinds = get_args(known.annotation) if known is not None else ()
        if int in kinds and _WHOLE.fullmatch(text):
            fields[name] = int(text)
        elif float in kinds and (number := body.number(text)) is not None:
            fields[name] = number
        elif (bool in kinds or name == "prompt_weighting") and text in ("true", "false"):
            fields[name] = text == "true"
        elif _is_json(name, text):
            fields[name] = body.parse(f'{{"{name}":{text}}}'.encode())[name]
        elif list[int] in kinds or list[float] in kinds:
            fields[name] = _numbers(text, whole=list[int] in kinds) or text
    return fields
