"""Charges requests and pictures to the rate limits of a key, whose state each response tells in its headers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Request
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Receive, Scope, Send

from api.access import Caller
from api.errors import NO_RETRY, ApiError
from api.middleware import on_start
from api.service import Service
from core.jobs.rates import RateLimitCost, RateLimitState

HEADERS = [
    f"x-ratelimit-{part}-{what}" for part in ("limit", "remaining", "reset") for what in ("requests", "pictures")
]
_SOON_S = 120  # a longer delay is not worth a client's automatic retries
_STATE = "rate_limits"  # of a request: the headers, by name


class RateLimitHeadersMiddleware:
    """Adds the state of the counters that were charged to the response."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers: dict[str, str] = {}
            scope.setdefault("state", {})[_STATE] = headers
            send = on_start(send, lambda message: MutableHeaders(scope=message).update(headers))
        await self.app(scope, receive, send)


async def enforce_rate_limit(request: Request, service: Service, caller: Caller) -> None:
    """Charge one request to the rate limit. Raises `ApiError` (429)."""
    await _count(request, service, request_costs(caller))


@asynccontextmanager
async def charge_refusals(request: Request, service: Service, caller: Caller) -> AsyncIterator[None]:
    """Context manager that charges a request whose body is refused to the rate limit.

    For requests that are charged with the creation of their job otherwise, in one call of Redis. Raises `ApiError`: 429
    in place of the refusal if the limit is exceeded.
    """
    try:
        yield
    except ApiError:
        await enforce_rate_limit(request, service, caller)
        raise


async def count_pictures(request: Request, service: Service, caller: Caller, n: int) -> None:
    """Charge the images of a job before it is created. Raises `ApiError` (429)."""
    await _count(request, service, picture_costs(caller, n))


def request_costs(caller: Caller) -> list[RateLimitCost]:
    """The charge of `enforce_rate_limit`, for callers that apply it with another script; none without a limit."""
    return [RateLimitCost(caller.rate, caller.id, "requests")] if caller.id and caller.rate else []


def picture_costs(caller: Caller, n: int) -> list[RateLimitCost]:
    """The charge of `count_pictures`, likewise."""
    return [RateLimitCost(caller.quota, caller.id, "pictures", n)] if caller.id and caller.quota else []


def apply_rate_limit(request: Request, charge: RateLimitCost, standing: RateLimitState) -> None:
    """Add a counter's state to the response's headers. Raises `ApiError` (429) if the limit is exceeded."""
    unit = charge.unit
    request.scope["state"][_STATE] |= {
        f"x-ratelimit-limit-{unit}": str(standing.limit),
        f"x-ratelimit-remaining-{unit}": str(standing.remaining),
        f"x-ratelimit-reset-{unit}": f"{standing.reset_s:.3f}s",
    }
    if not standing.allowed:
        again = {"Retry-After": str(standing.retry_after_s), **(NO_RETRY if standing.reset_s > _SOON_S else {})}
        code = "rate_limit_exceeded" if unit == "requests" else "quota_exceeded"
        raise ApiError(429, f"This key's limit of {charge.rate} {unit} is reached.", code=code, headers=again)


async def _count(request: Request, service: Service, charges: list[RateLimitCost]) -> None:
    for charge in charges:
        apply_rate_limit(request, charge, await service.call(service.rates.take, charge))
