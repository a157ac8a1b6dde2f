"""Threads of their own: what hangs holds so many of them and no more, and nobody waits for one longer than asked."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar

import pytest

from api.concurrency.timeout_pool import TimeoutThreadPool
from tests.starved import no_threads

PATIENCE_S = 60.0  # no test is decided by it


def test_it_returns_and_raises_what_the_function_does_in_its_callers_context() -> None:
    told = ContextVar("told", default="")
    pool = TimeoutThreadPool("test", 2)

    def fail() -> None:
        raise KeyError("yes")

    async def work() -> None:
        told.set("by the caller")
        assert await pool.run(told.get, PATIENCE_S) == "by the caller"
        with pytest.raises(KeyError, match="yes"):
            await pool.run(fail, PATIENCE_S)
        names = {await pool.run(lambda: threading.current_thread().name, PATIENCE_S) for _ in range(20)}
        assert names <= {"test-0", "test-1"}

    asyncio.run(work())
    pool.close()


def test_what_hangs_is_left_and_what_waited_behind_it_never_begins() -> None:
    pool, go, begun = TimeoutThreadPool("test", 3), threading.Event(), []

    def hang(k: int) -> int:
        begun.append(k)
        assert go.wait(PATIENCE_S)
        return k

    async def work() -> None:
        calls = [asyncio.create_task(pool.run(lambda k=k: hang(k), 1.0)) for k in range(10)]
        left = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(one) for one in left] == [TimeoutError] * 10
        assert len(begun) == 3, "one a thread"
        go.set()
        assert await pool.run(lambda: hang(99), PATIENCE_S) == 99
        assert sorted(begun) == [*sorted(begun[:3]), 99]

    asyncio.run(work())
    pool.close()


def test_a_thread_that_cannot_start_is_started_by_the_next_call() -> None:
    pool = TimeoutThreadPool("test", 1)

    async def work() -> None:
        with no_threads(), pytest.raises(TimeoutError):
            await pool.run(lambda: 1, 0.05)
        assert await pool.run(lambda: 2, PATIENCE_S) == 2

    asyncio.run(work())
    pool.close()
