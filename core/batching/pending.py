"""Futures of the requests that an engine has accepted and not ended yet."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from core.batching.request import Request, State


class Aborted(RuntimeError):
    """The request was aborted before it was done."""


class Expired(RuntimeError):
    """The request's deadline passed before it was done."""


class Closed(RuntimeError):
    """The engine takes no more requests, or stopped before this one was done."""


def rejected(error: Exception) -> Future[Any]:
    """Return the future of a request that was not accepted: its caller reads the error where it reads others'."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


class PendingResults:
    """One future per accepted request, by id. Thread-safe."""

    def __init__(self) -> None:
        self.futures: dict[str, Future[Any]] = {}
        self._lock = threading.Lock()
        self._accepting = True
        self._cause: BaseException | None = None

    def accept(self, request: Request, enqueue: Callable[[], None]) -> Future[Any]:
        """The request's future; `enqueue` is called before a `refuse` takes effect.

        Raises `Closed`, and ValueError for an id that is live.
        """
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # it is `abort` that stops a request and gives its slots back
        with self._lock:
            if not self._accepting:
                raise Closed("the engine takes no more requests") from self._cause
            if request.id in self.futures:
                raise ValueError(f"id {request.id!r} is already in use by a live request")
            self.futures[request.id] = future
            enqueue()
        return future

    def refuse(self) -> None:
        """Accept no more."""
        with self._lock:
            self._accepting = False

    def end(self, request: Request, *, closing: bool) -> None:
        """Resolve an ended request's future by its state. What ends while the engine is closing ends with `Closed`."""
        match request.state:
            case State.DONE:
                self.resolve(request, None)
            case State.ABORTED if closing:
                self.resolve(request, Closed(f"request {request.id} was not done when the engine closed"))
            case State.ABORTED:
                self.resolve(request, Aborted(f"request {request.id} was aborted"))
            case State.EXPIRED:
                self.resolve(request, Expired(f"request {request.id} was not done by its deadline"))
            case _:
                self.resolve(request, request.error or RuntimeError("failed"))

    def resolve(self, request: Request, error: BaseException | None) -> None:
        """Set the request's result, or this error."""
        with self._lock:
            future = self.futures.pop(request.id, None)
        if future is None:
            return
        if error is None:
            future.set_result(request.result)
        else:
            future.set_exception(error)

    def fail_all(self, error: BaseException) -> None:
        """Accept no more, and set this error on all futures; unless it is `Closed` it is also why none is accepted."""
        with self._lock:
            self._accepting = False
            self._cause = None if isinstance(error, Closed) else error
            futures, self.futures = self.futures, {}
        for future in futures.values():
            future.set_exception(error)
