"""Answers whose masks are slow wait, so that others' steps are delayed by a bounded share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.batching.engine import Engine
from core.batching.request import Outcome, Request
from llm import model_runner
from llm.grammars import constrain, mask_turns
from llm.grammars.mask_turns import MaskTurns
from llm.parameters import TextParameters
from llm.runner import TextRunner
from llm.sequence import SequenceState
from llm.step import Share, StepResult
from tests.llm import stage

FORWARD_S = 0.002


@dataclass
class Matcher:
    """As MaskTurns sees one: its masks take what is expected."""

    tenant: str
    expected_s: float
    ready: bool = False
    turn: int = 0
    steps: list[int] = field(default_factory=list)


def run(matchers: list[Matcher], *, plain: int, iterations: int) -> list[float]:
    """Seconds of each iteration beyond its forward; `plain` answers need no mask."""
    turns, excess_s = MaskTurns(), []
    for number in range(iterations):
        answers: list[Any] = [(matcher.tenant, matcher) for matcher in matchers] + [("plain", None)] * plain
        waiting = turns.waiting(answers, FORWARD_S)
        assert all(i < len(matchers) for i in waiting) and len(waiting) < len(answers)
        taken = [matcher for i, matcher in enumerate(matchers) if i not in waiting]
        excess_s.append(max(0.0, sum(matcher.expected_s for matcher in taken) - FORWARD_S))
        for matcher in taken:
            matcher.steps.append(number)
    return excess_s


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(1e-5, 0.025)), min_size=1, max_size=40))
def test_masks_delay_those_that_need_none_by_a_share(masks: list[tuple[str, float]]) -> None:
    matchers = [Matcher(*mask) for mask in masks]
    excess_s = run(matchers, plain=1, iterations=300)
    slowest_s = max(matcher.expected_s for matcher in matchers)
    assert sum(excess_s) <= mask_turns._SHARE * 300 * FORWARD_S + mask_turns._BURST_S + slowest_s
    assert max(excess_s) <= mask_turns._BURST_S + slowest_s


def test_nobody_waits_for_ever_and_a_tenants_quick_masks_hardly() -> None:
    slow = [Matcher("slow", 0.02) for _ in range(10)]
    quick = [Matcher("quick", 5e-5) for _ in range(4)]
    run([*slow, *quick], plain=2, iterations=600)
    assert all(len(matcher.steps) in (1, 2) for matcher in slow)
    assert all(len(matcher.steps) > 500 for matcher in quick)


def test_what_delayed_nobody_is_not_owed_to_those_who_come_later() -> None:
    matcher, turns = Matcher("slow", 0.02), MaskTurns()
    alone: list[Any] = [("slow", matcher)]
    for _ in range(1000):
        assert not turns.waiting(alone, FORWARD_S)
    waited = [bool(turns.waiting([*alone, ("plain", None)], FORWARD_S)) for _ in range(200)]
    every = round((matcher.expected_s - FORWARD_S) / (mask_turns._SHARE * FORWARD_S))
    assert waited.count(False) >= 200 // every


def test_masks_within_the_forwards_time_never_wait_and_alone_somebody_goes() -> None:
    assert run([Matcher("a", FORWARD_S / 64) for _ in range(64)], plain=3, iterations=9) == pytest.approx([0.0] * 9)
    alone = [Matcher("a", 1.0), Matcher("b", 1.0)]
    run(alone, plain=0, iterations=8)
    assert [matcher.steps for matcher in alone] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    ready = [Matcher("a", 1.0, ready=True) for _ in range(5)]
    assert run(ready, plain=0, iterations=3) and all(len(matcher.steps) == 3 for matcher in ready)


SCHEMA = '{"type": "array", "items": {"type": "integer"}, "minItems": 60}'
MODEL = stage.small()
HELD = [TextParameters(stage.plain(MODEL, "x"), 12, seed=seed, json_schema=SCHEMA) for seed in range(3)]
FREE = TextParameters(stage.plain(MODEL, "y"), 60, seed=2, ignore_end=True)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Engine, TextRunner, list[tuple[int, ...]]]]:
    """An engine, its runner, and what it answers to `HELD` and `FREE`, one after the other."""
    with stage.serving(MODEL, kernels=stage.kernels()) as (engine, runner):
        yield engine, runner, [stage.answers(engine, [parameters])[0].tokens for parameters in (*HELD, FREE)]


def test_a_slow_grammar_delays_its_own_answers_alone_and_changes_none(
    served: tuple[Engine, TextRunner, list[tuple[int, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its masks were computed in every step; here each seems to take ten seconds."""
    engine, _, alone = served
    counts = {"held": 0, "free": 0}
    held_at_the_end: list[int] = []

    def listen(request: Request, outcome: Outcome) -> None:
        counts[request.tenant] += len(outcome.token.tokens) if outcome.token is not None else 0
        if request.tenant == "free" and outcome.finished:
            held_at_the_end.append(counts["held"])

    clock = itertools.count(0, 10)
    monkeypatch.setattr(constrain, "_BURST_S", 1e9)
    monkeypatch.setattr(constrain.time, "thread_time", lambda: float(next(clock)))
    futures = [
        stage.submit(engine, parameters, f"{i}", listener=listen, tenant="free" if i == 3 else "held")
        for i, parameters in enumerate((*HELD, FREE))
    ]
    assert [future.result(timeout=300).tokens for future in futures] == alone
    assert held_at_the_end[0] <= 9, "of 36 tokens: the first of each, and those before the cost was known"


def test_masks_that_are_late_are_left_to_the_next_step(
    served: tuple[Engine, TextRunner, list[tuple[int, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, runner, alone = served
    late = []
    commit, compute = runner._commit, model_runner._compute

    def noted(sequence: SequenceState, shares: Sequence[Share], results: Sequence[StepResult]) -> Outcome:
        late.extend(result for result in results if result.tokens == ())
        return commit(sequence, shares, results)

    monkeypatch.setattr(model_runner, "_compute", lambda matchers, enough: compute(matchers[:1], enough))
    monkeypatch.setattr(runner, "_commit", noted)
    assert [text.tokens for text in stage.answers(engine, [*HELD, FREE])] == alone
    assert len(late) >= 12
