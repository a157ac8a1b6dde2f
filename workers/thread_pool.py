"""Runs Celery's tasks on threads that are started before the first message, and whose death ends the worker."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

from celery.concurrency.base import BasePool, apply_target

from core.threads import VitalThread


class ThreadPool(BasePool):  # type: ignore[misc]
    """A pool of `limit` threads, all started at once: with little memory left none could be started for a message.

    A thread that starts while memory runs out may also never report that it has, and its starter waits for ever.
    An exception that escapes a task leaves its message unacknowledged and its place taken, so it ends the process.
    """

    body_can_be_buffer = True
    signal_safe = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._threads = [
            VitalThread(target=self._run, name=f"task-{number}", daemon=True) for number in range(self.limit)
        ]

    def on_start(self) -> None:
        for thread in self._threads:
            thread.start()

    def on_stop(self) -> None:
        """End the threads; returns once all tasks have ended."""
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def on_apply(
        self,
        target: Callable[..., object],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        callback: Callable[..., object] | None = None,
        accept_callback: Callable[..., object] | None = None,
        **_: Any,
    ) -> None:
        self._tasks.put(lambda: apply_target(target, args, kwargs, callback, accept_callback))

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # an idle thread keeps no message
