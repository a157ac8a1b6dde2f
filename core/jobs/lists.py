"""Reads lists of records page by page, by indexes of their ids in Redis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from core.jobs.connection import RedisClient, RedisStore
from core.jobs.keys import PREFIX
from core.jobs.record import pairs

T = TypeVar("T")

_PAGE_BYTES = 2**20  # that one page reads
_PORTION = 100  # records per round trip of a list
_LOOKS = 500  # entries of an index that are examined in one: Redis serves nobody else meanwhile


@dataclass(frozen=True, slots=True)
class ListPage(Generic[T]):
    """One page of a list; `more` says whether another follows."""

    items: list[T]
    more: bool


class ListReader(RedisStore, Generic[T]):
    """Reads pages of indexes whose entries have records of one kind, `{kind}:{id}`."""

    def __init__(self, redis: RedisClient | str, kind: str, of: Callable[[str, Mapping[str, str]], T]) -> None:
        super().__init__(redis)
        self._kind = kind
        self._of = of
        self._page = self._client.script("lists/page")

    def page(
        self, index: str, *, field: str = "", value: str = "", oldest: bool = False, after: str, limit: int
    ) -> ListPage[T] | None:
        """A page of an index, newest first unless `oldest`, of records with this `value` of a `field`.

        Only the page's records are read. A page may be short although more follow, if they are large. None: `after` is
        not in the index.
        """
        rank = 0
        if after:
            at: Any = (self._client.zrank if oldest else self._client.zrevrank)(f"{PREFIX}{index}", after)
            if at is None:
                return None
            rank = at + 1
        items: list[T] = []
        more, room = 1, _PAGE_BYTES
        while more == 1 and len(items) <= limit:  # one more than the page has, to know whether another follows
            left = min(limit + 1 - len(items), _PORTION)
            order = "asc" if oldest else "desc"
            rank, more, *flat = self._page(index, self._kind, order, rank, left, _LOOKS, field, value, room)
            room -= sum(len(text.encode()) for fields in flat[1::2] for text in fields)
            items += [self._of(id, pairs(fields)) for id, fields in zip(flat[::2], flat[1::2], strict=True)]
        return ListPage(items[:limit], more == 2 or len(items) > limit)
