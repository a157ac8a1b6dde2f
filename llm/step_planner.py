"""Plans the next iteration of text requests: prefill or decode, how much of a prompt, how many guesses."""

from __future__ import annotations

from collections.abc import Sequence

from core.batching.cost import CostCurve
from core.batching.request import Request
from llm.cache.pages import PAGE
from llm.drafts.speculate import DraftLengths
from llm.drafts.speculator import Speculator
from llm.sequence import SequenceState

PREFILL, DECODE = "prefill", "decode"


class StepPlanner:
    """`chunk` tokens of one prompt go into an iteration: as many as keep the pace of those that decode."""

    def __init__(self, guessing: Speculator, cost: CostCurve, *, chunk: int, pace_s: float) -> None:
        self.chunk = self._most = chunk
        self._guessing = guessing
        self._cost = cost
        self._pace_s = pace_s

    def plan(self, request: Request, lengths: DraftLengths | None = None) -> None:
        """Set the phase and the guesses of a request's next iteration."""
        work: SequenceState = request.work
        request.phase = DECODE if work.decoding else PREFILL
        if work.beams is None:
            self._guessing.plan(work, lengths)
        work.guessable = work.guesses > 0
        if not work.decoding or work.pending is not None:
            work.guesses = 0

    def plan_all(self, requests: Sequence[Request], *, decoding: int) -> None:
        """Plan after an iteration in which so many requests got new tokens."""
        self.chunk = self._most
        while self.chunk > PAGE and self._cost(1) <= self._pace_s < self._cost(decoding + self.chunk):
            self.chunk //= 2
        lengths = self._guessing.lengths(decoding)
        for request in requests:
            if self._guessing.active or request.phase != DECODE:  # without guesses decoding has nothing to plan
                self.plan(request, lengths)
