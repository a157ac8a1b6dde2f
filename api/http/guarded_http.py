"""Connects to URLs that clients give: to receivers of webhooks, and to where pictures lie.

Only public addresses are called unless private ones are allowed, the connection uses the address that was checked, and
the use of time is limited. Redirects are the caller's: each is a new connection.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import urlsplit

from api.concurrency.tenant_pool import Deadline, DeadlineExceeded
from api.errors import invalid_field
from contract import urls

_ADDRESSES = 8  # of a host that are tried, within one bound
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


def check(field: str, url: str, *, private: bool, code: str, schemes: tuple[str, ...] = ("http", "https")) -> None:
    """Reject URLs that can never be called. Raises `ApiError` (400), of this code for private addresses. DNS is
    resolved when it is called.
    """
    try:
        parts = urls.parse(url, schemes)
    except ValueError as error:
        raise invalid_field(field, str(error)) from None
    if "@" in parts.netloc:
        raise invalid_field(field, "must hold no user and no password")
    host = parts.hostname or ""
    if private:
        return
    if host.rstrip(".").endswith("localhost"):
        raise invalid_field(field, "must be a public address", code)
    with contextlib.suppress(ValueError):
        if not _public(ipaddress.ip_address(host)):
            raise invalid_field(field, "must be a public address", code)


@contextmanager
def connected(url: str, *, private: bool, bound: Deadline) -> Iterator[socket.socket]:
    """A connection to the first address of the URL's host that takes one, with TLS and its certificate verified for
    https. Raises `Unreachable`, also for what its user meets: errors of the connection and the end of the bound.
    """
    parts = urlsplit(url)
    secure, host = parts.scheme == "https", parts.hostname or ""
    port = parts.port or (443 if secure else 80)
    addresses = _resolved(host, port, private=private)
    try:
        for left in range(len(addresses), 0, -1):
            address = addresses[-left]
            with (
                socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as plain,
                plain.dup() as cut,  # TLS wraps another socket object
                bound.closing(functools.partial(cut.shutdown, socket.SHUT_RDWR)),
            ):
                try:
                    plain.settimeout(bound.left_s() / left)
                    plain.connect((address, port))
                except OSError:
                    if left == 1:
                        raise
                    continue
                with _secured(plain, host, bound) if secure else plain as connection:
                    yield connection
                return
    except (OSError, DeadlineExceeded) as error:
        name = "TimeUp" if bound.aborted else type(error).__name__
        raise Unreachable(f"it does not answer ({name})") from error


def send(
    connection: socket.socket, bound: Deadline, method: str, url: str, headers: Mapping[str, str], body: bytes = b""
) -> None:
    """Send a request of HTTP/1.1, after whose response the connection is closed."""
    parts = urlsplit(url)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    fields = {"Host": parts.netloc, **headers, "Connection": "close"}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    connection.settimeout(bound.left_s())
    connection.sendall("\r\n".join(lines).encode("ascii") + body)


def _secured(plain: socket.socket, host: str, bound: Deadline) -> ssl.SSLSocket:
    """A TLS socket with the certificate verified for this name. Its handshake is done."""
    secured = _tls().wrap_socket(plain, server_hostname=host, do_handshake_on_connect=False)
    try:
        secured.settimeout(bound.left_s())
        secured.do_handshake()
    except BaseException:
        secured.close()  # it has taken the plain socket over
        raise
    return secured


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def _resolved(host: str, port: int, *, private: bool) -> list[str]:
    """The host's first addresses, all of which may be called. Raises `Unreachable`."""
    try:
        resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise Unreachable("its host name does not resolve") from error
    addresses = [str(entry[4][0]) for entry in resolved]
    # All of them: a name with one private address is rejected.
    if not private and not all(_public(ipaddress.ip_address(address.partition("%")[0])) for address in addresses):
        raise Unreachable("its host name resolves to a private address")
    return list(dict.fromkeys(addresses))[:_ADDRESSES]


def _public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    if not address.is_global or address.is_multicast or any(address in network for network in _NEVER[address.version]):
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return True
    within = address.ipv4_mapped or address.sixtofour
    if address in _NAT64:  # a gateway on the way translates it to the IPv4 address in it
        within = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return within is None or _public(within)
