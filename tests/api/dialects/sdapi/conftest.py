"""Provides an API with AUTOMATIC1111's routes, and a worker that draws by itself, with its parameters in each file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from deployment.redis import RedisServer
from tests.api.dialects.sdapi.studio import CARD, Studio
from tests.api.world import Api, Worker, opened, settings_of


@pytest.fixture(scope="module")
def shared(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """One API with two models. Never flushed."""
    settings = settings_of(redis_server.url, tmp_path_factory.mktemp("data"), max_queued=1_000_000, sdapi=True)
    flow = replace(CARD, name="emoji-z", schedulers=("flow-euler",), default_scheduler="flow-euler", upscalers=())
    with Worker(settings, "other") as other:
        other.announce(card=flow)
        with opened(settings, CARD) as (api, _):
            yield api


@pytest.fixture
def studio(worker: Worker) -> Iterator[Studio]:
    with Studio(worker) as studio:
        yield studio
