"""Collects the token rows that requests contribute to one forward, and which of them need logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.kernels.kv_cache import TokenBatch
from llm.choose import SampleRequest
from llm.sequence import SequenceState
from llm.speculate import DraftTokens


@dataclass(slots=True, eq=False)
class ScheduledTokens:
    """A request's share of an iteration: `count` of its tokens from `start` on, then guesses."""

    work: SequenceState
    start: int
    count: int
    last: bool  # whether the next token is wanted


def gather_step(
    parts: Sequence[ScheduledTokens], guesses: Sequence[DraftTokens]
) -> tuple[TokenBatch, dict[int, SampleRequest]]:
    """All parts as one step, and by index those that want a next token."""
    tokens: list[int] = []
    positions: list[int] = []
    sequences: list[int] = []
    output_rows: list[int] = []
    sample_requests: dict[int, SampleRequest] = {}
    for i, (part, guess) in enumerate(zip(parts, guesses, strict=True)):
        work, start = part.work, part.start
        if part.count == 1 and not guess.tokens:  # most of hundreds
            tokens.append(work.tokens[start])
            positions.append(start)
            sequences.append(work.row)
        else:
            rows = part.count + len(guess.tokens)
            tokens += work.tokens[start : start + part.count]
            tokens += guess.tokens
            positions += range(start, start + rows)
            sequences += [work.row] * rows
        if part.last:
            sample_requests[i] = SampleRequest(work, len(output_rows), guess)
            output_rows += range(len(tokens) - 1 - len(guess.tokens), len(tokens))
    return TokenBatch.of(tokens, positions, sequences, output_rows), sample_requests
