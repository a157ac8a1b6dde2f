"""The jobs that a worker has in hand, from their claim to their end: which requests of the engine belong to each.

Knows claims, requests and how to stop them; knows nothing of models, Celery or Redis.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any

from core.batching.engine import Aborted, Engine
from core.batching.request import Request, State
from core.jobs.record import Claim


class Work:
    """One claimed job and its requests. Thread-safe."""

    def __init__(self, claim: Claim, engine: Engine) -> None:
        self.claim = claim
        self._engine = engine
        self._lock = threading.Lock()
        self._requests: list[Request] = []
        self._stopped = False
        self.artifacts: list[str] = []  # keys of what its result names
        self.dropped = False  # nobody wants it any more, or it is another worker's now: nothing is to be written

    @property
    def begun(self) -> bool:
        """Whether any of its requests has left the engine's waiting line."""
        return any(request.state is not State.WAITING for request in tuple(self._requests))

    def make(self, requests: Sequence[Request]) -> list[Any]:
        """Have the engine do all of them, and return what each came to.

        If one fails the others are stopped, and its error is raised: the engine's, or `Aborted` where `stop` was
        called. Either way nothing of it is left in the engine.
        """
        futures: list[Future[Any]] = []
        try:
            for request in requests:
                with self._lock:
                    if self._stopped:
                        raise Aborted("the job was stopped")
                    futures.append(self._engine.submit(request))
                    self._requests.append(request)
            wait(futures, return_when="FIRST_EXCEPTION")
        finally:
            if not all(future.done() for future in futures):
                self.stop()
                wait(futures)
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:  # one that was stopped because of another's error says nothing
            raise next((error for error in errors if not isinstance(error, Aborted)), errors[0])
        return [future.result() for future in futures]

    def stop(self) -> None:
        """Take it out of the engine, at the next iteration."""
        with self._lock:
            self._stopped = True
            for request in self._requests:
                self._engine.abort(request.id)

    def drop(self) -> None:
        """Stop it, and write nothing about it."""
        self.dropped = True
        self.stop()


class Hand:
    """All of them, by id. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._works: dict[str, Work] = {}

    def add(self, work: Work) -> None:
        """Take a job in hand. An earlier attempt of it, which this worker has lost, is dropped."""
        with self._lock:
            before = self._works.get(work.claim.id)
            self._works[work.claim.id] = work
        if before is not None:
            before.drop()

    def remove(self, work: Work) -> None:
        with self._lock:
            if self._works.get(work.claim.id) is work:
                del self._works[work.claim.id]

    def works(self) -> list[Work]:
        with self._lock:
            return list(self._works.values())

    def __contains__(self, id: str) -> bool:
        return id in self._works

    def leases(self) -> dict[str, str]:
        """Id to the attempt's fencing token."""
        with self._lock:
            return {id: work.claim.fence for id, work in self._works.items()}

    def drop(self, id: str, fence: str | None = None) -> bool:
        """Drop a job, if it is in hand and (where given) is this attempt of it."""
        with self._lock:
            work = self._works.get(id)
        if work is None or fence not in (None, work.claim.fence):
            return False
        work.drop()
        return True
