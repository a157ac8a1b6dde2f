"""Stores file records in OpenAI's form: owner, size, quota, and references to their artifacts.

Keys in Redis:

    file:{id}             hash: owner, name, purpose, size, key of its artifact, created; of a picture width and height
    files:{owner}         zset: id → creation time
    file_sizes:{owner}    hash: id → bytes, and `total`
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from core.jobs.connection import RedisClient, RedisStore
from core.jobs.keys import PREFIX
from core.jobs.lists import ListPage, ListReader

KEPT_S = 30 * 86_400  # files and batches
_MADE, _BARRED, _NO_ROOM = 1, -1, -2
_RESERVED_MS = 3_600_000  # between an artifact's first byte and its file's record


def new_file_id() -> str:
    return f"file-{secrets.token_hex(12)}"


class FilesFull(RuntimeError):
    """The owner's file quota is used up. Not a `StoreError`: the store works."""

    def __init__(self, used: int, quota: int) -> None:
        super().__init__(f"the files take {used} of {quota} bytes")
        self.used = used
        self.quota = quota


class ShareFull(RuntimeError):
    """The owner's records take all the bytes of Redis that they may. Not a `StoreError`: the store works."""


class KeyRequired(RuntimeError):
    """The first API key was added since a request without one was admitted. Not a `StoreError`: the store works."""


@dataclass(frozen=True, slots=True)
class File:
    """An uploaded or generated file. `key` is its artifact's; times are seconds since the epoch."""

    id: str
    owner: str
    name: str
    purpose: str
    size: int
    key: str
    created: int
    picture_size: tuple[int, int] | None = None  # (width, height) of a picture that was checked; older records lack it

    @classmethod
    def of(cls, id: str, fields: Mapping[str, str]) -> Self:
        return cls(
            id, fields["owner"], fields["name"], fields["purpose"], int(fields["size"]), fields["key"],
            int(fields["created"]), (int(fields["width"]), int(fields["height"])) if "width" in fields else None,
        )  # fmt: skip


class FileStore(RedisStore):
    """The files' records."""

    def __init__(self, redis: RedisClient | str) -> None:
        super().__init__(redis)
        self._reserve = self._client.script("files/reserve")
        self._add = self._client.script("files/add")
        self._forget = self._client.script("files/forget")
        self._lists = ListReader(self._client, "file", File.of)

    def add(
        self, owner: str, name: str, purpose: str, size: int, key: str, *, quota: int = 0, id: str = "",
        picture_size: tuple[int, int] | None = None, keyless: bool = False, stored: int | None = None,
    ) -> File:  # fmt: skip
        """Create the record of a file, which keeps its artifact. Raises `FilesFull` if it would exceed a `quota`,
        `ShareFull` if the owner's records would take more bytes of Redis than `stored` (None: no limit), and
        `KeyRequired` for a `keyless` request if keys are required by now.

        With an `id` chosen by the caller, an existing record stays unchanged.
        """
        id = id or new_file_id()
        sides = picture_size or ("", "")
        code, number = self._add(
            id, owner, name, purpose, size, key, KEPT_S * 1000, quota or "", *sides, "1" if keyless else "",
            "" if stored is None else stored,
        )  # fmt: skip
        if code == _BARRED:
            raise KeyRequired
        if code == _NO_ROOM:
            raise ShareFull
        if code != _MADE:
            raise FilesFull(int(number), quota)
        return File(id, owner, name, purpose, size, key, int(number), picture_size)

    def reserve(self, id: str, artifact: str) -> bool:
        """Announce that the artifact of a file is about to be written. False: it is being deleted; ask again."""
        return bool(self._reserve(id, artifact, _RESERVED_MS))

    def file(self, id: str) -> File | None:
        fields: Any = self._client.hgetall(f"{PREFIX}file:{id}")
        return File.of(id, fields) if fields else None

    def used_bytes(self, owner: str) -> int:
        """Total size of an owner's files; expired ones count until the next file is added."""
        total: Any = self._client.hget(f"{PREFIX}file_sizes:{owner}", "total")
        return int(total or 0)

    def files(
        self, owner: str, *, purpose: str | None = None, oldest: bool = False, after: str = "", limit: int = 10_000
    ) -> ListPage[File] | None:
        """List an owner's files with this purpose, newest first unless `oldest`, after the given one. None: that one
        does not exist.
        """
        field = "purpose" if purpose else ""
        index = f"files:{owner}"
        return self._lists.page(index, field=field, value=purpose or "", oldest=oldest, after=after, limit=limit)

    def forget(self, file: File) -> None:
        """Delete the record; the artifact is deleted within seconds unless something else references it."""
        self._forget(file.id)
