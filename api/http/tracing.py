"""ASGI middleware that opens a trace span for every request, within the caller's trace if it names one."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.middleware import on_start
from core import logs, traces

_QUIET = ("/healthz", "/readyz", "/v2/health/live", "/v2/health/ready", "/metrics")  # frequent, and not worth tracing


class TracingMiddleware:
    """Names a request's span by its route, so that it contains nothing chosen by a client."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _QUIET:
            await self.app(scope, receive, send)
            return
        parent = Headers(scope=scope).get("traceparent", "")
        with traces.span("HTTP", "server", parent, request_id=logs.current_request_id()) as span:

            def note(message: Message) -> None:
                span.name(f"{scope['method']} {getattr(scope.get('route'), 'path', 'other')}")
                span.note(status=message["status"])
                if message["status"] >= 500:
                    span.fail(str(message["status"]))

            await self.app(scope, receive, on_start(send, note))
