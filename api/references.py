"""Resolves the pictures of a request: files of its form, uploaded files by their id, data URLs, as OpenAI has them.

Loads no bytes and never fetches a URL. picture_decoder.py checks the pictures.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from api import files, schemas
from api.access import Caller
from api.errors import invalid_field
from api.schemas import EditBody, ImageReference
from api.service import Service
from api.uploads import NO_PICTURES, PictureSource, PictureUploads, Upload
from contract.image import PICTURES
from contract.image_request import EditRequest, ImageRequest
from contract.picture_input import PictureInput
from core.artifacts import digest_of
from core.jobs.files import File

FORM_FILES: dict[str, type[PictureInput]] = {kind.FORM_FILE: kind for kind in PICTURES.values()}
"""A form's files, of entries that have no image of their own."""
_DATA = re.compile(r"data:image/(?:png|jpeg|webp);base64,", re.IGNORECASE)


class GivenPictures(NamedTuple):
    """The pictures that a request holds beside its fields, such as a form's files."""

    image: PictureSource | None = None
    mask: PictureSource | None = None
    inputs: Mapping[str, Sequence[PictureSource]] = {}  # by the names of `FORM_FILES`


NONE_GIVEN = GivenPictures()


def read_job(fields: dict[str, Any]) -> ImageRequest:
    """The fields of a job, by its type. Raises `ApiError`."""
    kind = fields.get("type")
    if kind == "edit":
        return schemas.read(schemas.EditJobFields, fields)
    if isinstance(kind, str) and kind != "image":
        raise invalid_field("type", "must be 'image' or 'edit'")
    return schemas.read(schemas.JobFields, fields)


def any_named(fields: ImageRequest, pictures: GivenPictures = NONE_GIVEN) -> bool:
    """Return whether a request has any pictures."""
    inputs = any(getattr(fields, name) for name in PICTURES) or any(pictures.inputs.values())
    return bool(isinstance(fields, EditRequest) or inputs or pictures.image or pictures.mask)


async def resolve(
    service: Service, caller: Caller, fields: ImageRequest, pictures: GivenPictures = NONE_GIVEN
) -> PictureUploads:
    """Resolve pictures as `Resolver.uploads` does, without blocking."""
    if not any_named(fields, pictures):
        return NO_PICTURES
    return await service.call(Resolver(service, caller.id, admin=caller.may("admin")).uploads, fields, pictures)


class Resolver:
    """Resolves the pictures of one request, each file once."""

    def __init__(self, service: Service, owner: str, *, admin: bool = False) -> None:
        """Files are the owner's; with `admin` anybody's."""
        self._service, self._owner, self._admin = service, owner, admin
        self._files: dict[str, File] = {}

    def uploads(self, fields: ImageRequest, pictures: GivenPictures = NONE_GIVEN) -> PictureUploads:
        """The pictures of these fields, with what is known of them. Blocks.

        Raises `ApiError` (400, 404, 413), naming the field.
        """
        return PictureUploads(
            self._source(fields, pictures) if isinstance(fields, EditRequest) else None,
            {
                kind.FIELD: self._inputs(kind, getattr(fields, kind.FIELD) or [], file, pictures.inputs.get(file, ()))
                for file, kind in FORM_FILES.items()
            },
        ).check()

    def _source(self, fields: EditRequest, pictures: GivenPictures) -> Upload:
        """The source image of an edit."""
        if not isinstance(fields, EditBody):
            if pictures.image is None:
                raise invalid_field("image", "is required, as a file", "missing_required_parameter")
            return Upload(pictures.image, pictures.mask, fields.outpaint)
        if len(fields.images) != 1:
            raise invalid_field("images", "must contain one image: one can be edited at a time")
        image = self._named("images", fields.images[0])
        return Upload(image, None if fields.mask is None else self._named("mask", fields.mask), fields.outpaint)

    def _inputs(
        self,
        kind: type[PictureInput],
        entries: Sequence[Any],
        file: str,
        sources: Sequence[PictureSource],
    ) -> tuple[Upload, ...]:
        """The pictures of a field's entries; `sources` are those of the entries without an image, in order."""
        if len(entries) > kind.MOST:
            raise invalid_field(kind.FIELD, f"must be at most {kind.MOST}, not {len(entries)}")
        field, rest, uploads = f"{kind.FIELD}.image", list(sources), []
        for entry in entries:
            if entry.image is not None:
                source = self._named(field, entry.image)
            elif rest:
                source = replace(rest.pop(0), field=field)
            else:
                raise invalid_field(field, "must be given", "missing_required_parameter")
            uploads.append(Upload(source))
        if rest:
            raise invalid_field(file, f"is of no entry of {kind.FIELD}: each has an image of its own")
        return tuple(uploads)

    def _named(self, field: str, reference: ImageReference) -> PictureSource:
        if (reference.file_id is None) == (reference.image_url is None):
            raise invalid_field(field, "must have either file_id or image_url")
        if reference.image_url is not None:
            return replace(_inline(field, reference.image_url), luminance=reference.LUMINANCE)
        id, param = reference.file_id or "", f"{field}.file_id"
        if id not in self._files:
            self._files[id] = files.get(self._service, id, self._owner, admin=self._admin, param=param)
        file = self._files[id]
        if file.purpose != "vision":
            raise invalid_field(param, "must be a file with the purpose vision")
        read = partial(files.content_of, self._service, file, param)
        return PictureSource(
            field, file.size, read, digest_of(file.key), file.picture_size, luminance=reference.LUMINANCE
        )


def _inline(field: str, url: str) -> PictureSource:
    prefix = _DATA.match(url)
    if prefix is None:
        message = "must be a data: URL of a PNG, JPEG or WebP in base64; addresses are not fetched"
        raise invalid_field(f"{field}.image_url", message)

    def read() -> bytes:
        return decoded(f"{field}.image_url", "is not in base64", url[prefix.end() :])

    return PictureSource(field, (3 * (len(url) - prefix.end()) + 3) // 4, read)


def decoded(field: str, message: str, text: str | bytes) -> bytes:
    """The bytes of a base64 text. Raises `ApiError` (400) with this message."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise invalid_field(field, message) from None
