"""Makes the system refuse what it refuses when memory is short, for this process and for a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_STACK_BYTES = 2**47  # all that a process can address


@contextmanager
def no_threads() -> Iterator[None]:
    """No thread can be started: there is no memory for its stack."""
    before = threading.stack_size(_STACK_BYTES)
    try:
        yield
    finally:
        threading.stack_size(before)
