"""Host and Origin checks for every request: without keys only this machine may call, under its own names, and no
foreign page.

A web page may send requests to any address that the browser reaches; without keys, `Host` (against DNS rebinding) and
`Origin` (against request forgery) identify such calls.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from api.errors import ApiError
from api.service import Service

_OPEN = ("/healthz", "/readyz", "/v2/health/live", "/v2/health/ready")  # expose nothing, and are used by supervisors
_SAFE = ("GET", "HEAD", "OPTIONS")


class HostOriginMiddleware:
    """Rejects (403) disallowed requests."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app = app
        self._service = service
        self._named = _host(service.settings.public_url)
        origins = (service.settings.public_url, *service.settings.cors_origins.split(","))
        self._origins = {_origin(origin) for origin in origins if origin.strip()} - {""}
        self._any = "*" in {origin.strip() for origin in origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Until Redis has been read, it is unknown whether keys exist: everything else is rejected.
        checked = scope["type"] == "http" and not self._service.cards.now.guarded and scope["path"] not in _OPEN
        refused = self._refusal(scope) if checked else None
        await (self.app if refused is None else refused.response)(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        peer = (scope.get("client") or ("",))[0]
        if peer and not self._service.settings.trust_network and not _loopback(peer):
            message = (
                "There are no keys, so only this machine is served: make one with `diptych keys add`, or set "
                "DIPTYCH_TRUST_NETWORK if something else keeps strangers out."
            )
            return ApiError(403, message, code="keys_required")
        host = _host("//" + headers.get("host", ""))
        if not (_own_name(host) or (self._named and host == self._named)):
            message = (
                "This server has no keys, and is not called by that name: call it by an IP address or localhost, set "
                "DIPTYCH_PUBLIC_URL to the address that clients use, or make a key with `diptych keys add`."
            )
            return ApiError(403, message, param="host", code="host_not_allowed")
        if scope["method"] not in _SAFE:
            origin, called = headers.get("origin"), headers.get("host", "").lower()
            own_origins = {f"http://{called}", f"https://{called}"}
            strange = (
                headers.get("sec-fetch-site") == "cross-site" if origin is None else _origin(origin) not in own_origins
            )
            if strange and not self._allowed(origin):
                return ApiError(403, "Pages of other origins may not call.", param="origin", code="origin_not_allowed")
        return None

    def _allowed(self, origin: str | None) -> bool:
        """Return whether pages of this origin may call. An opaque origin (`null`: a file, a sandbox) never may."""
        parsed = _origin(origin or "")
        return bool(parsed) and (self._any or parsed in self._origins)


def _host(url: str) -> str:
    """The host in a URL, without its port, in lower case; empty if there is none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _origin(url: str) -> str:
    try:
        parts = urlsplit(url.strip())
    except ValueError:
        return ""
    return f"{parts.scheme}://{parts.netloc}".lower() if parts.scheme and parts.netloc else ""


def _own_name(host: str) -> bool:
    """Return whether it is localhost or an IP address: a foreign DNS name may resolve to this machine."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def _loopback(peer: str) -> bool:
    try:
        address = ipaddress.ip_address(peer.partition("%")[0])
    except ValueError:
        return False  # e.g. `unknown`, from a proxy
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
