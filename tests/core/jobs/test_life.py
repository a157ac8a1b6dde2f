"""Jobs live beside their model (see life.py): on walks of many steps, and wherever Hypothesis looks for trouble."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.core.jobs.life import FINAL, Life

WALKS, STEPS = 12, 150


def test_walks(client: redis.Redis, redis_url: str) -> None:
    seen: Counter[str] = Counter()
    for walk in range(WALKS):
        dice, life = Random(walk), Life(client, redis_url)
        names, weights = zip(*Life.OPERATIONS.items(), strict=True)
        for name in dice.choices(names, weights, k=STEPS):
            getattr(life, name)(dice)
            life.agrees()
        life.drain()
        life.close()
        seen += life.seen
    # A walk that meets nothing proves nothing.
    for what in (
        *("queue full", "claim too late", "renewed", "graced", "swept expired", "swept failed", "swept lost"),
        *("sent again, none there", "sent again, later ones there", "cancel of queued", "cancel of running"),
        "kept back while on offer",
        *("erase of queued", "erase of running", "erase of succeeded"),
        *("handed back running: refused", "handed back queued: refused", "succeed of running, 1 back: False"),
        *("succeed of queued, 0 back: False", "fail of succeeded, 0 back: False", "succeed of succeeded, 0 back: True"),
        *(f"claim of {state}" for state in ("running", "None", *FINAL)),
    ):
        assert seen[what] > 0, what


class Machine(RuleBasedStateMachine):
    """The same life, step by step by Hypothesis, which finds the shortest way to a failure."""

    new: Callable[[], Life]

    def __init__(self) -> None:
        super().__init__()
        self.life = type(self).new()

    @invariant()
    def agrees(self) -> None:
        self.life.agrees()

    def teardown(self) -> None:
        self.life.drain()
        self.life.close()


def _step(name: str) -> Callable[[Machine, Random], None]:
    def step(self: Machine, dice: Random) -> None:
        getattr(self.life, name)(dice)

    step.__name__ = name
    return step


def test_machine(client: redis.Redis, redis_url: str) -> None:
    dice = st.randoms(use_true_random=False)
    steps = {name: rule(dice=dice)(_step(name)) for name in Life.OPERATIONS}
    machine = type("Here", (Machine,), {"new": staticmethod(lambda: Life(client, redis_url)), **steps})
    examples = max(20, settings().max_examples // 4)
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=40))
