"""What the tests of pools share: an engine over several models, and the stages of a test."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from core.batching.engine import Engine, Tick
from core.batching.request import Request
from core.batching.runner import Lane
from pipeline.model_pool import ModelPool


class PoolStage:
    """An engine over a pool that has started, on one lane."""

    def __init__(self, lane: Lane, pool: ModelPool[Any], served: Iterable[str]) -> None:
        """The models `served` are loaded first."""
        self.lane, self.pool = lane, pool
        self.ticks: list[Tick] = []
        self._numbers = itertools.count(1)
        for name in served:
            pool.load(name)
        self.engine = Engine([pool], on_tick=self.ticks.append)
        pool.retry_admission = self.engine.retry_admission

    def add(self, parameters: Any, model: str, tenant: str = "") -> Future[Any]:
        """Submit a request. On any thread."""
        request = Request(f"{next(self._numbers)}", self.pool.modality, parameters, model=model, tenant=tenant)
        return self.engine.submit(request)

    def close(self) -> None:
        self.engine.close()
        self.pool.close()
        self.lane.close()


S = TypeVar("S", bound=PoolStage)


def stages_of(kind: Callable[..., S]) -> Iterator[Callable[..., S]]:
    """A maker of stages, all of which are closed in the end."""
    opened: list[S] = []

    def make(*arguments: Any, **options: Any) -> S:
        opened.append(kind(*arguments, **options))
        return opened[-1]

    yield make
    for each in opened:
        each.close()
