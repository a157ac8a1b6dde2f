"""Limits by model: what is written is read, and what cannot be meant is refused with the entry's text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.limits import COUNT, RATE, SHARE, LimitForm, read_limits

NAMES = st.just("") | st.text("az09-_./:= ", min_size=1, max_size=20).map(str.strip).filter(bool)
RATES = st.builds("{}/{}".format, st.integers(1, 999_999_999), st.sampled_from(("second", "minute", "hour", "day")))
COUNTS = st.integers(1, 9_999_999).map(str)
SHARES = COUNTS | st.integers(1, 100).map("{}%".format)


@pytest.mark.parametrize(("form", "limits"), [(RATE, RATES), (COUNT, COUNTS), (SHARE, SHARES)])
@given(data=st.data())
def test_what_is_written_is_read(form: LimitForm, limits: st.SearchStrategy[str], data: st.DataObject) -> None:
    chosen = data.draw(st.dictionaries(NAMES, limits, max_size=4))
    entries = [f"{name} = {limit}" if name else limit for name, limit in chosen.items()]
    assert read_limits(data.draw(st.sampled_from((",", " , ", ",\t"))).join(entries), form) == chosen


@pytest.mark.parametrize(
    ("form", "text", "entry"),
    [
        *(
            (RATE, text, text)
            for text in ("often", "0/minute", "5", "5/", "5/week", "1/day/day", "-1/day", "a=b", "a=")
        ),
        *((COUNT, text, text) for text in ("0", "5%", "1.5", "a=0", "12345678")),
        *((SHARE, text, text) for text in ("0%", "101%", "%", "5 %")),
        (RATE, "1/day, =5/day", "=5/day"),
        (RATE, "a=1/day, b=2/day, a=3/day", "a=3/day"),
        (RATE, "1/day, 2/day", "2/day"),
        (RATE, "a\x01=1/day", r"a\\x01=1/day"),
        (RATE, f"{'a' * 500}=1/day", f"{'a' * 500}=1/day"),
    ],
)
def test_what_cannot_be_meant(form: LimitForm, text: str, entry: str) -> None:
    with pytest.raises(ValueError, match=rf"^'{entry}' (must|is)"):
        read_limits(text, form)
