"""Decides whether a JSON schema has a finite instance: `{"$ref": "#"}` has none, and its answer would never end."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

from contract.errors import Invalid

Node = int  # the identity of a schema, or a number for a part of it

_DIGITS = 9  # of an index in a JSON pointer: no schema has a list as long
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


def has_finite_instance(schema: dict[str, Any]) -> bool:
    """False only if no finite JSON fits: due to required `$ref`s that lead back to themselves.

    A schema has a finite instance if everything it requires has: this is a Horn formula, whose least model is found in
    linear time (Dowling and Gallier, 1984). Unsupported keywords (patterns, formats, bounds, `not`,
    `patternProperties`) count as satisfiable. JSON Schema 2020-12, and `items` in lists as before it.
    """
    return _Formula(schema).holds()


class _Formula:
    """Rules `head ← body`: the head has a finite instance if every node of the body has."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._made = -1  # nodes of parts count downwards, so that they collide with no schema's identity
        self._missing: list[int] = []  # by rule: how many nodes of its body are not yet known to be satisfiable
        self._heads: list[Node] = []
        self._uses: dict[Node, list[int]] = defaultdict(list)  # node → rules in whose body it is
        self._pending: list[dict[str, Any]] = []
        self._seen: set[Node] = set()
        self._goal = self._node(root)
        while self._pending:
            self._read(self._pending.pop())

    def holds(self) -> bool:
        ready = [rule for rule, missing in enumerate(self._missing) if not missing]
        fitted: set[Node | None] = {None}
        while ready:
            head = self._heads[ready.pop()]
            if head in fitted:
                continue
            fitted.add(head)
            for rule in self._uses[head]:
                self._missing[rule] -= 1
                if not self._missing[rule]:
                    ready.append(rule)
        return self._goal in fitted

    def _rule(self, head: Node, body: Iterable[Node | None]) -> None:
        needed = {node for node in body if node is not None}
        for node in needed:
            self._uses[node].append(len(self._heads))
        self._heads.append(head)
        self._missing.append(len(needed))

    def _part(self, *bodies: Iterable[Node | None]) -> Node:
        """A node that is satisfied if all nodes of one of these bodies are."""
        self._made -= 1
        node = self._made
        for body in bodies:
            self._rule(node, body)
        return node

    def _node(self, schema: Any) -> Node | None:
        """The node of a schema; None for one that everything fits, or that is no schema."""
        if schema is False:
            return self._part()
        if not isinstance(schema, dict):
            return None
        if id(schema) not in self._seen:
            self._seen.add(id(schema))
            self._pending.append(schema)
        return id(schema)

    def _read(self, schema: dict[str, Any]) -> None:
        parts: list[Node | None] = []
        if isinstance(schema.get("$ref"), str):
            parts.append(self._node(self._target(schema["$ref"])))
        parts += [self._node(part) for part in _list(schema.get("allOf"))]
        for name in ("anyOf", "oneOf"):
            if _list(schema.get(name)):
                parts.append(self._part(*([self._node(part)] for part in schema[name])))
        if "const" not in schema and "enum" not in schema:
            allowed_types = schema.get("type", list(_TYPES))
            types = allowed_types if isinstance(allowed_types, list) else [allowed_types]
            parts.append(self._part(*(self._contents(schema, type) for type in types)))
        self._rule(id(schema), parts)

    def _contents(self, schema: dict[str, Any], type: Any) -> list[Node | None]:
        """The contents that an instance of this type must have."""
        if type == "object":
            properties = schema.get("properties")
            declared = properties if isinstance(properties, dict) else {}
            additional = None if "patternProperties" in schema else schema.get("additionalProperties")
            required = [name for name in _list(schema.get("required")) if isinstance(name, str)]
            return [self._node(declared.get(name, additional)) for name in required]
        if type == "array":
            min_items = schema.get("minItems", 0)
            count = int(min_items) if isinstance(min_items, int) or _is_finite(min_items) else 0
            items = schema.get("items")
            first = _list(schema.get("prefixItems")) or _list(items)
            additional = schema.get("additionalItems") if isinstance(items, list) else items
            return [self._node(item) for item in [*first[:count], *([additional] if count > len(first) else [])]]
        return []

    def _target(self, reference: str) -> Any:
        """The target of a JSON pointer (RFC 6901); None for another kind of reference, or one without a target."""
        start, *names = unquote(reference).split("/")
        target: Any = self._root if start == "#" else None
        for name in (name.replace("~1", "/").replace("~0", "~") for name in names):
            if isinstance(target, dict):
                target = target.get(name)
            elif isinstance(target, list) and name.isdecimal() and len(name) <= _DIGITS and int(name) < len(target):
                target = target[int(name)]
            else:
                return None
        return target


def _is_finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def check_schema(schema: dict[str, Any], field: str) -> None:
    """Raise `Invalid` naming the field for a schema that no finite text satisfies."""
    if not has_finite_instance(schema):
        raise Invalid(field, "no finite text satisfies it: a $ref leads back to itself through what is required")
