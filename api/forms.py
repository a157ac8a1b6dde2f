"""Parses a body as a multipart form with files; its size is checked by the declared length before it is read."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Request
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from api.errors import ApiError

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it logs rejected forms


@asynccontextmanager
async def form(request: Request, *, max_bytes: int, max_files: int, max_fields: int) -> AsyncIterator[FormData]:
    """The form, with its files open as long as the context. `max_bytes` limits the whole body.

    Raises `ApiError`: 411, 413 and 415 by its headers, 400 for a malformed form.
    """
    declared = request.headers.get("content-length", "")
    if not re.fullmatch(r"[0-9]{1,12}", declared):
        raise ApiError(411, "content-length: must be given.", param="content-length", code="length_required")
    if int(declared) > max_bytes:
        raise ApiError(413, f"The body is larger than {max_bytes} bytes.", code="body_too_large")
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        message = "content-type: must be multipart/form-data."
        raise ApiError(415, message, param="content-type", code="unsupported_media_type")
    try:
        parsed = await request.form(max_files=max_files, max_fields=max_fields)
    except (HTTPException, ValueError, KeyError, ClientDisconnect):
        raise ApiError(400, "The body is not a form, or has too many parts.", code="invalid_body") from None
    try:
        yield parsed
    finally:
        await parsed.close()
