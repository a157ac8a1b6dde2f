"""Limits concurrent work that needs memory, time or a thread, with few items per tenant.

For coroutines of one event loop; tenant_pool.py does the same for work on threads.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import ParamSpec, TypeVar

import anyio
import anyio.to_thread

P = ParamSpec("P")
T = TypeVar("T")


class FairLimiter:
    """A limiter: at most `total` calls at once, on as many threads, and `each` per tenant, in order of arrival.

    The costs of those that run add up to `budget` at most; a turn that costs more than all of it runs alone.
    """

    def __init__(self, total: int, budget: int = 0, each: int = 1) -> None:
        self._threads = anyio.CapacityLimiter(total)
        self._each = each
        self._of_tenant: dict[str, tuple[asyncio.Semaphore, list[None]]] = {}
        self._free, self._running, self._used, self._budget = total, 0, 0, budget
        self._queue: deque[tuple[asyncio.Future[None], int]] = deque()

    async def run(self, tenant: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking function on a thread in the tenant's turn. A cancelled caller waits for its end."""
        async with self.turn(tenant):
            return await self.on_thread(function, *args, **kwargs)

    async def on_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking function on one of the threads, within a turn. A cancelled caller waits for its end."""
        return await anyio.to_thread.run_sync(partial(function, *args, **kwargs), limiter=self._threads)

    @asynccontextmanager
    async def turn(self, tenant: str, cost: int = 0, within_s: float | None = None) -> AsyncIterator[None]:
        """The tenant's turn, for as long as the context is open. Callers that wait for it should hold little.

        Raises TimeoutError where it does not come `within_s`.
        """
        of_tenant = self._of_tenant.get(tenant)
        if of_tenant is None:
            self._of_tenant[tenant] = of_tenant = (asyncio.Semaphore(self._each), [])
        places, waiting = of_tenant
        waiting.append(None)
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(within_s):
                    await stack.enter_async_context(places)
                    await self._acquire(cost)
                stack.callback(self._release, cost)
                yield
        finally:
            waiting.pop()
            if not waiting:
                del self._of_tenant[tenant]

    async def _acquire(self, cost: int) -> None:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((ready, cost))
        self._admit()
        try:
            await ready
        except asyncio.CancelledError:
            if ready.cancelled():
                self._admit()  # those behind it
            else:  # its turn had come
                self._release(cost)
            raise

    def _release(self, cost: int) -> None:
        self._free, self._running, self._used = self._free + 1, self._running - 1, self._used - cost
        self._admit()

    def _admit(self) -> None:
        """Let the first ones run: none overtakes, so that a large one is not passed by for ever."""
        while self._queue and self._free:
            ready, cost = self._queue[0]
            if ready.cancelled():
                self._queue.popleft()
                continue
            if self._running and self._budget and self._used + cost > self._budget:
                return
            self._queue.popleft()
            self._free, self._running, self._used = self._free - 1, self._running + 1, self._used + cost
            ready.set_result(None)
