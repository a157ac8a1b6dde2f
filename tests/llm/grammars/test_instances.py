"""Which JSON schemas nothing finite fits: found for those that have no instance, and never said of one that has."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.errors import Invalid
from llm.grammars.constrain import _checked
from llm.grammars.instances import has_finite_instance

SELF = {"$ref": "#"}
NAMES = ("a", "b", "c")

NONE: list[dict[str, Any]] = [
    SELF,
    {"allOf": [SELF, {}]},
    {"anyOf": [SELF, {"allOf": [SELF]}]},
    {"type": "object", "required": ["a"], "additionalProperties": SELF},
    {"type": "object", "required": ["a"], "additionalProperties": False},
    {"type": "object", "required": ["a", "b"], "properties": {"a": {}, "b": SELF}},
    {"type": "array", "minItems": 2, "prefixItems": [{}, SELF]},
    {"type": "array", "minItems": 2, "items": [{}, SELF]},
    {"type": "array", "minItems": 2, "prefixItems": [{}], "items": SELF},
    {"type": ["array", "object"], "minItems": 1, "items": SELF, "required": ["a"], "properties": {"a": SELF}},
    {"$ref": "#/$defs/x~1y%25", "$defs": {"x/y%": {"type": "array", "minItems": 1, "items": {"$ref": "#"}}}},
]
SOME: list[dict[str, Any]] = [
    {},
    {"anyOf": [SELF, {"type": "null"}]},
    {"oneOf": [{"type": "null"}, SELF]},
    {"type": "object", "required": ["a"], "properties": {"a": {"type": ["object", "null"]}}},
    {"type": ["object", "null"], "required": ["a"], "properties": {"a": SELF}},
    {"required": ["a"], "properties": {"a": SELF}},
    {"type": "array", "minItems": 1, "prefixItems": [{}, SELF]},
    {"const": 5, "type": "object", "required": ["a"], "properties": {"a": SELF}},
    {"$ref": "https://example.com/elsewhere"},
    {"$ref": "#/nowhere"},
    {"$ref": "#/required/9", "required": ["a"]},
    {"type": "object", "required": 5, "properties": [], "allOf": {}, "anyOf": 3, "minItems": "x"},
]  # fmt: skip


@pytest.mark.parametrize("schema", NONE)
def test_without_an_instance(schema: dict[str, Any]) -> None:
    assert not has_finite_instance(schema)


@pytest.mark.parametrize("schema", SOME)
def test_with_one(schema: dict[str, Any]) -> None:
    assert has_finite_instance(schema)


def test_a_long_chain_takes_no_longer_than_it_is() -> None:
    """Neither the stack nor the square of the length: as many as a schema of 64 Ki characters can name."""
    count = 50_000
    defs: dict[str, Any] = {f"{k}": {"$ref": f"#/$defs/{k + 1}"} for k in range(count)}
    assert not has_finite_instance({"$ref": "#/$defs/0", "$defs": {**defs, f"{count}": {"$ref": "#/$defs/0"}}})
    assert has_finite_instance({"$ref": "#/$defs/0", "$defs": {**defs, f"{count}": {"type": "null"}}})
    wide = {"anyOf": [{"$ref": "#"}] * count}
    assert not has_finite_instance(wide)


refs = st.sampled_from(NAMES).map(lambda name: {"$ref": f"#/$defs/{name}"})
schemas: st.SearchStrategy[dict[str, Any]] = st.recursive(
    refs | st.just({"type": "null"}),
    lambda inner: (
        st.builds(lambda one: {"anyOf": one}, st.lists(inner, min_size=1, max_size=3))
        | st.builds(
            lambda one, required: {"type": "object", "properties": one, "required": sorted(required & one.keys()),
                                   "additionalProperties": False},
            st.dictionaries(st.sampled_from(NAMES), inner, max_size=3), st.sets(st.sampled_from(NAMES)),
        )
        | st.builds(lambda one, least: {"type": "array", "items": one, "minItems": least}, inner, st.integers(0, 2))
    ),
    max_leaves=5,
)  # fmt: skip


def smallest(schema: dict[str, Any], defs: dict[str, Any], depth: int) -> bool:
    """Whether an instance of this depth at most can be built, by trying to: another way to the same answer."""
    if depth < 0:
        return False
    if "$ref" in schema:
        return smallest(defs[schema["$ref"][-1]], defs, depth - 1)
    if "anyOf" in schema:
        return any(smallest(one, defs, depth) for one in schema["anyOf"])
    if schema["type"] == "object":
        return all(smallest(schema["properties"][name], defs, depth) for name in schema["required"])
    if schema["type"] == "array":
        return not schema["minItems"] or smallest(schema["items"], defs, depth)
    return True


@settings(max_examples=100)
@given(schemas, st.fixed_dictionaries(dict.fromkeys(NAMES, schemas)))
def test_as_building_one_finds_it(root: dict[str, Any], defs: dict[str, Any]) -> None:
    """With three names a shortest instance follows each of them once on a way: three references deep at most."""
    if "$ref" in root:
        root = {"anyOf": [root]}
    assert has_finite_instance({**root, "$defs": defs}) == smallest(root, defs, len(NAMES))


# Whatever a stranger may write where a schema has a keyword, at the edges of what Python's numbers and texts can be.
EDGES = [
    10**400, -(10**400), 2**63, 1e308, float("inf"), float("-inf"), float("nan"), -0.0, "9" * 5000, "\u0663", "\u00b2",
    *(f"#/anyOf/{index}" for index in ("9" * 5000, "-1", "\u0663", "\u00b2", "0/anyOf/0")), "#", "#/%", "#/%ff", "#/~",
    "#/properties/a/minItems", "", "\0", True, None,
]  # fmt: skip
KEYWORDS = [
    "$ref", "allOf", "anyOf", "oneOf", "type", "properties", "required", "additionalProperties", "patternProperties",
    "minItems", "maxItems", "items", "prefixItems", "additionalItems", "const", "enum", "pattern", "multipleOf",
    "minLength", "minProperties", "maxProperties", "a", "x-guidance", "$defs",
]  # fmt: skip
KEYS = st.sampled_from(KEYWORDS)
VALUES = st.recursive(
    st.sampled_from(EDGES) | KEYS | st.integers(-2, 3) | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(KEYS, VALUES, max_size=5))
def test_whatever_it_says_it_is_refused_or_read(schema: dict[str, Any]) -> None:
    """Never an error of ours: not by the bounds, nor by the search for an instance, nor past the bounds."""
    has_finite_instance(schema)
    try:
        text = json.dumps(schema)
        _checked(text)
    except Invalid as error:
        assert str(error)


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_each_keyword_takes_anything(keyword: str) -> None:
    for edge in EDGES:
        for schema in ({keyword: edge}, {"anyOf": [{keyword: edge}]}, {"type": "array", keyword: [edge]}):
            has_finite_instance(schema)
            with contextlib.suppress(Invalid):
                _checked(json.dumps(schema))
