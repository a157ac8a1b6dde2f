"""Who may use the service: API keys, of which only hashes are kept, and the secret that links are signed with.

Where there was ever a key, no key lets nobody in: that is noted beside the keys, and outlives the last of them.

Knows keys, scopes and what is stored of them; knows nothing of HTTP, and not what a scope allows.
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

from contract.errors import Invalid
from core.config import RATE, SHARE
from core.jobs import keys
from core.jobs.connection import RedisClient, RedisStore, StoreFull
from core.jobs.record import to_json

SCOPES = ("images", "text", "files", "admin")
USUAL_SCOPES = SCOPES[:3]
_TOKEN = re.compile(r"dpt_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._@-]{0,63}")
_RATE = re.compile(RATE)
_SHARE = re.compile(SHARE)
_MOST_BYTES = 2**50
_GUARDED, _OPEN = "keys", "open"  # what `keys.ACCESS` holds


@dataclass(frozen=True, slots=True)
class Key:
    """An API key as it is kept. `hash` is SHA-256 of the whole token, which nobody can guess: it needs no salt.

    `rate` (requests) and `quota` (pictures) look like 60/minute, `queued` (its jobs that may wait in a queue) like 200
    or 25%; empty: the service's own. `file_bytes` is what its files may take together; 0: the service's own. `created`
    is seconds since the epoch.
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


@dataclass(frozen=True, slots=True)
class Guard:
    """Who may come in: the keys by id; and, where there are none, whether nobody may (`closed`) or the door is `open`.

    Neither: there never was a key, as far as this Redis knows.
    """

    keys: Mapping[str, Key]
    closed: bool = False
    open: bool = False


class Keyring(RedisStore):
    """The API keys, and the secret that links are signed with."""

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
    ) -> tuple[Key, str]:
        """Make a key; returns it with its token, which is told this once. Raises ValueError, naming the field."""
        check(name, scopes, rate, quota, queued, file_bytes)
        id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
        token = f"dpt_{id}_{secret}"
        ordered = tuple(scope for scope in SCOPES if scope in scopes)
        key = Key(id, name, _hash(token), ordered, rate, quota, int(time.time()), queued, file_bytes)
        self._add(id, to_json(asdict(key)))
        return key, token

    def all(self) -> list[Key]:
        """Every key, oldest first."""
        found: Any = self._client.hgetall(keys.KEYS)
        return sorted((_key(json.loads(text)) for text in found.values()), key=lambda key: (key.created, key.id))

    def guard(self) -> Guard:
        """Who may come in now."""
        with self._client.pipeline(transaction=False) as pipe:  # a full Redis refuses transactions
            pipe.hgetall(keys.KEYS)
            pipe.get(keys.ACCESS)  # after the keys: it is set before the last of them goes
            found, said = pipe.execute()
        known = {key.id: key for key in (_key(json.loads(text)) for text in found.values())}
        if known and said != _GUARDED:  # of a version that noted nothing
            with contextlib.suppress(StoreFull):
                self._client.set(keys.ACCESS, _GUARDED)
        return Guard(known, not known and said == _GUARDED, not known and said == _OPEN)

    def revoke(self, id: str, *, end: bool = False) -> bool:
        """Take a key away, by its id. False: there is none. APIs hear of it within a second or two.

        With `end` no job is made for it from now on, whatever an API still believes. After the last key nobody is let
        in, until there is another or `unlock` is called.
        """
        return bool(self._revoke(id, int(end)))

    def unlock(self) -> bool:
        """Have no key mean what it meant before there was one. False: there are keys."""
        return bool(self._unlock())

    def secret(self, last: bytes = b"") -> bytes:
        """What links are signed with: made once, and the same for all who use this Redis.

        One that was emptied gets the `last` that its caller knew, so that links go on to work.
        """
        found: Any = self._client.get(keys.SECRET)
        if not found:
            self._client.set(keys.SECRET, last.hex() or secrets.token_hex(32), nx=True)
            found = self._client.get(keys.SECRET)
        return bytes.fromhex(found)

    def clock(self) -> float:
        """The time by Redis's clock, in seconds since the epoch."""
        seconds, microseconds = self._client.time()
        return float(seconds + microseconds / 1e6)

    def webhook_secret(self, owner: str) -> str:
        """The secret that an owner's webhooks are signed with."""
        return webhook_secret(self.secret(), owner)


def check(name: str, scopes: Sequence[str], rate: str, quota: str, queued: str = "", file_bytes: int = 0) -> None:
    """Raises `Invalid` where no key can be made of these."""
    if not _NAME.fullmatch(name):
        raise Invalid("name", "must be 1 to 64 letters, digits, spaces or . _ @ -, a letter or digit first")
    if not scopes or not set(scopes) <= set(SCOPES):
        raise Invalid("scopes", f"must be some of {', '.join(SCOPES)}")
    for field, value in (("rate", rate), ("quota", quota)):
        if not _RATE.fullmatch(value):
            raise Invalid(field, "must look like 60/minute (second, minute, hour or day)")
    if not _SHARE.fullmatch(queued):
        raise Invalid("queued", "must be a number of jobs, such as 200, or a share of the queue, such as 25%")
    if not 0 <= file_bytes <= _MOST_BYTES:
        raise Invalid("file_bytes", f"must be between 0 and {_MOST_BYTES}")


def most_queued(share: str, max_queued: int) -> int:
    """How many jobs may wait of a queue that holds `max_queued`, at least one. Empty: all of it."""
    if not share:
        return max_queued
    return max(1, max_queued * int(share[:-1]) // 100) if share.endswith("%") else min(int(share), max_queued)


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
    known = {field.name: raw[field.name] for field in fields(Key) if field.name in raw}
    scopes = {*raw["scopes"]} if "file_bytes" in raw else {*raw["scopes"], "files"}  # older ones: all had files
    return Key(**{**known, "scopes": tuple(scope for scope in SCOPES if scope in scopes)})
