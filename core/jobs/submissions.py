"""Creates jobs from one event loop, sending requests that arrive while Redis is busy in one round trip.

Needs no thread, and under load Redis writes its append-only file once for many. Encoding and decoding are in
creation.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

import redis
from redis.asyncio.connection import AbstractConnection

from core.jobs.connection import TIMEOUT_S, RedisClient, StoreDown, StoreError, StoreFull, translate_redis_errors
from core.jobs.creation import UNLIMITED, JobCreation, OwnerLimits, argument, outcome
from core.jobs.keys import PREFIX
from core.jobs.rates import LIMITS, RateLimitCost
from core.jobs.record import JobDraft, milliseconds
from core.jobs.upkeep import MARGIN_MS

log = logging.getLogger(__name__)

_AT_ONCE = 64  # per round trip: Redis serves nobody else meanwhile
_DOUBTFUL = 10_000  # maximum of jobs to withdraw once Redis replies
_AGAIN_S = 0.5  # between retries of withdrawals


class Submissions:
    """Belongs to one event loop; connects at its first call. Jobs are created in call order.

    `max_queued`: waiting jobs per queue. `retention_s`: how long what a record references is kept.

    If Redis does not reply, it is unknown whether the job gets created. The caller gets `StoreDown`, and the job is
    withdrawn once Redis replies; unless the caller chose its id (it has a digest): a repeated call then finds it.
    """

    def __init__(self, redis: RedisClient | str, max_queued: int, retention_s: float = 86_400.0) -> None:
        """Raises ValueError for an unusable URL."""
        client = RedisClient.at(redis)
        self._create = client.script("jobs/create", LIMITS)
        self._withdrawal, self._erasure = client.script("jobs/withdraw"), client.script("jobs/erase")
        self._line = client.asyncio_connection()
        self._withdrawing_line = client.asyncio_connection()
        self._retention_ms = milliseconds(retention_s)
        self._doubtful: dict[str, None] = {}  # in order of arrival
        self._withdrawer: asyncio.Task[None] | None = None
        self._closed = False
        self._max_queued = max_queued
        self._waiting: deque[tuple[str, asyncio.Future[Any]]] = deque()
        self._sender: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Release the connection. Pending callers get `StoreDown`; their jobs may have been created."""
        self._closed = True
        for task in (self._sender, self._withdrawer):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await self._line.disconnect()
        await self._withdrawing_line.disconnect()

    async def make(
        self,
        draft: JobDraft[Any],
        message: str = "",
        charges: Sequence[RateLimitCost] = (),
        always: int = 0,
        limits: OwnerLimits = UNLIMITED,
        *,
        keyless: bool = False,
    ) -> JobCreation:
        """Charge the rate limits, create the record, and push `message` into the queue's list: all or nothing.

        If a charge exceeds its limit, the queue is full, or the owner has as many jobs as its `limits` say, no job is
        created, and only the first `always` charges count, as they do if the job exists already. `keyless` requests are
        barred once keys are required. Raises `StoreDown` and `StoreFull`. A cancelled call may leave a job behind.
        """
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        text = argument(draft, self._max_queued, message, charges, always, limits, keyless=keyless)
        self._waiting.append((text, answered))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send())
        try:
            answer = await answered
        except StoreDown as error:
            refused = isinstance(error.__cause__, redis.ResponseError)
            if not refused and not draft.digest:
                self._withdraw(draft.id)
            raise
        return outcome(draft, charges, answer)

    def _withdraw(self, id: str) -> None:
        """Withdraw the job, whether it exists already or is still to be created."""
        if len(self._doubtful) < _DOUBTFUL:
            self._doubtful[id] = None
        if not self._closed and (self._withdrawer is None or self._withdrawer.done()):
            self._withdrawer = asyncio.create_task(self._take_back())

    async def _take_back(self) -> None:
        while self._doubtful:
            ids = list(self._doubtful)[:_AT_ONCE]
            # First forbid its creation: a create call that Redis has not read yet could follow the erasure.
            commands: list[tuple[str | int, ...]] = [("EVAL", self._withdrawal.text, 0, PREFIX, id) for id in ids]
            keep_ms = self._retention_ms + MARGIN_MS
            commands += [("EVAL", self._erasure.text, 0, PREFIX, id, self._retention_ms, keep_ms, "") for id in ids]
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    answers = await self._run(self._withdrawing_line, commands)
            except Exception:
                await asyncio.sleep(_AGAIN_S)
                continue
            if any(_refused(answer) for answer in answers):
                await asyncio.sleep(_AGAIN_S)
                continue
            erased = sum(answer == 1 for answer in answers[len(ids) :])
            if erased:
                log.info("%d jobs were created after their requests had failed; they are withdrawn", erased)
            for id in ids:
                del self._doubtful[id]

    async def _send(self) -> None:
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(_AT_ONCE, len(self._waiting)))]
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    answers = await self._ask([request for request, _ in batch])
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

    async def _ask(self, arguments: list[str]) -> list[Any]:
        """Answers in order, errors among them. Calls that were cut off are repeated: all of them are idempotent."""
        calls = [("EVALSHA", self._create.sha, 0, PREFIX, argument) for argument in arguments]
        answers = await self._run(self._line, calls)
        unknown = [k for k, answer in enumerate(answers) if isinstance(answer, redis.exceptions.NoScriptError)]
        if unknown:  # Redis has just restarted: it has run none of these
            load = ("SCRIPT", "LOAD", self._create.text)
            for k, answer in zip(
                unknown, (await self._run(self._line, [load, *(calls[k] for k in unknown)]))[1:], strict=True
            ):
                answers[k] = answer
        return answers

    async def _run(self, line: AbstractConnection, commands: Sequence[tuple[str | int, ...]]) -> list[Any]:
        # Writes and reads the connection directly: redis-py's pipelines double the cost.
        async def ask() -> list[Any]:
            await line.send_packed_command(line.pack_commands(commands))
            return [await _answer(line) for _ in commands]

        async def broken(_: Exception) -> None:
            await line.disconnect(nowait=True)

        return await line.retry.call_with_retry(ask, broken)


async def _answer(line: AbstractConnection) -> Any:
    try:
        return await line.read_response()
    except redis.ResponseError as error:
        return error


def _refused(answer: Any) -> bool:
    """Return whether a retry may succeed."""
    try:
        with translate_redis_errors():
            if isinstance(answer, Exception):
                raise answer
    except (StoreDown, StoreFull):
        return True
    except StoreError:
        log.exception("a job cannot be withdrawn")
    return False


def _tell(batch: Sequence[tuple[str, asyncio.Future[Any]]], answers: Sequence[Any]) -> None:
    for (_, answered), answer in zip(batch, answers, strict=True):
        if answered.done():  # its caller was cancelled
            continue
        if not isinstance(answer, Exception):
            answered.set_result(answer)
            continue
        try:
            with translate_redis_errors():
                raise answer
        except Exception as error:
            answered.set_exception(error)
