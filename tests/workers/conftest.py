"""Provides a Redis per test module, and workers for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import redis_server, redis_url
from tests.workers.crew import Crew

__all__ = ["redis_server", "redis_url"]


@pytest.fixture
def crew(redis_url: str, tmp_path: Path) -> Iterator[Crew]:
    crew = Crew(redis_url, tmp_path)
    yield crew
    crew.close()
