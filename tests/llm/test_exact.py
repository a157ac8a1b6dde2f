"""Greedy answers are transformers' own: alone or in a crowd, sent away and read again, with guesses or without."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from core.batching.engine import Engine
from llm.checkpoints.load import TextModel
from llm.drafts.speculator import Speculator
from tests.llm import stage

MOST = 32
CLOSE = 1e-4  # between the two likeliest: closer than this, either may be written


@functools.cache
def asked() -> list[tuple[int, ...]]:
    made = stage.prompts(stage.emoji(), 80)
    assert len(set(made)) > 60
    return made


@functools.cache
def wanted() -> list[tuple[int, ...]]:
    return stage.generated(stage.emoji(), asked(), MOST)


def gap(model: TextModel, tokens: tuple[int, ...]) -> float:
    """Between the logits of the two likeliest next tokens."""
    top = stage.logits(model, tokens)[-1].topk(2).values
    return float(top[0] - top[1])


def check(
    found: list[tuple[int, ...]],
    expected: list[tuple[int, ...]],
    given: list[tuple[int, ...]],
    model: TextModel | None = None,
) -> list[str]:
    """Equal, but for flips at near ties, which are listed. The model is emoji-lm by default."""
    flips = []
    for i, (answer, reference) in enumerate(zip(found, expected, strict=True)):
        if answer == reference:
            continue
        at = next(n for n in range(len(reference)) if answer[: n + 1] != reference[: n + 1])
        apart = gap(model or stage.emoji(), given[i] + reference[:at])
        assert apart <= CLOSE, f"prompt {i} differs at token {at}, where the likeliest two are {apart} apart"
        flips.append(f"prompt {i}, token {at}: {apart:.1e} apart")
    print(f"{len(found)} answers, {len(flips)} flips: {flips}")
    return flips


def answered(
    model: TextModel, engine: Engine, given: list[tuple[int, ...]], most: int, *, on: bool
) -> list[tuple[int, ...]]:
    """Answers up to their ends; `on` has them go on behind it, so that they need many pages."""
    texts = stage.answers(engine, [stage.greedy(prompt, most + 16 if on else most, ignore_end=on) for prompt in given])
    return [stage.until_end(model, text.tokens)[:most] for text in texts]


@pytest.mark.quick("preempted", "draft-preempted", "lookup")
@pytest.mark.parametrize(
    ("count", "options", "guessing"),
    [
        (16, {"max_requests": 1}, False),
        (80, {"max_requests": 48}, False),
        (60, {"max_requests": 24, "pages": 48, "chunk": 5}, False),  # too few pages for all: many are sent away
        (60, {"max_requests": 16, "draft": "model"}, True),
        (40, {"max_requests": 24, "pages": 48, "chunk": 7, "draft": "model"}, True),
        (60, {"max_requests": 4, "draft": "lookup"}, True),
    ],
    ids=["alone", "in-flight", "preempted", "draft", "draft-preempted", "lookup"],
)
def test_prompts_on_our_kernels(
    count: int, options: dict[str, Any], guessing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # How many guesses pay off is a matter of acceptance alone here, not of how fast the machine is today.
    monkeypatch.setattr(Speculator, "lengths", lambda self, decoding: None)
    options = {**options, "kernels": stage.kernels()}
    if options.get("draft") == "model":
        options["draft"] = stage.emoji_draft()
    given = asked()[:count]
    with stage.serving(stage.emoji(), **options) as (engine, runner):
        preempted = watch(runner)
        found = answered(stage.emoji(), engine, given, MOST, on="pages" in options)
        assert bool(preempted) == ("pages" in options)
        assert (runner.guessing.guessed > 0) == guessing
    check(found, wanted()[:count], given)


@pytest.mark.quick(0)
@pytest.mark.parametrize("drafted", [False, True])
def test_prompts_on_torch(drafted: bool) -> None:
    """The models' own code on our attention, with too few pages."""
    given = asked()[:14]
    options = {"draft": stage.emoji_draft()} if drafted else {}
    with stage.serving(stage.emoji(), max_requests=12, pages=24, chunk=6, **options) as (engine, runner):
        preempted = watch(runner)
        found = answered(stage.emoji(), engine, given, MOST, on=True)
        assert preempted
    check(found, wanted()[:14], given)


def watch(runner: Any) -> list[str]:
    """Ids of requests that were sent away."""
    seen: list[str] = []
    preempt, release = runner.preempt, runner.release

    def watched(request: Any) -> None:
        seen.append(request.id)
        preempt(request)

    def released(request: Any) -> None:
        release(request)
        seen.pop()  # a release gives back in the same way

    runner.preempt, runner.release = watched, released
    return seen
