"""Resolves images that a JSON body references: an uploaded file by its id, or a data URL, as OpenAI has them.

Never fetches a URL. uploads.py checks the images.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from api import files, schemas
from api.access import Caller
from api.errors import invalid_field
from api.schemas import EditBody, ImageReference
from api.service import Service
from api.uploads import NO_PICTURES, PictureUploads, Upload
from contract.control import ControlChoice
from contract.image_fields import ControlFields, ImageFields, ImagePromptFields
from contract.image_prompt import ImagePromptChoice
from contract.picture_input import PictureInput

CONTROL, IMAGE_PROMPT = "control_image", "image_prompt"  # a form's files, of what has no image of its own
_DATA = re.compile(r"data:image/(?:png|jpeg|webp);base64,", re.IGNORECASE)


async def read_job(service: Service, caller: Caller, given: dict[str, Any]) -> tuple[ImageFields, Upload | None]:
    """The fields of a job, by its type, and its source image. Raises `ApiError`, and as `fetch`."""
    kind = given.get("type")
    if kind == "edit":
        fields = schemas.read(schemas.EditJobFields, given)
        return fields, await read(service, caller, fields)
    if isinstance(kind, str) and kind != "image":
        raise invalid_field("type", "must be 'image' or 'edit'")
    return schemas.read(schemas.JobFields, given), None


async def read(service: Service, caller: Caller, fields: EditBody) -> Upload:
    """As `fetch`, without blocking."""
    return await service.stored(fetch, service, caller.id, fields, admin=caller.may("admin"))


async def read_pictures(
    service: Service, caller: Caller, fields: ImageFields, given: Mapping[str, Sequence[bytes]] | None = None
) -> PictureUploads:
    """As `fetch_pictures`, without blocking."""
    if not (fields.control or fields.image_prompts or given):
        return NO_PICTURES
    return await service.stored(fetch_pictures, service, caller.id, fields, given, admin=caller.may("admin"))


def fetch(service: Service, owner: str, fields: EditBody, *, admin: bool = False) -> Upload:
    """The source image of these fields. Blocks. Raises `ApiError` (400, 404, 413), naming the field;
    `ArtifactError`.
    """
    if len(fields.images) != 1:
        raise invalid_field("images", "must contain one image: one can be edited at a time")

    bytes_of = partial(_bytes_of, service, owner, admin=admin)
    mask = None if fields.mask is None else bytes_of("mask", fields.mask)
    return Upload.of(bytes_of("images", fields.images[0]), mask, "images", fields.outpaint)


def fetch_pictures(
    service: Service, owner: str, fields: ImageFields, given: Mapping[str, Sequence[bytes]] | None = None, *,
    admin: bool = False,
) -> PictureUploads:  # fmt: skip
    """The pictures of the fields' controls and image prompts.

    `given` are a form's files by name, of those without an image of their own. Blocks. Raises as `fetch`.
    """
    bytes_of, files = partial(_bytes_of, service, owner, admin=admin), given or {}
    return PictureUploads(
        _uploads(ControlChoice, fields.control or [], bytes_of, CONTROL, files.get(CONTROL, ())),
        _uploads(ImagePromptChoice, fields.image_prompts or [], bytes_of, IMAGE_PROMPT, files.get(IMAGE_PROMPT, ())),
    )


def _uploads(
    kind: type[PictureInput],
    entries: Sequence[ControlFields] | Sequence[ImagePromptFields],
    bytes_of: Callable[[str, ImageReference], bytes],
    file: str,
    given: Sequence[bytes],
) -> tuple[Upload, ...]:
    """The pictures of a field's entries; `given` are the form's files of this name. Raises `ApiError`."""
    if len(entries) > kind.MOST:
        raise invalid_field(kind.FIELD, f"must be at most {kind.MOST}, not {len(entries)}")
    named, rest, found = f"{kind.FIELD}.image", list(given), []
    for one in entries:
        if one.image is not None:
            data = bytes_of(named, one.image)
        elif rest:
            data = rest.pop(0)
        else:
            raise invalid_field(named, "must be given", "missing_required_parameter")
        found.append(Upload.of(data, None, named))
    if rest:
        raise invalid_field(file, f"is of no entry of {kind.FIELD}: each has an image of its own")
    return tuple(found)


def _bytes_of(service: Service, owner: str, field: str, reference: ImageReference, *, admin: bool = False) -> bytes:
    if (reference.file_id is None) == (reference.image_url is None):
        raise invalid_field(field, "must have either file_id or image_url")
    if reference.image_url is not None:
        return _inline(f"{field}.image_url", reference.image_url)
    param = f"{field}.file_id"
    file = files.get(service, reference.file_id or "", owner, admin=admin, param=param)
    if file.purpose != "vision":
        raise invalid_field(param, "must be a file with the purpose vision")
    return files.content_of(service, file, param)


def _inline(field: str, url: str) -> bytes:
    found = _DATA.match(url)
    if found is None:
        raise invalid_field(field, "must be a data: URL of a PNG, JPEG or WebP in base64; addresses are not fetched")
    try:
        return base64.b64decode(url[found.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise invalid_field(field, "is not in base64") from None
