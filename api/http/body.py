"""Parses request bodies as strict JSON, and rejects by field path what other parsers let pass."""

from __future__ import annotations

import asyncio
import io
import json
import math
import re
import time
from collections.abc import Callable
from itertools import islice, takewhile
from typing import Any, Protocol, TypeVar

from anyio.lowlevel import RunVar
from fastapi import Request
from starlette.requests import ClientDisconnect

from api.concurrency.fair_limiter import FairLimiter
from api.errors import ApiError, invalid_field
from contract.bounds import MAX_EXACT

T = TypeVar("T")

MAX_BYTES = 1024 * 1024
MAX_DEPTH = 64
_LARGE = 32 * 1024  # bytes
_PARSERS = 2  # large bodies parsed at once, and one per tenant
_INTAKES = 4  # chunks of large bodies taken in at once, and one per tenant
_RATE = 64 * 2**20  # bytes of a tenant's large bodies in a second, at most: more would delay others' requests
_PAUSE = 7.0  # times as long as a chunk took: less than `_RATE` on a machine whose processors have other work
MAX_TOKENS = 50_000  # in a body: strings, brackets and commas; scanning more would delay all requests
_COUNTED = 500  # at once: meanwhile no other thread runs
_MAX_DIGITS = 20  # of an integer, including its sign; 2**63 - 1 has 19

_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{,]', re.DOTALL)
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_MOST_CHARACTERS = 100  # of a number in a form or a query
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}(\[[A-Za-z0-9_-]{0,32}\]){0,4}")  # of forms also in brackets
_NEVER = re.compile("[\x00\ud800-\udfff]")


class Sink(Protocol):
    """A file to which a body is written."""

    def write(self, data: bytes, /) -> object: ...

    def seek(self, offset: int, /) -> object: ...


class _Huge:
    """Placeholder for an integer with too many digits."""


class _Repeated:
    """Placeholder for an object with duplicate names."""

    def __init__(self, name: str) -> None:
        self.name = name


_HUGE = _Huge()


_parsers: RunVar[FairLimiter] = RunVar("parsers")
_intakes: RunVar[FairLimiter] = RunVar("intakes")


def _limiter(variable: RunVar[FairLimiter], total: int) -> FairLimiter:
    """Return this event loop's limiter of `total` concurrent calls."""
    try:
        return variable.get()
    except LookupError:
        limiter = FairLimiter(total)
        variable.set(limiter)
        return limiter


async def read(request: Request, tenant: str) -> dict[str, Any]:
    """The body's top-level object. Raises `ApiError`: 415 if the headers declare no JSON, 413, 400."""
    return await read_as(request, tenant, lambda fields: fields)


async def read_as(request: Request, tenant: str, validate: Callable[[dict[str, Any]], T]) -> T:
    """Return what `validate` makes of the body's top-level object. Raises `ApiError` as `read`, and what `validate`
    raises.
    """
    raw = io.BytesIO()
    size = await spool(request, "", raw, MAX_BYTES)
    return await run_parser(tenant, size, lambda: validate(parse(raw.getvalue())))


async def run_parser(tenant: str, size: int, function: Callable[[], T]) -> T:
    """Run a function that parses so many bytes, or writes them."""
    if size <= _LARGE:  # done faster than a thread starts
        return function()
    return await _limiter(_parsers, _PARSERS).run(tenant, function)  # may take long: it must not block the loop


async def take_in(tenant: str, chunk: bytes, function: Callable[[bytes], object]) -> None:
    """Call a function with a chunk of a large body, on a thread. Meanwhile, and for as long as `_RATE` and `_PAUSE`
    demand, no other chunk of the tenant's bodies is taken in: they stay with their clients.
    """
    limiter = _limiter(_intakes, _INTAKES)
    async with limiter.turn(tenant):
        started = time.monotonic()
        await limiter.on_thread(function, chunk)
        await asyncio.sleep(max(len(chunk) / _RATE, _PAUSE * (time.monotonic() - started)))


async def spool(request: Request, tenant: str, file: Sink, max_bytes: int) -> int:
    """Write the raw body of a JSON request to a file, which is then at its start; return its size. Raises `ApiError` as
    `read`.
    """
    _check_headers(request)
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and (len(declared) > 18 or int(declared) > max_bytes):
        raise too_large(max_bytes)
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > max_bytes:  # whatever Content-Length declared
                raise too_large(max_bytes)
            if size <= MAX_BYTES:
                file.write(chunk)
            else:  # to a disk, which may be slow
                await take_in(tenant, chunk, file.write)
    except ClientDisconnect:
        raise ApiError(400, "The body ended early.", code="invalid_body") from None
    file.seek(0)
    return size


def parse(raw: bytes) -> dict[str, Any]:
    """Parse strict JSON whose top level is an object. Raises `ApiError` (400) naming the location, without echoing
    input.
    """
    if not raw.strip():
        raise _invalid("The body is empty; it must be a JSON object.")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _invalid(f"The body is not UTF-8, from byte {error.start + 1} on.") from None
    if _too_many(raw):
        raise _invalid(f"The body has more than {MAX_TOKENS} values and names.")
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_int=_integer, parse_float=_number)
    except json.JSONDecodeError as error:
        raise _invalid(f"The body is not JSON: line {error.lineno}, column {error.colno}.") from None
    except RecursionError:
        raise _too_deep() from None
    if not isinstance(value, dict | _Repeated):
        raise _invalid("The body must be a JSON object.")
    _check(value, [])
    assert isinstance(value, dict)
    return value


def _too_many(raw: bytes) -> bool:
    """Return whether there are more than `MAX_TOKENS` strings, and brackets and commas outside of them."""
    if raw.count(b"[") + raw.count(b"{") + raw.count(b",") + raw.count(b'"') <= MAX_TOKENS:
        return False
    tokens = _TOKEN.finditer(raw)
    for _ in range(MAX_TOKENS // _COUNTED):
        if next(islice(tokens, _COUNTED - 1, None), None) is None:
            return False
    return next(tokens, None) is not None


def plain(name: object) -> str | None:
    """A field's name if it is short and plain, so that a response may repeat it; else None."""
    return name if isinstance(name, str) and _PLAIN.fullmatch(name) else None


def number(text: str) -> float | None:
    """A number in a form or a query, in JSON's syntax (5.5e0 too); None if it is none, or not finite."""
    if len(text) > _MOST_CHARACTERS or _NUMBER.fullmatch(text) is None:
        return None
    value = _number(text)
    return value if math.isfinite(value) else None


def _check_headers(request: Request) -> None:
    kind, *parameters = request.headers.get("content-type", "").split(";")
    charsets = [
        value.strip().strip('"').lower()
        for name, _, value in (parameter.partition("=") for parameter in parameters)
        if name.strip().lower() == "charset"
    ]
    if kind.strip().lower() != "application/json" or any(charset not in ("utf-8", "utf8") for charset in charsets):
        message = "content-type: must be application/json, in UTF-8."
        raise ApiError(415, message, param="content-type", code="unsupported_media_type")
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        message = "content-encoding: a compressed body is not understood."
        raise ApiError(415, message, param="content-encoding", code="unsupported_media_type")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | _Repeated:
    members = dict(pairs)
    if len(members) == len(pairs):
        return members
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            break
        seen.add(name)
    return _Repeated(name)


def _integer(digits: str) -> int | _Huge:
    return int(digits) if len(digits) <= _MAX_DIGITS else _HUGE


def _number(text: str) -> float:
    """A number with a fraction or an exponent; an int where it is whole, as in JSON Schema, and exact in a float."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) <= MAX_EXACT else value


def _check(value: Any, path: list[str | int]) -> None:
    """Reject, in document order, values that are never allowed, even in fields that are ignored.

    `path` is the value's location; it is modified in place, since there may be half a million values.
    """
    if isinstance(value, str):
        if (match := _NEVER.search(value)) is not None:
            character = "NUL" if match[0] == "\x00" else "a lone surrogate"
            raise _wrong(path, f"character {match.start() + 1} is {character}, which is allowed nowhere")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise _wrong(path, "must be a finite number")
    elif isinstance(value, dict | list):
        if len(path) >= MAX_DEPTH:
            raise _too_deep()
        if isinstance(value, dict) and any(map(_NEVER.search, value)):
            raise _wrong(path, "the name of a field holds NUL or a lone surrogate, which is allowed nowhere")
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if inner is not None and not isinstance(inner, int):
                path.append(name)
                _check(inner, path)
                path.pop()
    elif isinstance(value, _Repeated):
        raise _wrong([*path, value.name], "appears twice", "repeated_field")
    else:
        raise _wrong(path, f"a whole number of more than {_MAX_DIGITS} digits is allowed nowhere")


def _wrong(path: list[str | int], message: str, code: str = "invalid_value") -> ApiError:
    """A 400 for the value at this path. A name in the path that is not plain may hold any text: the error is then of
    what holds the value, as far as names are plain.
    """
    known = list(takewhile(lambda name: isinstance(name, int) or plain(name), path))
    field = "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in known).removeprefix(".")
    if not field:
        return invalid_field(None, f"A field is wrong: {message}.", code)
    return invalid_field(field, message if len(known) == len(path) else f"a field in it is wrong: {message}", code)


def _invalid(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_body")


def _too_deep() -> ApiError:
    return _invalid(f"The body is nested more than {MAX_DEPTH} deep.")


def too_large(max_bytes: int = MAX_BYTES) -> ApiError:
    """A 413."""
    hint = (
        " Send pictures as files (multipart/form-data to /v1/images/edits, or POST /v1/files), or by https:// URL."
        if max_bytes == MAX_BYTES
        else ""
    )
    return ApiError(413, f"The body is larger than {max_bytes} bytes.{hint}", code="body_too_large")
