"""The gate with real threads: many or one, the one first, and nobody left standing when it closes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.crew import PATIENCE_S, eventually
from workers.claims.shared_lock import SharedLock


class Guest:
    """A thread that goes in, stays until it is told to leave, and tells where it is."""

    def __init__(self, shared_lock: SharedLock, alone: bool, guests: list[Guest]) -> None:
        self.alone = alone
        self.where, self.breach = "outside", False
        self._go = threading.Event()
        self._shared_lock = shared_lock
        self._guests = guests
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        if not self._shared_lock.enter(alone=self.alone):
            self.where = "turned away"
            return
        self.where = "inside"
        # Looked at by everyone who is inside: a breach cannot hide between two looks of the test.
        company = [guest for guest in self._guests if guest is not self and guest.where == "inside"]
        self.breach = bool(company) if self.alone else any(guest.alone for guest in company)
        self._go.wait(PATIENCE_S)
        self.where = "left"
        self._shared_lock.leave()

    def leave(self) -> None:
        self._go.set()
        self.join()

    def join(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


@contextmanager
def party(shared_lock: SharedLock) -> Iterator[list[Guest]]:
    guests: list[Guest] = []
    yield guests
    shared_lock.close()
    for guest in guests:
        guest.leave()
        assert not guest.breach


def count(guests: list[Guest], where: str, alone: bool) -> int:
    return sum(guest.where == where and guest.alone is alone for guest in guests)


@given(st.lists(st.sampled_from(["many", "alone", "leave", "leave last"]), max_size=14))
def test_many_or_one_and_the_one_first(steps: list[str]) -> None:
    shared_lock = SharedLock()
    with party(shared_lock) as guests:
        for step in steps:
            inside = [guest for guest in guests if guest.where == "inside"]
            if step.startswith("leave"):
                if inside:
                    inside[-1 if step == "leave last" else 0].leave()
            else:
                waits = count(guests, "outside", True)
                guests.append(Guest(shared_lock, step == "alone", guests))
                if step == "alone":
                    eventually(lambda: shared_lock.narrow)
                elif waits:
                    assert guests[-1].where == "outside"  # whoever must be alone goes first
            eventually(lambda: settled(guests))
            assert count(guests, "inside", True) <= 1
            assert not (count(guests, "inside", True) and count(guests, "inside", False))
        for _ in range(len(guests)):  # everybody gets in, whatever the order
            for guest in [guest for guest in guests if guest.where == "inside"]:
                guest.leave()
            eventually(lambda: settled(guests))
        assert all(guest.where == "left" for guest in guests)


def settled(guests: list[Guest]) -> bool:
    if count(guests, "inside", True):
        return True
    if count(guests, "outside", True):
        return count(guests, "inside", False) > 0
    return count(guests, "outside", False) == 0


def test_a_closed_gate_turns_all_away() -> None:
    shared_lock = SharedLock()
    with party(shared_lock) as guests:
        guests.append(Guest(shared_lock, True, guests))
        eventually(lambda: guests[0].where == "inside")
        guests += [Guest(shared_lock, alone, guests) for alone in (False, True, False, True)]
        shared_lock.close()
        for guest in guests[1:]:
            guest.join()
            assert guest.where == "turned away"
        assert not shared_lock.enter(alone=False) and guests[0].where == "inside"


@pytest.mark.parametrize("end", ["leave", "close"])
def test_changes_are_told(end: str) -> None:
    told: list[bool] = []
    shared_lock = SharedLock(on_change=lambda: told.append(shared_lock.narrow))
    assert shared_lock.enter(alone=False)
    with party(shared_lock) as guests:
        guests.append(Guest(shared_lock, True, guests))
        eventually(lambda: told == [True])
        if end == "leave":
            shared_lock.leave()
            eventually(lambda: guests[0].where == "inside")
            assert shared_lock.narrow
            guests[0].leave()
        else:
            shared_lock.close()
            guests[0].join()
        assert told == [True, False] and not shared_lock.narrow
