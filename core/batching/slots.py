"""Numbered places and amounts of memory, handed out and taken back.

A slot is an integer; its user decides what lies in it (latents, features, pages of the KV cache).
"""

from __future__ import annotations

from bisect import insort
from operator import neg


class IntegrityError(RuntimeError):
    """The books do not balance: a slot leaked, was given back twice, or was never taken."""


class Slots:
    """`capacity` slots, the lowest free one first, so that equal histories give equal slots."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, not {capacity}")
        self.capacity = capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def taken(self) -> int:
        return len(self._taken)

    def take(self, count: int = 1) -> list[int] | None:
        """Take `count` slots, or none at all: returns None where fewer are free."""
        if count < 0:
            raise ValueError(f"cannot take {count} slots")
        if count > len(self._free):
            return None
        slots = [self._free.pop() for _ in range(count)]
        self._taken.update(slots)
        return slots

    def give(self, slots: list[int]) -> None:
        """Give slots back. Raises `IntegrityError` for one that is not taken."""
        for slot in slots:
            if slot not in self._taken:
                raise IntegrityError(f"slot {slot} is given back but not taken")
            self._taken.remove(slot)
            insort(self._free, slot, key=neg)

    def check(self) -> None:
        """Raise `IntegrityError` unless every slot is either free or taken, once."""
        if sorted([*self._free, *self._taken]) != list(range(self.capacity)):
            free, counts = len(self._free), len(self._taken)
            raise IntegrityError(f"{self.capacity} slots, but {free} free and {counts} taken")


class Budget:
    """An amount, in bytes, of which no more than `capacity` is out at any time."""

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(f"capacity must not be negative, not {capacity}")
        self.capacity = capacity
        self.taken = 0

    def take(self, amount: int) -> bool:
        """Take so much, or nothing: returns False where less is left."""
        if amount < 0:
            raise ValueError(f"cannot take {amount} bytes")
        if self.taken + amount > self.capacity:
            return False
        self.taken += amount
        return True

    def give(self, amount: int) -> None:
        """Give it back. Raises `IntegrityError` for more than is out."""
        if not 0 <= amount <= self.taken:
            raise IntegrityError(f"{amount} bytes are given back, but {self.taken} are out")
        self.taken -= amount
