"""Provides services that end with their tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deployment.served import Served
from tests.servers import redis_server, redis_url  # noqa: F401


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Starts one. A second one has a folder of its own, unless `folder` names another."""
    services: list[Served] = []

    def begin(*arguments: str, folder: Path | None = None, **options: Any) -> Served:
        services.append(Served(folder or tmp_path / f"served-{len(services)}", *arguments, **options))
        return services[-1]

    yield begin
    for service in services:
        service.close()
