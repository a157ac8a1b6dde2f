"""Reads requests in the field names of other servers' APIs, and answers errors in their form.

Another such API is a `FieldNames`, a function that writes an error, and its routes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from api import schemas
from api.errors import KNOWN, ApiError, api_error, invalid_field
from api.http.body import plain
from contract.field_names import OTHER_NAMES, SIDES, size_field
from contract.image_request import EditRequest

# Fields that an endpoint of one model and one way to answer expresses otherwise, or not at all.
_OTHERWISE = frozenset((
    "model", "n", "response_format", "stream", "partial_images", "user", "quality", "style", "background", "moderation",
    "input_fidelity",
))  # fmt: skip

Places = dict[str, str]
"""Paths in a client's request by our names of fields; an object's also holds for what is in it."""


@dataclass(frozen=True)
class FieldNames:
    """Names in a flat object of parameters.

    prefix: of its fields, in errors.
    names: of ours, by theirs. A field is given by one of its names only.
    passed: names that are passed on as they are, besides the `shared` ones.
    ignored: names without effect here.
    excluded: fields of ours that are not among the `shared` ones, besides those of `_OTHERWISE`.
    """

    prefix: str
    names: Mapping[str, str]
    passed: Collection[str] = SIDES
    ignored: Collection[str] = ()
    excluded: Collection[str] = ()

    @cached_property
    def shared(self) -> Mapping[str, None]:
        """Fields of an edit that have the same name here, in order."""
        return {name: None for name in EditRequest.model_fields if name not in (*_OTHERWISE, *self.excluded)}

    @cached_property
    def _places(self) -> Places:
        """Names by our fields, before a request says which of several it has: the first."""
        first = {ours: name for name, ours in reversed([*self.names.items()]) if ours not in self.shared}
        return {name: name for name in (*self.shared, *self.passed)} | first

    def read(
        self,
        values: Mapping[str, Any],
        known: Mapping[str, str] = {},
        *,
        ignore_unknown: bool = False,
        warnings: Sequence[str] = (),
    ) -> tuple[dict[str, Any], Places, list[str]]:
        """Return our fields of these values, their places, and these warnings with those of unknown names.

        `known` are fields that the caller reads itself, with their names here. Raises `ApiError` (400).
        """
        fields: dict[str, Any] = {}
        given, warnings = dict(known), [*warnings]
        for name, value in values.items():
            if value is None or name in self.ignored:
                continue
            ours = self.names.get(name, name)
            if ours == name and name not in self.shared and name not in self.passed:
                word = plain(name)
                if not ignore_unknown or len(warnings) >= schemas.MAX_UNKNOWN:
                    raise schemas.unknown_field(self.prefix + (word or ""), word is not None)
                warnings.append(schemas.is_ignored(self.prefix + (word or ""), word is not None))
                continue
            if ours in given:
                words = f"must not be given beside {given[ours]}"
                raise invalid_field(self.prefix + name, words, "repeated_field")
            fields[ours], given[ours] = value, name
        places = self._places | {OTHER_NAMES.get(name, name): name for name in fields}
        places |= {"size": size_field(fields)} | given
        return fields, {ours: self.prefix + name for ours, name in places.items()}, warnings


def place(param: str, places: Mapping[str, str]) -> str | None:
    """Return a field's path in the request, by the longest part of ours that has a place; None if none has."""
    path = param.split(".")
    for count in range(len(path), 0, -1):
        if (start := places.get(".".join(path[:count]))) is not None:
            return ".".join((start, *path[count:]))
    return None


@contextlib.contextmanager
def errors_at(places: Mapping[str, str]) -> Iterator[None]:
    """Name the fields of `ApiError`s by their places, which are looked up when one is raised."""
    try:
        yield
    except ApiError as error:
        param = place(error.param or "", places)
        if param is None:
            raise
        detail = str(error).removeprefix(f"{error.param}: ") if error.detail is None else error.detail
        raise ApiError(
            error.status, f"{param}: {detail}", param=param, code=error.code, headers=error.headers, detail=detail
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
