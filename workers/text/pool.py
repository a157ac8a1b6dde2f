"""Serves several text models as one runner, as `pipeline.model_pool` does image models."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from core.batching.request import Request
from core.batching.runner import NotYet
from core.config import Settings
from llm.parallel.micro_batches import MicroBatches
from llm.runner import TextRunner
from llm.sampling.token_counts import table_bytes
from pipeline.model_pool import Checked, ModelPool


class TextPool(ModelPool[TextRunner]):
    """A pool of text models, each with places and a KV cache of its own: requests of one never wait for another's.

    A request that is preempted does not keep its model in memory.
    """

    modality = "text"

    def admit(self, request: Request) -> NotYet | None:
        refusal = super().admit(request)
        if refusal is None or refusal.resource or refusal.pending:
            return refusal
        (resource,) = self.resources(request)
        return NotYet(resource)

    @property
    def pace_s(self) -> float:
        return self._first.pace_s

    @property
    def overlaps(self) -> bool:
        return self._first.overlaps

    def reserve(self, requests: Sequence[Request]) -> bool:
        return self._of(requests[0]).reserve(requests)

    def preempt(self, request: Request) -> None:
        asset, runner = self._leases.pop(request.id)
        runner.preempt(request)
        request.checked = Checked(weakref.ref(runner), request.checked)
        self._models.give([asset])

    def _loading_bytes(self, name: str) -> int:
        return self._sizes.get(name, super()._loading_bytes(name))  # its own: it shares no parts

    @property
    def _first(self) -> TextRunner:
        first = self.resident(self.names[0])
        assert first is not None, "the first model stays in memory"
        return first


def size_bytes(runner: TextRunner) -> int:
    """Return the memory of a model and its draft: weights, packed ones included, keys and values."""
    return runner.execution.size_bytes + runner.guessing.size_bytes


def later_bytes(settings: Settings, runner: TextRunner) -> int:
    """Return the memory that requests of a model may come to take: LoRAs, and counts of tokens for penalties."""
    loras = settings.text_loras_mib * 2**20 if settings.text_loras else 0
    rows, batches = len(runner.execution.cache.table), MicroBatches.count(runner.pipeline)
    return loras + batches * table_bytes(rows, runner.model.vocabulary)
