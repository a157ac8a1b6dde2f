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


async def on_a_thread_for_redis(service: Service, get: Get) -> bytes:
    return await service.call("", get)


async def after_a_stored_one(service: Service, get: Get) -> bytes:
    await service.stored("", lambda: None)
    return await service.call("", get)


async def after_redis(service: Service, get: Get) -> bytes:
    await service.call("", lambda: None)
    return await service.stored("", get)


Way = Callable[[Service, Get], Awaitable[bytes]]


@pytest.mark.parametrize("way", [on_the_loop, on_a_thread_for_redis, after_a_stored_one])
def test_nobody_waits_for_artifacts_where_all_others_would(service: Service, way: Way) -> None:
    async def run() -> bytes:
        return await way(service, lambda: service.artifacts.get(KEY))

    with pytest.raises(RuntimeError, match=r"see Service\.stored"):
        asyncio.run(run())


@pytest.mark.parametrize(
    "way",
    [
        lambda service, get: service.stored("", get),
        after_redis,
        lambda service, get: service.parsing.run("ann", get),
        lambda service, get: service.writing.run("ann", get),
        lambda _, get: asyncio.to_thread(get),
    ],
)
def test_threads_that_may_hang_reach_them(service: Service, way: Way) -> None:
    async def run() -> bytes:
        return await way(service, lambda: service.artifacts.get(KEY))

    with pytest.raises(NoArtifact):
        asyncio.run(run())
