"""Parses and validates URLs given by clients. Does no DNS lookup."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import SplitResult, urlsplit

_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*\.?")
_BRACKETED = re.compile(r"\[[0-9A-Fa-f:.]+\](:[0-9]+)?")  # no zone id: it differs between machines
_PRINTABLE = re.compile(r"[!-~]+")


def parse(url: str, schemes: tuple[str, ...] = ("http", "https")) -> SplitResult:
    """Parse a URL: its host is a DNS name (RFC 1123, `_` too) or an IP address, its port 1 to 65535 or absent; it
    contains no blanks, control characters or non-ASCII. Raises ValueError, whose message does not echo it.
    """
    if not _PRINTABLE.fullmatch(url):
        raise ValueError("must hold no spaces and nothing beyond ASCII")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise ValueError("must be an address whose host and port can be read") from None
    if parts.scheme not in schemes or "://" not in url:
        raise ValueError(f"must begin with {' or '.join(f'{scheme}://' for scheme in schemes)}")
    if not host:
        raise ValueError("must name a host")
    if port == 0 or parts.netloc.endswith(":"):
        raise ValueError("must have a port from 1 to 65535, or none")
    bare = parts.netloc.rpartition("@")[2]
    if not (
        _BRACKETED.fullmatch(bare) and _is_address(host) if "[" in bare else len(host) <= 253 and _NAME.fullmatch(host)
    ):
        raise ValueError("must name a host that can be one")
    return parts


def _is_address(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True
