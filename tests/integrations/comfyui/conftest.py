"""Provides a service with a worker that draws by itself, and a ComfyUI with the nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from contract.card import ImageCard
from tests.api.dialects.sdapi.studio import CARD
from tests.api.fixtures import api, easel, worker, world
from tests.api.world import Api
from tests.integrations.comfyui.host import Host
from tests.servers import redis_server

__all__ = ["api", "easel", "redis_server", "worker", "world"]


@pytest.fixture(scope="module")
def offered() -> ImageCard:
    """A card with LoRAs, a control network and an image prompt."""
    return CARD


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
    monkeypatch.setenv("DIPTYCH_URL", api.url)
    return host
