"""Tracks threads that cannot be interrupted, such as a compiler's: an exiting process must not wait for them."""

from __future__ import annotations

import threading


class UninterruptibleThread(threading.Thread):
    """A thread that cannot be stopped. The interpreter would abort when exiting while it runs."""


def uninterruptible() -> bool:
    """Whether such a thread is running: then the process has to end by `os._exit`."""
    return any(isinstance(thread, UninterruptibleThread) for thread in threading.enumerate())
