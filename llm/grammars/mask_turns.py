"""Decides whose masks an iteration computes: a grammar with slow masks delays its own answers, and others hardly.

An iteration takes as long as its forward, and longer where the masks of its rows do: by a share of the forwards' time
in all, and otherwise rows wait for a later iteration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from llm.grammars.constrain import GrammarMatcher

_SHARE = 0.25  # of the forwards' time: what masks may take beyond it
_BURST_S = 0.005  # of that which is saved up


class MaskTurns:
    """The turns of answers in computing masks: one tenant's after the other's, and of each its longest waiting first.

    A mask that takes longer than what is saved up is computed in advance of it, and paid back before the next one.
    """

    def __init__(self) -> None:
        self._credit_s = 0.0
        self._iteration = 0

    def waiting(self, answers: Sequence[tuple[str, GrammarMatcher | None]], forward_s: float) -> set[int]:
        """Return which answers of an iteration have to wait for a later one: never all of them.

        Each is its tenant and its matcher, or None if it needs none. `forward_s` is what the forward is expected to
        take, beside which masks cost nothing.
        """
        self._iteration += 1
        self._credit_s = min(_BURST_S, self._credit_s + _SHARE * forward_s)
        computing = [(i, tenant, m) for i, (tenant, m) in enumerate(answers) if m is not None and not m.ready]
        turns, places = Counter[str](), {}
        for i, tenant, _ in sorted(computing, key=lambda answer: answer[2].turn):
            places[i] = turns[tenant]
            turns[tenant] += 1
        room_s, spent_s, waiting = forward_s + max(0.0, self._credit_s), 0.0, set()
        first = self._credit_s > 0 or len(computing) == len(answers)
        for i, _, matcher in sorted(computing, key=lambda answer: (places[answer[0]], answer[2].turn)):
            if first or spent_s + matcher.expected_s <= room_s:
                first, matcher.turn = False, self._iteration
                spent_s += matcher.expected_s
            else:
                waiting.add(i)
        left_s = self._credit_s - max(0.0, spent_s - forward_s)
        # Where every answer computes a mask, there is nobody whom time beyond what was saved up is owed to.
        self._credit_s = max(left_s, min(0.0, self._credit_s)) if len(computing) == len(answers) else left_s
        return waiting
