"""Generates the models of HTTP bodies from the dataclasses that requests are, so that a field is declared once.

A dataclass's field whose annotation has a sentence is a field of the body too, with that as its description and the
bounds of its `Field`, and optional: null means not given. `check_bounds` checks values that came by another way.
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
from contract.errors import Invalid
from contract.strict import StrictModel

M = TypeVar("M", bound=StrictModel)
_BOUNDS = ("gt", "ge", "le", "min_length", "max_length")


@dataclass(frozen=True, slots=True)
class InBody:
    """The type of a field in a body, where it is not the dataclass's own."""

    type: Any


class Declaration(NamedTuple):
    """A field: its type in a body, whether it may be None, its description, and its bounds by `Field`'s names."""

    kind: Any
    nullable: bool
    text: str
    bounds: Mapping[str, Any]


def declarations(kind: object) -> Mapping[str, Declaration]:
    """The fields of a dataclass that bodies have, by name."""
    return _declared(kind)


@cache  # whose argument mypy takes for unhashable where it is a type[T]
def _declared(kind: object) -> dict[str, Declaration]:
    declared = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        field_type, *extra = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        text = next((item for item in extra if isinstance(item, str)), None)
        if text is None:
            continue
        nullable = get_origin(field_type) is UnionType and NoneType in get_args(field_type)
        field_type = get_args(field_type)[0] if nullable and len(get_args(field_type)) == 2 else field_type
        field_type = list[get_args(field_type)[0]] if get_origin(field_type) is tuple else field_type  # type: ignore[misc]  # as JSON has it
        field_type = next((item.type for item in extra if isinstance(item, InBody)), field_type)
        limits = (limit for item in extra if isinstance(item, FieldInfo) for limit in item.metadata)
        bounds = {key: getattr(limit, key) for limit in limits for key in _BOUNDS if hasattr(limit, key)}
        declared[name] = Declaration(field_type, nullable, text, bounds)
    return declared


def body_of(kind: type[Any], required: str) -> type[StrictModel]:
    """The model of a body with the fields that this dataclass declares, all optional but the `required` one."""
    description = (kind.__doc__ or "").partition("\n")[0]
    return create_model(kind.__name__, __base__=StrictModel, __doc__=description, **_fields(kind, required))


def with_fields_of(*kinds: type[Any]) -> Callable[[type[M]], type[M]]:
    """Decorate a body's model: add the fields of these dataclasses, all optional. Its own may be declared alike."""

    def extend(body: type[M]) -> type[M]:
        needed = (name for name, declaration in declarations(body).items() if not declaration.nullable)
        fields = _fields(body, next(needed, "")) | {k: v for kind in kinds for k, v in _fields(kind).items()}
        extended: type[M] = create_model(
            body.__name__, __base__=body, __module__=body.__module__, __doc__=body.__doc__, **fields
        )
        return extended

    return extend


def _fields(kind: object, required: str = "") -> dict[str, Any]:
    definitions: dict[str, Any] = {}
    for name, (declaration, _, text, bounds) in declarations(kind).items():
        strict = {float: {"allow_inf_nan": False}, list: {"fail_fast": True}}.get(
            get_origin(declaration) or declaration, {}
        )
        info: Any = Field(... if name == required else None, description=text, **{**bounds, **strict})
        definitions[name] = declaration if name == required else declaration | None, info
    return definitions


def check_bounds(kind: object, values: Mapping[str, Any], limits: Mapping[str, float] = {}, prefix: str = "") -> None:
    """Raise `Invalid` for the first number or flag among these of a dataclass's fields that is beyond its bounds.

    `limits` are upper bounds in place of the declared ones; `prefix` goes before the field's name in the error.
    """
    declared = declarations(kind)
    for name, value in values.items():
        pair, field = declared.get(name), prefix + name
        if pair is None or pair.kind not in (int, float, bool) or (pair.nullable and value is None):
            continue
        if pair.kind is bool:
            check_flag(field, value)
            continue
        low = pair.bounds["gt"] if "gt" in pair.bounds else pair.bounds["ge"]
        high: Any = limits[name] if name in limits else pair.bounds["le"]
        (check_whole if pair.kind is int else check_number)(field, value, low, high)
        if value == pair.bounds.get("gt"):
            raise Invalid(field, f"must be more than {low}")
