"""What was read of files stays within its budget, is found while another is read, and is read anew when it changed."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.extensions.sized_cache import SizedCache, stamp_of


def find(cache: SizedCache, key: int, size: int = 1, stamp: int = 0) -> tuple[int, int]:
    return cache.find(key, stamp, lambda: (key, stamp), lambda _: size)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1)), max_size=30), st.integers(0, 9))
def test_it_keeps_the_last_used_within_its_budget(asked: list[tuple[int, int]], capacity: int) -> None:
    cache, order = SizedCache(capacity), list[tuple[int, int]]()
    for key, stamp in asked:
        assert find(cache, key, 1 + key, stamp) == (key, stamp)
        order = [(k, s) for k, s in order if k != key] + [(key, stamp)] * (1 + key <= capacity)
        while sum(1 + k for k, _ in order) > capacity:
            order.pop(0)
        assert list(cache.held) == [k for k, _ in order]
        assert sum(cache.held.values()) <= capacity


def test_it_reads_once_and_what_failed_again() -> None:
    cache = SizedCache(9)
    with pytest.raises(ValueError, match="damaged"):
        cache.find(1, 0, lambda: int("damaged"), lambda _: 1)
    assert [find(cache, 1), find(cache, 1), find(cache, 1, stamp=2)] == [(1, 0), (1, 0), (1, 2)]
    assert cache.reads == 3


def test_a_stamp_changes_with_any_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one").write_text("1")
    (tmp_path / "b").write_text("2")
    seen = [stamp_of(tmp_path / "a", tmp_path / "b")]
    for path, text in ((tmp_path / "a" / "one", "11"), (tmp_path / "b", "22"), (tmp_path / "a" / "two", "3")):
        path.write_text(text)
        seen.append(stamp_of(tmp_path / "a", tmp_path / "b"))
    assert len({*seen}) == len(seen) and stamp_of(tmp_path / "b") == stamp_of(tmp_path / "b")


def test_what_is_kept_is_found_while_another_is_read() -> None:
    """By the thread that computes, among others: it never waits for a file that another request needs."""
    cache, begun, go_on, niceness = SizedCache(10), threading.Event(), threading.Event(), list[int]()

    def slowly() -> str:
        niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        begun.set()
        assert go_on.wait(60)
        return "slow"

    assert cache.find("kept", 1, lambda: "kept", len) == "kept"
    threads = [threading.Thread(target=cache.find, args=("slow", 1, slowly, len), daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert begun.wait(60)
    found: list[str] = []
    third = threading.Thread(target=lambda: found.append(cache.find("kept", 1, str, len)), daemon=True)
    third.start()
    third.join(60)
    assert found == ["kept"]
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert cache.find("slow", 1, str, len) == "slow" and cache.reads == 2
    assert niceness[0] > os.getpriority(os.PRIO_PROCESS, 0)
