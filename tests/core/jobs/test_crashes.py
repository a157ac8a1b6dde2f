"""Who runs beside others after a crash: the poison is found, innocents end, and crashes are few, whatever happens."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.jobs.crashes import COMPANY, alone_from


@dataclass
class Fleet:
    """Workers that take jobs as ours do: many at once, or one that must be alone. A poison kills whoever runs it."""

    slots: int
    max_attempts: int
    poisons: set[int]
    waiting: list[int]
    lost: dict[int, int] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    crashes: int = 0

    def turn(self, dice: Random) -> None:
        """One worker fills its slots from the front of the queue; then all of it ends, or it crashes."""
        held: list[int] = []
        while self.waiting and len(held) < self.slots:
            job = self.waiting[0]
            if self.lost.get(job, 0) >= alone_from(self.max_attempts):
                if not held:
                    held.append(self.waiting.pop(0))
                break
            held.append(self.waiting.pop(0))
        if not self.poisons & set(held):
            self.done |= set(held)
            return
        self.crashes += 1
        ended = {job for job in held if job not in self.poisons and dice.random() < 0.2}  # just before
        self.done |= ended
        for job in held:
            if job not in ended:
                self.lost[job] = self.lost.get(job, 0) + 1
                if self.lost[job] >= self.max_attempts:
                    self.failed.add(job)
                else:
                    self.waiting.insert(0, job)


@given(
    jobs=st.integers(1, 60), poisons=st.integers(0, 4), slots=st.integers(1, 32),
    max_attempts=st.integers(1, 8), dice=st.randoms(use_true_random=False),
)  # fmt: skip
def test_poison_is_found_and_innocents_end(
    jobs: int, poisons: int, slots: int, max_attempts: int, dice: Random
) -> None:
    order = list(range(jobs))
    dice.shuffle(order)
    fleet = Fleet(slots, max_attempts, set(order[:poisons]), sorted(order))
    for _ in range(1000):
        if not fleet.waiting:
            break
        fleet.turn(dice)
    assert not fleet.waiting
    assert len(fleet.done) + len(fleet.failed) == jobs and not fleet.done & fleet.failed
    assert fleet.poisons <= fleet.failed
    if max_attempts > 1:
        assert fleet.failed == fleet.poisons  # nobody else
        innocent = {job: lost for job, lost in fleet.lost.items() if job not in fleet.poisons}
        assert max(innocent.values(), default=0) <= alone_from(max_attempts) <= COMPANY
    # However many there are beside it, a poison costs as many workers as it has lives.
    assert fleet.crashes <= max_attempts * len(fleet.poisons)


@pytest.mark.parametrize(("max_attempts", "alone"), [(1, 1), (2, 1), (3, 2), (4, 2), (9, 2)])
def test_the_last_life_is_spent_alone(max_attempts: int, alone: int) -> None:
    assert alone_from(max_attempts) == alone
    assert max_attempts == 1 or alone <= max_attempts - 1
