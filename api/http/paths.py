"""Serves addresses with a slash at the end, as some clients make them, like those without."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class TrailingSlashMiddleware:
    """Removes slashes at the end of a path below /v1. A redirect would make clients send a body again, or lose it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1/") and scope["path"].endswith("/"):
            scope["path"] = scope["path"].rstrip("/")  # in place: outer middlewares read the route of this scope
        await self.app(scope, receive, send)
