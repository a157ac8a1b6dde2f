"""Provides a service with a worker that draws by itself, and a ComfyUI with the nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deployment.redis import RedisServer
from tests.api.easel import Easel
from tests.api.sdapi.studio import CARD
from tests.api.world import Api, Worker, opened, settings_of
from tests.integrations.comfyui.host import Host
from tests.servers import redis_server

__all__ = ["redis_server"]


@pytest.fixture(scope="module")
def world(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Api, Worker]]:
    with opened(settings_of(redis_server.url, tmp_path_factory.mktemp("data")), CARD) as (api, worker):
        yield api, worker


@pytest.fixture
def api(world: tuple[Api, Worker]) -> Api:
    return world[0]


@pytest.fixture
def worker(world: tuple[Api, Worker]) -> Worker:
    return world[1]


@pytest.fixture
def easel(worker: Worker) -> Iterator[Easel]:
    with Easel(worker) as easel:
        yield easel


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Host:
    """No service is configured, and `host.services` is not written."""
    for name in ("DIPTYCH_URL", "DIPTYCH_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    host = Host(monkeypatch)
    host.services = tmp_path / "services.json"
    monkeypatch.setattr(host.part("service"), "FILE", host.services)
    return host


@pytest.fixture
def comfy(host: Host, api: Api, monkeypatch: pytest.MonkeyPatch) -> Host:
    """The default service is `api`."""
    monkeypatch.setenv("DIPTYCH_URL", api.url)
    return host
