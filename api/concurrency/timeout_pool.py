"""A bounded thread pool for one kind of blocking call, with a time limit for its callers.

A hanging call occupies a thread of its own pool only; its caller leaves at the time limit, even if the thread cannot.
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

from core.threads import started

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Task:
    function: Callable[[], Any]
    context: Context
    loop: asyncio.AbstractEventLoop
    answered: asyncio.Future[Any]


class TimeoutThreadPool:
    """Belongs to no event loop. Its threads are daemons: a hanging one does not delay the process's exit."""

    def __init__(self, name: str, threads: int) -> None:
        self._name, self._most = name, threads
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    async def run(self, function: Callable[[], T], within_s: float) -> T:
        """Run the function on a thread and return or raise what it does. Raises TimeoutError after `within_s`.

        A call not started by then never runs; one that has started continues on its thread.
        """
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[T] = loop.create_future()
        self._tasks.put(_Task(function, copy_context(), loop, answered))
        if len(self._threads) < self._most:
            thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
            if started(thread):  # else the next call starts it
                self._threads.append(thread)
        async with asyncio.timeout(within_s):
            return await answered

    def close(self) -> None:
        """Let the threads end after their current calls. Does not wait for them."""
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
            del task, result, error  # not kept alive until the next task


def _tell(answered: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if answered.done():  # its caller has left
        return
    if error is not None:
        answered.set_exception(error)
    else:
        answered.set_result(result)
