"""Provides a real service, and an API with a worker that is played by hand, whose webhooks may call this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pipeline.checkpoints import tiny
from tests.api.fixtures import api, easel, offered, worker, world
from tests.deployment.served import Served
from tests.servers import redis_server

__all__ = ["api", "easel", "offered", "redis_server", "worker", "world"]


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
