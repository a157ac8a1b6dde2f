"""Who is guessed for and how far: what is not worth a guess gets none, and what is learnt counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm.backends.select import select
from llm.drafts import speculator
from llm.drafts.drafter import DraftRequest, LookupDrafter
from llm.drafts.speculate import MOST, USUAL, AcceptanceRate, DraftTokens
from llm.drafts.speculator import Speculator
from llm.parameters import TextParameters
from llm.runner import TextRunner
from llm.sequence import SequenceState
from llm.step import Share, StepResult
from tests.llm import stage

REPEATED = (7, 8, 9, 10) * 4  # whose end stood there before


def work(tokens: tuple[int, ...] = REPEATED, **wanted: Any) -> SequenceState:
    return stage.state_of(TextParameters(tokens, **{"max_tokens": 20, "temperature": 0.0, **wanted}))


def test_nobody_guesses_for_what_looks_at_every_token_or_where_nobody_can() -> None:
    guessing = Speculator(LookupDrafter())
    free, penalized, biased = work(), work(repetition_penalty=1.3), work(logit_bias=((8, -100),))
    for one in (free, penalized, biased):
        guessing.plan(one)
    assert free.guesses and penalized.guesses == biased.guesses == 0
    free.guesses = 2
    Speculator().plan(free)
    assert free.guesses == 0 and Speculator().lengths(4) is None


@given(st.integers(1, 40), st.integers(1, 64), st.floats(0.01, 0.99))
def test_guesses_end_before_the_answer_does(left: int, decoding: int, acceptance: float) -> None:
    guessing = Speculator(LookupDrafter())
    guessing.observe(8, 0.010)
    one = work(max_tokens=left)
    one.pace = AcceptanceRate(acceptance)
    guessing.plan(one, guessing.lengths(decoding))
    assert one.guesses <= min(MOST, left - 1)
    (share,) = guessing.make([Share(one, 15, 1, True)])
    assert share.guess.tokens == [7, 8, 9, 10, 7, 8, 9, 10][: one.guesses]


def test_a_seeded_text_is_guessed_for_alike_at_any_load() -> None:
    """Where rows are dear nobody else is guessed for."""
    guessing = Speculator(LookupDrafter())
    for rows in (1, 2, 64) * 20:
        guessing.observe(rows, 0.001 * rows)
    dear = guessing.lengths(64)
    seeded, free = work(temperature=1.0, seed=5), work()
    for one in (seeded, free):
        one.pace = AcceptanceRate(0.5)
        guessing.plan(one, dear)
    alone = work(temperature=1.0, seed=5)
    alone.pace = AcceptanceRate(0.5)
    guessing.plan(alone)
    assert seeded.guesses == alone.guesses != 0 and free.guesses == 0


def right(count: int) -> StepResult:
    result = StepResult()
    result.accepted = count
    return result


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_what_came_of_guesses_is_counted(kept: int) -> None:
    guessing, one = Speculator(LookupDrafter()), work()
    guessing.plan(one)
    assert one.pace is not None
    before = one.pace.acceptance
    guessing.settle(Share(one, 15, 1, True, DraftTokens([7, 8, 9])), right(kept))
    assert (guessing.guessed, guessing.accepted) == (3, kept)
    assert (one.pace.acceptance > before) == (kept == 3)
    guessing.settle(Share(one, 16, 1, True), StepResult())
    assert guessing.guessed == 3


@pytest.mark.parametrize("beside_lane", [False, True])
def test_a_drafter_is_timed_before_requests_come(beside_lane: bool) -> None:
    """On tokens of nobody: its guesses do not count, and its first, slow ones do not stay its price."""
    runner = TextRunner(stage.small(), draft=stage.other(), kernels=stage.kernels(), context=64)
    try:
        runner.prepare(beside_lane=beside_lane)
        guessing = runner.guessing
        assert guessing._draft_s > 0 and guessing.guessed == 0
        assert guessing.drafter is not None and runner.held() == 0
    finally:
        runner.close()


def test_what_is_usual_is_learnt_from_all_but_seeded_texts() -> None:
    """Texts that nobody foresees soon get no guesses from their first token on, and sometimes one is tried again."""
    guessing = Speculator(LookupDrafter())
    guessing.observe(1, 0.010)
    guessing.observe(16, 0.100)
    tried = []
    for _ in range(300):
        one = work()
        guessing.plan(one, guessing.lengths(1))
        tried.append(one.guesses > 0)
        if one.guesses:
            guessing.settle(Share(one, 15, 1, True, DraftTokens([7] * one.guesses)), StepResult())
    assert tried[0] and 1 <= sum(tried[200:]) < 25
    seeded = work(temperature=1.0, seed=5)
    guessing.plan(seeded)
    assert seeded.pace is not None and seeded.pace.acceptance == USUAL


def test_guesses_end_where_tiles_do() -> None:
    """By costs that rise in steps, and not where they are dear."""
    guessing = Speculator(LookupDrafter())
    for rows in range(1, 17):
        guessing.observe(rows, 0.001 * -(-rows // 4))
    one = work()
    one.pace = AcceptanceRate(0.6)
    guessing.plan(one, guessing.lengths(1))
    assert one.guesses == 3
    guessing.plan(one, guessing.lengths(64))
    assert one.guesses == 0


def test_a_drafter_is_timed_on_no_more_guesses_than_it_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no graphs for more."""
    counts: list[int] = []

    class Blocks(LookupDrafter):
        reads, at_once, most = True, True, 3

        def guess(self, requests: Sequence[DraftRequest]) -> list[DraftTokens]:
            counts.extend(request.count for request in requests)
            return [DraftTokens([]) for _ in requests]

    monkeypatch.setattr(speculator, "_TIMED_S", 0.0)
    Speculator(Blocks()).time(select(stage.small(), pages=4, sequences=2, context=64))
    assert counts and {*counts} == {3}
