"""Fields of an image request that are objects, and are the same in requests, parameters and records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import ValidationError

from contract.errors import Invalid
from contract.strict import StrictModel


class Nested(StrictModel):
    """An object among a request's fields."""

    @classmethod
    def read(cls, field: str, told: Mapping[str, Any]) -> Self:
        """Parse what `to_dict` wrote. Raises `Invalid`, naming the field."""
        try:
            return cls(**told)
        except (ValidationError, TypeError):
            raise Invalid(field, "has another form") from None

    def to_dict(self) -> dict[str, Any]:
        """As JSON, without what is not given."""
        return self.model_dump(by_alias=True, exclude_none=True)
