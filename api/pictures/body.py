"""Reads a JSON body whose pictures are in base64, as large as a form's files: the pictures are kept on disk.

What is left of the body is parsed within the bounds of all bodies.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from tempfile import SpooledTemporaryFile
from typing import Any

from fastapi import Request

from api.errors import ApiError, invalid_field
from api.http import body
from api.pictures.uploads import MAX_BYTES, PictureSource
from api.pictures.urls import MAX_URL, NOT_BASE64, decoded, picture_of
from contract.card import MAX_PROMPT_CHARACTERS

_LEAST = 16 * 1024  # characters of a picture that is kept apart: more than any text of a request has
assert _LEAST > MAX_PROMPT_CHARACTERS
_MOST = 10  # pictures of the largest size in a body
_SPOOLED = 64 * 1024  # bytes of a body's pictures in memory
_ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/-_=\\"  # \ as in \/ and \n
_ESCAPES = ((b"\\/", b"/"), (b"\\n", b""), (b"\\r", b""))
_HEAD = re.compile(rb"data:[A-Za-z0-9.+-]{0,20}(?:\\?/[A-Za-z0-9.+-]{1,40})?(?:;[A-Za-z0-9.=_-]{1,40}){0,4};base64,")
_KEPT = "picture"
_PICTURE_BYTES = 4 * MAX_BYTES // 3 + 4  # in base64
MAX_BODY_BYTES = _MOST * _PICTURE_BYTES + body.MAX_BYTES


class PictureBody:
    """A body that is written in parts, on any thread, one at a time.

    A string of at least `_LEAST` characters of base64 goes into a file, and the text has `{"picture": k}` in its place;
    with `key` only where the text before it ends so, in 64 bytes. All methods raise `ApiError` at a limit.
    """

    def __init__(self, key: re.Pattern[bytes] | None = None) -> None:
        self._key = key
        self._text = bytearray()
        self._file = SpooledTemporaryFile(max_size=_SPOOLED)  # noqa: SIM115 - `close` closes it
        self._places: list[tuple[int, int]] = []  # where each picture begins in the file, and its length
        self._span = b""  # what came since the last quote, unless it is in the file
        self._written = -1  # characters of the picture that is being written; -1: none is

    def write(self, data: bytes) -> None:
        while data:
            data = self._write_text(data) if self._written < 0 else self._write_picture(data)

    def seek(self, offset: int) -> None:
        """End the body."""
        self._add(self._span)
        self._span = b""

    def close(self) -> None:
        self._file.close()

    @property
    def text(self) -> bytes:
        """The body without its pictures."""
        return bytes(self._text)

    def source(self, field: str, value: str | dict[str, Any]) -> PictureSource:
        """The picture of a field: in the file, or in the text. Raises `ApiError` (400) for an address."""
        if isinstance(value, str):
            if "://" in value[:MAX_URL]:
                raise invalid_field(field, "must be a picture in base64, or its data: URL; addresses are not fetched")
            return picture_of(field, value, bare=True)
        k = value.get(_KEPT)
        if not isinstance(k, int) or not 0 <= k < len(self._places):
            raise invalid_field(field, "must be text")
        start, length = self._places[k]
        return PictureSource(field, 3 * length // 4, lambda: self._decoded(field, start, length))

    def _decoded(self, field: str, start: int, length: int) -> bytes:
        self._file.seek(start)
        encoded = self._file.read(length)
        if b"\\" in encoded:
            for escape, character in _ESCAPES:
                encoded = encoded.replace(escape, character)
        return b"".join(decoded(field, NOT_BASE64, encoded))

    def _write_text(self, data: bytes) -> bytes:
        """Take in text up to the beginning of a picture; return the rest."""
        data, at = self._span + data, 0  # where the last quote was seen
        self._span = b""
        while len(data) - at >= _LEAST:
            quote = data.rfind(b'"', at, at + _LEAST)
            if quote < 0:
                self._add(data[:at])
                return self._begin_picture(data[at:])
            at = quote + 1
        at = max(at, data.rfind(b'"', at) + 1)
        self._add(data[:at])
        self._span = data[at:]
        return b""

    def _begin_picture(self, data: bytes) -> bytes:
        """Begin a picture if these `_LEAST` bytes without a quote are of one; return what follows, also if not."""
        head = _HEAD.match(data)
        start = 0 if head is None else head.end()
        opened = self._text.endswith(b'"') and not self._text.endswith(b'\\"')
        if self._key is not None:
            opened = opened and self._key.search(self._text[-64:]) is not None
        if not opened or data[start:_LEAST].translate(None, _ALPHABET):
            self._add(data[:_LEAST])
            return data[_LEAST:]
        self._places.append((self._file.tell(), 0))
        self._written = 0
        return data[start:]

    def _write_picture(self, data: bytes) -> bytes:
        """Take in a picture up to its end; return what follows."""
        part, quote, rest = data.partition(b'"')
        if part.translate(None, _ALPHABET):
            raise ApiError(400, "A text of the body is too long.", code="invalid_body")
        self._written += self._file.write(part)
        if quote:
            self._places[-1] = self._places[-1][0], self._written
            self._text[-1:] = f'{{"{_KEPT}":{len(self._places) - 1}}}'.encode()  # in place of the quote before it
            self._written = -1
        return rest

    def _add(self, text: bytes | bytearray) -> None:
        if len(self._text) + len(text) > body.MAX_BYTES:
            raise ApiError(413, f"The body without its pictures is larger than {body.MAX_BYTES} bytes.",
                           code="body_too_large")  # fmt: skip
        self._text += text


@asynccontextmanager
async def read(
    request: Request, tenant: str, field: str | None = None
) -> AsyncIterator[tuple[dict[str, Any], PictureBody]]:
    """The body's top-level object, and its pictures, which can be read for as long as the context is open.

    With `field` the body has one picture, which that field holds. Raises `ApiError` as `api.http.body.read`.
    """
    pictures = PictureBody(None if field is None else re.compile(rb'"%s"\s*:\s*"\Z' % field.encode()))
    try:
        await body.spool(request, tenant, pictures, _PICTURE_BYTES * (_MOST if field is None else 1) + body.MAX_BYTES)
        text = pictures.text
        yield await body.run_parser(tenant, len(text), lambda: body.parse(text)), pictures
    finally:
        pictures.close()
