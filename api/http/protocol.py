"""uvicorn's HTTP/1.1 protocol on h11, hardened against slow, silent and non-HTTP clients.

A client that sends headers or a body too slowly gets a 408 and is closed, one that does not read is closed, and the
number of connections is limited: idle ones are closed for new ones, oldest first. A malformed request gets an error in
the API's format, and nothing is answered after it. A response that is complete before its request's body closes the
connection, after a while in which the client can read it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import resource
import sys
import termios
from http import HTTPStatus
from typing import Any, ClassVar, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from api.errors import NO_RETRY, ApiError
from api.http import request_ids
from api.http.connection import HttpConnection
from core.config import Settings

_SLOWEST = 1024  # bytes per second of a body, or of a response being read
_LINGER_S = 5.0  # from the last bytes written, or from the last `_SLOWEST` bytes per second read, to the end
_MOST_LINGER_S = 30.0
_OTHERS = 256  # open files other than clients: Redis, storage, logs
_PLENTY = 65_536
_AT_ONCE = 2048
_MAX_HEAD_BYTES = 64 * 1024


def connection_limit() -> tuple[int, int]:
    """Return the number of connections that the limit of open files allows, after raising it as far as possible; and
    the number of pending ones that may be accepted at once: they are open before any other can be closed for them.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _PLENTY if hard == resource.RLIM_INFINITY else min(hard, _PLENTY)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        soft = limit
    files = _PLENTY if soft == resource.RLIM_INFINITY else min(soft, _PLENTY)
    at_once = min(_AT_ONCE, files // 8)
    return files - min(_OTHERS, files // 2) - 2 * at_once, at_once


def protocol(settings: Settings) -> type[HttpProtocol]:
    """The protocol class of one server, with its limits."""
    limits = {"patience_s": settings.client_s, "most": settings.connections or connection_limit()[0], "idle": {}}
    return type("LimitedHttpProtocol", (HttpProtocol,), limits)


class ReadTimeout:
    """Aborts a connection whose client reads responses slower than `_SLOWEST` bytes per second."""

    def __init__(self, loop: asyncio.AbstractEventLoop, patience_s: float) -> None:
        self._loop = loop
        self._patience_s = patience_s
        self._timer: asyncio.TimerHandle | None = None
        self._unread = 0  # bytes when the timer was started

    def watch(self, transport: asyncio.Transport) -> None:
        """Watch the client as long as data is unsent."""
        self._unread = _unread(transport)
        if self._unread and self._timer is None:
            self._timer = self._loop.call_later(self._patience_s, self._check, transport)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self, transport: asyncio.Transport) -> None:
        self._timer = None
        expected_bytes = min(self._patience_s * _SLOWEST, self._unread)
        if _unread(transport) > self._unread - expected_bytes:
            transport.abort()
        else:
            self.watch(transport)


def _unread(transport: asyncio.Transport) -> int:
    """Bytes not received yet: in our buffer, and in the kernel's, which takes ours in large chunks only."""
    buffered = transport.get_write_buffer_size()
    if not buffered:
        return 0
    kernels = bytearray(4)
    with contextlib.suppress(OSError, AttributeError):
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, kernels)
    return buffered + int.from_bytes(kernels, sys.byteorder)


class _LingeringTransport:
    """A transport that closes after lingering where the client may still be sending a body."""

    def __init__(self, transport: asyncio.Transport, protocol: HttpProtocol) -> None:
        self._transport = transport
        self._protocol = protocol

    def close(self) -> None:
        if self._protocol.lingers:
            self._protocol.linger()
        else:
            self._transport.close()

    def is_closing(self) -> bool:
        return self._protocol.closing or self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class HttpProtocol(H11Protocol):
    """`idle` are all connections without a complete request, oldest first; shared by one server's connections."""

    patience_s: ClassVar[float] = 20.0
    most: ClassVar[int] = sys.maxsize
    idle: ClassVar[dict[HttpProtocol, None]] = {}

    def __init__(self, *options: Any, **named: Any) -> None:
        super().__init__(*options, **named)
        self.conn: HttpConnection = HttpConnection(self.config.h11_max_incomplete_event_size or _MAX_HEAD_BYTES)
        self._slow: asyncio.TimerHandle | None = None  # deadline for a complete head, or body
        self._in_body, self._until = False, 0.0
        self._read_timeout = ReadTimeout(self.loop, self.patience_s)
        self.closing = False  # for writing: what still arrives is discarded
        self._discarded, self._lingering = 0, cast(asyncio.TimerHandle | None, None)

    @property
    def lingers(self) -> bool:
        """Return whether closing now could reset the connection, and lose the response."""
        return self.conn.discards and not self.closing

    # -- incoming ------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_LingeringTransport(transport, self))  # type: ignore[arg-type]
        if len(self.connections) > self.most and not self._make_room():
            message = f"This server has {self.most} connections open, and no room for another; try again soon."
            self._refuse(ApiError(503, message, code="too_many_connections", headers={"Retry-After": "1"}))
            return
        self.idle[self] = None
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        if self.conn.discards:
            self._discarded += len(data)
            self.conn.receive_data(data)
            if self.conn.discarded_too_much:
                self.transport.abort()
            return
        super().data_received(data)
        if self.closing:
            return
        state = self.conn.their_state
        if state is h11.IDLE:
            if self._slow is None:
                self._expect_head()
        elif state is h11.SEND_BODY:
            self._expect_body(len(data))
        else:
            self._expect_nothing()

    def eof_received(self) -> None:
        """Refuse a body that can no longer become complete; asyncio closes the transport once the answer is written."""
        if self.conn.their_state is h11.SEND_BODY and not self.conn.discards:
            self._refuse(ApiError(400, "The body ended early.", code="invalid_body"))

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.their_state is not h11.IDLE:
            self.idle.pop(self, None)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._expect_nothing()
            self._read_timeout.watch(self.transport)
        elif self.cycle.response_complete:
            state = self.conn.their_state
            if state is h11.IDLE:
                self.idle[self] = None
                if self.conn.trailing_data[0]:  # the next request has begun; else uvicorn's own timer applies
                    self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self.idle.pop(self, None)
        self._expect_nothing()
        self._read_timeout.cancel()
        if self._lingering is not None:
            self._lingering.cancel()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def _expect_nothing(self) -> None:
        self._in_body = False
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None

    def _expect_head(self) -> None:
        """Start the time limit from the first byte, or from connecting, until the head is complete, however its bytes
        arrive.
        """
        self._expect_nothing()
        self._slow = self.loop.call_later(self.patience_s, self._headless)

    def _expect_body(self, came: int) -> None:
        """Extend the time limit for every `_SLOWEST` bytes, but never beyond patience from now."""
        now = self.loop.time()
        if not self._in_body:
            self._expect_nothing()
            self._in_body, self._until = True, now + self.patience_s
        self._until = min(self._until + came / _SLOWEST, now + self.patience_s)
        if self._slow is None:
            self._slow = self.loop.call_at(self._until, self._bodiless)

    def _headless(self) -> None:
        self._slow = None
        if self.conn.trailing_data[0]:
            self._refuse(ApiError(408, "The request's headers did not come in time.", code="request_timeout"))
        else:
            self.transport.close()

    def _bodiless(self) -> None:
        self._slow = None
        if self.conn.their_state is not h11.SEND_BODY or self.conn.discards or self.transport.is_closing():
            return
        now = self.loop.time()
        # The server keeps it waiting, or it was in time since this was set.
        held_up = self.flow.read_paused or self.conn.they_are_waiting_for_100_continue
        if held_up or now < self._until:
            self._until = now + self.patience_s if held_up else self._until
            self._slow = self.loop.call_at(self._until, self._bodiless)
            return
        self._refuse(ApiError(408, "The request's body did not come in time.", code="request_timeout"))

    # -- outgoing ------------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._read_timeout.watch(self.transport)

    def resume_writing(self) -> None:
        if not self.transport.is_closing():
            self._read_timeout.cancel()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._read_timeout.watch(self.transport)

    # -- the end ---------------------------------------------------------------------------------------------------

    def _make_room(self) -> bool:
        """Close the connection that has been idle the longest. False: none is."""
        oldest = next(iter(self.idle), None)
        if oldest is None:
            return False
        self.idle.pop(oldest)
        self.connections.discard(oldest)
        oldest.transport.abort()
        return True

    def linger(self) -> None:
        """Close for writing, and discard what still arrives: closing with unread data could reset the connection before
        the client has read the response, and many clients read it after the last byte of their body.
        """
        self.closing = self.conn.discards = True
        self.idle.pop(self, None)
        self._expect_nothing()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            with contextlib.suppress(OSError):  # the client has gone
                self.transport.write_eof()
        self._lingering = self.loop.call_later(_LINGER_S, self._end, self.loop.time() + _MOST_LINGER_S, self._discarded)

    def _end(self, until: float, before: int) -> None:
        """Close, unless the client still sends its body, until a time; `before` were discarded when this was set."""
        if self._discarded - before >= _LINGER_S * _SLOWEST and self.loop.time() < until:
            self._lingering = self.loop.call_later(_LINGER_S, self._end, until, self._discarded)
            return
        if self.transport.get_write_buffer_size():
            self.transport.close()
            self._read_timeout.watch(self.transport)
        else:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        self._refuse(self.conn.refusal)

    def _refuse(self, error: ApiError) -> None:
        """Send an error if no response has begun, and close.

        The request may be running although its body turned out malformed: its application sees a disconnect, and its
        further output is dropped. uvicorn's own protocol lets it answer, for which h11 raises LocalProtocolError.
        """
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._expect_nothing()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error.content).encode("ascii")
            headers = {
                "content-type": "application/json",
                "content-length": str(len(body)),
                "connection": "close",
                request_ids.HEADER: request_ids.new(),
                **(NO_RETRY if error.status == HTTPStatus.REQUEST_TIMEOUT else {}),
                **(error.headers or {}),
            }
            for event in (
                h11.Response(
                    status_code=error.status,
                    headers=list(headers.items()),
                    reason=HTTPStatus(error.status).phrase.encode("ascii"),
                ),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.linger()
