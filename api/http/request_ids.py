"""Request ids, as in OpenAI's API: `x-request-id` on each response, in log lines, traces and jobs."""

from __future__ import annotations

import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.middleware import on_start
from core import logs

HEADER = "x-request-id"
PATTERN = "[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_SANE = re.compile(PATTERN)


def new() -> str:
    """`req_` and 32 hexadecimal digits."""
    return f"req_{secrets.token_hex(16)}"


class RequestIdMiddleware:
    """Takes the client's `X-Request-ID` if it matches `PATTERN`, else generates one. The outermost middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get(HEADER, "")
        id = request_id if _SANE.fullmatch(request_id) else new()

        def name(message: Message) -> None:
            MutableHeaders(scope=message)[HEADER] = id

        with logs.request_context(id):
            await self.app(scope, receive, on_start(send, name))
