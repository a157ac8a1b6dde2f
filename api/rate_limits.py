"""Charges requests, pictures and tokens to the limits of a key, whose state each response tells in its headers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import Request
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Receive, Scope, Send

from api.access import Caller
from api.errors import NO_RETRY, ApiError, invalid_field
from api.http.middleware import on_start
from api.service import Service
from core.jobs.connection import StoreFull
from core.jobs.rates import RateLimitCost, RateLimitState

_UNITS = ("requests", "pictures", "tokens")
HEADERS = [f"x-ratelimit-{part}-{unit}" for part in ("limit", "remaining", "reset") for unit in _UNITS]
_FIELDS = {"pictures": "n", "tokens": "max_tokens"}  # of a single request, that say how much it asks for
_SOON_S = 120  # a longer delay is not worth a client's automatic retries
_STORED_S = 60  # until a retry, of a key that has no room in the store
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
    await charge(request, service, caller.limits.request_costs())


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


async def charge(request: Request, service: Service, costs: Sequence[RateLimitCost], field: str | None = None) -> None:
    """Charge all of these costs, or none. Raises `ApiError` as `apply_rate_limits`."""
    if costs:
        states = await service.call(costs[0].tenant, service.rates.take, *costs)
        apply_rate_limits(request, costs, states, field)


async def refund(request: Request, service: Service, costs: Sequence[RateLimitCost]) -> None:
    """Take back what these cost, but requests, where their job was refused after the charge."""
    refunds = [cost for cost in costs if cost.unit != "requests"]
    if refunds:
        await service.call(refunds[0].tenant, service.rates.refund, *refunds)
    for name in [name for name in HEADERS if not name.endswith("-requests")]:
        request.scope["state"][_STATE].pop(name, None)


def apply_rate_limits(
    request: Request, costs: Sequence[RateLimitCost], states: Sequence[RateLimitState], field: str | None = None
) -> None:
    """Add the counters' states to the response's headers: of each unit that which leaves the least.

    Raises `ApiError` if the last of them is exceeded: 429, or 400 where the request costs more than the whole limit,
    naming the `field` that says how much it asks for; None: the field of a single request.
    """
    headers = request.scope["state"][_STATE]
    for cost, state in zip(costs, states, strict=False):
        unit = cost.unit
        remaining = headers.get(f"x-ratelimit-remaining-{unit}")
        if remaining is None or not state.allowed or state.remaining < int(remaining):
            headers |= {
                f"x-ratelimit-limit-{unit}": str(state.limit),
                f"x-ratelimit-remaining-{unit}": str(state.remaining),
                f"x-ratelimit-reset-{unit}": f"{state.reset_s:.3f}s",
            }
        if state.never:
            raise too_large(cost, field)
        if not state.allowed:
            again = {"Retry-After": str(state.retry_after_s), **(NO_RETRY if state.wait_s > _SOON_S else {})}
            message = f"This key's limit of {_words(cost)} is reached."
            raise ApiError(429, message, param="model" if cost.model else None, code=_code(unit), headers=again)


def too_large(cost: RateLimitCost, field: str | None = None) -> ApiError:
    """The 400 for a request that costs more than the whole limit, so that no wait helps."""
    message = f"{cost.cost} {cost.unit} are more than this key's limit of {_words(cost)} ever allows"
    return invalid_field(field or _FIELDS.get(cost.unit), message, _code(cost.unit))


def stored_limit(service: Service, owner: str) -> int | None:
    """The bytes of Redis that an owner's records may take; None: no limit. Raises `StoreFull` while it is so full that
    nobody may create records.
    """
    now = service.cards.now
    if now.memory.nearly_full:
        raise StoreFull("Redis has nearly reached its memory limit")
    percent = int(service.settings.key_stored.removesuffix("%") or 0)
    return now.memory.share(percent, len(now.keys)) if owner else None


def store_share_full() -> ApiError:
    """The 429 for what would be stored of a key whose records take all the memory that they may."""
    message = (
        "The jobs, files and batches of this key take all the room in the service's store that they may; "
        "erase some, or wait until they end or expire."
    )
    return ApiError(429, message, code="store_share_full", headers={"Retry-After": str(_STORED_S), **NO_RETRY})


def _words(cost: RateLimitCost) -> str:
    return f"{cost.rate} {cost.unit}" + (f" of {cost.model}" if cost.model else "")


def _code(unit: str) -> str:
    return "quota_exceeded" if unit == "pictures" else "rate_limit_exceeded"
