"""Limits that memory lowered: halved at once, tried again after enough batches of about that width."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.batching.limits import _TRIAL, Limits
from tests.core.batching.fake import Clock, FakeRunner

MOST, GROUP = 16, ("step", "s")


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner(Clock(), limit=MOST)


def test_only_batches_wider_than_half_of_it_try_a_limit(runner: FakeRunner) -> None:
    limits = Limits()
    assert limits.of(runner, GROUP) == MOST and limits.lower(runner, GROUP, MOST) == 8
    for rows in (1, 4):
        for _ in range(2 * _TRIAL):
            limits.fitted(runner, GROUP, rows)
    assert limits.of(runner, GROUP) == 8, "a batch of half the limit says nothing of the whole"
    for _ in range(_TRIAL - 1):
        limits.fitted(runner, GROUP, 5)
    assert limits.of(runner, GROUP) == 8 and limits.of(runner, ("vae", "s")) == MOST
    limits.fitted(runner, GROUP, 5)
    assert limits.of(runner, GROUP) == MOST and limits.lowered() == {}


@given(st.lists(st.integers(1, MOST), min_size=1, max_size=6))
def test_each_failure_halves_and_doubles_the_trial(widths: list[int]) -> None:
    runner, limits, trial = FakeRunner(Clock(), limit=MOST), Limits(), _TRIAL
    for k, width in enumerate(widths):
        trial = _TRIAL * 2**k
        assert limits.lower(runner, GROUP, width) == limits.of(runner, GROUP) == max(1, width // 2)
    now = limits.of(runner, GROUP)
    for _ in range(trial - 1):
        limits.fitted(runner, GROUP, now)
    assert limits.of(runner, GROUP) == now
    limits.fitted(runner, GROUP, now)
    assert limits.of(runner, GROUP) == min(2 * now, MOST)
