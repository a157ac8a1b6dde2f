"""Runs calls of many tenants on a few threads: one of a tenant at a time, and the tenants in turn."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from core.threads import started


class TenantThreads:
    """A pool of threads, which exist while there is something to do. A tenant's calls run in their order."""

    def __init__(self, name: str, threads: int) -> None:
        self._name, self._most = name, threads
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, deque[tuple[Future[None], Callable[..., None], tuple[Any, ...]]]] = (
            OrderedDict()
        )
        self._running: set[str] = set()  # tenants whose call runs
        self._threads: set[threading.Thread] = set()
        self._closed = False

    def submit(self, tenant: str, function: Callable[..., None], *arguments: Any) -> Future[None]:
        """Run a call in the tenant's turn. Its future is cancelled if the pool is closed before."""
        result: Future[None] = Future()
        with self._lock:
            if self._closed:
                result.cancel()
                return result
            self._waiting.setdefault(tenant, deque()).append((result, function, arguments))
            self._staff()
        return result

    def close(self) -> None:
        """Cancel the calls that wait, and wait for the end of those that run."""
        with self._lock:
            self._closed = True
            waiting = [call for calls in self._waiting.values() for call in calls]
            self._waiting.clear()
            threads = [*self._threads]
        for result, _, _ in waiting:
            result.cancel()
        for thread in threads:
            thread.join()

    def _next(self) -> str | None:
        """The tenant whose turn it is, under the lock."""
        return next((tenant for tenant in self._waiting if tenant not in self._running), None)

    def _staff(self) -> None:
        """Start a thread, under the lock, if a tenant has a turn and there may be another."""
        if len(self._threads) < self._most and self._next() is not None:
            thread = threading.Thread(target=self._run, name=self._name)
            if started(thread):  # it needs the lock first
                self._threads.add(thread)
            elif not self._threads:  # nobody would come for them
                for calls in self._waiting.values():
                    for result, _, _ in calls:
                        result.set_exception(MemoryError("the system starts no thread now"))
                self._waiting.clear()

    def _run(self) -> None:
        done: str | None = None
        while True:
            with self._lock:
                if done is not None:
                    self._running.discard(done)
                tenant = self._next()
                if tenant is None:
                    self._threads.discard(threading.current_thread())
                    return
                calls = self._waiting.pop(tenant)
                result, function, arguments = calls.popleft()
                if calls:
                    self._waiting[tenant] = calls  # behind the others
                self._running.add(tenant)
                self._staff()
            done = tenant
            if not result.set_running_or_notify_cancel():
                continue
            try:
                function(*arguments)
            except BaseException as error:  # whoever waits has to hear of it
                result.set_exception(error)
            else:
                result.set_result(None)
            del result, function, arguments, calls  # not kept until the next one
