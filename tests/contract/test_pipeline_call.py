"""Options of a pipeline: their types, and that what is offered and nothing else is taken."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from contract.errors import Invalid
from contract.image import ImageJob, ImageParameters
from contract.pipeline_call import FIELDS, MAX_OPTIONS, Options, check_fields, check_options
from tests.contract.refused import refused

OFFERED = {name: {"type": name} for name in ("boolean", "integer", "number", "string")}
ADAPTER: TypeAdapter[dict[str, Any]] = TypeAdapter(Options)
scalars = st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.text()


@given(st.sampled_from(sorted(OFFERED)), scalars)
def test_an_option_has_the_type_that_is_offered(name: str, value: Any) -> None:
    kinds = {"boolean": bool, "integer": int, "number": int | float, "string": str}
    fits = isinstance(value, kinds[name]) and (name == "boolean" or not isinstance(value, bool))
    fits = fits and (not isinstance(value, str) or value.isprintable())
    if fits:
        check_options({name: value}, OFFERED)
    elif not isinstance(value, str) or name != "string":  # texts with other characters have rules of their own
        with refused(f"pipeline_options.{name}"):
            check_options({name: value}, OFFERED)


@given(st.dictionaries(st.text(max_size=8), scalars, max_size=4))
def test_bodies_and_records_keep_values_as_they_are(options: dict[str, Any]) -> None:
    assert ADAPTER.validate_python(options) == options
    parameters = ImageParameters("a", 0, 64, 64, pipeline_options=options or None)
    record = json.loads(json.dumps(ImageJob(parameters).to_dict()))
    assert ImageJob.read(record).picture == parameters


@pytest.mark.parametrize("value", [[1], {"a": 1}, None, math.nan])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises((ValidationError, Invalid)):
        check_options(ADAPTER.validate_python({"number": value}), OFFERED)


@given(st.sampled_from(["integer", "number"]), st.integers(), st.integers(0, 100))
def test_a_number_is_within_the_bounds_that_are_offered(kind: str, value: int, width: int) -> None:
    offered = {"a": {"type": kind, "minimum": -3, "maximum": width}}
    if -3 <= value <= width:
        check_options({"a": value}, offered)
    else:
        with pytest.raises(Invalid, match=f"between -3 and {width}") as error:
            check_options({"a": value}, offered)
        assert error.value.field == "pipeline_options.a"


@pytest.mark.parametrize("options", [{"other": 1}, dict.fromkeys(map(str, range(MAX_OPTIONS + 1)), 1), [1]])
def test_what_is_not_offered_is_refused(options: Any) -> None:
    with refused("pipeline_options"):
        check_options(options, OFFERED)


@given(st.sets(st.sampled_from(FIELDS)), st.sampled_from(FIELDS))
def test_fields_are_those_of_the_offer(fields: set[str], name: str) -> None:
    check_fields({name: 1}, None)
    check_fields({name: None}, fields)
    if name in fields:
        check_fields({name: 1}, fields)
    else:
        with refused(name):
            check_fields({name: 1}, fields)
