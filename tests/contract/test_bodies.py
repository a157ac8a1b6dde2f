"""Bodies that are generated from dataclasses, and the checks of the same bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, ValidationError

from contract.bodies import InBody, body_of, check_bounds, with_fields_of
from contract.errors import Invalid
from contract.strict import StrictModel


@dataclass(frozen=True)
class Sketch:
    """A sketch.

    More about it.
    """

    subject: Annotated[str, Field(max_length=9), "of it"]
    key: str = ""
    lines: Annotated[int, Field(ge=1, le=9), "how many"] = 3
    weight: Annotated[float | None, Field(gt=0, le=1), "of each"] = None
    marks: Annotated[tuple[int, ...], Field(max_length=2), "where"] = ()
    tone: Annotated[str, InBody(Literal["dark", "light"]), "of the paper"] = "light"
    inked: Annotated[bool, "in ink"] = False


BODY: Any = body_of(Sketch, "subject")
GOOD: dict[str, Any] = {"subject": "a hat", "lines": 2, "weight": 0.5, "marks": [1, 2], "tone": "dark", "inked": True}


def test_a_body_has_the_declared_fields_and_null_means_not_given() -> None:
    assert list(BODY.model_fields) == ["subject", "lines", "weight", "marks", "tone", "inked"]
    assert BODY.model_json_schema()["description"] == "A sketch."
    assert BODY.model_fields["tone"].description == "of the paper"
    assert BODY(**GOOD).given == GOOD
    assert BODY(subject="a", **dict.fromkeys(("lines", "weight", "marks", "tone", "inked"))).given == {"subject": "a"}


@pytest.mark.parametrize(
    ("name", "value"),
    [("subject", "0123456789"), ("subject", None), ("marks", [1, 2, 3]), ("tone", "grey"), ("key", "k")],
)
def test_a_body_is_refused_beyond_the_declared_bounds(name: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        BODY(**{"subject": "a", name: value})
    assert caught.value.errors()[0]["loc"][0] == name


@given(st.sampled_from(["lines", "weight", "inked"]), st.none() | st.booleans() | st.integers(-2, 12) | st.floats())
def test_a_value_is_within_bounds_exactly_if_a_body_takes_it(name: str, value: Any) -> None:
    """But for null, which is no value of a field without None."""
    try:
        BODY(subject="a", **{name: value})
        taken = value is not None or name == "weight"
    except ValidationError:
        taken = False
    try:
        check_bounds(Sketch, {name: value})
        checked = True
    except Invalid as error:
        checked = error.field != name
    assert taken == checked


def test_bounds_of_a_model_are_in_place_of_the_declared_ones() -> None:
    check_bounds(Sketch, {"lines": 4}, {"lines": 4})
    for most in (3, 0):
        with pytest.raises(Invalid, match=f"^of lines: must be between 1 and {most}, not 4"):
            check_bounds(Sketch, {"lines": 4}, {"lines": most}, prefix="of ")


def test_a_body_with_fields_of_its_own_keeps_them_first() -> None:
    @with_fields_of(Sketch)
    class Order(StrictModel):
        copies: Annotated[int, Field(ge=1), "of the sketch"]

    order: Any = Order
    assert list(order.model_fields)[:2] == ["copies", "subject"] and order(copies=1).given == {"copies": 1}
    with pytest.raises(ValidationError):
        order(copies=0)
