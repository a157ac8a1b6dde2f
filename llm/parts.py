"""Collects the token rows that requests contribute to one forward, and which of them need logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from core.kernels.kv_cache import TokenBatch
from llm.choose import SampleRequest, ScoreRequest
from llm.sequence import SequenceState
from llm.speculate import DraftTokens


@dataclass(slots=True, eq=False)
class ScheduledTokens:
    """A request's share of an iteration: `count` of its tokens from `start` on, then guesses.

    The first one may be its pending token. None: its last token is only waited for.
    """

    work: SequenceState
    start: int
    count: int
    last: bool  # whether its tokens end with this

    @property
    def scored(self) -> range:
        """The positions among its tokens whose logits give log probabilities of the prompt."""
        return self._among(self.work.scored)

    @property
    def pooled(self) -> range:
        """The positions among its tokens whose hidden states are pooled."""
        return self._among(self.work.unpooled)

    def _among(self, positions: range) -> range:
        start, stop = max(self.start, positions.start), min(self.start + self.count, positions.stop)
        return range(start, max(start, stop))


class Step(NamedTuple):
    """All parts of an iteration as one step, and by index those that want something of it."""

    tokens: TokenBatch
    sampled: dict[int, SampleRequest]  # that want a next token
    scored: dict[int, ScoreRequest]  # and log probabilities of prompts
    pooled: dict[int, slice]  # and hidden states: their places among these


def gather_step(parts: Sequence[ScheduledTokens], guesses: Sequence[DraftTokens]) -> Step:
    """Collect all parts as one step."""
    tokens: list[int] = []
    positions: list[int] = []
    sequences: list[int] = []
    output_rows: list[int] = []
    sample_requests: dict[int, SampleRequest] = {}
    score_requests: dict[int, ScoreRequest] = {}
    state_rows: list[int] = []
    pooled: dict[int, slice] = {}
    for i, (part, guess) in enumerate(zip(parts, guesses, strict=True)):
        work, start = part.work, part.start
        if part.count == 1 and not guess.tokens:  # most of hundreds
            pending = work.pending
            tokens.append(work.tokens[start] if pending is None else pending.known)
            positions.append(start)
            sequences.append(work.row)
            if pending is not None:  # it decodes
                sample_requests[i] = SampleRequest(work, len(output_rows), guess)
                output_rows.append(len(tokens) - 1)
                continue
        else:
            rows = part.count + len(guess.tokens)
            tokens += work.tokens[start : start + part.count]
            tokens += guess.tokens
            positions += range(start, start + rows)
            sequences += [work.row] * rows
        if work.parameters.prompt_logprobs and (scored := part.scored):
            score_requests[i] = ScoreRequest(work, scored, len(output_rows))
            zero = len(tokens) - len(guess.tokens) - part.count - start  # position 0's row
            output_rows += range(zero + scored.start, zero + scored.stop)
        if work.pooling is not None and (states := part.pooled):
            pooled[i] = slice(len(state_rows), len(state_rows) + len(states))
            zero = len(tokens) - part.count - start
            state_rows += range(zero + states.start, zero + states.stop)
        if part.last and work.parameters.max_tokens:
            sample_requests[i] = SampleRequest(work, len(output_rows), guess)
            output_rows += range(len(tokens) - 1 - len(guess.tokens), len(tokens))
    step = TokenBatch.of(tokens, positions, sequences, output_rows, state_rows)
    if not score_requests and all(request.plain for request in sample_requests.values()):
        step = replace(step, logits=False)
    return Step(step, sample_requests, score_requests, pooled)
