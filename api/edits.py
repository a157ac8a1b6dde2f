"""POST /v1/images/edits: OpenAI's endpoint, like images.py from a source image and an optional mask.

picture_decoder.py checks and decodes the pictures; a form's files are open, on disk, until that is done.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, get_args, get_origin

from fastapi import Request, Response
from starlette.datastructures import FormData, UploadFile

from api import body, images, schemas, submission
from api.access import By, Caller
from api.errors import invalid_field
from api.forms import form, upload_source
from api.rate_limits import enforce_rate_limit
from api.references import FORM_FILES, NONE_GIVEN, GivenPictures
from api.routers import new_router
from api.service import Given, Service
from api.uploads import MAX_BYTES, PictureSource
from contract.card import MAX_STEPS
from contract.field_names import OTHER_NAMES, SIDES
from contract.image_request import EditRequest
from contract.strict import StrictModel

router = new_router("images")

_ENVELOPE = 2 * 2**20  # of a form around its files
_FILES = ("image", "mask")
_LISTS = ("image[]", *(f"{name}[]" for name in FORM_FILES))  # as clients send lists
_MOST = schemas.MAX_PICTURES + 1 + sum(kind.MOST for kind in FORM_FILES.values())
_WHOLE = re.compile(r"-?[0-9]{1,20}")
_FILE = {"type": "string", "format": "binary"}


@router.post(
    "/v1/images/edits",
    summary="Draw pictures from one, and wait for them",
    response_model=schemas.Generated,
    responses={200: {"content": {"text/event-stream": {}}}},
    openapi_extra=schemas.document(
        EditRequest, schemas.EditBody,
        form={
            "image": {
                "oneOf": [_FILE, {"type": "array", "items": _FILE, "maxItems": schemas.MAX_PICTURES}],
                "description": "PNG, JPEG or WebP: the picture to begin with; further ones are image prompts",
            },
            "mask": {**_FILE, "description": "of the same size: what is transparent in it is drawn anew"},
        } | {
            name: {"type": "array", "items": _FILE, "description": f"of {kind.FIELD} without an image, in order"}
            for name, kind in FORM_FILES.items()
        },
    ) | {"parameters": [schemas.IDEMPOTENCY_KEY]},
)  # fmt: skip
async def edit(request: Request, service: Given, caller: By) -> Response:
    """Edit an image. Responses, streams and disconnects are as in /v1/images/generations."""
    caller.check("images")
    await enforce_rate_limit(request, service, caller)
    async with _read(request, service, caller) as (fields, form):
        id = submission.idempotency_id(request, caller)
        job, _ = await submission.submit(service, request, caller, fields, id, form, charged=True)
    return await images.answer(service, request, job, fields, stays=id is not None)


@asynccontextmanager
async def _read(request: Request, service: Service, caller: Caller) -> AsyncIterator[tuple[EditRequest, GivenPictures]]:
    """The request, as a form or as JSON, and its files, which are open as long as the context. Raises `ApiError`."""
    if request.headers.get("content-type", "").lower().startswith("application/json"):
        fields = await body.read(request, caller.id)
        yield schemas.read(schemas.EditBody, fields, ignore_unknown=service.ignore_unknown), NONE_GIVEN
        return
    most_bytes = _MOST * MAX_BYTES + _ENVELOPE
    async with form(request, caller.id, max_bytes=most_bytes, max_files=_MOST + 2, max_fields=100) as parts:
        texts, files = _parts(parts)
        yield schemas.read(EditRequest, _typed(texts), ignore_unknown=service.ignore_unknown), files


def _parts(parts: FormData) -> tuple[dict[str, str], GivenPictures]:
    """Texts by name, and the files. Raises `ApiError` (400, 413) for duplicates, and for the wrong kind."""
    texts: dict[str, str] = {}
    files: dict[str, PictureSource] = {}
    several: dict[str, list[PictureSource]] = {name: [] for name in ("image", *FORM_FILES)}
    for part, value in parts.multi_items():
        name = part.removesuffix("[]") if part in _LISTS else part
        if name in texts or name in files:
            raise invalid_field(
                body.plain(name), "appears twice" if body.plain(name) else "A field appears twice.", "repeated_field"
            )
        if isinstance(value, UploadFile):
            if name not in (*_FILES, *FORM_FILES):
                raise invalid_field(body.plain(name), "must not be a file", "invalid_type")
            source = upload_source(name, value)
            if name in several:
                several[name].append(source)
            else:
                files[name] = source
        elif name in (*_FILES, *FORM_FILES):
            raise invalid_field(name, "must be a file", "invalid_type")
        else:
            texts[name] = value
    images = several.pop("image")
    if len(images) > schemas.MAX_PICTURES:
        words = f"must be at most {schemas.MAX_PICTURES} files, not {len(images)}"
        raise invalid_field("image", words, "too_many_images")
    return texts, GivenPictures(images[0] if images else None, files.get("mask"), several, images[1:])


def _numbers(text: str, *, integers: bool) -> list[Any] | None:
    """Numbers with commas between them, in brackets or not; None if it is anything else."""
    if text.count(",") > MAX_STEPS + 1:
        return None
    parts = [part.strip() for part in text.removeprefix("[").removesuffix("]").split(",")]
    numbers = [body.number(part) for part in parts]
    return numbers if all(isinstance(number, int if integers else int | float) for number in numbers) else None


def _has_objects(kinds: Iterable[Any]) -> bool:
    """Return whether a value of one of these types may be, or hold, an object, which is JSON in a form too."""
    return any(
        get_origin(kind) is dict
        or (isinstance(kind, type) and issubclass(kind, StrictModel))
        or _has_objects(get_args(kind))
        for kind in kinds
    )


def _typed(texts: dict[str, str]) -> dict[str, Any]:
    """Convert form text that stands for a number or a boolean. Anything else is left for validation to reject."""
    declared = EditRequest.model_fields

    def kinds(name: str) -> tuple[Any, ...]:
        field = OTHER_NAMES.get(name, name)
        return (int,) if name in SIDES else get_args(declared[field].annotation) if field in declared else ()

    return {name: _value(name, text, kinds(name)) for name, text in texts.items()}


def _value(name: str, text: str, kinds: tuple[Any, ...]) -> Any:
    """Return the value that a form's text stands for in a field of these types."""
    if int in kinds and _WHOLE.fullmatch(text):
        return int(text)
    if (int in kinds or float in kinds) and (number := body.number(text)) is not None:
        return number
    if (bool in kinds or name == "prompt_weighting") and text in ("true", "false"):
        return text == "true"
    if _has_objects(kinds) and text.startswith("[" if any(get_origin(kind) is list for kind in kinds) else "{"):
        return body.parse(f'{{"{name}":{text}}}'.encode())[name]
    if list[int] in kinds or list[float] in kinds:
        return _numbers(text, integers=list[int] in kinds) or text
    return text
