"""Generates the models of HTTP bodies from the dataclasses that requests are, so that a field is declared once.

A dataclass's field whose annotation has pydantic's `Field` is a field of the body too, with the same bounds and
description, and optional: null means not given. `check_bounds` checks values that came by another way than a body.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from pydantic import Field, create_model
from pydantic.fields import FieldInfo

from contract.bounds import check_flag, check_number, check_whole
from contract.strict import StrictModel

M = TypeVar("M", bound=StrictModel)


@dataclass(frozen=True, slots=True)
class InBody:
    """The type of a field in a body, where it is not the dataclass's own."""

    type: Any


class Declaration(NamedTuple):
    """A field: its type in a body, whether it may be None, and its bounds and description."""

    kind: Any
    nullable: bool
    info: FieldInfo


@cache
def declarations(kind: object) -> Mapping[str, Declaration]:
    """The fields of a dataclass that bodies have, by name."""
    found = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if get_origin(hint) is not Annotated:
            continue
        own, *extra = get_args(hint)
        nullable = get_origin(own) is UnionType and NoneType in get_args(own)
        own = get_args(own)[0] if nullable and len(get_args(own)) == 2 else own
        own = list[get_args(own)[0]] if get_origin(own) is tuple else own  # type: ignore[misc]  # as JSON has it
        own = next((item.type for item in extra if isinstance(item, InBody)), own)
        found[name] = Declaration(own, nullable, next(item for item in extra if isinstance(item, FieldInfo)))
    return found


def body_of(*kinds: type[Any], required: str) -> type[StrictModel]:
    """The model of a body with the fields that these dataclasses declare, all optional but the `required` one.

    It is named after the first.
    """
    fields: dict[str, Any] = {}
    for name, (kind, _, info) in ((name, one) for declared in kinds for name, one in declarations(declared).items()):
        strict = Field(allow_inf_nan=False if kind is float else None, fail_fast=get_origin(kind) is list or None)
        own, default = (kind, ...) if name == required else (kind | None, None)
        fields[name] = Annotated[own, info, strict], default
    name, text = kinds[0].__name__, (kinds[0].__doc__ or "").partition("\n")[0]
    return create_model(name, __base__=StrictModel, __doc__=text, **fields)


def with_fields_of(*kinds: type[Any], required: str = "") -> Callable[[type[M]], type[M]]:
    """Decorate a body's model: put the fields of `body_of` before its own."""

    def extend(body: type[M]) -> type[M]:
        bases: Any = (body, body_of(*kinds, required=required))
        extended: type[M] = create_model(
            body.__name__, __base__=bases, __module__=body.__module__, __doc__=body.__doc__
        )
        return extended

    return extend


def check_bounds(kind: object, values: Mapping[str, Any], most: Mapping[str, float] = {}, prefix: str = "") -> None:
    """Raise `Invalid` for the first number or flag among these of a dataclass's fields that is beyond its bounds.

    `most` are upper bounds in place of the declared ones; `prefix` goes before the field's name in the error.
    """
    for name, (own, nullable, info) in declarations(kind).items():
        if name not in values or own not in (int, float, bool) or (nullable and values[name] is None):
            continue
        value, field = values[name], prefix + name
        if own is bool:
            check_flag(field, value)
            continue
        bounds: dict[str, Any] = {
            key: getattr(item, key) for item in info.metadata for key in ("ge", "le") if hasattr(item, key)
        }
        if name in most:
            bounds["le"] = most[name]
        (check_whole if own is int else check_number)(field, value, bounds["ge"], bounds["le"])
