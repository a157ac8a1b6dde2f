"""A file that never fits evicts nothing of others, is read once, and leaves no request waiting for it."""

from __future__ import annotations

import pytest

from pipeline.folder import ModelError
from pipeline.pinned_cache import PinnedCache, ReadFile


def cache_of(sizes: dict[str, int], capacity: int) -> PinnedCache[str]:
    return PinnedCache("file", capacity, lambda name: ReadFile(name, f"{name} {sizes[name]}", sizes[name]))


def test_what_never_fits_evicts_nothing_and_is_read_once() -> None:
    cache = cache_of({"a": 1, "b": 1, "big": 3}, 2)
    found = [cache.find(name, 0) for name in ("a", "b", "big", "big")]
    assert found[-1].size_bytes == 3, "which its request is told"
    assert [*cache.held] == ["a", "b"] and cache.reads == 3


def test_what_has_grown_too_large_since_its_check_fails_its_request() -> None:
    sizes = {"a": 1}
    cache = cache_of(sizes, 2)
    cache.find("a", 0)
    sizes["a"] = 3
    cache.find("a", 1)
    taken = cache.take(["a"], wait=True)
    assert taken is not None
    with pytest.raises(ModelError, match=r"^file a: needs more than"):
        cache.content(taken[0])
    cache.give(taken)
    assert not cache._pinned_bytes
