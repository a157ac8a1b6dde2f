"""Provides an API for the tests of clients: with a worker that is played by hand, or that draws by itself.

A conftest that needs them contains `from tests.api.fixtures import api, easel, offered, worker, world`, and may have an
`offered` of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from contract.card import ImageCard
from deployment.redis import RedisServer
from tests.api.easel import Easel
from tests.api.world import CARD, Api, Worker, opened, settings_of


@pytest.fixture(scope="module")
def offered() -> ImageCard:
    """The card of the worker."""
    return CARD


@pytest.fixture(scope="module")
def world(
    offered: ImageCard, redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Api, Worker]]:
    """One API for the module, whose webhooks may call this machine, and its worker. Never flushed."""
    settings = settings_of(redis_server.url, tmp_path_factory.mktemp("data"), webhook_private=True)
    with opened(settings, offered) as (api, worker):
        yield api, worker


@pytest.fixture
def api(world: tuple[Api, Worker]) -> Api:
    return world[0]


@pytest.fixture
def worker(world: tuple[Api, Worker]) -> Worker:
    return world[1]


@pytest.fixture
def easel(worker: Worker) -> Iterator[Easel]:
    """The worker draws by itself."""
    with Easel(worker) as easel:
        yield easel
