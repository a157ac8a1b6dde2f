"""Byte ranges of responses by RFC 9110 (14, 13.1.5): `Range`, `If-Range`, 206 and 416. One range only."""

from __future__ import annotations

import re

from fastapi import Request

from api.errors import ApiError

_ONE = re.compile(r"bytes=[ \t]*([0-9]{0,18})-([0-9]{0,18})[ \t]*", re.IGNORECASE)


def requested(request: Request, size: int, tag: str) -> tuple[int, int] | None:
    """The first and the last byte of the one requested range of content with this strong `ETag`; None: all of it.

    A `Range` of several ranges, of another unit, or under an `If-Range` that is not this ETag is ignored, as the RFC
    allows. Raises `ApiError` (416) for one beyond the end.
    """
    digits = _digits(request, tag)
    return None if digits is None else _within(digits, size)


def _digits(request: Request, tag: str) -> tuple[str, str] | None:
    """The digits before and behind the hyphen, one of which may be empty; None: the whole content."""
    headers = request.headers.getlist("range")
    match = _ONE.fullmatch(headers[0]) if len(headers) == 1 else None
    if match is None or not (match[1] or match[2]) or request.headers.get("if-range", tag) != tag:
        return None
    if match[1] and match[2] and int(match[1]) > int(match[2]):
        return None  # not a range
    return match[1], match[2]


def _within(digits: tuple[str, str], size: int) -> tuple[int, int]:
    """The first and the last byte."""
    first, last = digits
    if not first:  # the last so many bytes
        span = max(0, size - int(last)), size - 1
    else:
        span = int(first), min(int(last), size - 1) if last else size - 1
    if span[0] > span[1]:
        raise ApiError(
            416, f"range: there are {size} bytes.", param="range", code="range_not_satisfiable",
            headers={"Content-Range": f"bytes */{size}", "Accept-Ranges": "bytes"},
        )  # fmt: skip
    return span
