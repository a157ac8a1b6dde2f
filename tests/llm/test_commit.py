"""What the result of a step changes in its sequence, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from llm.commit import commit
from llm.features.embeddings import EmbeddingFeature
from llm.features.pooling import PooledStates
from llm.features.prompt_scores import PromptScoreFeature
from llm.parameters import Logprob
from llm.sampling.pending import PendingToken, PendingTokens
from llm.step import Share, StepResult
from tests.llm import stage

PROMPT = (1, 40, 41, 42)


def result(**values: object) -> StepResult:
    filled = StepResult()
    for name, value in values.items():
        setattr(filled, name, value)
    return filled


def test_a_chunk_of_a_prompt_counts_as_computed_and_tells_nothing() -> None:
    sequence = stage.state_of(stage.greedy(PROMPT, 3))
    outcome = commit(sequence, Share(sequence, 0, 3, False), StepResult(), {2})
    assert sequence.computed == 3 and sequence.tokens == [*PROMPT] and sequence.pending is None
    assert outcome.progress == (0, 3) and outcome.token is None and not outcome.finished


def test_right_guesses_count_as_computed_and_the_last_token_does_not() -> None:
    sequence = stage.state_of(stage.greedy(PROMPT, 9))
    sequence.computed = 3
    outcome = commit(sequence, Share(sequence, 3, 1, True), result(tokens=[50, 51, 52], accepted=2), {2})
    assert sequence.tokens == [*PROMPT, 50, 51, 52] and sequence.computed == 6
    assert outcome.token is not None and outcome.token.tokens == (50, 51, 52) and outcome.progress == (3, 9)


def test_an_answer_ends_with_its_end_token_and_whatever_follows_is_dropped() -> None:
    sequence = stage.state_of(stage.greedy(PROMPT, 9))
    outcome = commit(sequence, Share(sequence, 3, 1, True), result(tokens=[50, 2, 52], accepted=2), {2})
    assert outcome.finished and outcome.result.tokens == (50, 2) and outcome.result.finish == "stop"


def test_a_pending_token_is_kept_for_the_next_step() -> None:
    sequence = stage.state_of(stage.greedy(PROMPT, 9))
    pending = PendingToken(PendingTokens(torch.tensor([60, 61])), 1)
    commit(sequence, Share(sequence, 0, 4, True), result(pending=pending), {2})
    assert sequence.pending is pending and pending.token == -1 and sequence.answered == 0
    pending.step.wait()
    commit(sequence, Share(sequence, 4, 1, True), result(tokens=(pending.token,)), {2})
    assert sequence.pending is None and sequence.tokens == [*PROMPT, 61] and sequence.computed == 5


def test_scores_and_pooled_states_are_kept_and_end_a_request_without_tokens() -> None:
    sequence = stage.state_of(stage.greedy(PROMPT, 0))
    pooled = PooledStates().plus(torch.ones(4, 8))
    parts: Any = SimpleNamespace()
    features = [EmbeddingFeature(parts), PromptScoreFeature(parts)]
    scores = [Logprob(40, -1.0, ()), Logprob(41, -2.0, ())]
    taken = result(pooled=pooled, scores=scores)
    outcome = commit(sequence, Share(sequence, 0, 4, True), taken, {2}, features)
    assert outcome.finished and outcome.result.finish == "length"
    assert torch.frombuffer(bytearray(outcome.result.pooled), dtype=torch.float32).tolist() == [1.0] * 8
    assert [*outcome.result.prompt_logprobs] == scores
