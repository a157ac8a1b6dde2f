"""Files as OpenAI has them: whose they are, how many bytes each owner has, and what holds their artifacts.

    file:{id}             hash: owner, name, purpose, size, key of its artifact, created
    files:{owner}         zset: id → when it was made
    file_sizes:{owner}    hash: id → bytes, and `total`

Knows nothing of HTTP, and nothing of what is in a file.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import redis

from core.config import Settings
from core.jobs.connection import Script, connect, translated
from core.jobs.holding import HOLDING
from core.jobs.keys import PREFIX
from core.jobs.scripts import PRELUDE

T = TypeVar("T")

KEPT_S = 30 * 86_400  # files and batches
_PORTION = 100  # records of a list of one round trip
_MADE = 1
_RESERVED_MS = 3_600_000  # between the first byte of an artifact and its file's record

_COUNTING = (
    PRELUDE
    + HOLDING
    + """
local function discount(owner, id)
  local sizes = P .. 'file_sizes:' .. owner
  local size = redis.call('HGET', sizes, id)
  if size then
    redis.call('HINCRBY', sizes, 'total', -size)
    redis.call('HDEL', sizes, id)
  end
end
"""
)

# id, artifact, ms → 1: it may be made, and is held so long for the file of this id; 0: it is being deleted
_RESERVE = (
    _COUNTING
    + """
let_through()
if redis.call('ZSCORE', P .. 'going', ARGV[3]) then return 0 end
local at = now()
hold(ARGV[3], ARGV[2], at + ARGV[4], at)
return 1
"""
)

# id, owner, name, purpose, size, key, kept_ms, quota in bytes or '' → {1, created} or {0, bytes that the owner has}
# One of this id that is there already stays as it is.
_ADD = (
    _COUNTING
    + """
local id, owner, kept_ms = ARGV[2], ARGV[3], tonumber(ARGV[8])
local sizes, index = P .. 'file_sizes:' .. owner, P .. 'files:' .. owner
redis.call('HSETNX', sizes, 'total', 0)  -- on a full Redis this is refused, and nothing is begun
local t = redis.call('TIME')
local at = now()
for _, old in ipairs(redis.call('ZRANGEBYSCORE', index, '-inf', (at - kept_ms) / 1000)) do discount(owner, old) end
redis.call('ZREMRANGEBYSCORE', index, '-inf', (at - kept_ms) / 1000)
local created = redis.call('HGET', P .. 'file:' .. id, 'created')
if created then return {1, created} end
local total = redis.call('HGET', sizes, 'total')
if ARGV[9] ~= '' and total + ARGV[6] > tonumber(ARGV[9]) then
  release(ARGV[7], id, at)
  return {0, total}
end
redis.call('HSET', P .. 'file:' .. id, 'owner', owner, 'name', ARGV[4], 'purpose', ARGV[5], 'size', ARGV[6],
  'key', ARGV[7], 'created', t[1])
redis.call('PEXPIRE', P .. 'file:' .. id, kept_ms)
redis.call('ZADD', index, t[1] + t[2] / 1000000, id)  -- finer than `created`: lists are in this order
redis.call('HSET', sizes, id, ARGV[6])
redis.call('HINCRBY', sizes, 'total', ARGV[6])
redis.call('PEXPIRE', sizes, kept_ms + 86400000)
hold(ARGV[7], id, at + kept_ms, at)
return {1, t[1]}
"""
)

# id → whether there was one
_FORGET = (
    _COUNTING
    + """
local key = P .. 'file:' .. ARGV[2]
local v = redis.call('HMGET', key, 'owner', 'key')
if not v[1] then return 0 end
redis.call('DEL', key)
redis.call('ZREM', P .. 'files:' .. v[1], ARGV[2])
discount(v[1], ARGV[2])
release(v[2], ARGV[2], now())
return 1
"""
)


def new_file_id() -> str:
    return f"file-{secrets.token_hex(12)}"


class FilesFull(RuntimeError):
    """An owner's files take as many bytes as they may. Not a `StoreError`: nothing is wrong with the store."""

    def __init__(self, used: int, quota: int) -> None:
        super().__init__(f"the files take {used} of {quota} bytes")
        self.used = used
        self.quota = quota


@dataclass(frozen=True, slots=True)
class File:
    """A file as it was handed in, or made. `key` is its artifact's; times are seconds since the epoch."""

    id: str
    owner: str
    name: str
    purpose: str
    size: int
    key: str
    created: int

    @classmethod
    def of(cls, id: str, fields: Mapping[str, str]) -> Self:
        return cls(
            id, fields["owner"], fields["name"], fields["purpose"], int(fields["size"]), fields["key"],
            int(fields["created"]),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Listed(Generic[T]):
    """One page of a list; `more` says whether there is another."""

    items: list[T]
    more: bool


class FileStore:
    """Thread-safe; connects at its first command. Every method raises `StoreDown` or `StoreFull`."""

    def __init__(self, url: str) -> None:
        self._client = connect(url)
        self._reserve = Script(self._client, _RESERVE)
        self._add = Script(self._client, _ADD)
        self._forget = Script(self._client, _FORGET)

    @classmethod
    def of(cls, settings: Settings) -> Self:
        return cls(settings.redis_url)

    def close(self) -> None:
        """Give the connections back. A later call would open new ones."""
        self._client.close()

    def add(self, owner: str, name: str, purpose: str, size: int, key: str, *, quota: int = 0, id: str = "") -> File:
        """Make the record of a file, which holds its artifact. Raises `FilesFull` where that is more than a `quota`.

        With an `id` of the caller's choice, one that is there already stays as it is.
        """
        id = id or new_file_id()
        code, number = self._add(id, owner, name, purpose, size, key, KEPT_S * 1000, quota or "")
        if code != _MADE:
            raise FilesFull(int(number), quota)
        return File(id, owner, name, purpose, size, key, int(number))

    def reserve(self, id: str, artifact: str) -> bool:
        """Say that the artifact of a file is about to be made. False: it is being deleted; ask again."""
        return bool(self._reserve(id, artifact, _RESERVED_MS))

    @translated()
    def file(self, id: str) -> File | None:
        fields: Any = self._client.hgetall(f"{PREFIX}file:{id}")
        return File.of(id, fields) if fields else None

    @translated()
    def used_bytes(self, owner: str) -> int:
        """What an owner's files take together; of those that are too old until the next is added."""
        total: Any = self._client.hget(f"{PREFIX}file_sizes:{owner}", "total")
        return int(total or 0)

    def files(
        self, owner: str, *, purpose: str | None = None, oldest: bool = False, after: str = "", limit: int = 10_000
    ) -> Listed[File] | None:
        """Of an owner's files those with this purpose, newest first unless `oldest`, after the one named. None: that
        one is not there.
        """
        wanted = lambda file: purpose in (None, file.purpose)  # noqa: E731
        return listed(self._client, f"{PREFIX}files:{owner}", "file", File.of, wanted, oldest, after, limit)

    def forget(self, file: File) -> None:
        """The record; the artifact goes within seconds where nothing else needs it."""
        self._forget(file.id)


@translated()
def listed(
    client: redis.Redis, index: str, kind: str, of: Callable[[str, Mapping[str, str]], T],
    wanted: Callable[[T], bool], oldest: bool, after: str, limit: int,
) -> Listed[T] | None:  # fmt: skip
    """A page of what an index names: of each id a hash `{kind}:{id}`, of which some may be gone by now."""
    rank: Any = (client.zrank if oldest else client.zrevrank)(index, after) if after else -1
    if rank is None:
        return None
    found: list[T] = []
    while len(found) <= limit:
        ids: Any = client.zrange(index, rank + 1, rank + _PORTION, desc=not oldest)
        with client.pipeline(transaction=False) as pipe:
            for id in ids:
                pipe.hgetall(f"{PREFIX}{kind}:{id}")
            records: Any = pipe.execute()
        made = (of(id, fields) for id, fields in zip(ids, records, strict=True) if fields)
        found += [one for one in made if wanted(one)]
        rank += len(ids)
        if len(ids) < _PORTION:
            break
    return Listed(found[:limit], len(found) > limit)
