"""Answers HEAD wherever GET is, and lists an address's methods in the `Allow` of a 405."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
_BODILESS = "bodiless"


class HeadAsGetMiddleware:
    """Answers HEAD with GET's status and headers, and no body. The innermost middleware.

    `Range` is for GET alone (RFC 9110, 14.2) and is not passed on. A stream is not started: see `bodiless`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return
        scope.setdefault("state", {})[_BODILESS] = True
        headers = [(name, value) for name, value in scope["headers"] if name != b"range"]
        get_scope = {**scope, "method": "GET", "headers": headers}

        async def bare(message: Message) -> None:
            if message["type"] == "http.response.start":
                scope.update(
                    {name: get_scope[name] for name in ("route",) if name in get_scope}
                )  # read by outer middlewares
            elif message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self.app(get_scope, receive, bare)


def bodiless(scope: Scope) -> bool:
    """Return whether only the response's headers are needed."""
    return bool(scope.get("state", {}).get(_BODILESS))


def allowed(request: Request) -> str:
    """The methods of the request's address, as in `Allow`; empty if there are none."""
    routes: list[Any] = request.app.router.routes
    path = {name: request.scope[name] for name in ("type", "path", "root_path", "headers")}
    methods = [
        method
        for method in _METHODS
        if any(route.matches({**path, "method": method})[0] is Match.FULL for route in routes)
    ]
    return ", ".join([*methods[:1], *["HEAD"][: "GET" in methods], *methods[1:]])
