"""Tokens that the device may still compute, and their log probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from llm.parameters import Logprob


class RowLogprobs(NamedTuple):
    """Log probabilities [n] of the tokens of n rows, and those of the most likely tokens with their ids, [n, k]."""

    rows: Sequence[int]
    logs: Tensor
    top: Tensor
    ids: Tensor

    def read(self, tokens: Sequence[int]) -> list[Logprob]:
        """The log probabilities of these tokens [n]. Waits for the device, if they are there."""
        ranked = [tuple(zip(i, t, strict=True)) for i, t in zip(self.ids.tolist(), self.top.tolist(), strict=True)]
        return [Logprob(t, log, best) for t, log, best in zip(tokens, self.logs.tolist(), ranked, strict=True)]


class PendingTokens:
    """The next tokens of a step that may still run: int64 [L] on the model's device, -1 where logits were not finite.

    Made on the thread that submits to the device. `on_device` are they there, which of greedy tokens alone the next
    step overwrites.
    """

    def __init__(self, tokens: Tensor, logprobs: Sequence[RowLogprobs] = ()) -> None:
        self.on_device = tokens
        self.known: list[int] | None = None  # once somebody has waited for them
        self._tokens = _copied(tokens)
        self._copies = [RowLogprobs(rows, *map(_copied, parts)) for rows, *parts in logprobs]
        self._logprobs: dict[int, Logprob] = {}
        self._event: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> list[int]:
        if self.known is None:
            if self._event is not None:
                self._event.synchronize()
            self.known = known = self._tokens.tolist()
            for copies in self._copies:
                self._logprobs.update(zip(copies.rows, copies.read([known[row] for row in copies.rows]), strict=True))
        return self.known

    def logprobs(self, row: int) -> Sequence[Logprob]:
        """The log probability of a token that was waited for, if it was requested."""
        return (self._logprobs[row],) if row in self._logprobs else ()


@dataclass(slots=True, eq=False)
class PendingToken:
    """The token at one row of those that are pending."""

    step: PendingTokens
    row: int

    @property
    def token(self) -> int:
        """The token; -1 while nobody has waited for it."""
        known = self.step.known
        return -1 if known is None else known[self.row]


def _copied(x: Tensor) -> Tensor:
    """`x` in host memory, once what is submitted to its device by now has ended."""
    if not x.is_cuda:
        return x.clone()
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
