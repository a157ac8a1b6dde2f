"""Image prompts of a request: their bounds, the size at which pictures are kept, and their form in a record."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import Invalid
from contract.image_prompt import MAX_PIXELS, MAX_SIDE, ImagePrompt, deep_rows, fitted
from contract.picture_input import check_all

SHARES = st.floats(0, 1)
PROMPT = ImagePrompt(model="a", image=bytes(3 * 4 * 2), width=4, height=2)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [({"model": "a/b"}, "model"), ({"strength": -1}, "strength"), ({"strength": 11}, "strength"),
     ({"start": 1.5}, "start"), ({"end": 0.0}, "end"), ({"width": 3}, "image"), ({"width": 0}, "image"),
     ({"height": MAX_PIXELS}, "image"), ({"image": "text"}, "image"), ({"image": b""}, "image")],
)  # fmt: skip
def test_values_beyond_bounds_are_named(wrong: dict[str, Any], field: str) -> None:
    check_all(ImagePrompt, [PROMPT], None)
    PROMPT.check_pixels()
    one = replace(PROMPT, **wrong)
    with pytest.raises(Invalid) as caught:
        check_all(ImagePrompt, [one], None)
        one.check_pixels()
    assert caught.value.field == f"image_prompts.{field}"


def test_rows_are_counted_once_in_deep_steps_with_any_prompt() -> None:
    half, whole = replace(PROMPT, end=0.5), PROMPT
    steps = [(2, True), (2, False), (2, True), (1, True)]
    assert deep_rows([whole, half], steps, 4) == 5 and deep_rows([half], steps, 4) == 2 and deep_rows([], steps, 4) == 0


def test_what_a_model_does_not_have_is_refused() -> None:
    check_all(ImagePrompt, [PROMPT] * 4, ("a", "b"))
    with pytest.raises(Invalid, match="there is no a; it has b"):
        check_all(ImagePrompt, [PROMPT], ("b",))
    with pytest.raises(Invalid, match="at most 4, not 5"):
        check_all(ImagePrompt, [PROMPT] * 5, None)


@given(st.builds(ImagePrompt, model=st.just("a"), strength=SHARES, start=SHARES, end=SHARES,
                 image=st.none() | st.just("key")))  # fmt: skip
def test_a_record_reads_what_it_wrote(source: ImagePrompt) -> None:
    assert ImagePrompt.read(json.loads(json.dumps(source.to_dict()))) == source


@pytest.mark.parametrize("told", [None, [], {}, {"strength": 1}, {"model": "a", "mode": 1}])
def test_another_form_is_refused(told: object) -> None:
    with pytest.raises(Invalid) as caught:
        ImagePrompt.read(told)
    assert caught.value.field == "image_prompts"


@given(st.integers(1, 8192), st.integers(1, 8192))
def test_pictures_are_kept_in_their_shape_and_within_bounds(width: int, height: int) -> None:
    w, h = fitted(width, height)
    assert min(w, h) == min(width, height, MAX_SIDE) and w * h <= MAX_PIXELS
    assert abs(w * height - h * width) <= max(width, height)
    assert fitted(w, h) == (w, h)


def test_a_files_metadata_has_the_pictures_digest() -> None:
    assert PROMPT.to_dict() == {"model": "a", "width": 4, "height": 2, "image": PROMPT.digest}
    assert replace(PROMPT, width=2, height=4).digest != PROMPT.digest
