"""Threads of their own for one kind of waiting: so many at most, with a time limit for who waits for their answer.

What hangs holds a thread of its own pool and no other's; a caller whose time is up leaves, whether or not its thread
can. Knows threads and deadlines; knows nothing of what they wait for.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Task:
    function: Callable[[], Any]
    context: Context
    loop: asyncio.AbstractEventLoop
    answered: asyncio.Future[Any]


class Pool:
    """Belongs to no event loop. Its threads are daemons: one that hangs does not hold up the process's end."""

    def __init__(self, name: str, threads: int) -> None:
        self._name, self._most = name, threads
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    async def run(self, function: Callable[[], T], within_s: float) -> T:
        """What the function returns or raises, on one of the threads. Raises TimeoutError after `within_s`.

        A call that no thread has begun by then is never begun; one that a thread is at goes on there.
        """
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[T] = loop.create_future()
        self._tasks.put(_Task(function, copy_context(), loop, answered))
        if len(self._threads) < self._most:
            thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        async with asyncio.timeout(within_s):
            return await answered

    def close(self) -> None:
        """Let the threads end with what they are at. Does not wait for them."""
        for _ in self._threads:
            self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            if task.answered.cancelled():
                continue
            result, error = None, None
            try:
                result = task.context.run(task.function)
            except BaseException as raised:
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                task.loop.call_soon_threadsafe(_tell, task.answered, result, error)
            del task, result, error  # not kept until the next one comes


def _tell(answered: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if answered.done():  # its caller has left
        return
    if error is not None:
        answered.set_exception(error)
    else:
        answered.set_result(result)
