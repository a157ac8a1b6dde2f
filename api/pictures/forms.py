"""Reads the fields and pictures of a request for images from a form, whose files are open, on disk, until they are
decoded.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar, get_args, get_origin

from fastapi import Request
from starlette.datastructures import FormData, UploadFile

from api import schemas
from api.access import Caller
from api.errors import ApiError, invalid_field
from api.http import body
from api.http.forms import form, upload_source
from api.pictures.references import FORM_FILES, GivenPictures
from api.pictures.uploads import MAX_BYTES, PictureSource
from api.service import Service
from contract.card import MAX_STEPS
from contract.field_names import OTHER_NAMES, SIDES
from contract.image_request import EditRequest, ImageRequest
from contract.strict import StrictModel

R = TypeVar("R", bound=ImageRequest)

_ENVELOPE = 2 * 2**20  # of a form around its files
_MOST = schemas.MAX_PICTURES + 1 + sum(kind.MOST for kind in FORM_FILES.values())  # files
_MOST_FIELDS = 100
_WHOLE = re.compile(r"-?[0-9]{1,20}")
_FILE = {"type": "string", "format": "binary"}
_INPUTS = {
    name: {"type": "array", "items": _FILE, "description": f"of {kind.FIELD} without an image, in order"}
    for name, kind in FORM_FILES.items()
}
FILES: dict[type[ImageRequest], dict[str, Any]] = {
    ImageRequest: _INPUTS,
    EditRequest: {
        "image": {
            "oneOf": [_FILE, {"type": "array", "items": _FILE, "maxItems": schemas.MAX_PICTURES}],
            "description": "PNG, JPEG or WebP: the picture to begin with; further ones are image prompts",
        },
        "mask": {**_FILE, "description": "of the same size: what is transparent in it is drawn anew"},
        **_INPUTS,
    },
}
"""The schemas of the files of a form, by what it asks for."""


def is_form(request: Request) -> bool:
    """Return whether the request's headers declare a form."""
    return request.headers.get("content-type", "").lower().startswith("multipart/")


@asynccontextmanager
async def read(
    request: Request, service: Service, caller: Caller, kind: type[R]
) -> AsyncIterator[tuple[R, GivenPictures]]:
    """The request of a form and its files, which are open as long as the context. Raises `ApiError`."""
    most_bytes = _MOST * MAX_BYTES + _ENVELOPE
    async with form(request, caller.id, max_bytes=most_bytes, max_files=_MOST + 2, max_fields=_MOST_FIELDS) as parts:
        texts, pictures = _parts(parts, kind)
        fields = {name: _value(name, values, _kinds(kind, name)) for name, values in texts.items()}
        yield schemas.read(kind, fields, ignore_unknown=service.ignore_unknown), pictures


def _parts(parts: FormData, kind: type[ImageRequest]) -> tuple[dict[str, list[str]], GivenPictures]:
    """Texts by name, and the files. Raises `ApiError` (400, 413) for duplicates, and for the wrong kind."""
    names = FILES[kind]
    texts: dict[str, list[str]] = {}
    files: dict[str, PictureSource] = {}
    several: dict[str, list[PictureSource]] = {name: [] for name in ("image", *FORM_FILES)}
    for name, value in parts.multi_items():
        if name in files or (name in texts and not _is_list(_kinds(kind, name))):
            raise _wrong(name, "appears twice", "repeated_field")
        if isinstance(value, UploadFile):
            if name not in names:
                raise _wrong(name, f"must not be a file; {', '.join(names)} are", "invalid_type")
            source = upload_source(name, value)
            if name in several:
                several[name].append(source)
            else:
                files[name] = source
        elif name in names:
            raise invalid_field(name, "must be a file", "invalid_type")
        else:
            texts.setdefault(name, []).append(value)
    images = several.pop("image")
    if len(images) > schemas.MAX_PICTURES:
        words = f"must be at most {schemas.MAX_PICTURES} files, not {len(images)}"
        raise invalid_field("image", words, "too_many_images")
    return texts, GivenPictures(images[0] if images else None, files.get("mask"), several, images[1:])


def _wrong(name: str, message: str, code: str) -> ApiError:
    """A 400 for a part of this name."""
    field = body.plain(name)
    return invalid_field(field, message if field else f"A part whose name is no plain word {message}.", code)


def _kinds(kind: type[ImageRequest], name: str) -> tuple[Any, ...]:
    """The types of the field that a part of this name is of; none for an unknown one."""
    declared = kind.model_fields
    field = OTHER_NAMES.get(name, name)
    return (int,) if name in SIDES else get_args(declared[field].annotation) if field in declared else ()


def _is_list(kinds: Iterable[Any]) -> bool:
    return any(get_origin(kind) is list for kind in kinds)


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


def _value(name: str, texts: list[str], kinds: tuple[Any, ...]) -> Any:
    """Return the value that a form's texts stand for in a field of these types: one text, or items of a list.

    What stands for none is left for validation to reject. Raises `ApiError` (400) for JSON that is malformed.
    """
    if len(texts) > 1:
        return [item for text in texts for item in _items(_value(name, [text], kinds))]
    (text,) = texts
    if int in kinds and _WHOLE.fullmatch(text):
        return int(text)
    if (int in kinds or float in kinds) and (number := body.number(text)) is not None:
        return number
    if (bool in kinds or name == "prompt_weighting") and text in ("true", "false"):
        return text == "true"
    if _has_objects(kinds) and text.startswith(("[", "{") if _is_list(kinds) else "{"):
        value = _json(name, text)
        return _items(value) if _is_list(kinds) else value
    if list[int] in kinds or list[float] in kinds:
        return _numbers(text, integers=list[int] in kinds) or text
    return text


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _json(name: str, text: str) -> Any:
    """Parse the JSON of a field. Raises `ApiError` (400), naming it."""
    try:
        return body.parse(f'{{"{name}":{text}}}'.encode())[name]
    except ApiError as error:
        if error.param is not None:
            raise
        reason = str(error).removeprefix("The body ").removesuffix(".").partition(": line")[0]
        raise invalid_field(name, reason) from None
