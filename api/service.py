"""Parts that all requests share: the stores, the event reader, the producer, the model cards, the thread pools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextvars import ContextVar
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import anyio
import anyio.to_thread
from fastapi import Depends, Request
from prometheus_client import CollectorRegistry

from api.cards import CardCache, ModelNames
from api.concurrency.fair_limiter import FairLimiter
from api.concurrency.held_bytes import HeldBytes
from api.concurrency.timeout_pool import TimeoutThreadPool
from api.jobs.follower import JobFollower
from api.jobs.presentation import QueueForecast, running_forecast
from api.jobs.queue import MessageProducer
from api.key_limits import KeyLimits
from api.pictures.decoder import PictureDecoder
from api.pictures.fetcher import PictureFetcher
from api.pictures.links import ImageLinks
from core.artifacts import ArtifactError, Artifacts, StorageDown
from core.config import Settings, SettingsError
from core.jobs.access import AccessReader
from core.jobs.batches import BatchStore
from core.jobs.client_state import ClientState
from core.jobs.connection import RedisClient, StoreError
from core.jobs.events import EventReader
from core.jobs.files import FileStore
from core.jobs.keyring import Keyring
from core.jobs.rates import RateLimiter
from core.jobs.reaper import Reaper
from core.jobs.record import Job, JobState, QueuePosition
from core.jobs.registry import Registry
from core.jobs.rights import RedisPermissions, describe_missing
from core.jobs.store import JobStore
from core.jobs.submissions import Submissions

P = ParamSpec("P")
T = TypeVar("T")

_THREADS, _OF_TENANT = 24, 4  # for Redis calls, and those of one tenant; the client has more connections, for polling
_KEYS = 4096  # whose limits are held resolved
_PARSERS = 2  # of batch files, line by line
_WRITERS = 4  # of uploads: each holds a few MiB
_STORERS, _STORERS_OF_TENANT = 16, 8  # threads for the artifact store, separate from those for Redis
_INLINE_BYTES = 2**27  # of images in base64 that answers hold, besides the part of each that is being sent
_SERVICE = "(service)"  # no key's id: calls that are no tenant's
_WAITS_FOR_REDIS = ContextVar("waits_for_redis", default=False)


class Service:
    """Started and closed by the app's lifespan, on its event loop."""

    def __init__(self, settings: Settings) -> None:
        """Does not connect yet. Raises `SettingsError`."""
        if not settings.redis_url:
            raise SettingsError("DIPTYCH_REDIS_URL: must be given")
        self.settings = settings
        self._limits_of = lru_cache(_KEYS)(partial(KeyLimits.of, settings=settings))
        try:
            self.redis = RedisClient(settings.redis_url)
        except ValueError as error:
            raise SettingsError("DIPTYCH_REDIS_URL: is not a Redis URL") from error
        self.store = JobStore.of(settings, self.redis)
        self.registry = Registry(self.redis)
        self.keyring = Keyring(self.redis)
        self.rates = RateLimiter(self.redis)
        self.submissions = Submissions(self.redis, settings.max_queued, settings.retention_s)
        self.batches = BatchStore.of(settings, self.redis)
        self.files = FileStore(self.redis)
        self.sdapi = ClientState(self.redis, "sdapi")
        self.reader = EventReader(self.redis)
        self._rights = RedisPermissions(self.redis)
        self.queue = MessageProducer(settings.redis_url)
        try:
            self._artifacts = Artifacts(settings.artifacts, settings.storage_s)
        except ArtifactError as error:
            raise SettingsError(f"DIPTYCH_ARTIFACTS_URL: {error}") from error
        names = ModelNames(settings.aliases, settings.openai_names)
        self.cards = CardCache(
            self.registry, self.store, self.keyring, AccessReader(self.redis), names, _beside(settings)
        )
        self.reaper = Reaper(self.store.upkeep, self.queue.send, delete=self._artifacts.delete)
        self.figures = CollectorRegistry()
        self.closing = asyncio.Event()  # set: open waits end now
        self._calls = FairLimiter(_THREADS, each=_OF_TENANT)
        self.follower = JobFollower(self.store, self.reader, self.call, self.closing)
        self.parsing = FairLimiter(_PARSERS)
        self.writing = FairLimiter(_WRITERS)
        self.pictures = PictureDecoder(self.stored)
        self.fetcher = PictureFetcher(settings.fetch_images)
        self.inline_bytes = HeldBytes(_INLINE_BYTES)
        self._storing = FairLimiter(_STORERS, each=_STORERS_OF_TENANT)
        self._storers = TimeoutThreadPool("storage", _STORERS)

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self.reader.start()
        await self.cards.start()
        self.reaper.start()

    async def close(self) -> None:
        self.closing.set()
        await self.cards.close()
        await self.reader.close()
        await self.submissions.close()
        await anyio.to_thread.run_sync(self._close)

    def _close(self) -> None:
        self._storers.close()
        self.fetcher.stop()
        self.pictures.close()
        self.reaper.stop()
        self.queue.close()
        self.redis.close()

    @property
    def artifacts(self) -> Artifacts:
        """The artifact store, for code run by `stored`, or on its own thread: it may hang.

        Raises RuntimeError on the event loop and in `call`, where a hang would block others.
        """
        if _WAITS_FOR_REDIS.get() or _on_event_loop():
            raise RuntimeError("artifacts are read and written on threads of their own: see Service.stored")
        return self._artifacts

    async def call(self, tenant: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a Redis call on a thread, in the tenant's turn. It is not abandoned: a cancelled caller still waits for
        its end.
        """

        def run() -> T:
            _WAITS_FOR_REDIS.set(True)  # in this call's own context
            return function(*args, **kwargs)

        return await self._calls.run(tenant, run)

    async def stored(self, tenant: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function as `call` does, to read or write artifacts. Raises `StorageDown` if that takes too long."""
        within_s = self.settings.storage_s
        try:
            async with self._storing.turn(tenant, within_s=within_s):
                return await self._storers.run(partial(function, *args, **kwargs), within_s)
        except TimeoutError:
            raise StorageDown("the artifact store does not respond in time") from None

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the event loop, for a thread of another pool. Call after `start`."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    @property
    def ignore_unknown(self) -> bool:
        """Whether fields of requests that are not known are left out with a warning."""
        return self.settings.unknown_fields == "warn"

    async def lacking(self) -> str:
        """A sentence naming the rights that the Redis user lacks; empty if unknown."""
        try:
            missing = await self.call(_SERVICE, self._rights.missing)
        except StoreError:
            return ""
        return describe_missing(missing) if missing else ""

    def limits(self, owner: str) -> KeyLimits:
        """The limits of an owner's jobs and requests."""
        return self._limits_of(owner, self.cards.now.keys.get(owner))

    def links(self, request: Request, reader: str) -> ImageLinks:
        """Links as this request's client, whose key is the `reader`, reaches them, signed if keys are required."""
        base = self.settings.public_url.rstrip("/") + "/" if self.settings.public_url else str(request.base_url)
        return self.links_from(base, self.settings.link_s, reader)

    def links_from(self, base: str, lasts_s: float, reader: str) -> ImageLinks:
        """Links with this base for a reader's key, signed if keys are required; by Redis's clock, which all verifiers
        share.
        """
        now = self.cards.now
        return ImageLinks(base, now.secret if now.guarded else None, lasts_s, now.clock, reader)

    async def forecast(self, job: Job, standing: QueuePosition | None = None) -> QueueForecast | None:
        """A live job's queue position, estimated from the workers' costs.

        Redis is not queried if `standing` is given.
        """
        if job.state is not JobState.QUEUED:
            return running_forecast(job)
        workers = self.cards.now.ready(job.modality)
        work_s = job.work_ms / 1000
        if standing is None:
            standing = await self.call(job.owner, self.store.standing, job.id)
        if standing is None:
            return None
        backlog = standing.backlog
        if not workers:
            return QueueForecast(standing.ahead)
        start_s = backlog.queued_ms / 1000 * standing.ahead / max(1, backlog.queued) / workers
        return QueueForecast(standing.ahead, start_s, start_s + work_s)


def _beside(settings: Settings) -> Path | None:
    """The folder of a Redis that `diptych serve` runs beside this process, by the address file in it."""
    folder = settings.data_dir / "redis"
    try:
        return folder if (folder / "address").read_text("utf-8").strip() == settings.redis_url else None
    except OSError:
        return None


def _on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def of(request: Request) -> Service:  # a plain function would run on a thread at each request
    """The service of this request's app."""
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


Given = Annotated[Service, Depends(of)]
