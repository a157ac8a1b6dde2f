"""A request's share of an iteration: the token rows that it contributes to a forward, and what comes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from core.kernels.kv_cache import TokenBatch
from llm.drafts.speculate import NO_GUESS, DraftTokens
from llm.features.pooling import PooledStates
from llm.parameters import Logprob
from llm.sampling.pending import PendingTokens
from llm.sequence import SequenceState


@dataclass(slots=True, eq=False)
class ScheduledTokens:
    """A request's share of an iteration: `count` of its tokens from `start` on, then guesses.

    The first one may be its pending token. `count` 0: its last token is only waited for. Where it wants a next token,
    its logits begin at row `first`, one more row than it has guesses.
    """

    work: SequenceState
    start: int
    count: int
    last: bool  # whether its tokens end with this
    guess: DraftTokens = NO_GUESS
    first: int = -1
    # What the iteration computes: its next tokens, None where there are none, or why it failed. They are empty where
    # the mask of a grammar was late: it is to be run again. Of an answer that runs ahead they are those of the
    # iteration before, and this one's is the token of `pending` at row `first`.
    tokens: Sequence[int] | None = None
    logprobs: Sequence[Logprob] = ()  # of these
    error: BaseException | None = None
    pending: PendingTokens | None = None
    scores: Sequence[Logprob] = ()  # of the prompt's tokens
    pooled: PooledStates | None = None  # of an embedded prompt, with what was pooled before
    features: Tensor | None = None  # of positions that the drafter is yet to read
    # Of guesses that the device makes for the next iteration, with which the drafter reads what this one computes.
    next_guesses: int | None = None

    @property
    def plain(self) -> bool:
        """Return whether greedy decoding without adjustments suffices."""
        work = self.work
        adjusted = work.settings is not None or work.modifies_logits or self.guess.tokens
        return not adjusted and work.parameters.logprobs is None

    @property
    def position(self) -> int:
        """The position of its next token: that after the pending one, if there is one."""
        return len(self.work.tokens) + (self.work.pending is not None)

    @property
    def rows(self) -> range:
        """The rows of the logits of its next tokens."""
        return range(self.first, self.first + len(self.guess.tokens) + 1)

    @property
    def scored(self) -> range:
        """The positions among its tokens whose logits give log probabilities of the prompt."""
        return self._among(self.work.scored)

    @property
    def pooling(self) -> range:
        """The positions among its tokens whose hidden states are pooled."""
        return self._among(self.work.unpooled)

    def _among(self, positions: range) -> range:
        start, stop = max(self.start, positions.start), min(self.start + self.count, positions.stop)
        return range(start, max(start, stop))


class Step(NamedTuple):
    """All parts of a forward as one step, and those that want something of it."""

    tokens: TokenBatch
    sampled: list[ScheduledTokens]  # that want a next token
    scored: list[tuple[ScheduledTokens, slice]]  # log probabilities of the prompt: from these rows of the logits
    pooled: list[tuple[ScheduledTokens, slice]]  # pooled states: these of the step's


def gather_step(parts: Sequence[ScheduledTokens]) -> Step:
    """Collect all parts as one step."""
    tokens: list[int] = []
    positions: list[int] = []
    sequences: list[int] = []
    output_rows: list[int] = []
    state_rows: list[int] = []
    sampled: list[ScheduledTokens] = []
    scored: list[tuple[ScheduledTokens, slice]] = []
    pooled: list[tuple[ScheduledTokens, slice]] = []
    for part in parts:
        work, start, guess = part.work, part.start, part.guess.tokens
        pending = work.pending
        if part.count == 1 and not guess:  # most of hundreds
            tokens.append(work.tokens[start] if pending is None else pending.at(work.pending_row))
            positions.append(start)
            sequences.append(work.row)
            if pending is not None:  # it decodes
                part.first = len(output_rows)
                sampled.append(part)
                output_rows.append(len(tokens) - 1)
                continue
        else:
            rows = part.count + len(guess)
            tokens += work.tokens[start : start + part.count]
            tokens += guess
            positions += range(start, start + rows)
            sequences += [work.row] * rows
        zero = len(tokens) - len(guess) - part.count - start  # position 0's row
        if work.parameters.prompt_logprobs and (places := part.scored):
            scored.append((part, slice(len(output_rows), len(output_rows) + len(places))))
            output_rows += range(zero + places.start, zero + places.stop)
        if work.pooling is not None and (places := part.pooling):
            pooled.append((part, slice(len(state_rows), len(state_rows) + len(places))))
            state_rows += range(zero + places.start, zero + places.stop)
        if part.last and work.parameters.max_tokens:
            part.first = len(output_rows)
            sampled.append(part)
            output_rows += range(len(tokens) - 1 - len(guess), len(tokens))
    step = TokenBatch.of(tokens, positions, sequences, output_rows, state_rows)
    if any(part.work.adapter is not None for part in parts):
        packed = [None if part.work.adapter is None else part.work.adapter.packed for part in parts]
        counts = [part.count + len(part.guess.tokens) for part in parts]
        step = replace(step, adapters=[own for own, count in zip(packed, counts, strict=True) for _ in range(count)])
    if not scored and all(part.work.plain and not part.guess.tokens for part in sampled):
        step = replace(step, logits=False)
    return Step(step, sampled, scored, pooled)
