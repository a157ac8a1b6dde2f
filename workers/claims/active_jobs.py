"""The worker's active jobs, from claim to end, and the engine requests of each."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any

from core.batching.engine import Aborted, Engine
from core.batching.request import Request, State
from core.jobs.record import Claim


class ActiveJob:
    """A claimed job and its requests. Thread-safe."""

    def __init__(self, claim: Claim, engine: Engine) -> None:
        self.claim = claim
        self._engine = engine
        self._lock = threading.Lock()
        self._requests: list[Request] = []
        self._stopped = False
        self.artifacts: list[str] = []  # artifact keys that its result references
        self.dropped = False  # cancelled, or claimed by another worker: nothing may be written

    @property
    def begun(self) -> bool:
        """Whether any of its requests has left the engine's queue."""
        return any(request.state is not State.WAITING for request in tuple(self._requests))

    def make(self, requests: Sequence[Request]) -> list[Any]:
        """Submit all requests to the engine, and return their results.

        If one fails the others are stopped, and its error is raised: the engine's, or `Aborted` after `stop`. Either
        way no request of the job is left in the engine.
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
        if errors:  # requests stopped because of another's error are ignored
            raise next((error for error in errors if not isinstance(error, Aborted)), errors[0])
        return [future.result() for future in futures]

    def stop(self) -> None:
        """Remove it from the engine, at the next iteration."""
        with self._lock:
            self._stopped = True
            for request in self._requests:
                self._engine.abort(request.id)

    def abandon(self) -> None:
        """Stop it, and write no outcome."""
        self.dropped = True
        self.stop()


class ActiveJobs:
    """All active jobs, by id. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._works: dict[str, ActiveJob] = {}

    def add(self, work: ActiveJob) -> None:
        """Add a job. An earlier attempt of it, whose lease this worker has lost, is dropped."""
        with self._lock:
            before = self._works.get(work.claim.id)
            self._works[work.claim.id] = work
        if before is not None:
            before.abandon()

    def remove(self, work: ActiveJob) -> None:
        with self._lock:
            if self._works.get(work.claim.id) is work:
                del self._works[work.claim.id]

    def works(self) -> list[ActiveJob]:
        with self._lock:
            return list(self._works.values())

    def __contains__(self, id: str) -> bool:
        return id in self._works

    def leases(self) -> dict[str, str]:
        """Return the attempts' fencing tokens by id."""
        with self._lock:
            return {id: work.claim.fence for id, work in self._works.items()}

    def abandon(self, id: str, fence: str | None = None) -> bool:
        """Abandon a job, if it is active and (where given) is this attempt."""
        with self._lock:
            work = self._works.get(id)
        if work is None or fence not in (None, work.claim.fence):
            return False
        work.abandon()
        return True
