"""Event loops of tests: a time limit for all of a test, and a wait for followers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from core.jobs.events import EventReader

PATIENCE_S = 600.0  # no test is decided by it


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(work(), PATIENCE_S)

    return asyncio.run(bounded())


async def followed(reader: EventReader, count: int = 1) -> None:
    """Wait until so many follow jobs."""
    while sum(map(len, reader._followers.values())) < count:
        await asyncio.sleep(0.01)
