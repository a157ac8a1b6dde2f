"""Controls of a request: the steps in which they act, their bounds, and their form in a record."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract import control
from contract.control import Control, deep_rows
from contract.errors import Invalid

SHARES = st.floats(0, 1)


@given(st.integers(1, 60), SHARES, SHARES)
def test_it_acts_in_one_run_of_steps_as_diffusers_has_it(steps: int, start: float, end: float) -> None:
    acts = Control(model="a", start=start, end=end).acts(steps)
    keeps = [1.0 - float(i / steps < start or (i + 1) / steps > end) for i in range(steps)]  # diffusers' own line
    assert [float(one) for one in acts] == keeps
    assert "".join(str(int(one)) for one in acts).strip("0").count("0") == 0


def test_rows_are_counted_in_deep_steps_that_it_acts_in() -> None:
    half, whole = Control(model="a", end=0.5), Control(model="a")
    steps = [(2, True), (2, False), (2, True), (1, True)]
    found = [deep_rows(given, steps, 4) for given in ([], [half], [whole], [half, whole])]
    assert found == [0, 2, 5, 7] and deep_rows([whole], steps, 3) == 4


@pytest.mark.parametrize(
    ("wrong", "field"),
    [({"model": "a/b"}, "model"), ({"model": 3}, "model"), ({"strength": -1}, "strength"),
     ({"strength": 11}, "strength"),
     ({"strength": float("nan")}, "strength"), ({"start": 1.5}, "start"), ({"end": 0.0}, "end"),
     ({"start": 0.5, "end": 0.5}, "end"), ({"preprocessor": "pose"}, "preprocessor"), ({"mode": -1}, "mode")],
)  # fmt: skip
def test_values_beyond_bounds_are_named(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(Invalid) as caught:
        control.check([Control(**{"model": "a", **wrong})], None)
    assert caught.value.field == f"control.{field}"


def test_what_a_model_does_not_have_is_refused() -> None:
    choice = Control(model="a")
    control.check([choice] * 4, ("a", "b"))
    for offered, words in (((), "it has none"), (("b", "c"), "it has b, c")):
        with pytest.raises(Invalid, match=words):
            control.check([choice], offered)
    control.check([Control(model="a", preprocessor="canny")], ("a",), ("canny",))
    with pytest.raises(Invalid, match=r"depth is not offered by this model .*DIPTYCH_DEPTH_MODEL"):
        control.check([Control(model="a", preprocessor="depth")], ("a",), ("canny",))
    with pytest.raises(Invalid, match="at most 4, not 5"):
        control.check([choice] * 5, None)


@given(
    st.builds(
        Control,
        model=st.just("a"),
        strength=SHARES,
        start=SHARES,
        end=SHARES,
        preprocessor=st.sampled_from(["", *control.PREPROCESSORS]),
        mode=st.none() | st.integers(0, 7),
        image=st.none() | st.just("key"),
    )
)
def test_a_record_reads_what_it_wrote(source: Control) -> None:
    assert Control.read(json.loads(json.dumps(source.to_dict()))) == source


@pytest.mark.parametrize("told", [None, [], {}, {"strength": 1}, {"model": "a", "colour": 1}])
def test_another_form_is_refused(told: object) -> None:
    with pytest.raises(Invalid):
        Control.read(told)


def test_a_files_parameters_have_the_pictures_digest() -> None:
    told = Control(model="a", strength=0.5, image=b"abc").to_dict()
    assert told == {"model": "a", "strength": 0.5, "image": hashlib.sha256(b"abc").hexdigest()}
