"""h11's server connection with limits on header fields and chunks; it ignores what follows the start of a response."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import h11
from h11._receivebuffer import ReceiveBuffer

from api.errors import ApiError

MAX_FIELDS = 100  # of a head, or of a trailer
MAX_DISCARDED = 256 * 2**20  # bytes of a body that arrive after the start of its response: more than any form
_LEAST_DISCARDED = 1024  # counted for each read of the socket
_FREE_CHUNKS = 1024  # of any size
_CHUNK_BYTES = 256  # least average of those beyond `_FREE_CHUNKS`


class _LimitedBuffer(ReceiveBuffer):
    """Refuses more than `MAX_FIELDS` lines before h11 parses them, which costs microseconds for each."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        lines = super().maybe_extract_lines()
        if lines is not None and len(lines) > MAX_FIELDS + 1:  # a head begins with the request line
            status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            raise h11.LocalProtocolError("too many header fields", error_status_hint=status)
        return lines


class HttpConnection(h11.Connection):
    """A connection that parses requests within limits.

    Once a response begins before its request's body is complete, the rest of the body is discarded unparsed, and the
    response says that the connection closes.
    """

    def __init__(self, max_head_bytes: int) -> None:
        super().__init__(h11.SERVER, max_head_bytes)
        self._receive_buffer = _LimitedBuffer()
        self.discards = False
        self._discarded = 0  # bytes, at least `_LEAST_DISCARDED` for each read
        self._chunks = self._chunk_bytes = 0
        self._refusal: ApiError | None = None

    @property
    def discarded_too_much(self) -> bool:
        """Whether more was discarded than a client may send before it reads its response."""
        return self._discarded > MAX_DISCARDED

    @property
    def refusal(self) -> ApiError:
        """The answer to what `next_event` raised `h11.RemoteProtocolError` for."""
        return self._refusal or ApiError(400, "What came is no HTTP/1.1.", code="invalid_http")

    def receive_data(self, data: bytes) -> None:
        if self.discards:
            self._discarded += max(len(data), _LEAST_DISCARDED)
        else:
            super().receive_data(data)

    def next_event(self) -> Any:
        if self.discards:
            return h11.NEED_DATA
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            if error.error_status_hint == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
                message = f"The request's headers are too large, or more than {MAX_FIELDS}."
                self._refusal = ApiError(431, message, code="headers_too_large")
            raise
        if isinstance(event, h11.Request):
            self._chunks = self._chunk_bytes = 0
            self._check_length(event)
        elif isinstance(event, h11.Data):
            self._count(event)
        return event

    def _check_length(self, request: h11.Request) -> None:
        """Raise `h11.RemoteProtocolError` for a request with two lengths: h11 ignores Content-Length then, by which
        limits are checked, and a proxy may not (RFC 9112, 6.1).
        """
        names = {name for name, _ in request.headers}
        if {b"content-length", b"transfer-encoding"} <= names:
            message = "The request has Content-Length and Transfer-Encoding: send one of them."
            self._refusal = ApiError(400, message, code="invalid_http")
            raise h11.RemoteProtocolError(message)

    def _count(self, data: h11.Data) -> None:
        """Raise `h11.RemoteProtocolError` if the chunks of this body are too many for its bytes."""
        self._chunks += data.chunk_start
        self._chunk_bytes += len(data.data)
        if self._chunks > _FREE_CHUNKS + self._chunk_bytes // _CHUNK_BYTES:
            message = f"The body's chunks are too small: send {_CHUNK_BYTES} bytes or more in each."
            self._refusal = ApiError(400, message, code="chunks_too_small")
            raise h11.RemoteProtocolError(message)

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]
        if isinstance(event, h11.Response) and self.their_state is h11.SEND_BODY:
            self.discards = True
            headers = [(name, value) for name, value in event.headers if name != b"connection"]
            headers.append((b"connection", b"close"))
            event = h11.Response(status_code=event.status_code, headers=headers, reason=event.reason)
        return super().send(event)
