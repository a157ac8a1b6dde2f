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

from core.jobs.connection import RedisClient, RedisStore
from core.jobs.keys import PREFIX

T = TypeVar("T")

KEPT_S = 30 * 86_400  # files and batches
_PORTION = 100  # records of a list of one round trip
_MADE = 1
_RESERVED_MS = 3_600_000  # between the first byte of an artifact and its file's record


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


class FileStore(RedisStore):
    """The files' records."""

    def __init__(self, redis: RedisClient | str) -> None:
        super().__init__(redis)
        self._reserve = self._client.script("files/reserve")
        self._add = self._client.script("files/add")
        self._forget = self._client.script("files/forget")

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

    def file(self, id: str) -> File | None:
        fields: Any = self._client.hgetall(f"{PREFIX}file:{id}")
        return File.of(id, fields) if fields else None

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
