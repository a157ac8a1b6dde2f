"""Tells the end of jobs to addresses that were given with them, signed by the Standard Webhooks scheme.

An address is somebody's input: only public ones are called unless private ones are allowed, the one that was looked up
is the one that is called, and no redirect is followed. Knows HTTP and signatures; when, core.jobs.webhooks knows.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.client
import ipaddress
import json
import logging
import socket
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from api.errors import refused
from api.links import Links
from api.poller import Poller
from api.presentation import job_object
from api.service import Service
from core import urls
from core.jobs.keyring import webhook_secret
from core.jobs.webhooks import Webhooks

log = logging.getLogger(__name__)

_ANSWER_S = 10.0
_PAUSES_S = (5, 30, 120, 600, 3600, 3 * 3600, 6 * 3600)  # between tries; then it is given up
_AT_ONCE = 8
_LONGEST = 2048


class Unreachable(RuntimeError):
    """An address was not called, or did not answer with success. The message says why, without the address."""


def check(url: str, *, private: bool) -> None:
    """Refuse what can never be called. Raises `ApiError` (400). A name is looked up when it is called."""
    if len(url) > _LONGEST:
        raise refused("webhook_url", f"must have at most {_LONGEST} characters")
    try:
        parts = urls.parse(url)
    except ValueError as error:
        raise refused("webhook_url", str(error)) from None
    if "@" in parts.netloc:
        raise refused("webhook_url", "must hold no user and no password")
    host = parts.hostname or ""
    if private:
        return
    if host.rstrip(".").endswith("localhost"):
        raise refused("webhook_url", "must be a public address", "webhook_private")
    with contextlib.suppress(ValueError):
        if not _public(ipaddress.ip_address(host)):
            raise refused("webhook_url", "must be a public address", "webhook_private")


def sign(secret: str, id: str, timestamp: int, body: bytes) -> str:
    """The header webhook-signature of a message (Standard Webhooks, "Signature scheme", v1)."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    made = hmac.digest(key, f"{id}.{timestamp}.".encode() + body, hashlib.sha256)
    return "v1," + base64.b64encode(made).decode()


def call(url: str, headers: dict[str, str], body: bytes, *, private: bool) -> None:
    """POST once. Raises `Unreachable` for any end but an answer of 2xx."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    address = _resolved(parts.hostname or "", port, private=private)
    connection = _Pinned(parts.hostname or "", port, address, secure=parts.scheme == "https")
    try:
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        status = answer.status
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"it does not answer ({type(error).__name__})") from error
    finally:
        connection.close()
    if not 200 <= status < 300:
        raise Unreachable(f"it answered {status}")


class _Pinned(http.client.HTTPConnection):
    """Calls the address that was looked at, whatever the name means by now; TLS is held to the name."""

    def __init__(self, host: str, port: int, address: str, *, secure: bool) -> None:
        super().__init__(host, port, timeout=_ANSWER_S)
        self._address = address
        self._context = ssl.create_default_context() if secure else None

    def connect(self) -> None:
        self.sock = socket.create_connection((self._address, self.port), self.timeout)
        if self._context is not None:
            self.sock = self._context.wrap_socket(self.sock, server_hostname=self.host)


def _resolved(host: str, port: int, *, private: bool) -> str:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise Unreachable("its name leads nowhere") from error
    addresses = [str(entry[4][0]) for entry in found]
    # All of them: a name with one private address has no business here.
    if not private and not all(_public(ipaddress.ip_address(address.partition("%")[0])) for address in addresses):
        raise Unreachable("its name leads to a private address")
    return addresses[0]


def _public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    mapped = getattr(address, "ipv4_mapped", None) or getattr(address, "sixtofour", None)
    return address.is_global and not address.is_multicast and (mapped is None or _public(mapped))


class Teller:
    """A thread that looks who is due, and a few that tell. Every API has one; a job is one's at a time."""

    def __init__(self, service: Service, pauses_s: tuple[float, ...] = _PAUSES_S) -> None:
        self._service = service
        self._webhooks = Webhooks.of(service.settings)
        self._pauses_s = pauses_s
        self._private = service.settings.webhook_private
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="teller")
        self._poller = Poller("teller", "webhooks", self._look)

    def start(self) -> None:
        self._poller.start()

    def stop(self) -> None:
        self._poller.stop()
        self._pool.shutdown()
        self._webhooks.close()

    def _look(self) -> None:
        # One that hangs is told by nobody else before it must have ended here.
        list(self._pool.map(self._tell, self._webhooks.due(6 * _ANSWER_S, _AT_ONCE)))

    def _tell(self, due: tuple[str, int]) -> None:
        id, tries = due
        job = self._service.store.get(id)
        if job is None or job.webhook is None or not job.state.final:
            self._webhooks.settle(id)  # erased meanwhile
            return
        now = self._service.cards.now
        if not now.secret:
            return  # Redis has not been read yet; it comes again
        links = Links(job.webhook["base"], now.secret if now.guarded else None, self._service.settings.link_s)
        timestamp, message = int(time.time()), f"msg_{id}_{job.attempt}"
        told = {"type": f"job.{job.state.value}", "timestamp": job.ended, "data": job_object(job, links)}
        body = json.dumps(told, separators=(",", ":"), allow_nan=False).encode()
        headers = {
            "Content-Type": "application/json", "User-Agent": "diptych", "webhook-id": message,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": sign(webhook_secret(now.secret, job.owner), message, timestamp, body),
        }  # fmt: skip
        try:
            call(job.webhook["url"], headers, body, private=self._private)
        except Unreachable as error:
            if tries >= len(self._pauses_s):
                log.warning("nobody is told of the end of %s: %s, and it was tried %d times", id, error, tries + 1)
                self._webhooks.settle(id)
            else:
                log.info("the end of %s is told later: %s", id, error)
                self._webhooks.again(id, self._pauses_s[tries])
        else:
            self._webhooks.settle(id)
