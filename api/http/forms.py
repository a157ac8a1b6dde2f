"""Parses a body as a multipart form with files: in UTF-8, within bounds, and on threads of its own.

Large files are on disk. The body's size is checked by the declared length, if there is one, before it is read, and
while it is read.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from operator import itemgetter
from tempfile import SpooledTemporaryFile
from typing import BinaryIO, cast

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.datastructures import FormData, UploadFile
from starlette.requests import ClientDisconnect

from api.errors import ApiError
from api.http import body
from api.pictures.uploads import PictureSource

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it logs rejected forms

_MOST_TEXT = body.MAX_BYTES  # of all fields together, as of a JSON body
_MOST_HEAD = 4096  # bytes of a part's Content-Disposition: its name and its file's name
_MOST_HEADS = 2 * _MOST_HEAD  # bytes of all headers of a part, whatever its parser allows
_LEAST_LINE = 64  # bytes that each of them counts for
_MOST_BOUNDARY = 70  # characters, by RFC 2046
_MOST_TYPE = 512  # bytes of the request's Content-Type
_PARAMETER = r';\s*([\w.-]{1,40})=(?:"([^"\\]*)"|([^\s;"]+))\s*'
_TYPE = re.compile(rf"multipart/form-data\s*((?:{_PARAMETER})*);?", re.IGNORECASE | re.ASCII)
_LISTED = re.compile(r"([A-Za-z_][A-Za-z0-9_-]{0,63})\[([0-9]{0,4})\]")  # a part of a list, as clients name it
_INLINE = 4096  # bytes that are parsed faster than a thread starts
_SPOOLED = 64 * 1024  # bytes of a file in memory


@asynccontextmanager
async def form(
    request: Request, tenant: str, *, max_bytes: int, max_files: int, max_fields: int
) -> AsyncIterator[FormData]:
    """The form, with its files open as long as the context. `max_bytes` limits the whole body.

    Parts that are named `field[]` or `field[0]` are of the field, in the order of their numbers. A file without a name
    and without bytes, which browsers send of an input that nobody filled in, is not given.

    The forms of a tenant are read in turn, as `body.take_in` does.

    Raises `ApiError`: 413 and 415 by its headers, 413 by what comes, 400 for a malformed form.
    """
    declared = request.headers.get("content-length", "")  # none of a chunked body
    if declared.isascii() and declared.isdigit() and (len(declared) > 12 or int(declared) > max_bytes):
        raise body.too_large(max_bytes)
    size = 0
    parts = _Parts(_boundary(request.headers.get("content-type", "")), max_files, max_fields)
    try:
        try:
            async for chunk in request.stream():
                size += len(chunk)
                if size > max_bytes:  # whatever Content-Length declared
                    raise body.too_large(max_bytes)
                if len(chunk) <= _INLINE:
                    parts.feed(chunk)
                else:
                    await body.take_in(tenant, chunk, parts.feed)
            parts.finish()
        except ClientDisconnect:
            raise _invalid("it ended early") from None
        except FormParserError:
            raise _invalid("its parts are malformed") from None
        yield FormData(parts.items)
    finally:
        parts.close()


def upload_source(field: str, upload: UploadFile) -> PictureSource:
    """The picture in a form's file, which can be read for as long as the form is open."""

    def read() -> bytes:
        upload.file.seek(0)
        return upload.file.read()

    return PictureSource(field, upload.size or 0, read)


def _boundary(content_type: str) -> bytes:
    """Return the boundary of the parts. Raises `ApiError` (415), also for a charset other than UTF-8."""
    media_type = _TYPE.fullmatch(content_type.strip()) if len(content_type) <= _MOST_TYPE else None
    pairs = () if media_type is None else re.findall(_PARAMETER, media_type[1], re.ASCII)
    parameters: dict[str, str] = {name.lower(): quoted or plain for name, quoted, plain in pairs}
    boundary = parameters.get("boundary", "")
    if not 0 < len(boundary) <= _MOST_BOUNDARY or parameters.get("charset", "utf-8").lower() not in ("utf-8", "utf8"):
        message = (
            f"content-type: must be multipart/form-data with a boundary of 1 to {_MOST_BOUNDARY} characters, in UTF-8."
        )
        raise ApiError(415, message, param="content-type", code="unsupported_media_type")
    return boundary.encode("latin-1")


def _invalid(reason: str) -> ApiError:
    return ApiError(400, f"The body is not a form: {reason}.", code="invalid_body")


class _Parts:
    """The parts of a form, collected by the callbacks of its parser. `feed` may be called on any thread, one at a time.

    All methods raise `FormParserError` for a malformed form, and `ApiError` at a limit.
    """

    def __init__(self, boundary: bytes, max_files: int, max_fields: int) -> None:
        self._items: list[tuple[int, str, str | UploadFile]] = []  # by their number in a list, else 0
        self._left = {"files": max_files, "fields": max_fields}
        self._text_left = _MOST_TEXT
        self._files: list[UploadFile] = []
        self._name, self._number = "", 0
        self._text, self._file = bytearray(), cast(UploadFile | None, None)
        self._field, self._value, self._disposition = bytearray(), bytearray(), bytearray()
        self._heads_left = _MOST_HEADS
        self._ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._header_field,
                "on_header_value": self._header_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._data,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )

    @property
    def items(self) -> list[tuple[str, str | UploadFile]]:
        """The parts by their fields' names, in order."""
        return [(name, value) for _, name, value in sorted(self._items, key=itemgetter(0))]

    def feed(self, chunk: bytes) -> None:
        self._parser.write(chunk)

    def finish(self) -> None:
        self._parser.finalize()
        if not self._ended:
            raise _invalid("its last part has no end")
        for file in self._files:
            file.file.seek(0)

    def close(self) -> None:
        for file in self._files:
            file.file.close()

    def _begin_part(self) -> None:
        self._disposition, self._text, self._file = bytearray(), bytearray(), None
        self._heads_left = _MOST_HEADS

    def _count_head(self, size: int) -> None:
        self._heads_left -= size
        if self._heads_left < 0:
            raise _invalid("the headers of a part are too long")

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._count_head(end - start)
        self._field += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._count_head(end - start)
        self._value += data[start:end]

    def _end_header(self) -> None:
        self._count_head(_LEAST_LINE)
        if self._field.lower() == b"content-disposition":
            self._disposition = self._value
        self._field, self._value = bytearray(), bytearray()

    def _end_headers(self) -> None:
        if len(self._disposition) > _MOST_HEAD:
            raise _invalid("the name of a part is too long")
        _, options = parse_options_header(bytes(self._disposition))
        if b"name" not in options:
            raise _invalid("a part has no name")
        self._name, self._number = _decoded(options[b"name"]), 0
        if (listed := _LISTED.fullmatch(self._name)) is not None:
            self._name, self._number = listed[1], int(listed[2] or 0)
        if b"filename" not in options:
            self._count("fields")
            return
        self._count("files")
        filename = _decoded(options[b"filename"])
        file = cast(BinaryIO, SpooledTemporaryFile(max_size=_SPOOLED))  # noqa: SIM115 - `close` closes it
        self._file = UploadFile(file, size=0, filename=filename)
        self._files.append(self._file)

    def _count(self, kind: str) -> None:
        self._left[kind] -= 1
        if self._left[kind] < 0:
            raise _invalid(f"it has too many {kind}")

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._file is not None:
            self._file.file.write(data[start:end])
            self._file.size = (self._file.size or 0) + end - start
            return
        self._text_left -= end - start
        if self._text_left < 0:
            raise ApiError(413, f"The fields are larger than {_MOST_TEXT} bytes.", code="body_too_large")
        self._text += data[start:end]

    def _end_part(self) -> None:
        if self._file is None or self._file.filename or self._file.size:
            value = _decoded(self._text) if self._file is None else self._file
            self._items.append((self._number, self._name, value))

    def _end(self) -> None:
        self._ended = True


def _decoded(text: bytes | bytearray) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError:
        raise _invalid("a name or a field is not UTF-8") from None
