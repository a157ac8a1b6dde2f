"""Commits the result of a step to its sequence."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from core.batching.request import Outcome
from llm.features.feature import SequenceFeature
from llm.sequence import SequenceState
from llm.step import Share, StepResult


def commit(
    sequence: SequenceState, share: Share, result: StepResult, ends: Collection[int],
    features: Iterable[SequenceFeature] = (),
) -> Outcome:  # fmt: skip
    """Advance a sequence by its share's result, which has no error and is not late; returns its request's outcome.

    Depends on its arguments alone, and changes the sequence alone. `ends` are the tokens that end answers of the model,
    `features` those of the sequence.
    """
    parameters, tokens = sequence.parameters, result.tokens
    sequence.pending = result.pending
    sequence.computed = share.start + share.length + result.accepted
    for feature in features:
        feature.take(sequence, result)
    news = text = None
    if tokens is not None or (share.last and not parameters.max_tokens):
        news, text = sequence.take(tokens or (), result.logprobs, ends)
    progress = (0 if tokens is None else sequence.answered, parameters.max_tokens)
    return Outcome(progress, None, news, text, None, text is not None)
