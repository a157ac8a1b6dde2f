"""Pagination: reads and documents `limit` and `after`, and builds OpenAI's pages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from api.errors import ApiError, invalid_field

Parameter = tuple[Mapping[str, object], str]  # its JSON schema, and its description


@dataclass(frozen=True, slots=True)
class Pagination:
    """A list's parameters: default and maximum page size, and the form of its ids."""

    default: int
    maximum: int
    id: str  # the pattern of the ids
    kind: str  # what the ids are of, such as "a job"

    def read(self, request: Request) -> tuple[int, str]:
        """Page size, and the id to start after; "" is from the start. Raises `ApiError` (400) naming the field."""
        query = request.query_params
        limit, after = query.get("limit", str(self.default)), query.get("after")
        if not re.fullmatch(r"[0-9]{1,5}", limit) or not 1 <= int(limit) <= self.maximum:
            raise invalid_field("limit", f"must be a whole number between 1 and {self.maximum}")
        if after is not None and re.fullmatch(self.id, after) is None:
            raise invalid_field("after", f"must be the id of {self.kind}")
        return int(limit), after or ""

    def document(self, **more: Parameter) -> dict[str, Any]:
        """The parameters for OpenAPI, to be used as `openapi_extra`; `more` are further ones."""
        limit = {"type": "integer", "minimum": 1, "maximum": self.maximum, "default": self.default}
        after = {"type": "string", "pattern": f"^{self.id}$"}
        return query(limit=(limit, "objects of one page"), after=(after, "the last id of the page before"), **more)


def query(**parameters: Parameter) -> dict[str, Any]:
    """Optional query parameters, as `openapi_extra`."""
    return {
        "parameters": [
            {"name": name, "in": "query", "required": False, "schema": dict(schema), "description": words}
            for name, (schema, words) in parameters.items()
        ]
    }


def page(data: Sequence[Mapping[str, Any]], *, more: bool, last: str | None = None) -> dict[str, Any]:
    """One page of objects that have an `id`. `last`: where the next page begins, if not after the last of them."""
    first = data[0]["id"] if data else None
    return {
        "object": "list",
        "data": list(data),
        "first_id": first,
        "last_id": last or (data[-1]["id"] if data else None),
        "has_more": more,
    }


def missing() -> ApiError:
    """A 400: the object to start after is not in the list."""
    return invalid_field("after", "is not in this list, or no longer")
