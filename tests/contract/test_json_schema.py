"""JSON schemas beyond a bound are refused by its name; those that people write are not."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import create_model

from contract import json_schema
from contract.chat import ChatFields
from contract.errors import Invalid
from contract.json_schema import check_json_schema
from tests.schemas import heavy, hostile


def names(count: int) -> dict[str, Any]:
    return {f"p{i}": {} for i in range(count)}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


# By bound: a schema of so much of it, the bound, and what the error says of one more.
BOUNDS: dict[str, tuple[Any, int, str]] = {
    "characters": (lambda n: {"title": "x" * (n - 12)}, json_schema.MAX_CHARACTERS, "has 65537 characters"),
    "depth": (nested, json_schema.MAX_DEPTH, "is nested more than 56 deep"),
    "properties": (
        lambda n: {"properties": {f"o{i}": {"properties": names(n // 4 - 1)} for i in range(3)} | {"rest": {
            "properties": names(n - 3 * (n // 4 - 1) - 4)}}},
        json_schema.MAX_PROPERTIES, "too many properties, at most 2000",
    ),
    "optional": (lambda n: {"properties": names(n)}, json_schema.MAX_OPTIONAL, "501 optional properties in one object"),
    "counted": (
        lambda n: {"properties": names(n), "minProperties": 1}, json_schema.MAX_COUNTED,
        "33 optional properties in an object with",
    ),
    "patterned": (lambda n: {"patternProperties": names(n)}, json_schema.MAX_PATTERNED, "17 patternProperties"),
    "values": (lambda n: {"enum": [*range(n)]}, json_schema.MAX_VALUES, "too many values of enums, at most 2000"),
    "name": (lambda n: {"properties": {"x" * n: {}}}, json_schema.MAX_NAME, "1001 characters in a name or value"),
    "value": (lambda n: {"enum": ["x" * n]}, json_schema.MAX_NAME, "1001 characters in a name or value"),
    "const": (lambda n: {"const": "x" * n}, json_schema.MAX_NAME, "1001 characters in a name or value"),
    "patterns": (lambda n: {"anyOf": [{"pattern": "a"}] * n}, json_schema.MAX_PATTERNS,
        "too many patterns, at most 200"),
    "pattern": (lambda n: {"pattern": "x" * n}, json_schema.MAX_PATTERN,
        "1001 characters in a pattern"),
    "name's pattern": (lambda n: {"patternProperties": {"x" * n: {}}}, json_schema.MAX_PATTERN,
        "1001 characters in a pattern"),
    "repeats": (lambda n: {"pattern": f"a{{3,{n}}}"}, json_schema.MAX_REPEATS,
        "too many repetitions in a pattern, at most 1000"),
    "zeros": (lambda n: {"pattern": f"a{{{'0' * 20}{n}}}"}, json_schema.MAX_REPEATS,
        "too many repetitions in a pattern"),
    "branches": (
        lambda n: {"anyOf": [{}] * (n - 9), "items": {"oneOf": [{}] * 9}}, json_schema.MAX_BRANCHES,
        "too many branches of anyOf and oneOf, at most 1000",
    ),
    "all": (lambda n: {"allOf": [{}] * n}, json_schema.MAX_ALL, "too many schemas in allOf, at most 100"),
    "references": (
        lambda n: {"prefixItems": [{"$ref": "#"}] * n}, json_schema.MAX_REFERENCES, "too many references, at most 1000",
    ),
    "targets": (
        lambda n: {"prefixItems": [{"$ref": f"#/$defs/{i}"} for i in range(n)]}, json_schema.MAX_TARGETS,
        "too many different targets of $ref, at most 100",
    ),
    **{
        name: (lambda n, name=name: {name: n}, json_schema.MAX_SIZE, f"{name} must be at most 1000000")
        for name in ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
    },
    "multiple": (lambda n: {"multipleOf": n}, json_schema.MAX_MULTIPLE, "multipleOf must be at most 1000"),
    "decimal": (lambda n: {"multipleOf": n / 10_000}, json_schema.MAX_MULTIPLE, "multipleOf must be at most 1000"),
}  # fmt: skip


@pytest.mark.parametrize("name", BOUNDS)
def test_a_bound_is_the_most_that_is_allowed_and_one_more_is_refused_by_name(name: str) -> None:
    make, bound, words = BOUNDS[name]
    schema = make(bound)
    assert json.loads(check_json_schema(schema)) == schema
    with pytest.raises(Invalid, match=rf"^json_schema: .*{re.escape(words)}") as caught:
        check_json_schema(make(bound + 1))
    assert "xx" not in str(caught.value)


def test_llguidances_own_options_are_refused() -> None:
    with pytest.raises(Invalid, match="json_schema: must not have x-guidance"):
        check_json_schema({"x-guidance": {"whitespace_pattern": ".*"}})


ADDRESS = create_model("Address", street=(str, ...), city=(str | None, None), zip=(int, 0))
FIELDS: dict[str, Any] = {
    **{f"text_{i}": (str | None, None) for i in range(150)}, **{f"number_{i}": (float, 0.5) for i in range(150)},
    **{f"address_{i}": (ADDRESS | None, None) for i in range(100)},
    **{f"list_{i}": (list[ADDRESS], ...) for i in range(50)},
}  # fmt: skip
HONEST = {
    "wide": create_model("Wide", **FIELDS).model_json_schema(), "ours": ChatFields.model_json_schema(),
    "heavy": heavy(1),
}  # fmt: skip


@pytest.mark.parametrize("name", HONEST)
def test_schemas_that_people_write_are_within_the_bounds(name: str) -> None:
    assert json.loads(check_json_schema(HONEST[name])) == HONEST[name]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(
        st.sampled_from(["properties", "required", "enum", "pattern", "$ref", "allOf", "multipleOf", "maxItems", "a"]),
        inner,
        max_size=4,
    ),
    max_leaves=20,
)  # fmt: skip


@given(
    st.dictionaries(st.sampled_from(["properties", "required", "anyOf", "patternProperties", "const", "items"]), JSON)
)
def test_whatever_is_no_schema_is_no_error_of_ours(schema: dict[str, Any]) -> None:
    try:
        check_json_schema(schema)
    except Invalid as error:
        assert error.field == "json_schema"


@given(st.integers(0, 2**32))
def test_hostile_schemas_are_refused_without_echoing_them_or_are_within_the_bounds(seed: int) -> None:
    schema = hostile(random.Random(seed))
    try:
        assert len(check_json_schema(schema)) <= json_schema.MAX_CHARACTERS
    except Invalid as error:
        assert error.field == "json_schema" and len(str(error)) < 150 and str(error).isprintable()
