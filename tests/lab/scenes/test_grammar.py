"""Captions of scenes are in English, and read back; a painted sprite has the hue of its word."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lab.scenes import hues
from lab.scenes.subjects import article, plural
from lab.scenes.truth import SceneItem, Truth
from tests.lab.training.test_scenes import COMPOSER


@pytest.mark.parametrize(
    ("noun", "an", "many"),
    [
        ("fox", "a", "foxes"), ("unicorn", "a", "unicorns"), ("umbrella", "an", "umbrellas"), ("ewe", "a", "ewes"),
        ("pony", "a", "ponies"), ("key", "a", "keys"), ("computer mouse", "a", "computer mice"), ("owl", "an", "owls"),
    ],
)  # fmt: skip
def test_articles_and_plurals(noun: str, an: str, many: str) -> None:
    assert (article(noun), plural(noun)) == (an, many)


@pytest.mark.parametrize("caption", ["a cat on a mat", "two cat", "a red blue cat", "", "nine cats"])
def test_captions_of_other_grammars_are_refused(caption: str) -> None:
    with pytest.raises(ValueError, match="not of the grammar"):
        COMPOSER.reader.read(caption)


@given(st.integers(0, 7), st.floats(0.2, 1.0))
def test_a_tint_has_the_hue_of_its_word(word: int, light: float) -> None:
    """Whatever the coloured pixel was, dark or bright."""
    generator = torch.Generator().manual_seed(word)
    pixels = torch.rand(1, 3, 16, 16, generator=generator) * light
    sprite = torch.cat([pixels, torch.ones(1, 1, 16, 16)], 1)
    mean = hues.mean_luma(sprite)
    painted = hues.tint(sprite, mean, hues.palette()[word][None])
    clear = hues.coloured(pixels)[0] == 1
    found = hues.hue_name(painted[0, :3].permute(1, 2, 0)[clear])
    assert bool((found == word).all())


def test_a_thing_says_its_size_and_colour() -> None:
    found = COMPOSER.reader.read("a very small purple dog in front of three cats on a red to light blue gradient")
    wanted = (SceneItem("dog", 1, "purple", "tiny"), SceneItem("cat", 3))
    assert found == Truth(wanted, "in front of", ("red", "light blue"))
