"""Implements delta debugging (Zeller's ddmin): finds a short part of a list that still fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TypeVar

T = TypeVar("T")


def shrink(whole: Sequence[T], fails: Callable[[list[T]], bool], tries: int = 1000) -> list[T]:
    """A part of `whole`, in its order, that fails, and of which no single one can be left out (`tries` permitting)."""
    kept, parts, left = list(whole), 2, tries
    while kept and left > 0:
        size = -(-len(kept) // parts)
        pieces = [kept[k : k + size] for k in range(0, len(kept), size)]
        rests = [list(chain(*pieces[:k], *pieces[k + 1 :])) for k in range(len(pieces))]
        for tried, then in [
            *((piece, 2) for piece in pieces if len(pieces) > 1),
            *((r, max(2, parts - 1)) for r in rests),
        ]:
            if left <= 0:
                break
            left -= 1
            if fails(tried):
                kept, parts = tried, then
                break
        else:
            if parts >= len(kept):
                break
            parts = min(len(kept), 2 * parts)
    return kept
