"""Responses with an artifact's bytes, read from the store piece by piece as the client receives them."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Mapping

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from api.http import ranges
from api.http.methods import bodiless
from api.service import Service
from core.artifacts import ArtifactError, Artifacts, digest_of, media_type

PIECE = 256 * 1024  # bytes of an artifact in memory at once, for each client


async def respond(
    service: Service, tenant: str, request: Request, key: str, headers: Mapping[str, str], size: int | None = None
) -> Response:
    """The artifact, or, if `headers` have its `ETag`, the one requested range of it. `size` in bytes, if known. Each
    piece is read in the tenant's turn.

    What was read whole is verified: a small artifact before the response, a large one before its last piece, in place
    of which the connection is closed. Raises `NoArtifact`, `ArtifactError`, and `ApiError` (416).
    """
    if size is None or bodiless(request.scope):  # which reads nothing else of it
        size = await service.stored(tenant, lambda: service.artifacts.size(key))
    tag = headers.get("ETag")
    span = None if tag is None else ranges.requested(request, size, tag)
    first, last = span or (0, size - 1)
    sent = {**headers, "Content-Length": str(last - first + 1)}
    if tag is not None:
        sent["Accept-Ranges"] = "bytes"
    if span is not None:
        sent["Content-Range"] = f"bytes {first}-{last}/{size}"
    status = 200 if span is None else 206
    head = b""
    if not bodiless(request.scope):
        head = await service.stored(tenant, lambda: _first(service.artifacts, key, size, span))
    if bodiless(request.scope) or first + len(head) > last:
        return Response(head, status, sent, media_type(key))
    pieces = _pieces(service, tenant, key, head, first, last, verify=span is None)
    return StreamingResponse(pieces, status, sent, media_type(key))


def _first(artifacts: Artifacts, key: str, size: int, span: tuple[int, int] | None) -> bytes:
    """The first piece. Blocks."""
    if span is None and size <= PIECE:
        return artifacts.get(key)
    first, last = span or (0, size - 1)
    return artifacts.read_part(key, first, min(PIECE, last - first + 1))


def _piece(service: Service, key: str, at: int, length: int) -> bytes:
    return service.artifacts.read_part(key, at, length)


async def _pieces(
    service: Service, tenant: str, key: str, head: bytes, first: int, last: int, *, verify: bool
) -> AsyncIterator[bytes]:
    """The first piece and those after it. Raises `ArtifactError` before the last one if the content is damaged."""
    digest, piece = hashlib.sha256(), head
    for at in range(first, last + 1, PIECE):
        if at > first:
            length = min(PIECE, last - at + 1)
            piece = await service.stored(tenant, _piece, service, key, at, length)
        if verify:
            digest.update(piece)
            if at + PIECE > last and digest.hexdigest() != digest_of(key):
                raise ArtifactError("an artifact is damaged: its content does not match its key")
        yield piece
