"""Limits concurrent work that needs much memory or time, with at most one item per tenant.

For coroutines of one event loop; tenant_pool.py does the same for work on threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import ParamSpec, TypeVar

import anyio
import anyio.to_thread

P = ParamSpec("P")
T = TypeVar("T")


class FairLimiter:
    """At most `total` at once, on as many threads, and one per tenant; tenants in order of arrival."""

    def __init__(self, total: int) -> None:
        self._threads = anyio.CapacityLimiter(total)
        self._locks: dict[str, tuple[asyncio.Lock, list[None]]] = {}

    async def run(self, tenant: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking function on a thread in the tenant's turn. A cancelled caller waits for its end."""
        async with self._turn(tenant):
            return await anyio.to_thread.run_sync(partial(function, *args, **kwargs), limiter=self._threads)

    @asynccontextmanager
    async def _turn(self, tenant: str) -> AsyncIterator[None]:
        lock, waiting = self._locks.setdefault(tenant, (asyncio.Lock(), []))
        waiting.append(None)
        try:
            async with lock:
                yield
        finally:
            waiting.pop()
            if not waiting:
                del self._locks[tenant]
