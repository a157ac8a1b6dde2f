"""Provides a real Redis per test module, and a job store on it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
import redis

from core.jobs.events import EventReader
from core.jobs.files import FileStore
from core.jobs.limits import JobLimits
from core.jobs.registry import Registry
from core.jobs.store import JobStore
from core.jobs.submissions import Submissions
from deployment.redis import RedisServer
from tests.core.jobs.loops import run
from tests.servers import redis_server, redis_url

__all__ = ["redis_server", "redis_url"]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an async test in an event loop of its own, in which its reader starts, and its reader and submissions end."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    bound = [value for value in given.values() if isinstance(value, EventReader | Submissions)]

    async def test() -> None:
        for each in bound:
            if isinstance(each, EventReader):
                await each.start()
        try:
            await pyfuncitem.obj(**given)
        finally:
            for each in bound:
                await each.close()

    run(test)
    return True


@pytest.fixture
def reader(redis_url: str) -> EventReader:
    """The reader of an async test."""
    return EventReader(redis_url)


@pytest.fixture
def submissions(redis_url: str) -> Submissions:
    """An API's submissions, of an async test."""
    return Submissions(redis_url, 100_000)


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    """Redis as it is, past the store."""
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


@pytest.fixture
def store(redis_url: str) -> Iterator[JobStore]:
    """A store whose every wait is so long that no slow machine comes near: tests let time pass by `books.age`."""
    store = JobStore(redis_url, JobLimits(lease_s=1000, resend_s=1000, overtime_s=1000))
    yield store
    store.close()


@pytest.fixture
def jobs(redis_url: str) -> Iterator[JobStore]:
    """A store that keeps what has ended for a minute."""
    store = JobStore(redis_url, JobLimits(retention_s=60))
    yield store
    store.close()


@pytest.fixture
def registry(redis_url: str) -> Iterator[Registry]:
    registry = Registry(redis_url)
    yield registry
    registry.close()


@pytest.fixture
def files(redis_url: str) -> Iterator[FileStore]:
    files = FileStore(redis_url)
    yield files
    files.close()


@pytest.fixture
def full(redis_server: RedisServer, client: redis.Redis) -> Iterator[redis.Redis]:
    """Fill Redis by `client.config_set("maxmemory", 1)`; it has room again when the test ends."""
    yield client
    client.config_set("maxmemory", 0)


@pytest.fixture
def mortal(redis_server: RedisServer) -> Iterator[RedisServer]:
    """The server for a test that kills it; it runs again afterwards."""
    yield redis_server
    redis_server.kill()
    redis_server.start()
