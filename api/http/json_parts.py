"""Encodes large JSON documents in parts, between which other threads and the event loop go on.

Python's encoder holds the interpreter's lock until a whole document is written, a second for a million numbers, on
whatever thread it runs. It lets go where it calls back for a value that it does not know.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

_FEW = 32  # items of a list that are encoded together
_SLICE = 256 * 1024  # bytes of an answer that are handed over at once


class Deferred:
    """A value of a document that is computed when it is encoded."""

    __slots__ = ("compute",)

    def __init__(self, compute: Callable[[], Any]) -> None:
        self.compute = compute


class _Part:
    """An item of a long list."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def dumps(document: Any, *, ascii_only: bool = True) -> str:
    """Compact JSON of a document, whose values may be `Deferred`. Raises ValueError for NaN and infinities."""
    parts = _in_parts(document)
    return json.dumps(parts, default=_known, separators=(",", ":"), allow_nan=False, ensure_ascii=ascii_only)


def _in_parts(value: Any) -> Any:
    """The value, with each item of lists that may be long as a part. Lists of numbers and texts stay whole."""
    if isinstance(value, dict):
        return {
            name: _in_parts(member) if isinstance(member, dict | list) else member for name, member in value.items()
        }
    if isinstance(value, list) and value and isinstance(value[0], Mapping | list):
        return [_Part(item) for item in value] if len(value) > _FEW else [_in_parts(item) for item in value]
    return value


def _known(value: Any) -> Any:
    """What the encoder writes in place of a value that it does not know."""
    if isinstance(value, Deferred):
        return value.compute()
    if isinstance(value, _Part):
        return value.value
    raise TypeError(f"{type(value).__name__} has no form in JSON")


class LargeJSONResponse(JSONResponse):
    """A response whose content is encoded in parts, and handed to the connection as fast as the client reads."""

    def render(self, content: Any) -> bytes:
        return dumps(content, ascii_only=False).encode("utf-8")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        body = memoryview(self.body)
        for at in range(0, max(1, len(body)), _SLICE):
            more = at + _SLICE < len(body)
            await send({"type": "http.response.body", "body": bytes(body[at : at + _SLICE]), "more_body": more})
        if self.background is not None:
            await self.background()
