"""Resolves the pictures of a request: files of its form, uploaded files by their id, data URLs, as OpenAI has them.

Loads no bytes and fetches no URL. fetcher.py fetches, decoder.py checks the pictures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

from api import files, schemas
from api.access import Caller
from api.errors import invalid_field
from api.pictures.uploads import NO_PICTURES, MaskConvention, PictureSource, PictureUploads, Upload
from api.pictures.urls import picture_of
from api.schemas import EditBody, ImageReference
from api.service import Service
from contract.image import PICTURES
from contract.image_request import EditRequest, ImageRequest
from contract.picture_input import Fit, PictureInput
from core.artifacts import digest_of
from core.jobs.files import File

FORM_FILES: dict[str, type[PictureInput]] = {kind.FORM_FILE: kind for kind in PICTURES.values()}
"""A form's files, of entries that have no image of their own."""


class GivenPictures(NamedTuple):
    """The pictures that a request holds beside its fields, such as a form's files, and how its mask is read."""

    image: PictureSource | None = None
    mask: PictureSource | None = None
    inputs: Mapping[str, Sequence[PictureSource]] = {}  # by the names of `FORM_FILES`
    further: Sequence[PictureSource] = ()  # an edit's images behind its source
    mask_convention: MaskConvention = "hole"
    mask_blur: tuple[float, float] = (0.0, 0.0)


NONE_GIVEN = GivenPictures()


def read_job(fields: dict[str, Any], *, ignore_unknown: bool) -> ImageRequest:
    """The fields of a job, by its type. Raises `ApiError`."""
    kind = fields.get("type")
    if kind == "edit":
        return schemas.read(schemas.EditJobFields, fields, ignore_unknown=ignore_unknown)
    if isinstance(kind, str) and kind != "image":
        raise invalid_field("type", "must be 'image' or 'edit'")
    return schemas.read(schemas.JobFields, fields, ignore_unknown=ignore_unknown)


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
    return await service.call(
        caller.id, Resolver(service, caller.id, admin=caller.may("admin")).uploads, fields, pictures
    )


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
        images = self._images(fields, pictures) if isinstance(fields, EditRequest) else []
        fit: Fit = images[0].fit if images else "crop"
        uploads = PictureUploads(
            images[0] if images else None,
            {
                kind.FIELD: self._inputs(
                    kind, getattr(fields, kind.FIELD) or [], file, pictures.inputs.get(file, ()), fit
                )
                for file, kind in FORM_FILES.items()
            },
            tuple(images[1:]),
        ).check()
        return self._service.fetcher.check(uploads)

    def _images(self, fields: EditRequest, pictures: GivenPictures) -> list[Upload]:
        """The images of an edit: its source, then the further ones."""
        if isinstance(fields, EditBody):
            if not fields.images:
                raise invalid_field("images", "must contain an image")
            images = [self._named("images", reference) for reference in fields.images]
            mask = None if fields.mask is None else self._named("mask", fields.mask)
        else:
            if pictures.image is None:
                raise invalid_field("image", "is required, as a file", "missing_required_parameter")
            images, mask = [pictures.image, *pictures.further], pictures.mask
        fit = cast(Fit, fields.fit or "stretch")
        source = Upload(images[0], mask, fields.outpaint, fit)
        if mask is not None:
            source = replace(source, mask_convention=pictures.mask_convention, mask_blur=pictures.mask_blur)
        return [source, *map(Upload, images[1:])]

    def _inputs(
        self,
        kind: type[PictureInput],
        entries: Sequence[Any],
        file: str,
        sources: Sequence[PictureSource],
        fit: Fit,
    ) -> tuple[Upload, ...]:
        """The pictures of a field's entries; `sources` are those of the entries without an image, in order, and
        `fit` is of those that do not say.
        """
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
            # Image prompts have no fit: they keep their shape.
            uploads.append(Upload(source, fit=getattr(entry, "fit", "stretch") or fit))
        if rest:
            raise invalid_field(file, f"is of no entry of {kind.FIELD}: each has an image of its own")
        return tuple(uploads)

    def _named(self, field: str, reference: ImageReference) -> PictureSource:
        if (reference.file_id is None) == (reference.image_url is None):
            raise invalid_field(field, "must have either file_id or image_url")
        if reference.image_url is not None:
            return picture_of(field, reference.image_url, param=f"{field}.image_url")
        id, param = reference.file_id or "", f"{field}.file_id"
        if id not in self._files:
            self._files[id] = files.get(self._service, id, self._owner, admin=self._admin, param=param)
        file = self._files[id]
        if file.purpose != "vision":
            raise invalid_field(param, "must be a file with the purpose vision")
        read = partial(files.content_of, self._service, file, param)
        return PictureSource(field, file.size, read, digest_of(file.key), file.picture_size)
