"""Authenticates the caller by API key, or as this machine if there are no keys, and applies scopes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPBearer
from fastapi.security.base import SecurityBase

from api.errors import ApiError
from api.key_limits import UNLIMITED, KeyLimits
from api.service import of
from core.jobs.connection import StoreDown
from core.jobs.keyring import SCOPES, matching
from core.jobs.record import Job

BEARER = HTTPBearer(auto_error=False, description="An API key, where any were made with `diptych keys add`.")
_NO_KEYS = "No key is left, so nobody is served: `diptych keys add` makes one, `diptych keys open` asks for none."


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated caller. `id` is the key's, or empty without keys; jobs belong to it."""

    id: str
    scopes: frozenset[str]
    limits: KeyLimits = UNLIMITED

    def may(self, scope: str) -> bool:
        return scope in self.scopes or "admin" in self.scopes

    def sees(self, job: Job) -> bool:
        """Return whether the caller may see the job: its own, or any with the scope admin. Jobs of others are answered
        as not found.
        """
        return "admin" in self.scopes or job.owner == self.id

    def check(self, scope: str) -> None:
        """Raise `ApiError` (403) without one of these scopes."""
        if not self.may(scope):
            raise ApiError(403, f"This key lacks the scope {scope}.", code="insufficient_scope")


HERE = Caller("", frozenset(SCOPES))


async def identify(request: Request) -> Caller:
    """The caller of this request, by its bearer token. Raises as `authenticate`."""
    bearer = await BEARER(request)
    return await authenticate(request, None if bearer is None else bearer.credentials)


async def authenticate(request: Request, token: str | None) -> Caller:
    """The caller with this API key, by what Redis says during the request. Raises `ApiError` (401), and `StoreDown`
    while the keys have not been read yet.
    """
    service = await of(request)
    if not service.cards.known:
        raise StoreDown("Redis has never answered")
    if not await service.cards.guarded():
        return HERE
    keys = service.cards.now.keys
    if token is None:
        raise key_required() if keys else _unknown(_NO_KEYS)
    key = matching(token, keys)
    if key is None:
        await service.cards.renew_soon()  # the key may have just been created
        key = matching(token, service.cards.now.keys)
    if key is None:
        raise unknown_key()
    return Caller(key.id, frozenset(key.scopes), service.limits(key.id))


def key_required() -> ApiError:
    """A 401 for a request without a key."""
    return _unknown("An API key is required, as Authorization: Bearer dpt_….")


def unknown_key() -> ApiError:
    """A 401 for an unknown key."""
    return _unknown("This key is not known, or was revoked.")


class _Identified(SecurityBase):
    """`identify` as one dependency, since each adds measurable cost. Documented as bearer authentication."""

    def __init__(self) -> None:
        self.model, self.scheme_name = BEARER.model, BEARER.scheme_name

    async def __call__(self, request: Request) -> Caller:
        return await identify(request)


By = Annotated[Caller, Depends(_Identified())]


def _unknown(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
