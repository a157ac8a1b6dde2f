"""Binds the API's listening socket before anything is loaded, and gives the URL that leads to it."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from pathlib import Path

_URL = "url"  # a file


class AddressError(ValueError):
    """The address cannot be bound. The message names the option."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `AddressError`.

    It listens at once, and stays open while the API restarts: requests in between wait, and are served.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise AddressError(f"--host: is no address of this machine ({_reason(error)})") from error
    # A name may resolve to several addresses: the first is used, IPv4 before IPv6, as most clients do.
    family, kind, protocol, _, address = min(addresses, key=lambda address: address[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and address[0] == "::":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise AddressError(f"--port: {port} is in use; name another with --port") from error
        if error.errno == errno.EACCES:
            raise AddressError(f"--port: {port} is not for everyone to listen on; name one above 1023") from error
        raise AddressError(f"--host: is no address of this machine ({_reason(error)})") from error
    return listener


def is_private(listener: socket.socket) -> bool:
    """Return whether only this machine can reach it."""
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def url(listener: socket.socket) -> str:
    """A URL that reaches it from this machine."""
    host, port = listener.getsockname()[:2]
    if ipaddress.ip_address(host.partition("%")[0]).is_unspecified:
        host = "127.0.0.1"  # an IPv6 socket on :: accepts IPv4 too
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def write_url(folder: Path, url: str) -> None:
    """Write the service's URL into its data folder, for commands on this machine. Raises OSError."""
    (folder / _URL).write_text(url + "\n", "utf-8")


def forget_url(folder: Path) -> None:
    """Remove what `write_url` wrote."""
    with contextlib.suppress(OSError):
        (folder / _URL).unlink()


def url_in(folder: Path) -> str:
    """The URL of the service that runs on this data folder; "" if none does. One that was killed may have left it."""
    try:
        return (folder / _URL).read_text("utf-8").strip()
    except (OSError, UnicodeError):
        return ""


def _reason(error: Exception) -> str:
    if isinstance(error, socket.gaierror):
        return str(error.strerror)
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "not a host's name"
