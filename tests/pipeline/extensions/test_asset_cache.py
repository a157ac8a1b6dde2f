"""A file that never fits evicts nothing of others, is read once, and leaves no request waiting for it."""

from __future__ import annotations

import gc
import os
import threading
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.batching.runner import OutOfMemory
from pipeline.checkpoints.folder import ModelError
from pipeline.extensions.asset_cache import AssetCache, ReadFile
from tests.starved import no_threads


def cache_of(sizes: dict[str, int], capacity: int) -> AssetCache[str]:
    return AssetCache("file", capacity, lambda name: ReadFile(name, f"{name} {sizes[name]}", sizes[name]))


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
    assert not cache._pinned


class Broken:
    """Reads files by raising what `errors` has of them, and notes the calls and the threads' niceness."""

    def __init__(self) -> None:
        self.errors: dict[str, ModelError] = {}
        self.calls: list[tuple[str, str]] = []
        self.niceness: dict[str, int] = {}

    def check(self, name: str) -> None:
        self._called("check", name)
        if name in self.errors:
            raise self.errors[name]

    def read(self, name: str) -> ReadFile[str]:
        self._called("read", name)
        return ReadFile(name, name, 1)

    def _called(self, what: str, name: str) -> None:
        self.calls.append((what, name))
        self.niceness[what] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def _because(cause: BaseException | None) -> ModelError:
    error = ModelError("a: is damaged", kind="file")
    error.__cause__ = cause
    return error


def test_a_file_that_cannot_be_used_is_read_once_until_it_changes() -> None:
    broken = Broken()
    error = broken.errors["a"] = _because(ValueError("its header"))
    cache = AssetCache("file", 9, broken.read, check=broken.check)
    for stamp in (1, 1, 1, 2, 2):
        with pytest.raises(ModelError, match=r"^file a: is damaged$") as caught:
            cache.find("a", stamp)
        assert (caught.value.kind, caught.value.detail) == ("file", "a: is damaged")
    assert broken.calls == [("check", "a")] * 2
    assert broken.errors.pop("a") is error
    with pytest.raises(ModelError):
        cache.find("a", 2)
    assert cache.find("a", 3) and broken.calls[2:] == [("check", "a"), ("read", "a")]


@pytest.mark.parametrize("cause", [OSError(5, "input/output error"), MemoryError(), OutOfMemory("all of it")])
def test_what_may_pass_is_tried_again(cause: BaseException) -> None:
    broken = Broken()
    broken.errors["a"] = _because(ValueError("of a library"))
    broken.errors["a"].__cause__.__cause__ = cause  # type: ignore[union-attr]
    cache = AssetCache("file", 9, broken.read, check=broken.check)
    for _ in range(2):
        with pytest.raises(ModelError):
            cache.find("a", 1)
    assert len(broken.calls) == 2
    broken.errors.clear()
    assert cache.get("a", 1) == "a"


def test_a_header_is_checked_at_normal_priority_and_its_file_read_behind_all_others() -> None:
    """Whoever holds the GIL while others keep it from running stops the whole process."""
    broken = Broken()
    AssetCache("file", 9, broken.read, check=broken.check).find("a", 1)
    assert broken.niceness["check"] == os.getpriority(os.PRIO_PROCESS, 0) < broken.niceness["read"]


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 1)), max_size=30), st.integers(0, 9))
@settings(deadline=None)
def test_it_keeps_the_last_used_within_its_budget(asked: list[tuple[int, int]], capacity: int) -> None:
    """Each key is its size. What never fits evicts nothing, and is read once."""
    stamps, order, reads = dict[int, int](), list[tuple[int, int]](), 0
    cache = AssetCache[str]("file", capacity, lambda key: ReadFile(f"{key} {stamps[key]}", f"{stamps[key]}", key))
    for key, stamp in asked:
        reads += (key, stamp) not in order and (key <= capacity or stamps.get(key) != stamp)
        stamps[key] = stamp
        assert cache.find(key, stamp).size_bytes == key and cache.reads == reads
        order = [(k, s) for k, s in order if k != key] + [(key, stamp)] * (key <= capacity)
        while sum(k for k, _ in order) > capacity:
            order.pop(0)
        assert list(cache.held) == [k for k, _ in order]
        assert all(cache.known(k).content == f"{k} {s}" for k, s in order)


def test_an_error_that_is_no_file_s_is_raised_and_not_remembered() -> None:
    texts = iter(("damaged", "1"))
    cache = AssetCache[int]("file", 9, lambda key: ReadFile(int(next(texts)), "", 1))
    with pytest.raises(ValueError, match="invalid literal"):
        cache.get("a", 0)
    assert [cache.get("a", 0), cache.get("a", 0)] == [1, 1] and cache.reads == 2


def test_nothing_is_kept_of_a_file_that_could_not_be_read() -> None:
    """Nor by the error that is remembered: a traceback holds all that its functions held."""

    class Large:
        pass

    kept: list[weakref.ref[Large]] = []

    def read(name: str) -> ReadFile[str]:
        large = Large()
        kept.append(weakref.ref(large))
        if len(kept) > 1:
            raise ModelError("file a: is damaged")
        return ReadFile(name, "1", 1)

    cache = AssetCache("file", 2, read)
    file = cache.find("a", 1)
    file.content = None  # as if others had needed the room
    for use in (lambda: cache.content(file), lambda: cache.find("a", 2)):
        with pytest.raises(ModelError):
            use()
    gc.collect()
    assert len(kept) == 3 and not any(one() for one in kept)


def test_what_is_read_again_for_a_request_stays_until_it_is_admitted() -> None:
    cache = cache_of({"a": 1, "b": 1, "c": 1}, 1)
    for name in ("a", "b"):
        cache.find(name, 0)
    assert cache.take(["a"], wait=True) is None, "it was evicted, and is read again"
    for load in [*cache._loads.values()]:
        load.result(60)
    cache.find("c", 0)
    taken = cache.take(["a"], wait=True)
    assert taken is not None and cache.content(taken[0]) == "a"


def test_what_is_evicted_is_freed_also_where_no_thread_can_start() -> None:
    """On the engine's thread an error would end the process."""
    cache = cache_of({"a": 1, "b": 2}, 2)
    cache.find("a", 0)
    taken = cache.take(["a"], wait=True)
    assert taken is not None
    cache.find("b", 0)
    with no_threads():
        cache.give(taken)
    assert cache.held == {"b": 2}
