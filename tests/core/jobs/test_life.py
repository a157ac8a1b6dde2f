"""Jobs live beside their model (see life.py): on walks of many steps, and wherever Hypothesis looks for trouble."""

from __future__ import annotations

from collections import Counter
from random import Random

import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.core.jobs.life import FINAL, Life

WALKS, STEPS = 12, 150


def walk(client: redis.Redis, url: str, dice: Random, steps: int) -> Counter[str]:
    """What came about in a life of so many steps."""
    life = Life(client, url)
    names, weights = zip(*Life.OPERATIONS.items(), strict=True)
    for name in dice.choices(names, weights, k=steps):
        getattr(life, name)(dice)
        life.agrees()
    life.drain()
    life.close()
    return life.seen


def test_walks(client: redis.Redis, redis_url: str) -> None:
    seen = Counter[str]()
    for number in range(WALKS):
        seen += walk(client, redis_url, Random(number), STEPS)
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


@settings(max_examples=max(20, settings().max_examples // 4), suppress_health_check=list(HealthCheck))
@given(dice=st.randoms(use_true_random=False))
def test_any_walk(client: redis.Redis, redis_url: str, dice: Random) -> None:
    """Hypothesis draws each step, and finds the shortest way to a failure."""
    walk(client, redis_url, dice, 40)
