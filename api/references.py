"""Resolves images that a JSON body references: an uploaded file by its id, or a data URL, as OpenAI has them.

Never fetches a URL. uploads.py checks the images.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from api import files, schemas
from api.access import Caller
from api.errors import invalid_field
from api.schemas import EditBody, ImageReference
from api.service import Service
from api.uploads import Upload
from contract import control
from contract.image_fields import ImageFields

_CONTROL = "control.image"
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


async def read_controls(
    service: Service, caller: Caller, fields: ImageFields, given: Sequence[bytes] = ()
) -> tuple[Upload, ...]:
    """As `fetch_controls`, without blocking."""
    return await service.stored(fetch_controls, service, caller.id, fields, given, admin=caller.may("admin"))


def fetch(service: Service, owner: str, fields: EditBody, *, admin: bool = False) -> Upload:
    """The source image of these fields. Blocks. Raises `ApiError` (400, 404, 413), naming the field;
    `ArtifactError`.
    """
    if len(fields.images) != 1:
        raise invalid_field("images", "must contain one image: one can be edited at a time")

    bytes_of = partial(_bytes_of, service, owner, admin=admin)
    mask = None if fields.mask is None else bytes_of("mask", fields.mask)
    return Upload.of(bytes_of("images", fields.images[0]), mask, "images", fields.outpaint)


def fetch_controls(
    service: Service, owner: str, fields: ImageFields, given: Sequence[bytes] = (), *, admin: bool = False
) -> tuple[Upload, ...]:
    """The pictures of the fields' controls; `given` are those of a form, of the controls without one of their own.

    Blocks. Raises as `fetch`.
    """
    controls, rest, found = fields.control or [], list(given), []
    if len(controls) > control.MAX_CONTROLS:
        raise invalid_field(control.FIELD, f"must be at most {control.MAX_CONTROLS}, not {len(controls)}")
    for one in controls:
        if one.image is not None:
            data = _bytes_of(service, owner, _CONTROL, one.image, admin=admin)
        elif rest:
            data = rest.pop(0)
        else:
            raise invalid_field(_CONTROL, "must be given", "missing_required_parameter")
        found.append(Upload.of(data, None, _CONTROL))
    if rest:
        raise invalid_field("control_image", "is of no control: each has an image of its own")
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
