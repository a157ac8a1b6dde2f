"""Counts of tokens on the device are those of the host's lists, however sequences come, go, and are counted again."""

from __future__ import annotations

import gc
import weakref

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.batching.request import Outcome, Request
from llm.parameters import TextParameters
from llm.sampling.pending import PendingToken, PendingTokens
from llm.sampling.token_counts import TokenCounts
from llm.sequence import SequenceState
from tests.llm import stage

VOCABULARY = 8
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), max_size=6)


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), TOKENS, st.integers(-2, VOCABULARY - 1)), max_size=12))
def test_counts_are_those_of_the_tokens(events: list[tuple[int, bool, list[int], int]]) -> None:
    """Each event: a row, whether another sequence takes it, its new tokens, and a pending one (-1: NaN, -2: none)."""
    counts, works = TokenCounts(VOCABULARY, torch.device("cpu")), dict[int, SequenceState]()
    for number, (row, another, tokens, token) in enumerate(events):
        if another or row not in works:
            parameters = TextParameters((1, *tokens), 99, frequency_penalty=1.0)
            works[row] = stage.state_of(parameters, vocabulary=VOCABULARY)
        else:
            works[row].tokens += tokens
        work = works[row]
        work.row = row
        work.pending = None if token == -2 else PendingToken(PendingTokens(torch.tensor([5, token])), 1)
        if work.pending is not None and number % 2:
            work.pending.step.wait()
        for seen, count, each in zip(*counts.seen([*works.values()]), works.values(), strict=True):
            pending = [] if each.pending is None else [max(0, each.pending.step.on_device[1].item())]
            answer = torch.tensor(each.tokens[each.prompt :] + pending, dtype=torch.long)
            assert count.tolist() == answer.bincount(minlength=VOCABULARY).tolist()
            assert seen.nonzero()[:, 0].tolist() == sorted({*each.tokens, *pending})


def test_an_answer_that_has_ended_leaves_memory() -> None:
    works: list[weakref.ref[SequenceState]] = []

    def listener(request: Request, outcome: Outcome) -> None:
        if not outcome.finished:
            works.append(weakref.ref(request.work))

    with stage.serving(stage.small(), kernels=stage.kernels(), max_requests=2) as (engine, _):
        stage.submit(engine, stage.greedy((1, 2, 3), 8, frequency_penalty=1.0), listener=listener).result(60)
        stage.answers(engine, [stage.greedy((1, 2, 3), 2)])
        gc.collect()
        assert works and all(work() is None for work in works)
