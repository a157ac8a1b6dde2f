"""Commits the result of a step to its sequence."""

from __future__ import annotations

from collections.abc import Collection

from core.batching.request import Outcome
from llm.sequence import SequenceState
from llm.step import Share, StepResult


def commit(sequence: SequenceState, share: Share, result: StepResult, ends: Collection[int]) -> Outcome:
    """Advance a sequence by its share's result, which has no error and is not late; returns its request's outcome.

    Depends on its arguments alone, and changes the sequence alone. `ends` are the tokens that end answers of the model.
    """
    parameters, tokens = sequence.parameters, result.tokens
    sequence.pending = result.pending
    sequence.computed = share.start + share.length + result.accepted
    if result.scores:
        sequence.prompt_logprobs += result.scores
    if result.pooled is not None:
        sequence.pooled = result.pooled
    news = text = None
    if tokens is not None or (share.last and not parameters.max_tokens):
        news, text = sequence.take(tokens or (), result.logprobs, ends)
    progress = (0 if tokens is None else sequence.answered, parameters.max_tokens)
    return Outcome(progress, None, news, text, None, text is not None)
