"""The APIs of other servers as data: their names for our fields, and their form of errors. This reads both.

Another such API is its names, a function that writes an error, and its routes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from api import schemas
from api.body import plain
from api.errors import KNOWN, ApiError, api_error, invalid_field
from contract.field_names import OTHER_NAMES, SIDES
from contract.image_request import EditRequest

# Fields that an endpoint of one model and one way to answer expresses otherwise, or not at all.
_OTHERWISE = frozenset((
    "model", "n", "response_format", "stream", "partial_images", "user", "quality", "style", "background", "moderation",
    "input_fidelity",
))  # fmt: skip

Places = dict[str, str]
"""Where a client finds a field of ours in its request, by our name; that of an object also holds for what is in it."""


@dataclass(frozen=True, slots=True)
class FieldNames:
    """The names of a flat object of parameters.

    prefix: of its fields, in errors.
    names: of ours, by theirs. A field is given by one of its names only.
    passed: names that are passed on as they are, besides the `shared` ones.
    ignored: names without effect here.
    without: fields of ours that are not among the `shared` ones, besides those of `_OTHERWISE`.
    """

    prefix: str
    names: Mapping[str, str]
    passed: Collection[str] = SIDES
    ignored: Collection[str] = ()
    without: Collection[str] = ()

    @property
    def shared(self) -> tuple[str, ...]:
        """The fields of an edit that have the same name here."""
        return tuple(name for name in EditRequest.model_fields if name not in (*_OTHERWISE, *self.without))

    def read(
        self,
        values: Mapping[str, Any],
        known: Mapping[str, str] = {},
        *,
        ignore_unknown: bool = False,
        ignored: Sequence[str] = (),
    ) -> tuple[dict[str, Any], Places, list[str]]:
        """Return our fields of these values, where they were, and the warnings of those that are ignored as unknown.

        `known` are fields that the caller reads itself, with their names here; `ignored` are the warnings of those that
        were left out before. Raises `ApiError` (400).
        """
        fields: dict[str, Any] = {}
        given, warnings, shared = dict(known), [*ignored], self.shared
        for name, value in values.items():
            if value is None or name in self.ignored:
                continue
            ours = self.names.get(name, name)
            if ours == name and name not in (*shared, *self.passed):
                word = plain(name)
                field = word and self.prefix + word
                if not ignore_unknown or len(warnings) >= schemas.MAX_UNKNOWN:
                    raise invalid_field(field, "is not known", "unknown_parameter")
                warnings.append(schemas.is_ignored(field))
                continue
            if ours in given:
                words = f"must not be given beside {given[ours]}"
                raise invalid_field(self.prefix + name, words, "repeated_field")
            fields[ours], given[ours] = value, name
        places = {name: name for name in (*shared, *self.passed)} | {
            ours: name for name, ours in [*self.names.items()][::-1] if ours not in shared
        }
        names = sorted(fields, key=lambda name: name == SIDES[0])  # a size is where its width is, if that is given
        places |= {OTHER_NAMES.get(name, "size" if name in SIDES else name): name for name in names} | given
        return fields, {ours: self.prefix + name for ours, name in places.items()}, warnings


def place(param: str, places: Mapping[str, str]) -> str | None:
    """Where a field is, by the longest part of its path that has a place; None if none has."""
    path = param.split(".")
    for count in range(len(path), 0, -1):
        if (there := places.get(".".join(path[:count]))) is not None:
            return ".".join((there, *path[count:]))
    return None


@contextlib.contextmanager
def errors_at(places: Mapping[str, str]) -> Iterator[None]:
    """Context manager that names the fields of `ApiError`s by their places, which are looked up when one is raised."""
    try:
        yield
    except ApiError as error:
        there = place(error.param or "", places)
        if there is None:
            raise
        words = str(error).removeprefix(f"{error.param}: ") if error.detail is None else error.detail
        raise ApiError(
            error.status, f"{there}: {words}", param=there, code=error.code, headers=error.headers, detail=words
        ) from None


def error_route(respond: Callable[[ApiError], Response]) -> type[APIRoute]:
    """Return the class of routes whose errors have this form."""

    class ForeignRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handler = super().get_route_handler()

            async def handle(request: Request) -> Response:
                try:
                    return await handler(request)
                except KNOWN as error:
                    return respond(await api_error(request, error))

            return handle

    return ForeignRoute
