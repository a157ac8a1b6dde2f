"""Embeddings: the pooled hidden states of prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from contract.errors import UNSUPPORTED, Invalid
from contract.text import NO_EMBEDDINGS
from core.batching.request import Request
from llm.features.feature import SequenceFeature
from llm.parameters import TextParameters
from llm.sequence import SequenceState
from llm.step import Share, StepResult


class PooledReader:
    """Pools the hidden states of a prompt's chunks."""

    reads_states = True

    def places(self, share: Share) -> range:
        return share.among(share.sequence.unpooled)

    def fill(self, share: Share, result: StepResult, x: Tensor) -> None:
        result.pooled = share.sequence.pooled.plus(x)


class EmbeddingFeature(SequenceFeature):
    """The embedding of a prompt, as `llm.features.pooling` pools it."""

    name = "embedding"
    reader = PooledReader()

    def is_requested(self, parameters: TextParameters) -> bool:
        return parameters.embed

    def check(self, request: Request) -> None:
        if reason := self.parts.model.pooling.reason:
            raise Invalid("model", f"{NO_EMBEDDINGS}: {reason}", UNSUPPORTED)

    def options(self, request: Request) -> Mapping[str, Any]:
        return {"pooling": self.parts.model.pooling}

    def take(self, sequence: SequenceState, result: StepResult) -> None:
        if result.pooled is not None:
            sequence.pooled = result.pooled
