"""Provides real servers for tests: one Redis per test module, flushed before each test.

A conftest that needs them contains `from tests.servers import redis_server, redis_url`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from deployment.redis import RedisServer


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A running Redis with an append-only file. A test that stops it starts it again.

    Unlike a service's it leaves syncing to the system, as no test cuts the power: each write would wait for the disk.
    """
    server = RedisServer(tmp_path_factory.mktemp("redis"), ("appendfsync no",))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """URL of an empty Redis."""
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    return redis_server.url
