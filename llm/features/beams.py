"""Beam search: one request's beams, each of which is a sequence in the cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from contract.errors import CONTEXT_LENGTH, UNSUPPORTED, Invalid
from core.batching.request import Outcome, Request
from llm.cache.pages import PAGE
from llm.features.beam_search import BeamSearch
from llm.features.feature import SequenceFeature
from llm.parameters import Logprob, TextDelta, TextParameters
from llm.sequence import SequenceState
from llm.step import Share, StepResult


class BeamFeature(SequenceFeature):
    """The beams of a search: they begin with what they have in common, and go on together."""

    name = "beams"

    def is_requested(self, parameters: TextParameters) -> bool:
        return parameters.beams > 0

    def check(self, request: Request) -> None:
        """Reject a search whose beams cannot all be in the cache, or in one forward."""
        search: TextParameters = request.parameters
        if self.parts.backend.spread:  # pages are copied in this rank's cache only
            raise Invalid("use_beam_search", "is not supported where the model is spread over GPUs", UNSUPPORTED)
        if search.beams > (most := min(self.parts.sequences, self.parts.rows)):
            raise Invalid("n", f"{search.beams} beams are more than the {most} sequences that run at once here")
        pages = -(-len(search.prompt) // PAGE) + search.beams * (2 + -(-search.max_tokens // PAGE))
        if pages > self.parts.pages.capacity:
            raise Invalid("max_tokens", f"{search.beams} beams of so many tokens do not fit the cache", CONTEXT_LENGTH)

    def options(self, request: Request) -> Mapping[str, Any]:
        model = self.parts.model
        return {"beams": BeamSearch(request.parameters, model.ends, model.vocabulary)}

    def release(self, sequence: SequenceState) -> None:
        """Make what running beams have in common the prompt that is read again first."""
        beams = sequence.beams
        if beams is not None and beams.running:
            sequence.tokens = [*beams.parameters.prompt, *beams.common]
            sequence.prompt = len(sequence.tokens)

    def rows(self, sequence: SequenceState, rows: int) -> int:
        beams = sequence.beams
        return len(beams.states) * self._each(beams) if beams is not None and beams.states else rows

    def reserve(self, sequence: SequenceState) -> bool | None:
        beams = sequence.beams
        if beams is None:
            return None
        if not self.parts.allocator.grow_beams(beams, self._each(beams)):
            return False
        return True if beams.states else None

    def shares(self, sequence: SequenceState) -> list[Share] | None:
        beams = sequence.beams
        if beams is None or not beams.states:
            return None
        count = self._each(beams)
        return [Share(state, state.computed, count, not state.unread) for state in beams.states]

    def outcome(
        self, sequence: SequenceState, shares: Sequence[Share], results: Sequence[StepResult]
    ) -> Outcome | None:
        """Let beams go on, by the results of their shares; or begin, by that of what they have in common."""
        parts, beams, candidates = self.parts, sequence.beams, list[Logprob]()
        assert beams is not None
        for share, result in zip(shares, results, strict=True):
            parts.guessing.settle(share, result)
            share.sequence.computed = share.start + share.length
            parts.publish(share.sequence, share.sequence.computed)
            candidates += result.logprobs
        total = beams.width * beams.parameters.max_tokens
        if len(candidates) < len(shares):  # more is to be read
            return Outcome((beams.width * beams.length, total))
        resumed = beams.length > 0 and not beams.states
        parents = [0] * len(beams.running) if resumed else beams.advance(candidates)
        news, text = TextDelta("", tuple(beam.tokens[-1] for beam in beams.running)), None
        if parents:
            beams.states = beams.states or [sequence]
            parts.allocator.fork(beams, parents)
            for state, beam in zip(beams.states, beams.running, strict=True):
                state.tokens, state.prompt = [*beams.parameters.prompt, *beam.tokens], len(beams.parameters.prompt)
        else:
            text = beams.result(parts.model.tokenizer, sequence.cached)
        progress = (beams.width * beams.length, total)
        return Outcome(progress, token=news, result=text, finished=text is not None)

    def _each(self, beams: BeamSearch[SequenceState]) -> int:
        """The tokens of each running beam in the next step: one, or more that a preempted search reads again."""
        unread = max((state.unread for state in beams.states), default=0)
        return min(unread, max(1, self.parts.planner.chunk // beams.width)) or 1
