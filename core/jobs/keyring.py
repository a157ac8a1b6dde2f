"""Who may use the service: API keys, of which only hashes are kept, and the secret that links are signed with.

Knows keys, scopes and what is stored of them; knows nothing of HTTP, and not what a scope allows.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from core.config import RATE, Settings
from core.jobs import keys
from core.jobs.connection import connect, translated
from core.jobs.record import to_json

SCOPES = ("images", "text", "admin")
_TOKEN = re.compile(r"dpt_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._@-]{0,63}")
_RATE = re.compile(RATE)


@dataclass(frozen=True, slots=True)
class Key:
    """An API key as it is kept. `hash` is SHA-256 of the whole token, which nobody can guess: it needs no salt.

    `rate` (requests) and `quota` (pictures) look like 60/minute; empty: the service's own. `created` is seconds since
    the epoch.
    """

    id: str
    name: str
    hash: str
    scopes: tuple[str, ...]
    rate: str
    quota: str
    created: int


class Keyring:
    """Thread-safe; connects at its first command. Every method raises `StoreDown` or `StoreFull`."""

    def __init__(self, url: str) -> None:
        self._client = connect(url)

    @classmethod
    def of(cls, settings: Settings) -> Self:
        return cls(settings.redis_url)

    def close(self) -> None:
        """Give the connections back. A later call would open new ones."""
        self._client.close()

    @translated()
    def add(self, name: str, scopes: Sequence[str] = SCOPES[:2], rate: str = "", quota: str = "") -> tuple[Key, str]:
        """Make a key; returns it with its token, which is told this once. Raises ValueError, naming the field."""
        check(name, scopes, rate, quota)
        id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
        token = f"dpt_{id}_{secret}"
        ordered = tuple(scope for scope in SCOPES if scope in scopes)
        key = Key(id, name, _hash(token), ordered, rate, quota, int(time.time()))
        self._client.hset(keys.KEYS, id, to_json(asdict(key)))
        return key, token

    @translated()
    def all(self) -> list[Key]:
        """Every key, oldest first."""
        found: Any = self._client.hgetall(keys.KEYS)
        return sorted((_key(json.loads(text)) for text in found.values()), key=lambda key: (key.created, key.id))

    @translated()
    def revoke(self, id: str) -> bool:
        """Take a key away, by its id. False: there is none. APIs hear of it within a second or two."""
        return bool(self._client.hdel(keys.KEYS, id))

    @translated()
    def secret(self, last: bytes = b"") -> bytes:
        """What links are signed with: made once, and the same for all who use this Redis.

        One that was emptied gets the `last` that its caller knew, so that links go on to work.
        """
        found: Any = self._client.get(keys.SECRET)
        if not found:
            self._client.set(keys.SECRET, last.hex() or secrets.token_hex(32), nx=True)
            found = self._client.get(keys.SECRET)
        return bytes.fromhex(found)

    @translated()
    def clock(self) -> float:
        """The time by Redis's clock, in seconds since the epoch."""
        seconds, microseconds = self._client.time()
        return float(seconds + microseconds / 1e6)

    def webhook_secret(self, owner: str) -> str:
        """The secret that an owner's webhooks are signed with."""
        return webhook_secret(self.secret(), owner)


def check(name: str, scopes: Sequence[str], rate: str, quota: str) -> None:
    """Raises ValueError, naming the field, where no key can be made of these."""
    if not _NAME.fullmatch(name):
        raise ValueError("name: must be 1 to 64 letters, digits, spaces or . _ @ -, a letter or digit first")
    if not scopes or not set(scopes) <= set(SCOPES):
        raise ValueError(f"scopes: must be some of {', '.join(SCOPES)}")
    for field, value in (("rate", rate), ("quota", quota)):
        if not _RATE.fullmatch(value):
            raise ValueError(f"{field}: must look like 60/minute (second, minute, hour or day)")


def webhook_secret(shared: bytes, owner: str) -> str:
    """As receivers are configured with it, by Standard Webhooks: whsec_…"""
    return "whsec_" + base64.b64encode(hmac.digest(shared, f"webhooks of {owner}".encode(), hashlib.sha256)).decode()


def matching(token: str, known: Mapping[str, Key]) -> Key | None:
    """The key, of those known by id, that this token is of."""
    match = _TOKEN.fullmatch(token)
    key = known.get(match[1]) if match else None
    return key if key is not None and hmac.compare_digest(key.hash, _hash(token)) else None


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def _key(raw: Mapping[str, Any]) -> Key:
    known = {field.name: raw[field.name] for field in fields(Key)}
    return Key(**{**known, "scopes": tuple(raw["scopes"])})
