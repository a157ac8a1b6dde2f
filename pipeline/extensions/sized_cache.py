"""Keeps what was read of files within a budget: the last used stay."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from core.threads import lower_priority
from pipeline.checkpoints.folder import ModelError

T = TypeVar("T")
_MOST_FAILURES = 1_000  # files that cannot be used, and are remembered


class _Kept(NamedTuple):
    stamp: Hashable
    content: Any
    size: int


class SizedCache:
    """Contents by key, each of a size, in bytes or 1. Thread-safe; one is read at a time, at a low priority."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.reads = 0
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()
        self._failures: OrderedDict[Hashable, tuple[Hashable, str]] = OrderedDict()  # stamps and messages
        self._lock = threading.Lock()
        self._reading = threading.Lock()

    def find(
        self,
        key: Hashable,
        stamp: Hashable,
        read: Callable[[], T],
        size_of: Callable[[T], int],
        check: Callable[[], object] = lambda: None,
    ) -> T:
        """The content of this key, read if it is not kept or has another `stamp`. Raises as `check` and `read`.

        Others are evicted as far as needed; one that is larger than the budget is returned, and not kept. One that
        cannot be used is not read again until its stamp changes. `check` reads a header, at normal priority, as
        `PinnedCache` says.
        """
        if (known := self._known(key, stamp)) is not None:
            return known.content  # type: ignore[no-any-return]
        with self._reading:  # what is kept is found meanwhile
            if (known := self._known(key, stamp)) is not None:
                return known.content  # type: ignore[no-any-return]
            self.reads += 1
            try:
                check()
                # In a thread that ends: OpenMP keeps a team of threads for every thread that ever computed.
                begin = partial(lower_priority, idle=True), ("reading weight files",)
                with ThreadPoolExecutor(1, "read", *begin) as thread:
                    content = thread.submit(read).result()
            except ModelError as error:
                if error.lasting:
                    with self._lock:
                        self._failures[key] = stamp, str(error)
                        if len(self._failures) > _MOST_FAILURES:
                            self._failures.popitem(last=False)
                raise
            with self._lock:
                self._kept.pop(key, None)
                if (size := size_of(content)) <= self.capacity:
                    self._kept[key] = _Kept(stamp, content, size)
                while sum(one.size for one in self._kept.values()) > self.capacity:
                    self._kept.popitem(last=False)
            return content

    def _known(self, key: Hashable, stamp: Hashable) -> _Kept | None:
        with self._lock:
            if (failure := self._failures.get(key)) is not None and failure[0] == stamp:
                raise ModelError(failure[1])
            known = self._kept.get(key)
            if known is None or known.stamp != stamp:
                return None
            self._kept.move_to_end(key)
            return known

    @property
    def held(self) -> Mapping[Hashable, int]:
        """Sizes of what is kept, least recently used first."""
        with self._lock:
            return {key: one.size for key, one in self._kept.items()}


def stamp_of(*paths: Path) -> tuple[Any, ...]:
    """Changes when any of these files does, or any file right in one of these folders."""
    files = [one for path in paths for one in ([path] if path.is_file() else sorted(path.iterdir())) if one.is_file()]
    found = ((file.name, file.stat()) for file in files)
    return tuple((name, about.st_ino, about.st_size, about.st_mtime_ns) for name, about in found)
