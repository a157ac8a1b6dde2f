"""Calls webhook URLs, and signs the messages by the Standard Webhooks scheme.

A URL is client input: only public addresses are called unless private ones are allowed, the connection uses the address
that was checked, no redirect is followed, and a receiver's use of time and memory is limited.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import hmac
import ipaddress
import re
import socket
import ssl
from urllib.parse import SplitResult, urlsplit

from api.errors import invalid_field
from api.tenant_pool import Deadline, DeadlineExceeded
from contract import urls

ANSWER_S = 10.0  # limit of a call, everything included
_MOST_ANSWER = 64 * 1024  # bytes in which a response's status must come
_FINAL = re.compile(rb"HTTP/1\.[01] ([2-9][0-9][0-9])[^\n]*\n")
_INTERIM = re.compile(rb"HTTP/1\.1 1[0-9][0-9] ")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
# Global by the registries, yet never a client's public server: metadata and platform services of clouds (192.0.0.192,
# 168.63.129.16), site-local, NAT64 of one network, IPv4-compatible and IPv4-translated addresses.
_NEVER = {
    4: [ipaddress.ip_network(text) for text in ("192.0.0.0/24", "168.63.129.16/32", "192.88.99.0/24")],
    6: [ipaddress.ip_network(text) for text in ("fec0::/10", "64:ff9b:1::/48", "::/96", "::ffff:0:0:0/96", "5f00::/16",
                                                "3fff::/20")],
}  # fmt: skip


class Unreachable(RuntimeError):
    """The call was not made, or got no success response. The message says why, without the address."""


def check(url: str, *, private: bool) -> None:
    """Reject URLs that can never be called. Raises `ApiError` (400). DNS is resolved when it is called."""
    try:
        parts = urls.parse(url)
    except ValueError as error:
        raise invalid_field("webhook_url", str(error)) from None
    if "@" in parts.netloc:
        raise invalid_field("webhook_url", "must hold no user and no password")
    host = parts.hostname or ""
    if private:
        return
    if host.rstrip(".").endswith("localhost"):
        raise invalid_field("webhook_url", "must be a public address", "webhook_private")
    with contextlib.suppress(ValueError):
        if not _public(ipaddress.ip_address(host)):
            raise invalid_field("webhook_url", "must be a public address", "webhook_private")


def sign(secret: str, id: str, timestamp: int, body: bytes) -> str:
    """The header webhook-signature of a message (Standard Webhooks, "Signature scheme", v1)."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signature = hmac.digest(key, f"{id}.{timestamp}.".encode() + body, hashlib.sha256)
    return "v1," + base64.b64encode(signature).decode()


def call(url: str, headers: dict[str, str], body: bytes, *, private: bool, bound: Deadline | None = None) -> None:
    """POST once. Raises `Unreachable` unless the response is 2xx, within the bound; by itself, within 10 s."""
    bound = Deadline(ANSWER_S) if bound is None else bound
    parts = urlsplit(url)
    secure, host = parts.scheme == "https", parts.hostname or ""
    port = parts.port or (443 if secure else 80)
    request = _request(parts, {**headers, "Content-Length": str(len(body)), "Connection": "close"}) + body
    address = _resolved(host, port, private=private)
    try:
        with (
            socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as plain,
            plain.dup() as cut,  # TLS wraps another socket object
            bound.closing(lambda: cut.shutdown(socket.SHUT_RDWR)),
        ):
            plain.settimeout(bound.left_s())
            plain.connect((address, port))
            with _secured(plain, host, bound) if secure else plain as connection:
                connection.settimeout(bound.left_s())
                connection.sendall(request)
                status = _status(connection, bound)
    except (OSError, DeadlineExceeded) as error:
        name = "TimeUp" if bound.aborted else type(error).__name__
        raise Unreachable(f"it does not answer ({name})") from error
    if not 200 <= status < 300:
        raise Unreachable(f"it answered {status}")


def _request(parts: SplitResult, headers: dict[str, str]) -> bytes:
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    lines = [f"POST {path} HTTP/1.1", f"Host: {parts.netloc}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("ascii")


def _secured(plain: socket.socket, host: str, bound: Deadline) -> ssl.SSLSocket:
    """A TLS socket with the certificate verified for this name. Its handshake is done."""
    secured = _tls().wrap_socket(plain, server_hostname=host, do_handshake_on_connect=False)
    secured.settimeout(bound.left_s())
    secured.do_handshake()
    return secured


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


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


def _resolved(host: str, port: int, *, private: bool) -> str:
    try:
        resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise Unreachable("its host name does not resolve") from error
    addresses = [str(entry[4][0]) for entry in resolved]
    # All of them: a name with one private address is rejected.
    if not private and not all(_public(ipaddress.ip_address(address.partition("%")[0])) for address in addresses):
        raise Unreachable("its host name resolves to a private address")
    return addresses[0]


def _public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    if not address.is_global or address.is_multicast or any(address in network for network in _NEVER[address.version]):
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return True
    within = address.ipv4_mapped or address.sixtofour
    if address in _NAT64:  # a gateway on the way translates it to the IPv4 address in it
        within = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return within is None or _public(within)
