"""What every request passes: without keys only this machine, called by its own names, by no page of somebody else's.

A page in a browser may call any address that the browser reaches; where there is no key to ask for, `Host` (against
DNS rebinding) and `Origin` (against forged requests) tell its calls apart. Knows addresses and headers; knows no job.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import ApiError
from api.service import Service

_OPEN = ("/healthz", "/readyz")  # which tell nothing, and are asked by whoever supervises
_SAFE = ("GET", "HEAD", "OPTIONS")


class Doorway:
    """Refuses (403) what must not come in, and puts on answers what was noted for them on the way."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app = app
        self._service = service
        self._named = _host(service.settings.public_url)
        origins = (service.settings.public_url, *service.settings.cors_origins.split(","))
        self._origins = {_origin(origin) for origin in origins if origin.strip()} - {""}
        self._any = "*" in {origin.strip() for origin in origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        # Where Redis has not said yet whether there are keys, nothing is answered but that.
        keyless = not self._service.cards.now.guarded
        refused = self._refusal(scope) if keyless and scope["path"] not in _OPEN else None
        if refused is not None:
            await refused.response(scope, receive, send)
            return
        state = scope.setdefault("state", {})

        async def telling(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in state.get("told", {}).items():
                    headers[name] = value
            await send(message)

        await self.app(scope, receive, telling)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        peer = (scope.get("client") or ("",))[0]
        if peer and not self._service.settings.trust_network and not _loopback(peer):
            message = "There are no keys, so only this machine is served; make one with `diptych keys add`."
            return ApiError(403, message, code="keys_required")
        host = _host("//" + headers.get("host", ""))
        if not (_own_name(host) or (self._named and host == self._named)):
            message = "This server is not called by that name; DIPTYCH_PUBLIC_URL names another."
            return ApiError(403, message, param="host", code="host_not_allowed")
        if scope["method"] not in _SAFE:
            origin, called = headers.get("origin"), headers.get("host", "").lower()
            own = {f"http://{called}", f"https://{called}"}
            strange = headers.get("sec-fetch-site") == "cross-site" if origin is None else _origin(origin) not in own
            if strange and not self._allowed(origin):
                return ApiError(403, "Pages of other origins may not call.", param="origin", code="origin_not_allowed")
        return None

    def _allowed(self, origin: str | None) -> bool:
        """Whether pages of this origin may call. One that is none (`null`: a file, a frame in a sandbox) never may."""
        found = _origin(origin or "")
        return bool(found) and (self._any or found in self._origins)


def _host(url: str) -> str:
    """The host in a URL, without its port, in small letters; empty if there is none."""
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
    """localhost, or an address: a name that somebody else owns can be made to lead here, an address cannot."""
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
        return False  # what a proxy says of whom it does not know, such as `unknown`
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
