"""Provides a real service, and an API with a worker that is played by hand, whose webhooks may call this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deployment.redis import RedisServer
from pipeline.checkpoints import tiny
from tests.api.easel import Easel
from tests.api.world import CARD, Api, Worker, opened, settings_of
from tests.deployment.served import Served
from tests.servers import redis_server

__all__ = ["redis_server"]


@pytest.fixture(scope="module")
def world(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Api, Worker]]:
    settings = settings_of(redis_server.url, tmp_path_factory.mktemp("data"), webhook_private=True)
    with opened(settings, CARD) as (api, worker):
        yield api, worker


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A real `diptych serve` with the image model `tiny`, of 32×32 pixels, the text model emoji-lm, and AUTOMATIC1111's
    API.
    """
    folder = tmp_path_factory.mktemp("served")
    model = tiny.save(folder / "tiny", tiny.SHAPES[tiny.TINY])
    service = Served(folder / "service", "--sdapi", model=str(model), unset=("DIPTYCH_TEXT_MODEL",))
    try:
        service.ready()
        yield service
    finally:
        service.close()


@pytest.fixture
def api(world: tuple[Api, Worker]) -> Api:
    return world[0]


@pytest.fixture
def worker(world: tuple[Api, Worker]) -> Worker:
    return world[1]


@pytest.fixture
def easel(worker: Worker) -> Iterator[Easel]:
    """Draws by itself."""
    with Easel(worker) as easel:
        yield easel
