"""Text as it comes: what was told adds up, characters are whole, and no part of a stop is ever told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm import tiny
from llm.detokenizer import Detokenizer
from tests.llm import stage

BYTES = tiny.tokenizer(512)


def written(writer: Detokenizer, tokens: list[int]) -> list[str]:
    told = []
    for token in tokens:
        told.append(writer.add(token))
        if writer.ended:
            break
    return [*told, writer.finish()]


@given(text=st.text(st.characters(exclude_categories=("Cs",)), max_size=40))
def test_what_was_told_adds_up_and_is_never_taken_back(text: str) -> None:
    tokens = BYTES(text, add_special_tokens=False)["input_ids"]
    writer = Detokenizer(BYTES)
    told = written(writer, tokens)
    assert "".join(told) == text == writer.text
    assert all("�" not in piece for piece in told) or "�" in text


@given(text=st.text("abc", max_size=30), stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stops(text: str, stops: list[str]) -> None:
    """The text ends before the stop that is complete first; while it comes nothing is told that a stop may cut off."""
    writer = Detokenizer(BYTES, stops)
    told = written(writer, BYTES(text, add_special_tokens=False)["input_ids"])
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    # One letter comes at a time: of the stops that are complete at the same letter the one that began first.
    wanted = text if not ends else text[: min(start for end, start in ends if end == min(ends)[0])]
    assert writer.text == "".join(told) == wanted
    assert writer.ended == bool(ends)


def test_half_a_character_at_the_end_is_told_as_such() -> None:
    tokens = BYTES("é", add_special_tokens=False)["input_ids"]
    assert len(tokens) == 2
    writer = Detokenizer(BYTES)
    assert written(writer, tokens[:1])[-1] == writer.text == "�"


def test_special_tokens_are_no_text() -> None:
    writer = Detokenizer(BYTES)
    assert "".join(written(writer, [1, *BYTES("ab", add_special_tokens=False)["input_ids"], 2])) == "ab"


@pytest.mark.parametrize("text", ["A man riding a horse .", "  two  spaces", "naïve café 🍕!"])
def test_the_embedded_tokenizer(text: str) -> None:
    tokenizer = stage.emoji().tokenizer
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert "".join(written(Detokenizer(tokenizer), tokens)) == tokenizer.decode(tokens)
