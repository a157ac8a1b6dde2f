"""Runs a TCP proxy between two parts of the service that can disconnect, hang and slow down connections."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

PASS, CUT, HANG, SLOW = "pass", "cut", "hang", "slow"
_CHUNK = 65536


class Proxy:
    """Listens on a port of 127.0.0.1 from its start until `close`, in a thread of its own. Thread-safe."""

    def __init__(self, upstream: int) -> None:
        """`upstream`: the port on 127.0.0.1 that it leads to."""
        self._upstream = upstream
        self._mode, self._delay_s = PASS, 0.0
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._flows = asyncio.Event()
        self._flows.set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._server = self._ask(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port: int = self._server.sockets[0].getsockname()[1]

    def lead(self, upstream: int) -> None:
        """Lead somewhere else from now on; what is open is cut."""
        self._upstream = upstream
        self._do(self._abort)

    def turn(self, mode: str, delay_s: float = 0.0) -> None:
        """CUT: what is open breaks, nothing new is let in. HANG: nothing moves. SLOW: each piece waits for so long."""

        def change() -> None:
            self._mode, self._delay_s = mode, delay_s
            if mode == HANG:
                self._flows.clear()
            else:
                self._flows.set()
            if mode == CUT:
                self._abort()

        self._do(change)

    def close(self) -> None:
        """Break what is open and listen no more."""

        async def end() -> None:
            self._server.close()
            self._abort()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        self._ask(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, what: Callable[[], None]) -> None:
        async def done() -> None:
            what()

        self._ask(done())

    def _ask(self, what: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(10)

    def _abort(self) -> None:
        for writer in list(self._open):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        other: asyncio.StreamWriter | None = None
        try:
            if self._mode == CUT:
                return
            await self._flows.wait()
            back, other = await asyncio.open_connection("127.0.0.1", self._upstream)
            self._open.add(other)
            ways = [asyncio.ensure_future(self._pump(reader, other)), asyncio.ensure_future(self._pump(back, writer))]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            for one in (writer, other):
                if one is not None:
                    self._open.discard(one)
                    one.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_CHUNK):
            if self._mode == SLOW:
                await asyncio.sleep(self._delay_s)
            await self._flows.wait()
            writer.write(data)
            await writer.drain()
        # One side has said all: the other may still answer to it, and then ends by itself or is cut.
        if writer.can_write_eof():
            writer.write_eof()
        await asyncio.sleep(5)
