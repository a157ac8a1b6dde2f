"""Adapters of a request: a lease on one while its sequence runs."""

from __future__ import annotations

from contract.errors import UNSUPPORTED, Invalid
from core.batching.request import Request
from llm.features.feature import SequenceFeature
from llm.parameters import TextParameters
from llm.sequence import SequenceState


class AdapterFeature(SequenceFeature):
    """The adapter that a request names."""

    name = "adapter"
    resource = "text adapters"

    def is_requested(self, parameters: TextParameters) -> bool:
        return bool(parameters.adapter)

    def check(self, request: Request) -> None:
        if (source := self.parts.adapters()) is None:
            raise Invalid("model", "has no adapters", UNSUPPORTED)
        source.check(request.parameters.adapter)

    def admit(self, sequence: SequenceState, *, wait: bool) -> bool:
        source = self.parts.adapters()
        assert source is not None
        if sequence.adapter is None:
            sequence.adapter = source.acquire(sequence.parameters.adapter, wait=wait)
        return sequence.adapter is not None

    def release(self, sequence: SequenceState) -> None:
        source = self.parts.adapters()
        if sequence.adapter is not None and source is not None:
            source.release(sequence.adapter)
            sequence.adapter = None
