"""The caption language reads back what it writes, and tones and held-out variants are told apart."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.scenes import emoji
from lab.training import captions, phrases

NAMES = st.sampled_from(
    ["pizza", "red heart", "family: man, boy", "man: dark skin tone, bald", "on! arrow", "cat face"]
)


@given(NAMES, st.sampled_from(captions.COLOUR_NAMES))
def test_a_caption_reads_back(name: str, colour: str) -> None:
    said = captions.read_caption(captions.with_background(name, colour))
    assert said == captions.ParsedCaption(name.lower(), colour)
    assert captions.read_caption(f"  {name}. ").colour == "white", "no background means white"


@pytest.mark.parametrize("text", ["", "  ", "cat on a plaid background", "cat background"])
def test_what_is_not_in_the_language_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="caption"):
        captions.read_caption(text)
    with pytest.raises(ValueError, match="'plaid' is not one of white"):
        captions.with_background("cat", "plaid")


@pytest.mark.parametrize(("said", "colour"), [("grey", "gray"), ("sky blue", "light blue")])
def test_spellings_of_a_colour_meet(said: str, colour: str) -> None:
    assert captions.read_caption(f"Cat on a {said} background").colour == colour


@pytest.mark.parametrize(
    ("name", "base", "tone"),
    [
        ("waving hand", "waving hand", None),
        ("waving hand: dark skin tone", "waving hand", "dark"),
        ("man: medium-dark skin tone, bald", "man: bald", "medium-dark"),
        ("kiss: man, man, light skin tone, dark skin tone", "kiss: man, man", None),
        ("keycap: 5", "keycap: 5", None),
        ("medium skin tone", "medium skin tone", None),
    ],
)
def test_tones_are_split_from_names(name: str, base: str, tone: str | None) -> None:
    assert captions.split_tone(name) == (base, tone)


def test_held_out_variants_leave_four_tones_of_their_base(data: Path) -> None:
    rows = emoji.read_rows(data)
    hidden = captions.held_out(rows, 3)
    assert hidden == captions.held_out(rows, 3)
    assert len(hidden) == len({captions.split_tone(rows[index].name)[0] for index in hidden}) == 3
    assert all(captions.has_tone(rows[index].name) for index in hidden)


def test_every_wording_keeps_the_name_or_its_words(data: Path) -> None:
    for row in emoji.read_rows(data):
        found = captions.subjects(row, 8, random.Random(1))
        assert found[0] == row.name and len(found) == 8
        assert all(phrases.words(captions.split_tone(row.name)[0]) <= phrases.words(one) for one in found)


def test_expansions_name_what_was_asked(data: Path) -> None:
    rows = emoji.read_rows(data)
    expander, draw = phrases.Expander(rows), random.Random(3)
    chats = [expander.draw(draw) for _ in range(300)]
    assert all(phrases.names_the_subject(chat.prompt, chat.answer, rows) for chat in chats)
    assert not phrases.names_the_subject("blue square", "red circle on a teal background", rows)
    assert not phrases.names_the_subject("red circle", "red circle on a plaid background", rows)
    assert not phrases.names_the_subject("red circle", "red circles galore", rows)
