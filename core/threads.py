"""Threads in the background: at a low priority, and such as cannot be interrupted, for which an exit must not wait."""

from __future__ import annotations

import logging
import os
import threading

log = logging.getLogger(__name__)

_NICE = 15
_BEHIND = 14  # steps of niceness, a factor of 1.25 each, that leave a thread a twenty-fifth of a processor


def lower_priority(what: str, *, idle: bool = False) -> None:
    """Run the calling thread, and threads and processes that it starts, behind all others. `what` is for the log.

    `idle`: of a processor that the process's other threads keep busy, Linux gives it a twenty-fifth, unless these are
    nicer than 5.
    """
    if hasattr(os, "setpriority") and hasattr(threading, "get_native_id"):
        try:  # on Linux priorities are per thread
            nice = os.getpriority(os.PRIO_PROCESS, 0) + _BEHIND if idle else _NICE
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(nice, 19))
        except OSError as error:
            log.debug("%s at normal priority: %s", what, error)


class UninterruptibleThread(threading.Thread):
    """A thread that cannot be stopped. The interpreter would abort when exiting while it runs."""


def uninterruptible() -> bool:
    """Whether such a thread is running: then the process has to end by `os._exit`."""
    return any(isinstance(thread, UninterruptibleThread) for thread in threading.enumerate())
