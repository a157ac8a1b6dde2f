"""What image prompts have of their own: a size at which pictures are kept, and the rows that read them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import Invalid
from contract.image_prompt import MAX_PIXELS, MAX_SIDE, ImagePrompt, deep_rows, fitted

PROMPT = ImagePrompt(model="a", image=bytes(3 * 4 * 2), width=4, height=2)


@pytest.mark.parametrize(
    "wrong", [{"width": 3}, {"width": 0}, {"height": MAX_PIXELS}, {"image": "text"}, {"image": b""}, {"image": None}]
)
def test_pixels_of_another_size_are_refused(wrong: dict[str, Any]) -> None:
    PROMPT.check_pixels()
    with pytest.raises(Invalid) as caught:
        replace(PROMPT, **wrong).check_pixels()
    assert caught.value.field == "image_prompts.image"


def test_rows_are_counted_once_in_deep_steps_with_any_prompt() -> None:
    half, whole = replace(PROMPT, end=0.5), PROMPT
    steps = [(2, True), (2, False), (2, True), (1, True)]
    assert deep_rows([whole, half], steps, 4) == 5 and deep_rows([half], steps, 4) == 2 and deep_rows([], steps, 4) == 0


@given(st.integers(1, 8192), st.integers(1, 8192))
def test_pictures_are_kept_in_their_shape_and_within_bounds(width: int, height: int) -> None:
    w, h = fitted(width, height)
    assert min(w, h) == min(width, height, MAX_SIDE) and w * h <= MAX_PIXELS
    assert abs(w * height - h * width) <= max(width, height)
    assert fitted(w, h) == (w, h) == PROMPT.kept_size((width, height), (64, 64))
