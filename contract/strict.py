"""The base of all models of requests: strict types, no unknown fields, few errors for any input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from contract.errors import INVALID_VALUE, Invalid

UNKNOWN = "unknown_field"  # type of the error; its context has the `name`
FIELD = "field"  # type of an error whose context has the `field`, relative to where it is, `message` and `code`
MAX_NAME = 256  # characters of a model's, sampler's, plan's or network's name
MAX_IGNORED = 10_000  # characters of a text that is accepted and ignored
IGNORED = "accepted and ignored"

IgnoredText = Annotated[str | None, Field(max_length=MAX_IGNORED, description=IGNORED)]
IgnoredValue = Annotated[Any, Field(description=IGNORED)]


class StrictModel(BaseModel):
    """An object of a request."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    _warnings: tuple[str, ...] = PrivateAttr(default=())

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is told of the fields that were left out before the object was validated."""
        return self._warnings

    def with_warnings(self, warnings: tuple[str, ...]) -> Self:
        """Return the object with these warnings."""
        copy = self.model_copy()
        copy._warnings = warnings
        return copy

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        """Leave out the fields that are null. Reject an object with more names than there are fields by its first
        unknown name: pydantic would build an error for each.
        """
        if not isinstance(value, dict):
            return value
        names = {field.alias or name for name, field in cls.model_fields.items()}
        if len(value) > len(names):
            name = next(name for name in value if name not in names)
            raise PydanticCustomError(UNKNOWN, "an unknown field", {"name": name})
        return {name: member for name, member in value.items() if member is not None or name not in names}

    @property
    def given(self) -> dict[str, Any]:
        """The fields that are given, by name; null means not given."""
        return {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}


class Nested(StrictModel):
    """An object among a request's fields, the same in requests, parameters and records."""

    @classmethod
    def read(cls, field: str, record: Mapping[str, Any]) -> Self:
        """Parse what `to_dict` wrote. Raises `Invalid`, naming the field."""
        try:
            return cls(**record)
        except (ValidationError, TypeError):
            raise Invalid(field, "has another form") from None

    def to_dict(self) -> dict[str, Any]:
        """The object as JSON, without what is not given."""
        return self.model_dump(by_alias=True, exclude_none=True)


def field_error(field: str, message: str, code: str = INVALID_VALUE) -> PydanticCustomError:
    """The error of a validator that names the field. The message echoes no text of the request."""
    return PydanticCustomError(FIELD, "wrong", {"field": field, "message": message, "code": code})


def at_most(count: int) -> BeforeValidator:
    """Reject a longer object before its entries are validated: pydantic would build an error for each."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > count:
            raise PydanticCustomError("too_long", "too many entries", {"max_length": count})
        return value

    return BeforeValidator(check)
