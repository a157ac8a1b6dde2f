"""Provides the threads that encode the strips of image files."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache

from core.threads import cores

_MOST = 8


@cache
def pool() -> ThreadPoolExecutor:
    """Return the process's threads for strips."""
    return ThreadPoolExecutor(max(2, min(_MOST, cores())), "strips")
