"""GET /v1/jobs/{id}/events: a job's events as resumable server-sent events."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

import anyio
from fastapi import Request, Response
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from starlette.types import Receive, Scope, Send

from api.access import By
from api.errors import invalid_field
from api.http.methods import bodiless
from api.jobs.presentation import job_object
from api.jobs.routes import find
from api.pictures.links import ImageLinks
from api.rate_limits import enforce_rate_limit
from api.routers import new_router
from api.service import Given, Service
from core.jobs.connection import StoreError
from core.jobs.events import Event
from core.jobs.record import Job

router = new_router("jobs")

_KEEP_ALIVE_S = 15.0
_PAST_S = 2.0  # an existing stream delivers its past at once
_POSITION = re.compile(r"([0-9]{1,19})(?:-([0-9]{1,19}))?")


class EventStream(EventSourceResponse):
    """Closes its source when the client disconnects, without waiting for the garbage collector."""

    def __init__(self, source: AsyncGenerator[bytes], unheard: Callable[[], Awaitable[object]] | None = None) -> None:
        """`unheard` is called if the client disconnects before the source has started, whose own cleanup then never
        runs.
        """
        super().__init__(self._begun(source), headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._source = source
        self._unheard = unheard

    async def _begun(self, source: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
        self._unheard = None
        async for piece in source:
            yield piece

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if bodiless(scope):
                await self._source.aclose()
                await Response(headers=dict(self.headers), media_type=self.media_type)(scope, receive, send)
            else:
                await super().__call__(scope, receive, send)
        finally:
            if self._unheard is not None:
                with anyio.CancelScope(shield=True):
                    await self._unheard()

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._source):
            await super().stream_response(send)


@router.get(
    "/v1/jobs/{id}/events",
    summary="Stream what happens to a job",
    response_class=Response,
    responses={
        200: {"content": {"text/event-stream": {}}},
        204: {"description": "The job has ended, and the client has seen all of it."},
    },
    openapi_extra={
        "parameters": [
            {
                "name": name,
                "in": place,
                "required": False,
                "description": "the id of the last event that was seen",
                "schema": {"type": "string", "pattern": f"^{_POSITION.pattern}$"},
            }
            for name, place in (("Last-Event-ID", "header"), ("last_event_id", "query"))
        ]
    },
)
async def events(id: str, request: Request, service: Given, caller: By) -> Response:
    """Every event has an id, a type and JSON data. The last one is the job's end; its data is the whole job object."""
    after = request.headers.get("last-event-id") or request.query_params.get("last_event_id") or "0-0"
    seen = _position(after)
    if seen is None:
        raise invalid_field("last_event_id", "must be the id of an event, such as 1700000000000-0")
    links = service.links(request, caller.id)
    await enforce_rate_limit(request, service, caller)
    job = await find(service, id, caller)
    if not job.state.final:
        if job.followed is False:
            with contextlib.suppress(StoreError):  # then only its state changes are sent
                await service.call(caller.id, service.store.follow, job.id, job.incarnation)
        return EventStream(_live(service, job, seen, links))
    past = _past(service, job, seen)
    first = await anext(past, None)
    if first is None:
        return Response(status_code=204)  # tells a browser's EventSource not to reconnect
    return EventStream(_ended(first, past, job, links), past.aclose)


Position = tuple[int, int]


def _position(id: str) -> Position | None:
    """A position in a stream; None if it is none."""
    match = _POSITION.fullmatch(id)
    return (int(match[1]), int(match[2] or 0)) if match else None


async def _live(service: Service, job: Job, seen: Position, links: ImageLinks) -> AsyncGenerator[bytes]:
    """Events as they come, with keep-alive comments, until the job's end."""
    async with aclosing(service.follower.events(job, f"{seen[0]}-{seen[1]}", _KEEP_ALIVE_S)) as following:
        async for event in following:
            if event is not None:
                seen = _position(event.id) or seen
                yield _text(event, await service.follower.summary(job) if event.final else None, links)
                continue
            yield KEEPALIVE_COMMENT
            # After a silence the record is read, because a restarted Redis may have lost a stream's end.
            try:
                record = await service.call(job.owner, service.store.lists.summary, job.id)
            except StoreError:
                continue
            if record is None or not job.same(record):
                return
            if record.state.final:
                async with aclosing(_past(service, record, seen)) as past:
                    async for last in past:
                        yield _text(last, record, links)
                return


async def _past(service: Service, job: Job, seen: Position) -> AsyncGenerator[Event]:
    """The events of an ended job after this position; if its stream is gone, its end from the record."""
    async with aclosing(service.follower.events(job, f"{seen[0]}-{seen[1]}", _PAST_S)) as following:
        async for event in following:
            if event is None:
                yield Event("", job.state.value, {})
                return
            yield event


async def _ended(first: Event, past: AsyncGenerator[Event], job: Job, links: ImageLinks) -> AsyncGenerator[bytes]:
    """An ended job's events, read as the client receives them."""
    async with aclosing(past):
        yield _text(first, job, links)
        async for event in past:
            yield _text(event, job, links)


def _text(event: Event, job: Job | None, links: ImageLinks) -> bytes:
    data = job_object(job, links) if job is not None and event.final else event.data
    return format_sse_event(
        id=event.id or None, event=event.type, data_str=json.dumps(data, separators=(",", ":"), allow_nan=False)
    )
