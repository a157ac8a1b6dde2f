"""Makes jobs for one event loop: what comes in while Redis is busy with others goes to it in one round trip.

No thread is needed for it, and under load Redis writes its file once for many. Knows connections and when to send;
what is sent, and what comes back, is creation.py's.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Sequence
from typing import Any

import redis

from core.jobs.connection import TIMEOUT_S, StoreDown, connection_asyncio, translated
from core.jobs.creation import CREATE, Creation, argument, outcome
from core.jobs.keys import PREFIX
from core.jobs.rates import Charge
from core.jobs.record import Draft

_AT_ONCE = 64  # of one round trip: Redis answers nobody else meanwhile
_SHA = hashlib.sha1(CREATE.encode(), usedforsecurity=False).hexdigest()  # as Redis names scripts


class Submissions:
    """Belongs to one event loop; connects at its first call. Jobs are made in the order in which they are asked for.

    `max_queued`: jobs that may wait in one queue.
    """

    def __init__(self, url: str, max_queued: int) -> None:
        """Raises ValueError for a url of no use."""
        self._line = connection_asyncio(url)
        self._max_queued = max_queued
        self._waiting: deque[tuple[str, asyncio.Future[Any]]] = deque()
        self._sender: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Give the connection back. Who waits is told that the store is down; their jobs may have been made."""
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.gather(self._sender, return_exceptions=True)
        await self._line.disconnect()

    async def make(
        self,
        draft: Draft,
        message: str = "",
        charges: Sequence[Charge] = (),
        always: int = 0,
        most: int | None = None,
    ) -> Creation:
        """Count the charges, make the job's record, and put `message` into its queue's list: all of it or nothing.

        Where a charge is too much, the queue is full, or `most` of the owner's jobs wait in it, no job is made, and
        nothing further is counted. The first `always` of the charges count also where the queue is full, or the job is
        there already. Raises `StoreDown` and `StoreFull`. A caller that is cancelled may leave a job behind.
        """
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((argument(draft, self._max_queued, message, charges, always, most), answered))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send())
        return outcome(draft, charges, await answered)

    async def _send(self) -> None:
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(_AT_ONCE, len(self._waiting)))]
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    answers = await self._ask([asked for asked, _ in batch])
            except TimeoutError:
                answers = [StoreDown("Redis does not answer")] * len(batch)
            except Exception as error:
                answers = [error] * len(batch)
            except asyncio.CancelledError:
                batch += self._waiting
                self._waiting.clear()
                _tell(batch, [StoreDown("the service closes")] * len(batch))
                raise
            _tell(batch, answers)

    async def _ask(self, asked: list[str]) -> list[Any]:
        """The answers in order, errors among them. What was cut off is asked again: every call may be repeated."""
        calls = [("EVALSHA", _SHA, 0, PREFIX, one) for one in asked]
        answers = await self._run(calls)
        unknown = [k for k, answer in enumerate(answers) if isinstance(answer, redis.exceptions.NoScriptError)]
        if unknown:  # a Redis that has just started: it has done nothing of these
            load = ("SCRIPT", "LOAD", CREATE)
            for k, answer in zip(unknown, (await self._run([load, *(calls[k] for k in unknown)]))[1:], strict=True):
                answers[k] = answer
        return answers

    async def _run(self, commands: Sequence[tuple[str | int, ...]]) -> list[Any]:
        line = self._line  # its commands and answers as they are: redis-py's pipelines cost as much again

        async def ask() -> list[Any]:
            await line.send_packed_command(line.pack_commands(commands))
            return [await self._answer() for _ in commands]

        async def broken(_: Exception) -> None:
            await line.disconnect(nowait=True)

        return await line.retry.call_with_retry(ask, broken)

    async def _answer(self) -> Any:
        try:
            return await self._line.read_response()
        except redis.ResponseError as error:
            return error


def _tell(batch: Sequence[tuple[str, asyncio.Future[Any]]], answers: Sequence[Any]) -> None:
    for (_, answered), answer in zip(batch, answers, strict=True):
        if answered.done():  # its caller was cancelled
            continue
        if not isinstance(answer, Exception):
            answered.set_result(answer)
            continue
        try:
            with translated():
                raise answer
        except Exception as error:
            answered.set_exception(error)
