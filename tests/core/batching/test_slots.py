"""Slots: never one in two hands, never one lost, the lowest free one first."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.batching.slots import IntegrityError, Slots

FIXED = settings(deadline=None, derandomize=True, database=None, max_examples=200)


@FIXED
@given(st.integers(1, 12), st.lists(st.tuples(st.booleans(), st.integers(0, 13)), max_size=60))
def test_books_balance_whatever_is_taken_and_given(capacity: int, moves: list[tuple[bool, int]]) -> None:
    slots, hands = Slots(capacity), list[list[int]]()
    for take, number in moves:
        if take:
            free = sorted(set(range(capacity)) - {s for hand in hands for s in hand})
            taken = slots.take(number)
            if number > len(free):
                assert taken is None  # all or nothing
            else:
                assert taken == free[:number]  # the lowest first: equal histories give equal slots
                hands.append(taken)
        elif hands:
            slots.give(hands.pop(number % len(hands)))
        slots.check()
        assert slots.taken == sum(map(len, hands))
        assert slots.free == capacity - slots.taken


def test_what_is_not_taken_cannot_be_given() -> None:
    slots = Slots(4)
    slots.take(2)
    for wrong, named in (([2], 2), ([4], 4), ([-1], -1), ([0, 0], 0)):
        with pytest.raises(IntegrityError, match=f"slot {named} "):
            slots.give(wrong)
        slots.check()


def test_check_sees_a_slot_that_is_lost_or_in_two_hands() -> None:
    slots = Slots(4)
    slots.take(2)
    slots._taken.discard(1)
    with pytest.raises(IntegrityError):
        slots.check()
    slots._free.append(0)
    with pytest.raises(IntegrityError):
        slots.check()


@pytest.mark.parametrize("capacity", [0, -1])
def test_there_is_at_least_one(capacity: int) -> None:
    with pytest.raises(ValueError, match="capacity"):
        Slots(capacity)


def test_a_negative_number_takes_nothing() -> None:
    with pytest.raises(ValueError, match="-1"):
        Slots(4).take(-1)
