"""/v1/files: input and output files of batches, and images to be edited, in OpenAI's format.

batches/routes.py checks the lines of a file, pictures/decoder.py checks images: once, and the record keeps their size.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import IO, Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from starlette.datastructures import UploadFile

from api.access import By, Caller, key_required
from api.dialects.predictions.objects import file_object
from api.errors import NO_RETRY, ApiError, invalid_field
from api.http import body, stored_bytes
from api.http.forms import form, upload_source
from api.http.paging import Pagination, missing, page
from api.pictures.decoder import PictureInfo
from api.rate_limits import enforce_rate_limit, store_share_full, stored_limit
from api.routers import new_router
from api.service import Given, Service
from contract.card import Size
from core.artifacts import NoArtifact, Spool, StorageDown
from core.jobs.files import KEPT_S, File, FilesFull, KeyRequired, ShareFull, new_file_id

router = new_router("batches")

MAX_BYTES = 32 * 2**20
_ENVELOPE = 64 * 1024  # of a form around its file
_LINES = "application/jsonl"
_PICTURES = ("image/png", "image/jpeg", "image/webp")
_PURPOSES = ("batch", "vision")
_LISTED = (*_PURPOSES, "batch_output")
_PAGES = Pagination(default=10_000, maximum=10_000, id="file-[0-9a-f]{24}", kind="a file")
_MOST_LISTED = 1000  # of a page
_NAME = re.compile(r"[\w .@()+,=-]{1,255}")
_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "anyOf": [{"required": ["file", "purpose"]}, {"required": ["content"]}],
                    "properties": {
                        "file": {
                            "type": "string",
                            "format": "binary",
                            "description": "batch: JSON Lines; vision: a picture in PNG, JPEG or WebP",
                        },
                        "purpose": {"type": "string", "enum": list(_PURPOSES)},
                        "content": {
                            "type": "string",
                            "format": "binary",
                            "description": "a picture, in place of both, as Replicate's clients send it",
                        },
                    },
                }
            }
        },
    }
}


@router.post("/v1/files", summary="Hand in a file", openapi_extra=_FORM)
async def create(request: Request, service: Given, caller: By) -> Response:
    """With `content` in place of `file` and `purpose` it is a picture, and answered as Replicate does."""
    caller.check("files")
    await enforce_rate_limit(request, service, caller)
    quota = _quota(service, caller)
    async with _upload(request, caller) as (purpose, name, upload, as_replicate):
        info = None
        if purpose == "vision":
            info = await service.pictures.measure(caller.id, upload_source("file", upload))
        try:
            async with service.writing.turn(caller.id, within_s=service.settings.storage_s):
                file = await service.writing.on_thread(
                    _keep_upload, service, caller.id, name, purpose, upload.file, info, quota
                )
        except TimeoutError:
            raise StorageDown("an earlier file of this key is still being stored") from None
    if as_replicate and info is not None:
        return JSONResponse(file_object(file, info.media_type, service.links(request, caller.id).base))
    return JSONResponse(_object(file))


@router.get(
    "/v1/files",
    summary="List files",
    openapi_extra=_PAGES.document(
        purpose=({"type": "string", "enum": list(_LISTED)}, "only those with this purpose"),
        order=({"type": "string", "enum": ["asc", "desc"], "default": "desc"}, "desc: newest first"),
    ),
)
async def files(request: Request, service: Given, caller: By) -> Response:
    """The caller's files. A page has at most 1,000, whatever the limit."""
    caller.check("files")
    await enforce_rate_limit(request, service, caller)
    limit, after = _PAGES.read(request)
    query = request.query_params
    purpose, order = query.get("purpose"), query.get("order", "desc")
    if purpose is not None and purpose not in _LISTED:
        raise invalid_field("purpose", f"must be one of {', '.join(_LISTED)}")
    if order not in ("asc", "desc"):
        raise invalid_field("order", "must be asc or desc")

    def listed() -> Response:
        page_of_files = service.files.files(
            caller.id, purpose=purpose, oldest=order == "asc", after=after, limit=min(limit, _MOST_LISTED)
        )
        if page_of_files is None:
            raise missing()
        return JSONResponse(page([_object(file) for file in page_of_files.items], more=page_of_files.more))

    return await service.call(caller.id, listed)


@router.get("/v1/files/{id}", summary="Look at a file", operation_id="look_v1_files__id__get")
async def retrieve(id: str, service: Given, caller: By) -> Response:
    caller.check("files")
    return JSONResponse(_object(await find(service, id, caller)))


@router.get(
    "/v1/files/{id}/content",
    summary="Fetch a file",
    response_class=Response,
    responses={200: {"content": {kind: {} for kind in (_LINES, *_PICTURES)}}},
)
async def content(id: str, request: Request, service: Given, caller: By) -> Response:
    caller.check("files")
    file = await find(service, id, caller)
    try:
        headers = {"X-Content-Type-Options": "nosniff"}
        return await stored_bytes.respond(service, caller.id, request, file.key, headers, file.size)
    except NoArtifact:
        raise gone("id") from None


@router.delete("/v1/files/{id}", summary="Forget a file")
async def delete(id: str, service: Given, caller: By) -> Response:
    caller.check("files")
    file = await find(service, id, caller)
    await service.call(caller.id, service.files.forget, file)
    return JSONResponse({"id": file.id, "object": "file", "deleted": True})


async def find(service: Service, id: str, caller: Caller, param: str = "id") -> File:
    """Return the file as `get` does, for this caller, without blocking."""
    return await service.call(caller.id, get, service, id, caller.id, admin=caller.may("admin"), param=param)


def get(service: Service, id: str, owner: str, *, admin: bool = False, param: str = "id") -> File:
    """The owner's file of this id; as `admin` anybody's. Blocks. Raises `ApiError` (404), also for others' files."""
    file = service.files.file(id) if re.fullmatch(r"file-[0-9a-f]{24}", id) else None
    if file is None or not (file.owner == owner or admin):
        raise gone(param)
    return file


def content_of(service: Service, file: File, param: str = "id") -> bytes:
    """Return the file's bytes. Blocks. Raises `ApiError` (404) if they are gone."""
    try:
        return service.artifacts.get(file.key)
    except NoArtifact:
        raise gone(param) from None


def gone(param: str) -> ApiError:
    """A 404."""
    return ApiError(404, "There is no such file, or it has expired.", param=param, code="file_not_found")


def keep_spool(
    service: Service, owner: str, name: str, purpose: str, spool: Spool, kind: str = _LINES, *, quota: int = 0,
    id: str = "", picture_size: Size | None = None, keyless: bool = False, stored: int | None = None,
) -> File:  # fmt: skip
    """Store a file of this media type for its retention time. Raises `ArtifactError`, `StoreError`, and as
    `FileStore.add`."""
    id = id or new_file_id()
    key = service.artifacts.put_spool(spool, kind, partial(service.files.reserve, id))
    return service.files.add(
        owner, name, purpose, spool.size, key, quota=quota, id=id, picture_size=picture_size, keyless=keyless,
        stored=stored,
    )  # fmt: skip


def _quota(service: Service, caller: Caller) -> int:
    """Maximum total bytes of the caller's files: the key's own limit, or else the service's. 0: unlimited."""
    key = service.cards.now.keys.get(caller.id)
    return (key.file_bytes if key else 0) or service.settings.files_quota_bytes


def _keep_upload(
    service: Service, owner: str, name: str, purpose: str, upload: IO[bytes], info: PictureInfo | None, quota: int
) -> File:
    """Store an upload. Blocks. Raises `ApiError`: 429 if the owner's quota or share of the store is exceeded, 401 if
    keys are required by now."""
    try:
        spool, used = Spool.of(upload), service.files.used_bytes(owner)
        if quota and used + spool.size > quota:  # before anything is written; the record enforces the limit
            raise FilesFull(used, quota)
        kind, size = (_LINES, None) if info is None else (info.media_type, info.size)
        return keep_spool(
            service, owner, name, purpose, spool, kind, quota=quota, picture_size=size, keyless=not owner,
            stored=stored_limit(service, owner),
        )  # fmt: skip
    except KeyRequired:
        raise key_required() from None
    except ShareFull:
        raise store_share_full() from None
    except FilesFull as full:
        message = f"file: the files of this key take {full.used} of {full.quota} bytes; delete some first"
        raise ApiError(429, message, param="file", code="files_quota_exceeded", headers=NO_RETRY) from None


@asynccontextmanager
async def _upload(request: Request, caller: Caller) -> AsyncIterator[tuple[str, str, UploadFile, bool]]:
    """Purpose, name and content of an uploaded file, and whether the form is Replicate's; large content is on disk.
    Raises `ApiError`.
    """
    async with form(request, caller.id, max_bytes=MAX_BYTES + _ENVELOPE, max_files=2, max_fields=10) as parts:
        contents = [name for name, value in parts.multi_items() if isinstance(value, UploadFile) and name != "metadata"]
        if len(contents) > 1:
            raise invalid_field(body.plain(contents[1]), "A form hands in one file.", "repeated_field")
        purpose, upload = parts.get("purpose"), parts.get("file")
        as_replicate = purpose is None and upload is None and "content" in parts
        if as_replicate:
            purpose, upload = "vision", parts["content"]
        if not isinstance(purpose, str) or purpose not in _PURPOSES:
            raise invalid_field("purpose", f"must be one of {', '.join(_PURPOSES)}")
        if not isinstance(upload, UploadFile):
            raise invalid_field("file", "is required, as a file", "missing_required_parameter")
        if not upload.size:
            raise invalid_field("file", "must not be empty")
        name = upload.filename or ""
        yield purpose, name if _NAME.fullmatch(name) else "file", upload, as_replicate


def _object(file: File) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size,
        "created_at": file.created,
        "expires_at": file.created + KEPT_S,
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
    }
