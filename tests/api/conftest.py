"""An API on a real Redis and a real port, for each test or each module; workers are played by world.Worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deployment.redis import RedisServer
from tests.api.world import Api, Worker, settings_of
from tests.servers import redis_server, redis_url

__all__ = ["redis_server", "redis_url"]


@pytest.fixture(scope="module")
def shared(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """One API with a ready worker, for tests of a module that leave each other alone. Never flushed."""
    settings = settings_of(redis_server.url, tmp_path_factory.mktemp("data"), max_queued=1_000_000)
    with Worker(settings) as worker:
        worker.announce()
        with Api(settings) as api:
            yield api


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data"
