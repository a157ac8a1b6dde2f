"""Tests ddmin: the result is the cause, in its order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.faults.histories.shrink import shrink


@given(st.lists(st.integers(0, 40), unique=True, max_size=40), st.data())
def test_no_more_than_the_cause_is_left(whole: list[int], data: st.DataObject) -> None:
    cause = set(data.draw(st.lists(st.sampled_from(whole), unique=True, max_size=5))) if whole else set()
    assert shrink(whole, lambda part: cause <= set(part)) == [one for one in whole if one in cause]
