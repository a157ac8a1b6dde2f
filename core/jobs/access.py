"""Reads from one event loop whether requests need an API key, for all requests that wait for it in one round trip."""

from __future__ import annotations

import asyncio
from typing import Any

from core.jobs.connection import TIMEOUT_S, RedisClient, StoreDown, translate_redis_errors
from core.jobs.keyring import GUARDED
from core.jobs.keys import ACCESS


class AccessReader:
    """Belongs to one event loop; connects at its first call."""

    def __init__(self, redis: RedisClient | str) -> None:
        self._line = RedisClient.at(redis).asyncio_connection()
        self._waiting: list[asyncio.Future[bool]] = []
        self._reader: asyncio.Task[None] | None = None

    async def guarded(self) -> bool:
        """Return whether there are keys, or the last one was deleted, as Redis says after this call began.

        Calls that come during a read share the next one. Raises `StoreError`.
        """
        answered: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(answered)
        if self._reader is None or self._reader.done():
            self._reader = asyncio.create_task(self._read())
        return await answered

    async def close(self) -> None:
        """Release the connection; pending calls are cancelled."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        for answered in self._waiting:
            answered.cancel()
        await self._line.disconnect()

    async def _read(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                with translate_redis_errors():
                    async with asyncio.timeout(TIMEOUT_S):
                        guarded = await self._line.retry.call_with_retry(self._ask, self._broken) == GUARDED
            except asyncio.CancelledError:
                self._waiting += batch
                raise
            except Exception as error:
                failure = StoreDown("Redis does not answer") if isinstance(error, TimeoutError) else error
                for answered in batch:
                    if not answered.done():  # else its caller was cancelled
                        answered.set_exception(failure)
            else:
                for answered in batch:
                    if not answered.done():
                        answered.set_result(guarded)

    async def _ask(self) -> Any:
        await self._line.send_packed_command(self._line.pack_command("GET", ACCESS))
        return await self._line.read_response()

    async def _broken(self, _: Exception) -> None:
        await self._line.disconnect(nowait=True)
