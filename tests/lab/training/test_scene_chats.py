"""Scene chats ask for what their answers show, keep to their families, and answers that lose anything are told."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.scenes.emoji import PictureRow
from lab.scenes.truth import Truth
from lab.training.scene_chats import SceneChat, SceneExpander, keeps
from lab.training.scenes import is_held_out
from tests.lab.training.test_scenes import COMPOSER

KEYS = {"dog": ("pooch", "pet"), "cat": ("tom", "pet"), "rocket": ("bus", "fast and loud"), "owl": ("hooter",)}
ROWS = [PictureRow("", "", subject.noun, KEYS.get(subject.noun, ()), "Objects", "any") for subject in COMPOSER.subjects]
EXPANDER = SceneExpander(ROWS, COMPOSER)
READER = COMPOSER.reader


def chat(seed: int, held_out: bool = False) -> SceneChat:
    return next(EXPANDER.chats(seed, held_out=held_out))


@settings(max_examples=300)
@given(st.integers(0, 10**9), st.booleans())
def test_answers_keep_what_is_asked_on_a_background_that_stands_out(seed: int, held_out: bool) -> None:
    scene = chat(seed, held_out)
    said = READER.read(scene.chat.answer)
    assert keeps(scene.truth, said) and said.background
    assert scene.truth.background or said.background[0] in COMPOSER.backgrounds(replace(said, background=()))
    assert any(map(is_held_out, COMPOSER.families(said))) is held_out
    assert scene == chat(seed, held_out)


@settings(max_examples=300)
@given(st.integers(0, 10**9))
def test_prompts_name_all_that_is_asked(seed: int) -> None:
    scene = chat(seed)
    prompt, many = scene.chat.prompt.lower(), ("", "", "two", "three", "four", "five")
    for thing in scene.truth.items:
        subject = COMPOSER.by_noun[thing.subject]
        assert any(word in prompt for word in (subject.noun, subject.plural, *KEYS.get(subject.noun, ())))
        assert thing.count == 1 or many[thing.count] in prompt or str(thing.count) in prompt
        assert not thing.colour or thing.colour in prompt
    assert all(colour in prompt for colour in scene.truth.background)
    one = scene.truth.items[0]
    assert len(scene.truth.items) > 1 or one.count > 1 or one.colour or one.size, "that is a single emoji's"


def test_keywords_ask_where_they_mean_one_thing_that_can_be_counted() -> None:
    prompts = " ".join(scene.chat.prompt for scene in islice(EXPANDER.chats(0), 4000))
    assert all(key in prompts for key in ("pooch", "pooches", "tom ", "hooter"))
    assert not any(key in prompts for key in ("pet", "fast"))
    for scene in islice(EXPANDER.chats(1), 2000):
        assert "rocket" in scene.chat.prompt.lower() or all(thing.subject != "rocket" for thing in scene.truth.items)


@settings(max_examples=300)
@given(st.integers(0, 10**9), st.randoms(use_true_random=False))
def test_an_answer_with_one_thing_wrong_keeps_it_not(seed: int, draw: random.Random) -> None:
    asked = chat(seed).truth
    for wrong in COMPOSER.foils.captions(asked, 4, draw):
        assert not keeps(asked, READER.read(wrong))


@pytest.mark.parametrize(
    ("asked", "said", "good"),
    [
        ("a cat and a dog", "a dog behind a cat on a teal background as a sticker", False),
        ("a cat and a dog", "a dog behind a cat as a sticker on a teal background", True),
        ("a cat left of a dog", "a dog right of a cat", True),
        ("a cat left of a dog", "a dog left of a cat", False),
        ("a cat beside a dog", "a dog next to a cat", True),
        ("a cat beside a dog", "a cat and a dog", False),
        ("a cat and a dog", "a cat, a dog", True),
        ("a cat and a dog", "a row of a cat, a dog and a fox", False),
        ("a red cat", "a red cat on red", True),
        ("a cat", "a red cat", False),
        ("two cats on teal", "two cats on a navy background", False),
        ("two cats on a teal to navy gradient", "two cats on a background fading from navy to teal", False),
        ("two cats as a sticker", "two cats", False),
    ],
)
def test_what_is_kept(asked: str, said: str, good: bool) -> None:
    try:
        found: Truth | None = READER.read(said)
    except ValueError:
        found = None
    assert (found is not None and keeps(READER.read(asked), found)) is good
