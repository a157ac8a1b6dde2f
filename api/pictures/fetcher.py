"""Fetches the pictures that requests name by https URL, for the duration of a request, in memory that is bounded.

http/guarded_http.py connects; redirects are followed a few times, each checked like the first URL. Bytes count against
the key's share and the process's while the request's pictures are being stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from http.client import HTTPException, HTTPResponse
from typing import cast
from urllib.parse import urljoin, urlsplit
from weakref import WeakValueDictionary

from api.concurrency.held_bytes import HeldBytes
from api.concurrency.tenant_pool import Deadline, TenantPool
from api.errors import ApiError, invalid_field
from api.http.guarded_http import Unreachable, check, connected, send
from api.pictures.uploads import MAX_BYTES, PictureSource, PictureUploads
from api.pictures.urls import MAX_URL

ITEM_S = 10.0  # limit of one picture, redirects and all included
_QUEUE_S, _GRACE_S = 30.0, 1.0  # until its turn comes; until it is given up where its thread hangs
_AT_ONCE, _OF_TENANT, _OF_HOST = 32, 16, 4  # without keys all belong to one tenant
_BYTES, _TENANT_BYTES = 2**28, 2**26  # that are held: of all, and of one tenant's
_REDIRECTS = 3
_PIECE = 2**16
# What a response may have beside its content, with what is read ahead, and of its content the part that its chunks may
# add: reading each takes the interpreter, which the event loop waits for.
_OVERHEAD, _CHUNKING = 2**17, 32
_READS, _READ_BYTES = 1024, 256  # reads of a response at least, and bytes for each further one
_WELL_KNOWN = 1024  # ports below are other protocols', but for 443
_HEADERS = {"User-Agent": "diptych", "Accept": "image/png, image/jpeg, image/webp", "Accept-Encoding": "identity"}


class _TooLarge(Exception):
    """The picture has more than `MAX_BYTES`."""


class _Full(Exception):
    """The memory for fetched pictures is used up, or the request is over."""


class _NeverFits(Exception):
    """The pictures of one request are larger than its memory."""


class _Claim:
    """The bytes that one request holds, within each of these limits. Thread-safe."""

    def __init__(self, *limits: HeldBytes) -> None:
        self._limits, self._count, self._closed = limits, 0, False
        self._contents: list[io.BytesIO] = []
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Claim more bytes. Raises `_Full`, and `_NeverFits` if a limit is less than all that is claimed here."""
        with self._lock:
            if any(self._count + count > limit.limit for limit in self._limits):
                raise _NeverFits
            claimed: list[HeldBytes] = []
            for limit in () if self._closed else self._limits:
                if limit.claim(count):
                    claimed.append(limit)
            if len(claimed) < len(self._limits):
                for limit in claimed:
                    limit.give(count)
                raise _Full
            self._count += count

    def hold(self, data: bytes) -> Callable[[], bytes]:
        """Return what returns the claimed bytes until the claim is closed, which frees them."""
        content = io.BytesIO(data)
        self._contents.append(content)
        return content.getvalue

    def close(self) -> None:
        for content in self._contents:
            content.close()
        with self._lock:
            self._closed = True
            for limit in self._limits:
                limit.give(self._count)


class PictureFetcher:
    """The fetches of one event loop's requests."""

    def __init__(self, setting: str) -> None:
        """`setting` is DIPTYCH_FETCH_IMAGES: public, private or off."""
        self._setting = setting
        self._pool = TenantPool("fetches", _AT_ONCE, of_tenant=_OF_TENANT, of_lane=_OF_HOST, item_s=ITEM_S)
        self._held = HeldBytes(_BYTES)
        self._of_tenant: WeakValueDictionary[str, HeldBytes] = WeakValueDictionary()  # while a request holds it

    def stop(self) -> None:
        self._pool.stop()

    def check(self, pictures: PictureUploads) -> PictureUploads:
        """Return the pictures. Raises `ApiError` (400) for URLs that are never fetched."""
        for source in pictures.sources:
            if source.url and self._setting == "off":
                words = "is an address, and this service fetches none: send a data: URL or a file's id"
                raise invalid_field(f"{source.field}.image_url", words, "fetch_off")
            if source.url:
                check_url(f"{source.field}.image_url", source.url, private=self._setting == "private")
        return pictures

    @asynccontextmanager
    async def fetched(self, tenant: str, pictures: PictureUploads) -> AsyncIterator[PictureUploads]:
        """The pictures with the bytes of those that had a URL, which count as held as long as the context is open.
        Equal URLs are fetched once.

        Raises `ApiError` naming the field: 400 for one that cannot be fetched, 413 for one that is too large, or all
        together, 503 while too many bytes are held.
        """
        sources: dict[str, PictureSource] = {}
        for source in pictures.sources:
            if source.url:
                sources.setdefault(source.url, source)
        if not sources:
            yield pictures
            return
        claim = _Claim(self._of_tenant.setdefault(tenant, HeldBytes(_TENANT_BYTES)), self._held)
        fetches = [asyncio.ensure_future(self._fetch(tenant, source, claim)) for source in sources.values()]
        try:
            contents = await asyncio.gather(*fetches)  # of several that fail the first is told
            read = dict(zip(sources, contents, strict=True))

            def with_bytes(source: PictureSource) -> PictureSource:
                if not source.url:
                    return source
                size_bytes, function = read[source.url]
                return replace(source, size_bytes=size_bytes, read=function, digest=None, url="")

            yield pictures.map(with_bytes).check()
        finally:
            for fetch in fetches:
                fetch.cancel()
            claim.close()

    async def _fetch(self, tenant: str, source: PictureSource, claim: _Claim) -> tuple[int, Callable[[], bytes]]:
        """The number of a picture's bytes, and what returns them."""
        try:
            data = await self._get(tenant, source.url, claim)
        except Unreachable as error:
            raise invalid_field(source.field, f"cannot be fetched: {error}", "fetch_failed") from None
        except _TooLarge:
            message = f"{source.field}: is larger than {MAX_BYTES} bytes"
            raise ApiError(413, message, param=source.field, code="body_too_large") from None
        except _NeverFits:
            message = f"{source.field}: the pictures of this request are larger than {_TENANT_BYTES} bytes together"
            raise ApiError(413, message, param=source.field, code="body_too_large") from None
        except _Full:
            message = "Too many pictures are being fetched at the moment; try again later, or send fewer at once."
            raise ApiError(503, message, code="fetch_overloaded", headers={"Retry-After": "5"}) from None
        return len(data), claim.hold(data)

    async def _get(self, tenant: str, url: str, claim: _Claim) -> bytes:
        """Call `fetch` on a thread, in the tenant's turn; it ends with the wait for it. Raises as it does, and `_Full`
        if no turn comes.
        """
        loop, result, bounds = asyncio.get_running_loop(), Future[bytes](), list[Deadline]()

        def work(bound: Deadline) -> None:
            bounds.append(bound)
            if result.set_running_or_notify_cancel():
                loop.call_soon_threadsafe(begin)
                try:
                    result.set_result(fetch(url, private=self._setting == "private", bound=bound, claim=claim.add))
                except BaseException as error:
                    error.__cause__ = error.__context__ = None  # their tracebacks hold what has been read
                    result.set_exception(error.with_traceback(None))

        def begin() -> None:
            with contextlib.suppress(RuntimeError):  # its caller has left
                limit.reschedule(loop.time() + ITEM_S + _GRACE_S)

        try:
            async with asyncio.timeout(_QUEUE_S) as limit:
                if not self._pool.submit(tenant, urlsplit(url).hostname or "", secrets.token_hex(8), work):
                    raise _Full
                return await asyncio.wrap_future(result)
        except TimeoutError:
            if result.running():  # its thread hangs, as resolvers do
                raise Unreachable("it does not answer") from None
            raise _Full from None
        finally:
            for bound in bounds:
                bound.abort()


def check_url(field: str, url: str, *, private: bool) -> None:
    """Reject URLs that are never fetched: not https, of private addresses, of other protocols' ports. Raises `ApiError`
    (400).
    """
    check(field, url, private=private, code="fetch_private", schemes=("https",))
    port = urlsplit(url).port
    if port is not None and port != 443 and port < _WELL_KNOWN:
        raise invalid_field(field, f"must have the port 443, one from {_WELL_KNOWN} on, or none")


def fetch(url: str, *, private: bool, bound: Deadline | None = None, claim: Callable[[int], None]) -> bytes:
    """GET a picture's bytes, which are `claim`ed as they come. Blocks. Raises `Unreachable`, `_TooLarge` and what
    `claim` raises.
    """
    bound = Deadline(ITEM_S) if bound is None else bound
    for _ in range(_REDIRECTS + 1):
        with connected(url, private=private, bound=bound) as connection:
            send(connection, bound, "GET", url, _HEADERS)
            try:
                incoming = _Bounded(connection, bound)
                response = HTTPResponse(cast(socket.socket, incoming), method="GET")
                response.begin()
                target = response.headers.get("Location") if response.status in (301, 302, 303, 307, 308) else None
                if target is None:
                    return _content(response, incoming, claim)
            except (HTTPException, ValueError) as error:
                raise Unreachable("its response is not HTTP") from error
        url = _redirected(url, target, private=private)
    raise Unreachable(f"it redirects more than {_REDIRECTS} times")


def _redirected(url: str, target: str, *, private: bool) -> str:
    """The URL that a redirect leads to. Raises `Unreachable` for one that would not be fetched itself."""
    try:
        url = urljoin(url, target).partition("#")[0]
        if len(url) > MAX_URL:
            raise Unreachable(f"it redirects to more than {MAX_URL} characters")
        check_url("", url, private=private)
    except ValueError as error:
        raise Unreachable("it redirects to no address") from error
    except ApiError as error:
        raise Unreachable(f"it redirects, and the address {error}") from None
    return url


def _content(response: HTTPResponse, incoming: _Bounded, claim: Callable[[int], None]) -> bytes:
    if response.status != 200:
        raise Unreachable(f"it answered {response.status}")
    if response.headers.get("Content-Encoding", "identity").strip().lower() not in ("", "identity"):
        raise Unreachable("it answered with a compressed body, which was not asked for")
    declared, content, size = response.length, io.BytesIO(), 0
    if declared is not None:
        if declared > MAX_BYTES:
            raise _TooLarge
        claim(declared)
    incoming.allow(0)
    while piece := response.read(_PIECE):
        size += len(piece)
        if size > MAX_BYTES:
            raise _TooLarge
        if declared is None:
            claim(len(piece))
        content.write(piece)
        incoming.allow(size)
    if declared is not None and size < declared:
        raise Unreachable("its response ended early")
    return content.getvalue()  # without a copy


class _Bounded(io.RawIOBase):
    """A connection's incoming bytes, for `HTTPResponse`: each wait for more ends with the bound.

    Raises `Unreachable` for more bytes than the content explains, and for bytes that come in too small parts.
    """

    def __init__(self, connection: socket.socket, bound: Deadline) -> None:
        self._connection, self._bound = connection, bound
        self._bytes, self._reads, self._most = 0, 0, _OVERHEAD

    def allow(self, size: int) -> None:
        """Allow what comes with the next piece of content, behind `size` bytes of it."""
        size += _PIECE
        self._most = _OVERHEAD + size + size // _CHUNKING

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self, _PIECE)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        if self._bytes > self._most or self._reads > _READS + self._bytes // _READ_BYTES:
            raise Unreachable("its response comes in too many small parts")
        self._connection.settimeout(self._bound.left_s())
        count = self._connection.recv_into(buffer)
        self._bytes, self._reads = self._bytes + count, self._reads + 1
        return count
