"""Which threads may wait for the store of artifacts: never those that wait for Redis, nor the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from api.service import Service
from core.artifacts import NoArtifact
from tests.api.world import settings_of

KEY = f"sha256/00/{'0' * 62}.png"
Get = Callable[[], bytes]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """It connects to no Redis: nothing here asks for it."""
    service = Service(settings_of("redis://127.0.0.1:1", tmp_path))
    yield service
    service._close()


async def on_the_loop(service: Service, get: Get) -> bytes:
    return get()


async def on_redis_threads(service: Service, get: Get) -> bytes:
    return await service.call(get)


async def on_redis_threads_of_a_stored_one(service: Service, get: Get) -> bytes:
    await service.stored(lambda: None)
    return await service.call(get)


async def on_storage_threads(service: Service, get: Get) -> bytes:
    return await service.stored(get)


async def on_storage_threads_after_redis(service: Service, get: Get) -> bytes:
    await service.call(lambda: None)
    return await service.stored(get)


async def on_threads_that_check_files(service: Service, get: Get) -> bytes:
    await service.call(lambda: None)
    return await service.parsing.run("ann", get)


async def on_threads_that_write_files(service: Service, get: Get) -> bytes:
    return await service.writing.run("ann", get)


async def on_a_thread_of_its_own(service: Service, get: Get) -> bytes:
    return await asyncio.to_thread(get)


Way = Callable[[Service, Get], Awaitable[bytes]]


@pytest.mark.parametrize("way", [on_the_loop, on_redis_threads, on_redis_threads_of_a_stored_one])
def test_nobody_waits_for_artifacts_where_all_others_would(service: Service, way: Way) -> None:
    async def run() -> bytes:
        return await way(service, lambda: service.artifacts.get(KEY))

    with pytest.raises(RuntimeError, match=r"see Service\.stored"):
        asyncio.run(run())


@pytest.mark.parametrize(
    "way",
    [
        on_storage_threads, on_storage_threads_after_redis, on_threads_that_check_files, on_threads_that_write_files,
        on_a_thread_of_its_own,
    ],
)  # fmt: skip
def test_threads_that_may_hang_reach_them(service: Service, way: Way) -> None:
    async def run() -> bytes:
        return await way(service, lambda: service.artifacts.get(KEY))

    with pytest.raises(NoArtifact):
        asyncio.run(run())
