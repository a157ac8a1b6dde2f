"""Tests ddmin: the result still fails, keeps its order, and passes if any one more element is removed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.faults.histories.shrink import shrink


@given(st.lists(st.integers(0, 40), unique=True, max_size=40), st.data())
def test_no_more_than_the_cause_is_left(whole: list[int], data: st.DataObject) -> None:
    cause = set(data.draw(st.lists(st.sampled_from(whole), unique=True, max_size=5))) if whole else set()
    assert shrink(whole, lambda part: cause <= set(part)) == [one for one in whole if one in cause]


@given(st.lists(st.integers(0, 40), unique=True, min_size=1, max_size=30), st.integers(1, 10))
def test_any_of_several_causes_is_enough(whole: list[int], most: int) -> None:
    def fails(part: list[int]) -> bool:
        return sum(part) >= most

    if fails(whole):
        left = shrink(whole, fails)
        assert fails(left) and not any(fails(left[:k] + left[k + 1 :]) for k in range(len(left)))


def test_tries_are_counted() -> None:
    asked: list[list[int]] = []

    def fails(part: list[int]) -> bool:
        asked.append(part)
        return 7 in part and 3 in part

    assert {3, 7} <= set(shrink(list(range(64)), fails, tries=5))
    assert len(asked) == 5
