"""Calls webhook URLs, and signs the messages by the Standard Webhooks scheme.

A URL is client input: http/guarded_http.py connects to it. No redirect is followed, and a receiver's use of time and
memory is limited.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import socket

from api.concurrency.tenant_pool import Deadline
from api.http import guarded_http
from api.http.guarded_http import Unreachable

ANSWER_S = 10.0  # limit of a call, everything included
_MOST_ANSWER = 64 * 1024  # bytes in which a response's status must come
_FINAL = re.compile(rb"HTTP/1\.[01] ([2-9][0-9][0-9])[^\n]*\n")
_INTERIM = re.compile(rb"HTTP/1\.1 1[0-9][0-9] ")


def check(url: str, *, private: bool) -> None:
    """Reject URLs that can never be called. Raises `ApiError` (400). DNS is resolved when it is called."""
    guarded_http.check("webhook_url", url, private=private, code="webhook_private")


def sign(secret: str, id: str, timestamp: int, body: bytes) -> str:
    """The header webhook-signature of a message (Standard Webhooks, "Signature scheme", v1)."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signature = hmac.digest(key, f"{id}.{timestamp}.".encode() + body, hashlib.sha256)
    return "v1," + base64.b64encode(signature).decode()


def call(url: str, headers: dict[str, str], body: bytes, *, private: bool, bound: Deadline | None = None) -> None:
    """POST once. Raises `Unreachable` unless the response is 2xx, within the bound; by itself, within 10 s."""
    bound = Deadline(ANSWER_S) if bound is None else bound
    with guarded_http.connected(url, private=private, bound=bound) as connection:
        guarded_http.send(connection, bound, "POST", url, {**headers, "Content-Length": str(len(body))}, body)
        status = _status(connection, bound)
    if not 200 <= status < 300:
        raise Unreachable(f"it answered {status}")


def _status(connection: socket.socket, bound: Deadline) -> int:
    """The response's status; informational responses (1xx) and the body are skipped."""
    got, left = b"", _MOST_ANSWER
    while left > 0:
        connection.settimeout(bound.left_s())
        piece = connection.recv(min(left, 4096))
        if not piece:
            break
        got, left = got + piece, left - len(piece)
        while _INTERIM.match(got) and b"\r\n\r\n" in got:
            got = got.partition(b"\r\n\r\n")[2]
        if (match := _FINAL.match(got)) is not None:
            return int(match[1])
        if b"\n" in got and not _INTERIM.match(got):
            break
    raise Unreachable("its response is not HTTP")
