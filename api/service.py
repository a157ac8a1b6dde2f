"""What every request leans on: the store, the reader of events, the producer, the cards; and how a job is followed.

Knows how jobs are taken in and waited for; knows nothing of what answers look like.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import Annotated, ParamSpec, TypeVar

import anyio
import anyio.to_thread
from fastapi import Depends, Request

from api import admission
from api.cards import Cards
from api.errors import NO_RETRY, ApiError
from api.queue import Queue
from api.schemas import ImageFields
from core.artifacts import ArtifactError, Artifacts
from core.config import Settings, SettingsError
from core.jobs.broker import Envelope
from core.jobs.connection import StoreDown, StoreError
from core.jobs.events import Event, EventReader
from core.jobs.reaper import Reaper
from core.jobs.record import Job
from core.jobs.registry import Registry
from core.jobs.store import JobStore, QueueFull

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_THREADS = 24  # that wait for Redis; the store has a few more connections, for the reaper and the cards
_LOOK_S = 30.0  # of silence, after which a waiting request looks at the record
_AGAIN_S = 1.0  # between tries while Redis is away


class Service:
    """Started and closed by the app's lifespan, on its event loop."""

    def __init__(self, settings: Settings) -> None:
        """Connects to nothing yet. Raises `SettingsError`."""
        if not settings.redis_url:
            raise SettingsError("DIPTYCH_REDIS_URL: must be given")
        self.settings = settings
        try:
            self.store = JobStore.of(settings)
            self.registry = Registry.of(settings)
            self.reader = EventReader(settings.redis_url)
        except ValueError as error:
            raise SettingsError("DIPTYCH_REDIS_URL: is no address of a Redis") from error
        self.queue = Queue(settings.redis_url)
        try:
            self.artifacts = Artifacts(settings.artifacts)
        except ArtifactError as error:
            raise SettingsError(f"DIPTYCH_ARTIFACTS_URL: {error}") from error
        self.cards = Cards(self.registry, self.store)
        self.reaper = Reaper(self.store, self.queue.send)
        self.closing = asyncio.Event()  # set: open waits end now
        self._threads = anyio.CapacityLimiter(_THREADS)

    async def start(self) -> None:
        await self.reader.start()
        await self.cards.start()
        self.reaper.start()

    async def close(self) -> None:
        self.closing.set()
        await self.cards.close()
        await self.reader.close()
        await anyio.to_thread.run_sync(self._close)

    def _close(self) -> None:
        self.reaper.stop()
        self.queue.close()
        self.registry.close()
        self.store.close()

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run what blocks on a thread. It is not abandoned: a cancelled caller still waits for its end."""
        return await anyio.to_thread.run_sync(partial(function, *args, **kwargs), limiter=self._threads)

    async def accept(self, fields: ImageFields) -> Job:
        """Make a job of these fields and send it. Raises `ApiError` and `StoreError`, and then there is no job."""
        card = await self.cards.find(fields.model, "image")
        if card is None:
            if self.cards.now.model(None, "image") is not None:
                raise admission.unknown_model()
            raise admission.no_model() if self.cards.redis_answers else StoreDown("Redis has never answered")
        draft = admission.image_draft(fields, card)
        if draft.deadline_s is not None:
            # Read afresh: what was queued a second ago may be done, and nobody is refused for it.
            backlog = await self.call(self.store.backlog, draft.modality)
            admission.check_deadline(draft, card, backlog, self.cards.now.ready(draft.modality))
        try:
            job = await self.call(self.store.create, draft)
        except QueueFull as error:
            after_s = admission.retry_after_s(self.cards.now.wait_s(error.queue))
            message = f"The {error.queue} queue is full; try again later."
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": str(after_s)}) from None
        await self.call(self.queue.post, Envelope(job.id, job.modality, job.priority))
        return job

    async def follow(self, id: str, after: str, idle_s: float) -> AsyncGenerator[Event | None]:
        """The job's events after the one named; None after each `idle_s` of silence. Ends with the terminal event,
        or when the service closes. Close it (`aclose`) to leave early.
        """
        events = self.reader.subscribe(id, after)
        closing = asyncio.create_task(self.closing.wait())
        coming: asyncio.Task[Event | None] | None = None
        try:
            while True:
                if coming is None:
                    coming = asyncio.create_task(_next(events))
                await asyncio.wait({coming, closing}, timeout=idle_s, return_when=asyncio.FIRST_COMPLETED)
                if coming.done():
                    event = coming.result()
                    coming = None
                    if event is None:
                        return
                    yield event
                elif closing.done():
                    return
                else:
                    yield None
        finally:
            with anyio.CancelScope(shield=True):
                for task in (coming, closing):
                    if task is not None:
                        task.cancel()
                        await asyncio.gather(task, return_exceptions=True)
                await events.aclose()

    async def end(self, id: str) -> Job | None:
        """Wait for the job's end. None: the service closes first. Raises `ApiError` if there is no such job any more.

        Events tell. The record is looked at after a long silence, because a Redis that died and came back may have
        lost the last second of a stream.
        """
        while not self.closing.is_set():
            async with aclosing(self.follow(id, "0", _LOOK_S)) as events:
                async for event in events:
                    if event is None or event.final:
                        break
            job = await self.record(id)
            if job is None and not self.closing.is_set():
                raise ApiError(500, "The job's record is gone.", code="job_lost", headers=NO_RETRY)
            if job is not None and job.state.final:
                return job
        return None

    async def record(self, id: str) -> Job | None:
        """The job's record, as soon as Redis answers. None: there is none, or the service closes."""
        while not self.closing.is_set():
            try:
                return await self.call(self.store.get, id)
            except StoreError as error:
                log.warning("the end of %s is known and its record cannot be read yet: %s", id, error)
                try:
                    await asyncio.wait_for(self.closing.wait(), _AGAIN_S)
                except TimeoutError:
                    continue
        return None

    async def cancel(self, id: str) -> bool:
        """Cancel a job that nobody waits for any more. False: Redis is away, and it may go on."""
        try:
            await self.call(self.store.cancel, id)
        except StoreError as error:
            log.warning("%s should be cancelled and may go on: %s", id, error)
            return False
        return True


async def _next(events: AsyncIterator[Event]) -> Event | None:
    return await anext(events, None)


def _of(request: Request) -> Service:
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


Given = Annotated[Service, Depends(_of)]
