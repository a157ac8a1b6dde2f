"""/v1/files: what batches are made of, and what comes of them, in OpenAI's shape.

Knows uploads and records; what the lines of a file ask for, batches.py knows.
"""

from __future__ import annotations

import re
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from starlette.datastructures import UploadFile

from api.access import By, Caller, count_request
from api.errors import ApiError, refused
from api.forms import form
from api.service import Given, Service
from core.artifacts import NoArtifact, key_of
from core.jobs.batches import KEPT_S, File

router = APIRouter(tags=["batches"])

MAX_BYTES = 32 * 2**20
_ENVELOPE = 64 * 1024  # of a form around its file
_MEDIA_TYPE = "application/jsonl"
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
                        "file": {"type": "string", "format": "binary", "description": "JSON Lines"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                    },
                }
            }
        },
    }
}


@router.post("/v1/files", summary="Hand in a file", openapi_extra=_FORM)
async def create(request: Request, service: Given, caller: By) -> Response:
    await count_request(request, service, caller)
    name, data = await _upload(request)
    file = await service.call(keep, service, caller.id, name, "batch", data)
    return JSONResponse(_object(file))


@router.get("/v1/files", summary="List files")
async def files(service: Given, caller: By) -> Response:
    found = await service.call(service.batches.files, caller.id)
    return JSONResponse({"object": "list", "data": [_object(file) for file in found], "has_more": False})


@router.get("/v1/files/{id}", summary="Look at a file")
async def look(id: str, service: Given, caller: By) -> Response:
    return JSONResponse(_object(await find(service, id, caller)))


@router.get(
    "/v1/files/{id}/content",
    summary="Fetch a file",
    response_class=Response,
    responses={200: {"content": {_MEDIA_TYPE: {}}}},
)
async def content(id: str, service: Given, caller: By) -> Response:
    return Response(await read(service, await find(service, id, caller)), media_type=_MEDIA_TYPE)


@router.delete("/v1/files/{id}", summary="Forget a file")
async def delete(id: str, service: Given, caller: By) -> Response:
    file = await find(service, id, caller)
    await service.call(service.batches.forget_file, file)
    return JSONResponse({"id": file.id, "object": "file", "deleted": True})


async def find(service: Service, id: str, caller: Caller, param: str = "id") -> File:
    """The caller's file of this id. Raises `ApiError` (404), also for those of others."""
    file = await service.call(service.batches.file, id) if re.fullmatch(r"file-[0-9a-f]{24}", id) else None
    if file is None or not (file.owner == caller.id or "admin" in caller.scopes):
        raise ApiError(404, "There is no such file, or no longer.", param=param, code="file_not_found")
    return file


async def read(service: Service, file: File) -> bytes:
    """Its bytes. Raises `ApiError` (404) where they are gone."""
    try:
        return await service.call(service.artifacts.get, file.key)
    except NoArtifact:
        raise ApiError(404, "There is no such file, or no longer.", param="id", code="file_not_found") from None


def keep(service: Service, owner: str, name: str, purpose: str, data: bytes) -> File:
    """Keep a file for its time. Raises `ArtifactError` and `StoreError`."""
    # Nobody deletes what is told to be kept first; one that is just going is written anew by the next who asks.
    service.store.keep(key_of(data, _MEDIA_TYPE), KEPT_S)
    key = service.artifacts.put(data, _MEDIA_TYPE)
    return service.batches.add_file(owner, name, purpose, len(data), key)


async def _upload(request: Request) -> tuple[str, bytes]:
    """The name and the bytes of a file for batches. Raises `ApiError`."""
    async with form(request, max_bytes=MAX_BYTES + _ENVELOPE, max_files=1, max_fields=10) as parts:
        purpose, upload = parts.get("purpose"), parts.get("file")
        data = await upload.read() if isinstance(upload, UploadFile) else None
        name = (upload.filename or "") if isinstance(upload, UploadFile) else ""
    if purpose != "batch":
        raise refused("purpose", "must be batch")
    if data is None:
        raise refused("file", "must be given, as a file", "missing_required_parameter")
    if not data:
        raise refused("file", "must not be empty")
    return name if _NAME.fullmatch(name) else "file.jsonl", data


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
