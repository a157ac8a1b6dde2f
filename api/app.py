"""Assembles the app (routes, error handlers, lifespan) and runs its server."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import socket
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

import anyio.to_thread
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware

from api import document, errors, files, health, metrics, models, playground, queues, rate_limits
from api.batches import routes as batches
from api.batches.feeder import BatchFeeder
from api.dialects import inference
from api.dialects.predictions import routes as predictions
from api.dialects.sdapi import extras, generation, listings, options, progress
from api.http.host_origin import HostOriginMiddleware
from api.http.json_parts import dumps
from api.http.methods import HeadAsGetMiddleware
from api.http.paths import TrailingSlashMiddleware
from api.http.protocol import connection_limit, protocol
from api.http.request_ids import HEADER, RequestIdMiddleware
from api.http.tracing import TracingMiddleware
from api.jobs import events
from api.jobs import routes as jobs
from api.jobs.webhook_sender import WebhookSender
from api.pictures import downloads as pictures
from api.pictures import edits, images
from api.routers import add_routes
from api.service import Service
from api.text import routes as text
from core import traces
from core.config import Settings

_FULL_COLLECTIONS = 100  # middle-generation collections per full one; Python's default: 10
_GRACE_S = 5  # for requests in progress when the server stops
_SWITCH_S = 0.0005  # the longest that a computing thread delays the event loop; Python's default: 0.005
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # of <malloc.h>
_MAPPED = 256 * 1024  # bytes
_ARENAS = 4  # heaps that threads share: the GIL lets one allocate at a time
_IDLE_S = 75  # longer than load balancers keep idle connections, so that the balancer closes them first

_PARTS = (
    jobs, health, images, edits, text, inference, pictures, events, files, batches, models, queues, metrics, playground,
)  # fmt: skip
_SDAPI = (generation, options, listings, progress, extras)

_ABOUT = """Pictures from text. `POST /v1/images/generations` is OpenAI's endpoint and waits; `POST /v1/jobs` does not.

Errors are of OpenAI's form: `{"error": {"message", "type", "param", "code"}}`. Every answer has an `x-request-id`: the
request's own `X-Request-ID` where that is a plain word, else one that is made. Whatever answers GET answers HEAD."""


class App(FastAPI):
    """FastAPI with additions to its OpenAPI document, which is written once, on a thread: that takes long."""

    _document: bytes | None = None
    _writing = threading.Lock()

    def setup(self) -> None:
        self.add_route("/openapi.json", self._send_document, include_in_schema=False)

    async def _send_document(self, _: Request) -> Response:
        document = await anyio.to_thread.run_sync(self._write_document)
        return Response(document, media_type="application/json")

    def _write_document(self) -> bytes:
        with self._writing:
            if self._document is None:
                self._document = dumps(self.openapi(), ascii_only=False).encode()
            return self._document

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            document.extend(super().openapi())
        return super().openapi()


def create_app(settings: Settings) -> FastAPI:
    """Create the app with these settings. Its start does not need Redis. Raises `core.config.SettingsError`."""
    service = Service(settings)
    feeder, sender = BatchFeeder(service), WebhookSender(service)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        feeder.start()
        sender.start()
        try:
            yield
        finally:
            async with anyio.create_task_group() as ends:
                for part in (feeder, sender):
                    ends.start_soon(anyio.to_thread.run_sync, part.stop)
            await service.close()
            await anyio.to_thread.run_sync(traces.end)

    app = App(
        title="Diptych",
        version=version("diptych"),
        description=_ABOUT,
        lifespan=lifespan,
        docs_url=None,  # FastAPI's pages load scripts from other hosts; /docs is served by playground.py
        redoc_url=None,
        redirect_slashes=False,  # a redirect would echo the requested address
    )
    app.state.service = service
    service.figures.register(metrics.QueueCollector(service))
    _add_middlewares(app, service)
    # Predictions first, because the addresses of models in `inference` and `models` match any path.
    parts = (*((predictions,) if settings.predictions else ()), *_PARTS, *(_SDAPI if settings.sdapi else ()))
    add_routes(app, [part.router for part in parts])
    return app


def _add_middlewares(app: FastAPI, service: Service) -> None:
    """Add the middlewares and the error handlers. A request passes the last one added first."""
    app.add_middleware(HeadAsGetMiddleware)
    app.add_middleware(TrailingSlashMiddleware)
    app.add_middleware(rate_limits.RateLimitHeadersMiddleware)
    app.add_middleware(HostOriginMiddleware, service=service)
    app.add_middleware(metrics.MetricsMiddleware, registry=service.figures)
    if service.settings.traces:
        app.add_middleware(TracingMiddleware)
    origins = [origin.strip() for origin in service.settings.cors_origins.split(",") if origin.strip()]
    if origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"],
            expose_headers=["Retry-After", "Location", "x-should-retry", HEADER, *rate_limits.HEADERS],
        )  # fmt: skip
    errors.install(app)
    app.add_middleware(RequestIdMiddleware)


class Server(uvicorn.Server):
    """uvicorn's server, which ends requests that wait for a job before it waits for open connections."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.closing.set()
        await super().shutdown(sockets)


def make_server(settings: Settings) -> Server:
    """Create the app's server, not yet running. Raises `core.config.SettingsError`."""
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=protocol(settings),
        backlog=connection_limit()[1],
        lifespan="on",
        ws="none",
        access_log=False,
        log_config=None,  # keeps the process's own logging
        server_header=False,
        timeout_keep_alive=_IDLE_S,
        timeout_graceful_shutdown=_GRACE_S,
    )
    return Server(config, app.state.service)


def _return_large_buffers() -> None:
    """Make the C library map buffers above `_MAPPED` bytes one by one, so that their memory returns to the system.

    By default glibc raises that limit to 32 MiB once such a buffer is freed, and each thread keeps the memory of its
    own: twenty threads that have read a picture of 16 MiB each keep all of it.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _MAPPED)
        mallopt(_M_ARENA_MAX, _ARENAS)


def serve(settings: Settings, fd: int | None = None) -> None:
    """Serve until SIGTERM or SIGINT, on the settings' host and port or on `fd`, an already bound socket.

    As uvicorn does, raises the signal again after a clean shutdown. Raises `core.config.SettingsError`, OSError.
    """
    server = make_server(settings)
    # Objects created until now are long-lived: each scan of them for garbage would delay responses by 0.1 s.
    gc.collect()
    gc.freeze()
    # Full collections run less often than by default: each one stops all requests while it visits every object (40 ms
    # of a core with 300 event streams just opened). Short-lived garbage is collected as often as by default.
    gc.set_threshold(700, 10, _FULL_COLLECTIONS)
    sys.setswitchinterval(_SWITCH_S)
    _return_large_buffers()
    # Not uvicorn's `fd` option: it opens every descriptor as a Unix socket, for which asyncio does not set TCP_NODELAY,
    # and each response would take 40 ms longer. `socket.socket(fileno=…)` detects the family.
    server.run([socket.socket(fileno=fd)] if fd is not None else None)
