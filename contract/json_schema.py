"""Bounds the JSON schemas that requests may constrain answers by: what compiling them, or a step in them, may cost.

A walk in linear time over the schema as JSON, which stops at the first bound that is exceeded. Compiling one that is
within them is quick as a rule; what makes exceptions is found by compiling (`llm/grammars/grammar_process.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import Field

from contract.errors import Invalid
from contract.strict import IGNORED, IgnoredText, StrictModel

FIELD = "json_schema"
MAX_CHARACTERS = 65_536  # of the schema as compact JSON
MAX_KEYWORDS = 1000  # at its top
MAX_DEPTH = 56  # objects and lists inside each other
MAX_PROPERTIES = 2_000
MAX_OPTIONAL = 500  # properties of one object that are not in its `required`: compiling is quadratic in them
MAX_COUNTED = 32  # the same where minProperties or maxProperties counts them: the grammar is quadratic in them
MAX_PATTERNED = 16  # patternProperties of one object: each pair is intersected
MAX_VALUES = 2_000  # of enums
MAX_NAME = 1_000  # characters of one name, const or value of an enum: each step compares all of it
MAX_PATTERNS = 200  # patterns and patternProperties
MAX_PATTERN = 1_000  # characters of one
MAX_REPEATS = 1_000  # in a pattern's {m,n}
MAX_BRANCHES = 1_000  # of anyOf and oneOf
MAX_ALL = 100  # of allOf: its schemas are intersected
MAX_REFERENCES = 1_000
MAX_TARGETS = 100  # different ones of $ref: a chain of them is followed recursively
MAX_SIZE = 1_000_000  # minLength, maxLength, minItems, maxItems, minProperties, maxProperties
MAX_MULTIPLE = 1_000  # multipleOf, without its decimal point: the automaton has as many states

_SIZES = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_REPEATS = re.compile(r"\{(\d+)(?:,(\d*))?\}")
_OPTIONS = "x-guidance"  # llguidance reads its own options in it, such as the pattern of white space


class AnswerSchema(StrictModel):
    """The JSON schema that an answer fits."""

    description: IgnoredText = None
    strict: bool | None = Field(default=None, description=f"{IGNORED}: answers always fit the schema")
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema", max_length=MAX_KEYWORDS)


SchemaName = Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]
FormatType = Literal["text", "json_object", "json_schema"]


def schema_text(type: FormatType, schema: AnswerSchema | None) -> str | None:
    """The JSON schema for the answers, as text; None for any text. Raises `Invalid` for one beyond its bounds."""
    if type == "json_schema":
        return check_json_schema((schema and schema.json_schema) or {})
    return '{"type":"object"}' if type == "json_object" else None


def check_json_schema(schema: dict[str, Any]) -> str:
    """Return the schema as compact JSON. Raises `Invalid` naming the bound that it exceeds; nothing of it is echoed."""
    if _OPTIONS in schema:
        raise Invalid(FIELD, f"must not have {_OPTIONS}")
    _Bounds().walk(schema)
    text = json.dumps(schema, separators=(",", ":"))
    if len(text) > MAX_CHARACTERS:
        raise _more("characters", len(text), MAX_CHARACTERS)
    return text


class _Bounds:
    """Counts over a whole schema. Values of `default` and `examples` are counted like schemas."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._targets: set[str] = set()
        self._read: dict[str, Callable[[Any, dict[str, Any]], None]] = {
            "properties": self._properties,
            "patternProperties": self._pattern_properties,
            "enum": lambda value, _: self._values(value),
            "const": lambda value, _: _check_name(value),
            "pattern": lambda value, _: self._pattern(value),
            "anyOf": lambda value, _: self._list("branches of anyOf and oneOf", value, MAX_BRANCHES),
            "oneOf": lambda value, _: self._list("branches of anyOf and oneOf", value, MAX_BRANCHES),
            "allOf": lambda value, _: self._list("schemas in allOf", value, MAX_ALL),
            "$ref": lambda value, _: self._reference(value),
            "multipleOf": lambda value, _: _check_multiple(value),
            **{name: lambda value, _, name=name: _check_size(name, value) for name in _SIZES},  # type: ignore[misc]
        }

    def walk(self, schema: dict[str, Any]) -> None:
        pending: list[tuple[Any, int]] = [(schema, 1)]
        while pending:
            value, depth = pending.pop()
            if isinstance(value, str):
                self._add("characters", len(value), MAX_CHARACTERS)
                continue
            self._add("characters", 1, MAX_CHARACTERS)
            if not isinstance(value, dict | list):
                continue
            if depth > MAX_DEPTH:
                raise Invalid(FIELD, f"is nested more than {MAX_DEPTH} deep")
            if isinstance(value, dict):
                self._object(value)
            pending += [(inner, depth + 1) for inner in (value.values() if isinstance(value, dict) else value)]

    def _object(self, schema: dict[str, Any]) -> None:
        for name, value in schema.items():
            self._add("characters", len(name), MAX_CHARACTERS)
            if name in self._read:
                self._read[name](value, schema)

    def _add(self, name: str, count: int, limit: int) -> None:
        self._counts[name] = total = self._counts.get(name, 0) + count
        if total > limit:
            raise _more(name, None, limit)

    def _list(self, name: str, value: Any, limit: int) -> None:
        if isinstance(value, list):
            self._add(name, len(value), limit)

    def _properties(self, value: Any, schema: dict[str, Any]) -> None:
        if not isinstance(value, dict):
            return
        self._add("properties", len(value), MAX_PROPERTIES)
        for name in value:
            _check_name(name)
        required = schema.get("required")
        needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
        optional = len(value.keys() - needed)
        if optional > MAX_OPTIONAL:
            raise _more("optional properties in one object", optional, MAX_OPTIONAL)
        if optional > MAX_COUNTED and not schema.keys().isdisjoint(("minProperties", "maxProperties")):
            raise _more("optional properties in an object with minProperties or maxProperties", optional, MAX_COUNTED)

    def _pattern_properties(self, value: Any, schema: dict[str, Any]) -> None:
        if isinstance(value, dict):
            if len(value) > MAX_PATTERNED:
                raise _more("patternProperties in one object", len(value), MAX_PATTERNED)
            for pattern in value:
                self._pattern(pattern)

    def _values(self, value: Any) -> None:
        if isinstance(value, list):
            self._add("values of enums", len(value), MAX_VALUES)
            for item in value:
                _check_name(item)

    def _pattern(self, value: Any) -> None:
        if isinstance(value, str):
            self._add("patterns", 1, MAX_PATTERNS)
            if len(value) > MAX_PATTERN:
                raise _more("characters in a pattern", len(value), MAX_PATTERN)
            if any(_whole(number) > MAX_REPEATS for pair in _REPEATS.findall(value) for number in pair):
                raise _more("repetitions in a pattern", None, MAX_REPEATS)

    def _reference(self, value: Any) -> None:
        if isinstance(value, str):
            self._add("references", 1, MAX_REFERENCES)
            self._targets.add(value)
            if len(self._targets) > MAX_TARGETS:
                raise _more("different targets of $ref", None, MAX_TARGETS)


def _more(name: str, count: int | None, limit: int) -> Invalid:
    count_text = "too many" if count is None else str(count)
    return Invalid(FIELD, f"has {count_text} {name}, at most {limit} are allowed")


def _whole(digits: str) -> int:
    return int(digits.lstrip("0")[:10] or 0)


def _check_name(value: Any) -> None:
    if isinstance(value, str) and len(value) > MAX_NAME:
        raise _more("characters in a name or value", len(value), MAX_NAME)


def _check_size(name: str, value: Any) -> None:
    if isinstance(value, int | float) and value > MAX_SIZE:
        raise Invalid(FIELD, f"{name} must be at most {MAX_SIZE}")


def _check_multiple(value: Any) -> None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        # Zeros before a decimal point count, those behind the last digit after it do not.
        _, digits, exponent = Decimal(str(value)).normalize().as_tuple()
        max_digits = len(str(MAX_MULTIPLE))
        if (
            not isinstance(exponent, int)
            or len(digits) + max(exponent, 0) > max_digits
            or (int("".join(map(str, digits))) * 10 ** max(exponent, 0) > MAX_MULTIPLE)
        ):
            raise Invalid(FIELD, f"multipleOf must be at most {MAX_MULTIPLE}, its decimal point left out")
