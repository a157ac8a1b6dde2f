"""Stores API keys (as hashes) and the secret that signs links.

Once a key has existed, an empty keyring rejects every request: that state is stored beside the keys and outlives the
last of them. What a scope allows is decided by the API.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from contract.characters import text_error
from contract.content import ACTIONS
from contract.errors import Invalid
from contract.limits import KEY_LIMITS, SHARE, read_limits
from contract.strict import MAX_NAME
from core.jobs import keys
from core.jobs.connection import RedisClient, RedisStore, StoreFull
from core.jobs.record import to_json

SCOPES = ("images", "text", "files", "admin")
USUAL_SCOPES = SCOPES[:3]
_TOKEN = re.compile(r"dpt_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._@-]{0,63}")
_MOST_BYTES = 2**50
GUARDED, _OPEN = "keys", "open"  # values of `keys.ACCESS`


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An API key as stored. `hash` is SHA-256 of the whole token, which is random and so needs no salt.

    `rate` (requests), `quota` (images), `tokens`, `jobs` (queued or running) and `running` (of a model, at workers) are
    limits by model (`contract.limits`); `queued` (the key's jobs that may wait in a queue) has the form 200 or 25%;
    where they say nothing the service's defaults hold. `models` are those that the key may use, separated by commas;
    empty: all. `file_bytes` limits the total size of its files; 0: the service's default. `checker` is what is done to
    pictures that the service's checker flags (`contract.content`); empty: the service's own. `created` is seconds since
    the epoch.
    """

    id: str
    name: str
    hash: str
    scopes: tuple[str, ...]
    rate: str
    quota: str
    created: int
    queued: str = ""
    file_bytes: int = 0
    checker: str = ""
    tokens: str = ""
    jobs: str = ""
    running: str = ""
    models: str = ""

    @property
    def allowed_models(self) -> frozenset[str] | None:
        """The names of the models that the key may use. None: all."""
        return frozenset(map(str.strip, self.models.split(","))) if self.models else None


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """The policy that admits callers: the keys by id; and, without keys, whether access is `closed` or `open`.

    Neither: as far as this Redis can tell, there never was a key.
    """

    keys: Mapping[str, ApiKey]
    closed: bool = False
    open: bool = False


class Keyring(RedisStore):
    """The API keys, and the secret that signs links."""

    def __init__(self, redis: RedisClient | str) -> None:
        super().__init__(redis)
        self._add = self._client.script("keys/add")
        self._revoke = self._client.script("keys/revoke")
        self._unlock = self._client.script("keys/unlock")

    def add(
        self,
        name: str,
        scopes: Sequence[str] = USUAL_SCOPES,
        rate: str = "",
        quota: str = "",
        queued: str = "",
        file_bytes: int = 0,
        checker: str = "",
        **limits: str,
    ) -> tuple[ApiKey, str]:
        """Create a key; returns it with its token, which is shown only once. Raises ValueError, naming the field.

        `limits` are its `tokens`, `jobs`, `running` and `models`.
        """
        check(name, scopes, rate, quota, queued, file_bytes, checker, **limits)
        id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
        token = f"dpt_{id}_{secret}"
        ordered = tuple(scope for scope in SCOPES if scope in scopes)
        created = int(time.time())
        key = ApiKey(id, name, _hash(token), ordered, rate, quota, created, queued, file_bytes, checker, **limits)
        self._add(id, to_json(asdict(key)), checker)
        return key, token

    def all(self) -> list[ApiKey]:
        """Every key, oldest first."""
        reply: Any = self._client.hgetall(keys.KEYS)
        return sorted((_key(json.loads(text)) for text in reply.values()), key=lambda key: (key.created, key.id))

    def guard(self) -> AccessPolicy:
        """Read the current access policy."""
        with self._client.pipeline(transaction=False) as pipe:  # a full Redis refuses transactions
            pipe.hgetall(keys.KEYS)
            pipe.get(keys.ACCESS)  # read after the keys: it is set before the last key is revoked
            reply, results = pipe.execute()
        keys_by_id = {key.id: key for key in (_key(json.loads(text)) for text in reply.values())}
        if keys_by_id and results != GUARDED:  # keys of a version that stored no access state
            with contextlib.suppress(StoreFull):
                self._client.set(keys.ACCESS, GUARDED)
        return AccessPolicy(keys_by_id, not keys_by_id and results == GUARDED, not keys_by_id and results == _OPEN)

    def revoke(self, id: str, *, end: bool = False) -> bool:
        """Delete a key by id. False: it does not exist. APIs notice within a second or two.

        With `end` no job is created for it from now on, whatever an API still has cached. After the last key is deleted
        every request is rejected until a key is added or `unlock` is called.
        """
        return bool(self._revoke(id, int(end)))

    def unlock(self) -> bool:
        """Restore open access without keys. False: there are keys."""
        return bool(self._unlock())

    def secret(self, last: bytes = b"") -> bytes:
        """The secret that signs links: created once, shared by all processes of this Redis.

        If Redis was emptied it is set to `last`, the caller's cached secret, so that existing links stay valid.
        """
        reply: Any = self._client.get(keys.SECRET)
        if not reply:
            self._client.set(keys.SECRET, last.hex() or secrets.token_hex(32), nx=True)
            reply = self._client.get(keys.SECRET)
        return bytes.fromhex(reply)

    def clock(self) -> float:
        """The time by Redis's clock, in seconds since the epoch."""
        seconds, microseconds = self._client.time()
        return float(seconds + microseconds / 1e6)

    def webhook_secret(self, owner: str) -> str:
        """The secret that an owner's webhooks are signed with."""
        return webhook_secret(self.secret(), owner)


def check(
    name: str, scopes: Sequence[str], rate: str, quota: str, queued: str = "", file_bytes: int = 0, checker: str = "",
    *, tokens: str = "", jobs: str = "", running: str = "", models: str = "",
) -> None:  # fmt: skip
    """Raise `Invalid` for values that no key may have."""
    if not _NAME.fullmatch(name):
        raise Invalid("name", "must be 1 to 64 letters, digits, spaces or . _ @ -, a letter or digit first")
    if not scopes or not set(scopes) <= set(SCOPES):
        raise Invalid("scopes", f"must be some of {', '.join(SCOPES)}")
    limits = {"rate": rate, "quota": quota, "tokens": tokens, "jobs": jobs, "running": running}
    for field, form in KEY_LIMITS.items():
        try:
            read_limits(limits[field], form)
        except ValueError as error:
            raise Invalid(field, str(error)) from error
    for model in models.split(",") if models else ():
        if not model.strip() or text_error(model, MAX_NAME) is not None:
            raise Invalid("models", f"must be names of at most {MAX_NAME} characters, separated by commas")
    if queued and not SHARE.pattern.fullmatch(queued):
        raise Invalid("queued", "must be a number of jobs, such as 200, or a share of the queue, such as 25%")
    if not 0 <= file_bytes <= _MOST_BYTES:
        raise Invalid("file_bytes", f"must be between 0 and {_MOST_BYTES}")
    if checker not in ("", *ACTIONS):
        raise Invalid("checker", f"must be one of {', '.join(ACTIONS)}")


def most_queued(share: str, max_queued: int) -> int:
    """The number of jobs that may wait in a queue of `max_queued`, at least one. Empty: all of it."""
    if not share:
        return max_queued
    return max(1, max_queued * int(share[:-1]) // 100) if share.endswith("%") else min(int(share), max_queued)


def webhook_secret(shared: bytes, owner: str) -> str:
    """The secret as receivers configure it, in Standard Webhooks' form: whsec_…"""
    return "whsec_" + base64.b64encode(hmac.digest(shared, f"webhooks of {owner}".encode(), hashlib.sha256)).decode()


def matching(token: str, keys_by_id: Mapping[str, ApiKey]) -> ApiKey | None:
    """The key, among those given by id, that this token belongs to."""
    match = _TOKEN.fullmatch(token)
    key = keys_by_id.get(match[1]) if match else None
    return key if key is not None and hmac.compare_digest(key.hash, _hash(token)) else None


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def _key(raw: Mapping[str, Any]) -> ApiKey:
    values = {field.name: raw[field.name] for field in fields(ApiKey) if field.name in raw}
    scopes = {*raw["scopes"]} if "file_bytes" in raw else {*raw["scopes"], "files"}  # older keys: all could use files
    return ApiKey(**{**values, "scopes": tuple(scope for scope in SCOPES if scope in scopes)})
