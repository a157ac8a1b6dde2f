"""What controls have of their own: kinds of pictures, preprocessors, and the rows that their networks compute."""

from __future__ import annotations

from typing import Any

import pytest

from contract import control
from contract.control import Control, deep_rows
from contract.errors import Invalid


def test_rows_are_counted_in_deep_steps_that_it_acts_in() -> None:
    half, whole = Control(model="a", end=0.5), Control(model="a")
    steps = [(2, True), (2, False), (2, True), (1, True)]
    found = [deep_rows(given, steps, 4) for given in ([], [half], [whole], [half, whole])]
    assert found == [0, 2, 5, 7] and deep_rows([whole], steps, 3) == 4


@pytest.mark.parametrize(("wrong", "field"), [({"preprocessor": "pose"}, "preprocessor"), ({"mode": -1}, "mode")])
def test_values_beyond_bounds_are_named(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(Invalid) as caught:
        control.check([Control(model="a", **wrong)], None)
    assert caught.value.field == f"control.{field}"


def test_a_preprocessor_that_a_model_does_not_have_is_refused() -> None:
    control.check([Control(model="a", preprocessor="canny")], ("a",), ("canny",))
    with pytest.raises(Invalid, match=r"depth is not offered by this model .*DIPTYCH_DEPTH_MODEL"):
        control.check([Control(model="a", preprocessor="depth")], ("a",), ("canny",))
