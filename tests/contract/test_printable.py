"""Text of others does nothing to a terminal, forges no line and has an end."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.printable import printable, printable_lines, printable_message
from pipeline.checkpoints.folder import ModelError, first_line

# Escape sequences, C1, ends of lines of all kinds, marks of direction, half surrogates.
_BAD = ("\x1b[2J", "\x9b31m", *"\x00\x7f\x85\r\n\v\u2028\u2029\u202e\u2066\ud800")
_TEXTS = st.lists(st.sampled_from((*_BAD, "sha256 ", "ä", "𝄞", " ", "key.weight")) | st.text(max_size=5)).map("".join)


def moves_nothing(text: str) -> bool:
    """Whether a terminal shows the text where it stands: what is not printable to Python are spaces and joiners."""
    return all(c.isprintable() or c in "\u00ad\u200c\u200d" or unicodedata.category(c) == "Zs" for c in text)


@given(text=_TEXTS, most=st.integers(0, 30))
def test_it_is_one_printable_line_with_an_end(text: str, most: int) -> None:
    for made in (
        printable(text, most),
        printable_message(text, most),
        str(ModelError(text)),
        first_line(OSError(text)),
    ):
        assert moves_nothing(made)
    assert len(printable(text, most)) <= 10 * most + 1 and len(printable_message(text, most)) <= 10 * most + 1
    if text.isprintable() and len(text) <= most:
        assert printable(text, most) == text == printable_message(text, most) == printable_lines(text, most)


@given(text=_TEXTS)
def test_lines_keep_their_ends_and_nothing_else(text: str) -> None:
    made = printable_lines(text)
    assert made.count("\n") == text.count("\n") and moves_nothing(made.replace("\n", "").replace("\t", ""))


@pytest.mark.parametrize("text", ["Bonjour\u00a0!", "12\u202f000", "\u3000日本", "می\u200cخواهم", "👨\u200d👩\u200d👧"])
def test_text_of_every_script_stays(text: str) -> None:
    assert printable(text) == printable_lines(text) == text


def test_what_was_there_can_be_seen() -> None:
    assert printable("a\x1b[31m\u202e\n\x9b") == r"a\x1b[31m\u202e\n\x9b"
    assert printable_message("not a model\nsha256 " + 64 * "0") == "not a model sha256 " + 64 * "0"
    assert printable("x" * 500) == "x" * 200 + "…"
    assert len(str(ModelError("x" * 1_000_000))) == 2001
