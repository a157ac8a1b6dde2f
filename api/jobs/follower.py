"""Follows a job to its end, by its events and its record, for requests that wait."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, ParamSpec, Protocol, TypeVar

import anyio

from api.errors import NO_RETRY, ApiError
from core.jobs.connection import StoreError
from core.jobs.events import Event, EventReader
from core.jobs.record import Job
from core.jobs.store import JobStore

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_LOOK_S = 15.0  # of silence, after which a waiting request reads the record
_AGAIN_S = 1.0  # between retries while Redis is down


class RunOnThread(Protocol):
    """Runs a blocking Redis call on a thread, in the tenant's turn."""

    def __call__(self, tenant: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Awaitable[T]: ...


class JobFollower:
    """Follows the jobs of one store. Everything ends when `closing` is set."""

    def __init__(self, store: JobStore, reader: EventReader, call: RunOnThread, closing: asyncio.Event) -> None:
        self._store = store
        self._reader = reader
        self._call = call
        self._closing = closing

    async def events(self, job: Job, after: str, idle_s: float) -> AsyncGenerator[Event | None]:
        """The job's events after the given one; None after each `idle_s` of silence. Ends with the terminal event, when
        the job was erased and its id is reused, or when the service closes. Close it (`aclose`) to leave early.
        """
        events = self._reader.subscribe(job.id, after, job.incarnation)
        closing: asyncio.Future[Any] = asyncio.create_task(self._closing.wait())
        coming: asyncio.Future[Any] | None = None
        try:
            while True:
                if coming is None:
                    coming = asyncio.ensure_future(anext(events, None))
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

    async def until_end(self, job: Job) -> AsyncGenerator[Event]:
        """The job's events from the first one, until it has ended or is gone, or the service closes.

        After each long silence the record is read, because a restarted Redis may have lost the last second of a stream.
        """
        async with aclosing(self.events(job, "0", _LOOK_S)) as events:
            async for event in events:
                if event is not None:
                    yield event
                else:
                    summary = await self.summary(job)
                    if summary is None or summary.state.final:
                        return

    async def final_record(self, job: Job) -> Job | None:
        """The record of a job whose events have ended. None: it is gone, or the service closes."""
        while (record := await self.record(job)) is not None and not record.state.final:
            await self._pause()  # the terminal event came before the record could be read
        return record

    async def end(self, job: Job) -> Job | None:
        """Wait for the job's end; return its record. None: the service closes first. Raises `ApiError` if the job no
        longer exists.
        """
        return await self._end(job, self.record)

    async def summary_at_end(self, job: Job) -> Job | None:
        """Wait as `end` does; return the record's summary."""
        return await self._end(job, self.summary)

    async def _end(self, job: Job, read: Callable[[Job], Awaitable[Job | None]]) -> Job | None:
        while not self._closing.is_set():
            async with aclosing(self.until_end(job)) as events:
                async for _ in events:
                    pass
            record = await read(job)
            if record is None and not self._closing.is_set():
                raise job_lost()
            if record is not None and record.state.final:
                return record
            await self._pause()  # the terminal event came before the record could be read
        return None

    async def record(self, job: Job) -> Job | None:
        """The record of a job whose request is known, as soon as Redis replies. None: it is gone, or the service
        closes.
        """
        return await self._read(job, lambda: self._store.reread(job))

    async def summary(self, job: Job) -> Job | None:
        """The summary of the job's record (`JobLists`), as `record` returns it."""
        return await self._read(job, lambda: self._store.lists.summary(job.id))

    async def _read(self, job: Job, read: Callable[[], Job | None]) -> Job | None:
        while not self._closing.is_set():
            try:
                record = await self._call(job.owner, read)
            except StoreError as error:
                log.warning("the record of job %s cannot be read yet: %s", job.id, error)
                await self._pause()
            else:
                return record if job.same(record) else None
        return None

    async def _pause(self) -> None:
        """Wait before a retry; shorter if the service closes."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), _AGAIN_S)

    async def cancel(self, job: Job) -> bool:
        """Cancel a job that nobody waits for. False: Redis is down, and the job may continue."""
        try:
            await self._call(job.owner, self._store.cancel, job.id, job.incarnation)
        except StoreError as error:
            log.warning("job %s could not be cancelled and may continue: %s", job.id, error)
            return False
        return True


def job_lost() -> ApiError:
    return ApiError(500, "The job's record is gone.", code="job_lost", headers=NO_RETRY)


def not_followed(closing: bool) -> ApiError:
    """Return why a stream ends before its job: the service is closing, or the job's record is gone."""
    return ApiError(503, "The server is stopping." if closing else "The job's record is gone.", code="stopping")
