"""Threads in the background: at a low priority, and such as cannot be interrupted, for which an exit must not wait."""

from __future__ import annotations

import logging
import os
import threading

log = logging.getLogger(__name__)

_NICE = 15


def lower_priority(what: str) -> None:
    """Run the calling thread, and threads and processes that it starts, behind all others. `what` is for the log."""
    if hasattr(os, "setpriority") and hasattr(threading, "get_native_id"):
        try:  # on Linux priorities are per thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        except OSError as error:
            log.debug("%s at normal priority: %s", what, error)


class UninterruptibleThread(threading.Thread):
    """A thread that cannot be stopped. The interpreter would abort when exiting while it runs."""


def uninterruptible() -> bool:
    """Whether such a thread is running: then the process has to end by `os._exit`."""
    return any(isinstance(thread, UninterruptibleThread) for thread in threading.enumerate())
