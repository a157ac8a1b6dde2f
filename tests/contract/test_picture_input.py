"""The pictures of a request, of either kind: the steps in which they act, their bounds, and their form in a record."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from contract import control
from contract.control import PREPROCESSORS, Control
from contract.errors import Invalid
from contract.image_prompt import MAX_PIXELS, MAX_SIDE, ImagePrompt, fitted
from contract.picture_input import Edit, PictureInput, check_all
from tests.contract.refused import refused

SHARES = st.floats(0, 1)
KINDS: tuple[type[PictureInput], ...] = (Control, ImagePrompt)
SHARED: dict[str, Any] = {
    "model": st.just("a"), "strength": SHARES, "start": SHARES, "end": SHARES, "image": st.none() | st.just("key")
}  # fmt: skip
INPUTS = st.builds(ImagePrompt, **SHARED) | st.builds(
    Control, preprocessor=st.sampled_from(["", *PREPROCESSORS]), mode=st.none() | st.integers(0, 7), **SHARED
)
each_kind = pytest.mark.parametrize("kind", KINDS)


@given(st.integers(1, 60), SHARES, SHARES)
def test_it_acts_in_one_run_of_steps_as_diffusers_has_it(steps: int, start: float, end: float) -> None:
    acts = Control(model="a", start=start, end=end).acts(steps)
    keeps = [1.0 - float(i / steps < start or (i + 1) / steps > end) for i in range(steps)]  # diffusers' own line
    assert [float(one) for one in acts] == keeps
    assert "".join(str(int(one)) for one in acts).strip("0").count("0") == 0


@each_kind
@pytest.mark.parametrize(
    ("wrong", "field"),
    [({"model": "a/b"}, "model"), ({"model": 3}, "model"), ({"strength": -1}, "strength"),
     ({"strength": 11}, "strength"), ({"strength": float("nan")}, "strength"), ({"start": 1.5}, "start"),
     ({"end": 0.0}, "end"), ({"start": 0.5, "end": 0.5}, "end")],
)  # fmt: skip
def test_values_beyond_bounds_are_named(kind: type[PictureInput], wrong: dict[str, Any], field: str) -> None:
    with refused(f"{kind.FIELD}.{field}"):
        check_all(kind, [kind(**{"model": "a", **wrong})], None)


@each_kind
def test_what_a_model_does_not_have_is_refused(kind: type[PictureInput]) -> None:
    one = kind(model="a")
    check_all(kind, [one] * 4, ("a", "b"))
    for offered, reason, words in (
        ((), None, "it has none"), ((), "", "there is no a; its worker's folder of them is empty"),
        ((), "no folder", ": no folder$"), (("b", "c"), "", "there is no a; it has b, c"),
    ):  # fmt: skip
        with pytest.raises(Invalid, match=words):
            check_all(kind, [one], offered, reason)
    with pytest.raises(Invalid, match="at most 4, not 5"):
        check_all(kind, [one] * 5, None)


@given(INPUTS)
def test_a_record_reads_what_it_wrote(one: PictureInput) -> None:
    assert type(one).read(json.loads(json.dumps(one.to_dict()))) == one


@each_kind
@pytest.mark.parametrize("told", [None, [], {}, {"strength": 1}, {"model": "a", "colour": 1}])
def test_another_form_is_refused(kind: type[PictureInput], told: object) -> None:
    with refused(kind.FIELD):
        kind.read(told)


def test_a_files_parameters_have_the_pictures_digest() -> None:
    digest = hashlib.sha256(b"abc").hexdigest()
    assert Control(model="a", strength=0.5, image=b"abc").to_dict() == {"model": "a", "strength": 0.5, "image": digest}
    assert Edit(b"abc", soft_mask=True).to_dict() == {"strength": 0.8, "image": digest, "soft_mask": True}
    assert PROMPT.to_dict() == {"model": "a", "width": 4, "height": 2, "image": PROMPT.digest}
    assert replace(PROMPT, width=2, height=4).digest != PROMPT.digest


# -- what each kind has of its own -----------------------------------------------------------------------------------

PROMPT = ImagePrompt(model="a", image=bytes(3 * 4 * 2), width=4, height=2)


def test_rows_are_counted_in_deep_steps() -> None:
    """Each control's network computes its rows; several image prompts are read by the same rows."""
    steps = [(2, True), (2, False), (2, True), (1, True)]
    half, whole = Control(model="a", end=0.5), Control(model="a")
    assert [Control.deep_rows(given, steps, 4) for given in ([], [half], [whole], [half, whole])] == [0, 2, 5, 7]
    assert Control.deep_rows([whole], steps, 3) == 4
    partly = replace(PROMPT, end=0.5)
    assert [ImagePrompt.deep_rows(given, steps, 4) for given in ([], [partly], [PROMPT, partly])] == [0, 2, 5]


@pytest.mark.parametrize(("wrong", "field"), [({"preprocessor": "pose"}, "preprocessor"), ({"mode": -1}, "mode")])
def test_a_controls_values_beyond_bounds_are_named(wrong: dict[str, Any], field: str) -> None:
    with refused(f"control.{field}"):
        check_all(Control, [Control(model="a", **wrong)], None)


def test_a_preprocessor_that_a_model_does_not_have_is_refused() -> None:
    control.check_preprocessors([Control(model="a", preprocessor="canny")], ("canny",))
    with pytest.raises(Invalid, match=r"depth is not offered by this model .*DIPTYCH_DEPTH_MODEL"):
        control.check_preprocessors([Control(model="a", preprocessor="depth")], ("canny",))


@pytest.mark.parametrize(
    "wrong", [{"width": 3}, {"width": 0}, {"height": MAX_PIXELS}, {"image": "text"}, {"image": b""}, {"image": None}]
)
def test_pixels_of_another_size_are_refused(wrong: dict[str, Any]) -> None:
    PROMPT.check_pixels((64, 64))
    with refused("image_prompts.image"):
        replace(PROMPT, **wrong).check_pixels((64, 64))


@example(MAX_SIDE - 1, MAX_SIDE + 1)
@given(st.integers(1, 8192), st.integers(1, 8192))
def test_pictures_are_kept_in_their_shape_and_within_bounds(width: int, height: int) -> None:
    w, h = fitted(width, height)
    assert min(w, h) == min(width, height, MAX_SIDE) and w * h <= MAX_PIXELS
    assert abs(w * height - h * width) <= max(width, height)
    assert fitted(w, h) == (w, h) == PROMPT.kept_size((width, height), (64, 64))
