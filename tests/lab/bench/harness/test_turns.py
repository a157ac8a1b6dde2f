"""Contenders in turns: each in each turn, and what is left out."""

from __future__ import annotations

import pytest

from lab.bench.harness.turns import LeftOut, alternate


def test_all_are_measured_in_each_turn_in_their_order() -> None:
    asked: list[tuple[str, int]] = []

    def measure(name: str, contender: int, turn: int) -> int:
        asked.append((name, turn))
        return contender + turn

    assert alternate({"a": 10, "b": 20}, 3, measure) == {"a": [10, 11, 12], "b": [20, 21, 22]}
    assert asked == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert alternate({"a": 10}, 0, measure) == {"a": []}


def test_one_that_cannot_be_measured_is_left_out_of_all_later_turns() -> None:
    asked: list[tuple[str, int]] = []

    def measure(name: str, _: None, turn: int) -> int:
        asked.append((name, turn))
        if name == "b" and turn == 1:
            raise LeftOut("it broke")
        return turn

    left_out: dict[str, str] = {}
    contenders = dict.fromkeys(("a", "b", "c"))
    assert alternate(contenders, 3, measure, left_out) == {"a": [0, 1, 2], "c": [0, 1, 2]}
    assert left_out == {"b": "it broke"} and ("b", 2) not in asked and ("c", 1) in asked
    with pytest.raises(LeftOut, match="it broke"):
        alternate(contenders, 3, measure)
