"""Provides the threads that encode the strips of image files, and counts the files."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache

from core.threads import cores

_MOST = 8
_LOCK = threading.Lock()
_files = 0  # that are being encoded


@cache
def pool() -> ThreadPoolExecutor:
    """Return the process's threads for strips."""
    return ThreadPoolExecutor(max(2, min(_MOST, cores())), "strips")


@contextmanager
def encoding() -> Iterator[bool]:
    """Context: a large file is encoded. Yields whether no other was, when it began."""
    global _files
    with _LOCK:
        _files += 1
        alone = _files == 1
    try:
        yield alone
    finally:
        with _LOCK:
            _files -= 1
