"""Threads that cannot be interrupted, such as a compiler's: a process that ends must not wait for them."""

from __future__ import annotations

import threading


class UninterruptibleThread(threading.Thread):
    """A thread whose work goes on whatever asks it to stop. An interpreter that ends around it aborts."""


def uninterruptible() -> bool:
    """Whether such a thread runs now: then the process has to end by `os._exit`."""
    return any(isinstance(thread, UninterruptibleThread) for thread in threading.enumerate())
