"""/v1/files: what batches are made of and what comes of them, and pictures to be edited, in OpenAI's shape.

Knows uploads and records; what the lines of a file ask for, batches.py knows, and pictures are looked at in uploads.py.
"""

from __future__ import annotations

import re
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from starlette.datastructures import UploadFile

from api import uploads
from api.access import By, Caller, count_request
from api.errors import ApiError, refused
from api.forms import form
from api.paging import Paging, missing, page
from api.service import Given, Service
from core.artifacts import NoArtifact, media_type
from core.jobs.batches import KEPT_S, File

router = APIRouter(tags=["batches"])

MAX_BYTES = 32 * 2**20
_ENVELOPE = 64 * 1024  # of a form around its file
_LINES = "application/jsonl"
_PICTURES = ("image/png", "image/jpeg", "image/webp")
_PURPOSES = ("batch", "vision")
_LISTED = (*_PURPOSES, "batch_output")
_PAGES = Paging(default=10_000, most=10_000, id="file-[0-9a-f]{24}", what="a file")
_NAME = re.compile(r"[\w .@()+,=-]{1,255}")
_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {
                            "type": "string",
                            "format": "binary",
                            "description": "batch: JSON Lines; vision: a picture in PNG, JPEG or WebP",
                        },
                        "purpose": {"type": "string", "enum": list(_PURPOSES)},
                    },
                }
            }
        },
    }
}


@router.post("/v1/files", summary="Hand in a file", openapi_extra=_FORM)
async def create(request: Request, service: Given, caller: By) -> Response:
    caller.check("files")
    await count_request(request, service, caller)
    purpose, name, data = await _upload(request)
    kind = _LINES if purpose == "batch" else await service.call(uploads.media_type, "file", data)
    file = await service.stored(keep, service, caller.id, name, purpose, data, kind)
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
    """The caller's files."""
    caller.check("files")
    limit, after = _PAGES.read(request)
    given = request.query_params
    purpose, order = given.get("purpose"), given.get("order", "desc")
    if purpose is not None and purpose not in _LISTED:
        raise refused("purpose", f"must be one of {', '.join(_LISTED)}")
    if order not in ("asc", "desc"):
        raise refused("order", "must be asc or desc")
    found = await service.call(
        service.batches.files, caller.id, purpose=purpose, oldest=order == "asc", after=after, limit=limit
    )
    if found is None:
        raise missing()
    return JSONResponse(page([_object(file) for file in found.items], more=found.more))


@router.get("/v1/files/{id}", summary="Look at a file")
async def look(id: str, service: Given, caller: By) -> Response:
    caller.check("files")
    return JSONResponse(_object(await find(service, id, caller)))


@router.get(
    "/v1/files/{id}/content",
    summary="Fetch a file",
    response_class=Response,
    responses={200: {"content": {kind: {} for kind in (_LINES, *_PICTURES)}}},
)
async def content(id: str, service: Given, caller: By) -> Response:
    caller.check("files")
    file = await find(service, id, caller)
    data = await read(service, file)
    return Response(data, media_type=media_type(file.key), headers={"X-Content-Type-Options": "nosniff"})


@router.delete("/v1/files/{id}", summary="Forget a file")
async def delete(id: str, service: Given, caller: By) -> Response:
    caller.check("files")
    file = await find(service, id, caller)
    await service.call(service.batches.forget_file, file)
    return JSONResponse({"id": file.id, "object": "file", "deleted": True})


async def find(service: Service, id: str, caller: Caller, param: str = "id") -> File:
    """As `get`, for this caller and without blocking."""
    return await service.call(get, service, id, caller.id, admin=caller.may("admin"), param=param)


async def read(service: Service, file: File) -> bytes:
    """As `content_of`, without blocking."""
    return await service.stored(content_of, service, file)


def get(service: Service, id: str, owner: str, *, admin: bool = False, param: str = "id") -> File:
    """The owner's file of this id; as `admin` anybody's. Blocks. Raises `ApiError` (404), also for those of others."""
    file = service.batches.file(id) if re.fullmatch(r"file-[0-9a-f]{24}", id) else None
    if file is None or not (file.owner == owner or admin):
        raise _gone(param)
    return file


def content_of(service: Service, file: File, param: str = "id") -> bytes:
    """Its bytes. Blocks. Raises `ApiError` (404) where they are gone."""
    try:
        return service.artifacts.get(file.key)
    except NoArtifact:
        raise _gone(param) from None


def _gone(param: str) -> ApiError:
    return ApiError(404, "There is no such file, or no longer.", param=param, code="file_not_found")


def keep(service: Service, owner: str, name: str, purpose: str, data: bytes, kind: str = _LINES) -> File:
    """Keep a file of this media type for its time. Raises `ArtifactError` and `StoreError`."""
    key = service.artifacts.put_kept(data, kind, lambda key: service.store.keep(key, KEPT_S))
    return service.batches.add_file(owner, name, purpose, len(data), key)


async def _upload(request: Request) -> tuple[str, str, bytes]:
    """The purpose, the name and the bytes of a file. Raises `ApiError`."""
    async with form(request, max_bytes=MAX_BYTES + _ENVELOPE, max_files=1, max_fields=10) as parts:
        purpose, upload = parts.get("purpose"), parts.get("file")
        data = await upload.read() if isinstance(upload, UploadFile) else None
        name = (upload.filename or "") if isinstance(upload, UploadFile) else ""
    if not isinstance(purpose, str) or purpose not in _PURPOSES:
        raise refused("purpose", f"must be one of {', '.join(_PURPOSES)}")
    if data is None:
        raise refused("file", "must be given, as a file", "missing_required_parameter")
    if not data:
        raise refused("file", "must not be empty")
    return purpose, name if _NAME.fullmatch(name) else "file", data


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
