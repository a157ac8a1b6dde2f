"""Decides from which models' queues a worker takes jobs: of models that it has in memory always, of others by a rule.

Workers announce after which delay they could run the next job of a model: the work of the jobs that they have, by their
cards' capacity, and the time that the model takes to load where it is not in memory. A worker takes jobs of a model
that it would have to load if no other's delay is less, or if the first job has waited for longer than the load takes.
So no job waits for more than a load for a worker with a free place.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from core.jobs.placement import Model, ModelPlacement, Placement
from core.threads import VitalThread
from workers.claims.active_jobs import ActiveJobs
from workers.claims.prefetch import PrefetchLimiter
from workers.claims.store_retry import StoreRetry

if TYPE_CHECKING:
    from workers.handlers import JobHandler

log = logging.getLogger(__name__)

_EVERY_S = 1.0
_KNOWN_S = 10.0  # so long after the last announcement Redis keeps the delays of a model


class ModelRouter:
    """The routes of one worker. Thread-safe."""

    def __init__(
        self,
        worker: str,
        placement: ModelPlacement,
        store_retry: StoreRetry,
        handlers: Mapping[str, JobHandler],
        active_jobs: ActiveJobs,
        prefetch: PrefetchLimiter,
        capacities_per_s: Callable[[], Mapping[str, float]],
    ) -> None:
        """`handlers` may come to be more. `capacities_per_s` are those of the models' cards."""
        self._worker = worker
        self._placement = placement
        self._store_retry = store_retry
        self._handlers = handlers
        self._active_jobs = active_jobs
        self._prefetch = prefetch
        self._capacities_per_s = capacities_per_s
        self._stopping = threading.Event()
        self._thread = VitalThread(target=self._run, name="routes", daemon=True)

    def start(self) -> None:
        """Take jobs, of all models if the first announcement is not answered."""
        self._route([_model(handler) for handler in [*self._handlers.values()]])
        self.announce()
        self._thread.start()

    def stop(self) -> None:
        """Announce no more, and that no model is served. Call after `start`; idempotent."""
        self._stopping.set()
        self._thread.join()
        models = [_model(handler) for handler in [*self._handlers.values()]]
        self._store_retry.once(lambda: self._placement.withdraw(self._worker, models), None)

    def _run(self) -> None:
        while not self._stopping.wait(_EVERY_S):
            try:
                self.announce()
            except Exception:  # an ended thread would end the worker
                log.exception("the models could not be announced")

    def announce(self) -> None:
        """Announce the delays, and route by the answer; without one, as before."""
        begun = [work.claim.model for work in self._active_jobs.works()]
        capacities_per_s = self._capacities_per_s()
        busy_s = sum(1 / capacities_per_s[name] for name in begun if capacities_per_s.get(name))
        handlers = {_model(handler): handler for handler in [*self._handlers.values()]}
        # A model is in memory, or about to be, if it has jobs here.
        load_s = {model: 0.0 if handler.name in begun else handler.load_s for model, handler in handlers.items()}
        nothing: dict[Model, Placement] = {}
        delays_s = {model: busy_s + load_s[model] for model in handlers}
        placements = self._store_retry.once(lambda: self._placement.announce(self._worker, delays_s, _KNOWN_S), nothing)
        if placements:
            self._route([model for model, placement in placements.items() if takes(placement, load_s[model])])

    def _route(self, models: list[Model]) -> None:
        routes: dict[str, list[str]] = {}
        for queue, name in models:
            routes.setdefault(queue, []).append(name)
        self._prefetch.route(routes)


def takes(placement: Placement, load_s: float) -> bool:
    """Return whether a worker takes jobs of a model that it would have to load for `load_s`; 0: it has it."""
    return not load_s or placement.nearest or (placement.waited_s is not None and placement.waited_s > load_s)


def _model(handler: JobHandler) -> Model:
    return handler.modality, handler.name
