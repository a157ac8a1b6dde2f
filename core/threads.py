"""Numbers of threads that compute, threads of low priority, vital ones, and the end of a process that has threads."""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import signal
import sys
import threading
from collections.abc import MutableMapping
from typing import NoReturn

log = logging.getLogger(__name__)

THREAD_LOST = 72  # exit code
GPU_THREADS = 2  # of a worker on a GPU: its CPU work is small, and more threads spin for most of their time
_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")  # last: tokenizers
LIMITED: set[str] = set()  # variables that this process has limited itself by
_NICE = 15
_EXIT_HANDLERS_S = 5.0
_BEHIND = 14  # steps of niceness, a factor of 1.25 each, that leave a thread a twenty-fifth of a processor


def cores() -> int:
    """Number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compute_threads(setting: int, *, gpu: bool) -> int:
    """CPU threads of one worker: the setting, or where it is 0 `GPU_THREADS` on a GPU and one per core elsewhere."""
    return setting or (GPU_THREADS if gpu else cores())


def limit_threads(environment: MutableMapping[str, str], threads: int) -> None:
    """Limit the threads of OpenMP, BLAS and tokenizers, and make OpenMP's waiting threads sleep instead of spin.

    The libraries read these variables when they are loaded: call it before torch is imported. Variables that the user
    has set are kept.
    """
    for name in _COUNTS:
        if name not in environment:
            environment[name] = str(threads)
            LIMITED.add(name)
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def stay_on(near: set[int]) -> None:
    """Keep this process on those of its processors that are among these, if there are any."""
    if hasattr(os, "sched_setaffinity") and (own := near & os.sched_getaffinity(0)):
        os.sched_setaffinity(0, own)


def lower_priority(name: str, *, nicer: int = _NICE, idle: bool = False) -> None:
    """Run the calling thread, and threads and processes that it starts, behind all others, `nicer` than the process's
    usual priority of 0. `name` is for the log.

    `idle`: of a processor that the process's other threads keep busy, Linux gives it a twenty-fifth, unless these are
    nicer than 5.
    """
    if hasattr(os, "setpriority") and hasattr(threading, "get_native_id"):
        try:  # on Linux priorities are per thread
            own = os.getpriority(os.PRIO_PROCESS, 0)
            nice = own + _BEHIND if idle else max(own, nicer)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(nice, 19))
        except OSError as error:
            log.debug("%s at normal priority: %s", name, error)


def started(thread: threading.Thread) -> bool:
    """Start a thread for work that can wait. False: the system starts none now, mostly for want of memory."""
    try:
        thread.start()
    except RuntimeError as error:
        log.warning("%s waits: %s", thread.name, error)
        return False
    return True


def end_process(code: int, reason: str, *values: object) -> NoReturn:
    """Log the reason and exit at once, without running any more code, even if memory is too short for that."""
    try:
        log.critical(reason, *values)
        logging.shutdown()
    finally:
        os._exit(code)


class VitalThread(threading.Thread):
    """A thread that its process cannot do without: if it ends by an exception, the process ends too.

    Supervisors start the process again, and leases bring its jobs to others; without the thread it would wait for ever.
    """

    def run(self) -> None:
        try:
            super().run()
        except BaseException as error:  # MemoryError too
            end_process(THREAD_LOST, "exiting: the thread %s has failed (%r)", self.name, error)


def end_without_memory() -> None:
    """End this process from now on over a MemoryError that no code can handle, such as that of a starting thread.

    What starts that thread would wait for it for ever.
    """

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if issubclass(unraisable.exc_type, MemoryError):
            end_process(THREAD_LOST, "exiting: memory has run out")
        sys.__unraisablehook__(unraisable)

    sys.unraisablehook = hook


def exit_process(code: int) -> NoReturn:
    """End the process: kill its descendants, run what is registered for the exit, and exit without finalization.

    A finalizing interpreter unwinds each daemon thread that asks for its lock. In a thread that computes in C++, such
    as one that loads a model, the C++ runtime then aborts the process. So the interpreter is never finalized.
    """
    with contextlib.suppress(Exception):  # nothing keeps the process from exiting
        _kill_descendants()
    # It removes temporary folders and writes logs. A thread may hold a lock that it needs, for as long as it computes.
    handlers = threading.Thread(target=atexit._run_exitfuncs, name="exit", daemon=True)
    with contextlib.suppress(RuntimeError):  # no thread can be started, for want of memory
        handlers.start()
        handlers.join(_EXIT_HANDLERS_S)
    if threading.current_thread() is threading.main_thread():  # a reader that does not read may block what follows
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            if stream is sys.stdout and error.errno != errno.EPIPE:  # its reader has not gone: what was said is lost
                code = code or 1
                with contextlib.suppress(OSError):
                    os.write(2, f"the output cannot be written: {error.strerror}\n".encode())
        except (ValueError, AttributeError, RuntimeError):  # closed, none, or interrupted in a write
            pass
    os._exit(code)


def _kill_descendants() -> None:
    if hasattr(os, "waitid"):  # not on macOS before Python 3.13
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return  # no children; psutil takes longer to import than many a command runs
    import psutil

    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()
