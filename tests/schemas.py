"""Draws hostile JSON schemas: each is large or deep in a dimension that compiling a grammar may suffer from."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
_SIZES = (0, 1, 2, 5, 16, 17, 32, 33, 100, 101, 300, 500, 501, 2_000, 5_000)
_NUMBERS = (0, 1, 7, 99, 1_000, 1_001, 10**6, 10**6 + 1, 2**31, 2**63, 10**18, -1, 0.1, 1e-7, 1e300, 101 * 103 * 107)
_PATTERNS = (
    "(a+)+" * 30 + "$", "^[a-z]{1,1000}$", "^(([a-z]{1,100}){1,100}){1,100}$", "(a|b)*c(a|b){20}", r"\w{1,1000}",
    "(" * 300,
    r"\p{L}\P{Lu}[^\p{N}]" * 40, "[ab]*a[ab]{50}$", "a{99999999999}", "^(?!x)", "(?:" * 200 + "a" + ")" * 200,
    "[^\\]", "",
    "x.{30}y|y.{30}x|z.{29}w", "^(a?){300}a{300}$", "." * 1_000, "." * 1_001, "é\U0001f600" * 100,
)  # fmt: skip
_FORMATS = ("uri", "email", "date-time", "ipv6", "hostname", "uuid", "iri", "no such format")


def hostile(draw: random.Random, depth: int = 0) -> Schema:
    """A schema of two or three kinds together."""
    schema: Schema = {}
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        schema |= draw.choice(_KINDS)(draw, depth)
    return schema


def _inner(draw: random.Random, depth: int) -> Any:
    if depth < 3 and draw.random() < 0.3:
        return hostile(draw, depth + 1)
    return draw.choice(({}, True, False, {"type": "string"}, {"type": "null"}, {"enum": ["a", 1]}, {"$ref": "#"}))


def _count(draw: random.Random, depth: int) -> int:
    return draw.choice(_SIZES[: len(_SIZES) - 4 * depth])


def _object(draw: random.Random, depth: int) -> Schema:
    name, inner = draw.choice(("p", "n" * 60, "é", '"\\')), _inner(draw, depth)
    properties = {f"{name}{i}": inner for i in range(_count(draw, depth))}
    schema: Schema = {"type": "object", "properties": properties}
    if draw.random() < 0.5:
        schema["required"] = [name for name in properties if draw.random() < 0.5]
    if draw.random() < 0.7:
        schema["additionalProperties"] = _inner(draw, depth)
    if draw.random() < 0.3:
        schema[draw.choice(("minProperties", "maxProperties"))] = draw.choice(_NUMBERS)
    return schema


def _patterned(draw: random.Random, depth: int) -> Schema:
    names = (f"^a{i}{draw.choice(_PATTERNS)}" for i in range(min(_count(draw, depth), 50)))
    return {"type": "object", "patternProperties": {name: _inner(draw, depth) for name in names}}


def _array(draw: random.Random, depth: int) -> Schema:
    schema: Schema = {"type": "array", "items": _inner(draw, depth)}
    for name in ("minItems", "maxItems"):
        if draw.random() < 0.4:
            schema[name] = draw.choice(_NUMBERS)
    if draw.random() < 0.3:
        schema["prefixItems"] = [_inner(draw, depth)] * _count(draw, depth)
    return schema


def _string(draw: random.Random, depth: int) -> Schema:
    schema: Schema = {"type": "string"}
    for name in ("minLength", "maxLength"):
        if draw.random() < 0.4:
            schema[name] = draw.choice(_NUMBERS)
    if draw.random() < 0.6:
        schema["pattern"] = draw.choice(_PATTERNS)
    if draw.random() < 0.2:
        schema["format"] = draw.choice(_FORMATS)
    return schema


def _number(draw: random.Random, depth: int) -> Schema:
    schema: Schema = {"type": draw.choice(("integer", "number"))}
    for name in ("minimum", "exclusiveMaximum", "multipleOf"):
        if draw.random() < 0.5:
            schema[name] = draw.choice(_NUMBERS)
    if draw.random() < 0.3:
        schema["allOf"] = [{"multipleOf": number} for number in (101, 103, 107, 109)[: draw.randint(1, 4)]]
    return schema


def _values(draw: random.Random, depth: int) -> Schema:
    make = draw.choice(
        (str, int, lambda i: {"a": i, "b": [i]}, lambda i: "x" * i, lambda i: i * 1.1, lambda i: [[i]] * 3)
    )
    return (
        {"enum": [make(i) for i in range(min(_count(draw, depth), 2_001))]}
        if draw.random() < 0.9
        else {"const": "y" * 70_000}
    )


def _branches(draw: random.Random, depth: int) -> Schema:
    name, count = draw.choice(("anyOf", "oneOf", "allOf")), min(_count(draw, depth), 1_001)
    kind = draw.choice(("const", "object", "string", "array", "own"))
    own = _inner(draw, depth)
    make: dict[str, Callable[[int], Any]] = {
        "const": lambda i: {"const": i},
        "object": lambda i: {"type": "object", "properties": {"a": {"maxLength": i}, f"b{i}": {}}, "required": ["a"]},
        "string": lambda i: {"pattern": f"{chr(97 + i % 26)}.{{{i % 30}}}x"},
        "array": lambda i: {"type": "array", "items": {"type": "string", "maxLength": i + 1}},
        "own": lambda i: own,
    }
    return {name: [make[kind](i) for i in range(count)]}


def _references(draw: random.Random, depth: int) -> Schema:
    count = draw.choice((1, 2, 20, 40, 99, 100, 101, 900))
    keep = {"minProperties": 0} if draw.random() < 0.5 else {}

    def to(i: int) -> Schema:
        return {"$ref": f"#/$defs/d{i % (count + 1)}", **keep}

    make: Callable[[int], Any] = draw.choice((
        lambda i: to(i + 1),
        lambda i: {"type": "object", "properties": {"x": to(i + 1), "y": to(i + 1)}},
        lambda i: {"allOf": [to(i + 1), to(i + 1)]},
        lambda i: {"anyOf": [{"type": "array", "items": to(i + 1)}, to(i + 2)]},
        lambda i: {"type": "object", "properties": {f"a{j}": to(i + j) for j in range(20)}},
    ))  # fmt: skip
    return {
        "$defs": {f"d{i}": make(i) for i in range(count)} | {f"d{count}": _inner(draw, depth)},
        "$ref": "#/$defs/d0",
    }


def _deep(draw: random.Random, depth: int) -> Schema:
    schema: Any = {}
    for _ in range(draw.choice((5, 11, 12, 30, 400))):
        schema = {"items": schema} if draw.random() < 0.5 else {"properties": {"a": schema}}
    return schema  # type: ignore[no-any-return]


def _odd(draw: random.Random, depth: int) -> Schema:
    return draw.choice((
        {"x-guidance": {"whitespace_pattern": "(a|b)*c(a|b){20}"}}, {"$ref": "http://169.254.169.254/"}, {"$ref": 5},
        {"$ref": "#" + "/x" * 20_000}, {"type": "nothing"}, {"type": ["string"] * 500}, {"required": "a"}, {"enum": {}},
        {"properties": []}, {"not": {}}, {"description": "x" * 66_000}, {"uniqueItems": True}, {"if": {},
        "then": False},
        {"\x1b[31m\u202e": 1, "dependentSchemas": {}}, {"$schema": "no such draft"}, {"$id": "#"}, {"minLength": "5"},
    ))  # fmt: skip


_KINDS: tuple[Callable[[random.Random, int], Schema], ...] = (
    _object, _object, _patterned, _array, _string, _number, _values, _branches, _references, _deep, _odd,
)  # fmt: skip


def heavy(number: int) -> Schema:
    """A schema of 44 KB within all bounds, whose grammar is among the most expensive of its size; `number` tells them
    apart.
    """
    names = [f"{number}_{i}_{'n' * 55}" for i in range(500)]
    return {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in names},
        "additionalProperties": False,
    }


# Within all bounds of the contract, and beyond those of compiling: refused by the worker's checker.
COSTLY: tuple[Schema, ...] = (
    {"type": "integer", "allOf": [{"multipleOf": p} for p in (101, 103, 107, 109)]},
    {"$defs": {f"d{i}": {"type": "object", "properties": {
        name: {"$ref": f"#/$defs/d{i + 1}", "minProperties": 0} for name in "xy"}} for i in range(20)}
        | {"d20": {"type": "object"}}, "$ref": "#/$defs/d0"},
)  # fmt: skip

# Within all bounds: after each token any of 300 branches may go on, so that masks take long.
AMBIGUOUS: Schema = {"type": "array", "items": {"anyOf": [
    {"type": "array", "items": {"type": "string", "maxLength": i + 1}} for i in range(300)]}}  # fmt: skip
