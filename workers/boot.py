"""Runs the worker process: loads in order, handles signals, and ends the process even if a part hangs."""

from __future__ import annotations

import gc
import logging
import queue
import signal
import sys
import threading
import time
import warnings
from typing import Any

from celery.apps.worker import Worker as CeleryWorker
from celery.platforms import SecurityWarning
from celery.worker import state

from core import traces
from core.config import Settings
from core.threads import VitalThread, end_without_memory, exit_process
from workers.app import Build, create
from workers.thread_pool import ThreadPool
from workers.worker import Worker

log = logging.getLogger(__name__)

_SWITCH_S = 0.0005  # the longest that a computing thread delays the engine; Python's default: 0.005
_GRACE_S = 10.0  # after the time to drain; then the process exits even if a thread hangs
_PATIENCE_S = 3.0  # for the threads of stopped jobs to hand them back


def run(settings: Settings, build: Build | None = None) -> int:
    """Run until SIGTERM or SIGINT; returns the exit code.

    `build` builds the engine and its job handlers, by default from the settings. Raises what `build` raises
    (`ModelError`), and `SettingsError`. After a stop this exits the process instead of returning: its threads compute.
    """
    _speak_plainly()
    end_without_memory()
    sys.setswitchinterval(_SWITCH_S)
    worker = create(settings, build).Worker()
    worker.start()
    return int(worker.exitcode or 0)


class WorkerProgram(CeleryWorker):  # type: ignore[misc]
    """Celery's worker program with our `Worker`, which is loaded before Celery connects and drained before it ends."""

    def setup_instance(self, **options: Any) -> None:
        worker: Worker = self.app.worker
        self._ending = GracefulShutdown(worker)
        self._ending.install()
        worker.open()
        # Imports create millions of long-lived objects; scanning them for garbage takes a tenth of the start-up time.
        gc.disable()
        try:
            worker.equip(self.app.build(self.app.settings, worker.say))
        except BaseException:
            worker.deregister()
            raise
        finally:
            gc.freeze()
            gc.set_threshold(700, 10, 10)  # Python's own; the command starts with a higher one (`cli.entry`)
            gc.enable()
        self.pool_cls = ThreadPool
        self.concurrency = 2 * sum(worker.prefetch.limits.values())  # jobs in flight, and others being stored
        # Nothing consumes worker events, and each worker would leave its binding in Redis for ever.
        options |= dict.fromkeys(("without_gossip", "without_mingle", "without_heartbeat"), True)
        super().setup_instance(**options)

    def start(self) -> None:
        super().start()
        self._ending.finish()

    def stop(self, in_sighandler: bool = False, exitcode: int | None = None) -> None:
        self._ending.ask(exitcode or 0)  # Celery may end by itself: jobs in flight are drained then too
        super().stop(in_sighandler, exitcode)

    def on_consumer_ready(self, consumer: Any) -> None:
        super().on_consumer_ready(consumer)
        self.app.worker.ready()

    # Replaces what Celery's program does to the terminal, log and signals of its process.

    def setup_logging(self, colorize: bool | None = None) -> bool:
        return True

    def emit_banner(self) -> None:
        pass

    def install_platform_tweaks(self, worker: Any) -> None:
        pass

    def set_process_status(self, info: str) -> None:
        pass


class GracefulShutdown:
    """A thread that waits for a signal, and then ends the process within a time limit.

    At the first signal no new job starts, running ones get `drain_s`, and waiting ones are handed back. A second signal
    hands everything back now.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._drain_s = worker.settings.drain_s
        self._asked: queue.SimpleQueue[None] = queue.SimpleQueue()  # safe to put into from a signal handler
        self._code = 0
        self._begun = threading.Event()
        self._threads = [
            VitalThread(target=self._run, name="ending", daemon=True),
            VitalThread(target=self._watch, name="watchdog", daemon=True),
        ]

    def install(self) -> None:
        """Install the signal handlers, and start all threads that the end needs. Main thread only."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: self.ask(130 if number == signal.SIGINT else 0))
        for thread in self._threads:
            thread.start()

    def ask(self, code: int = 0) -> None:
        """Request the end, as a signal does. The process exits with the highest code given."""
        self._code = max(self._code, code)
        self._asked.put(None)

    def finish(self) -> None:
        """Close everything after Celery has ended, and exit the process."""
        self._worker.close()
        traces.end()
        exit_process(self._code)

    def _run(self) -> None:
        self._asked.get()
        self._begun.set()
        try:
            self._drain()
        except Exception:
            log.exception("the worker could not be drained")
        state.should_stop = 0
        self._worker.prefetch.wake()

    def _watch(self) -> None:
        self._begun.wait()
        time.sleep(min(self._drain_s + _GRACE_S, threading.TIMEOUT_MAX))
        exit_process(self._code)

    def _drain(self) -> None:
        worker = self._worker
        if worker.tasks is None:  # still loading: no job is in flight
            worker.deregister()
            exit_process(self._code)
        log.info("stopping: no new jobs; running jobs have %g s to finish", self._drain_s)
        worker.drain()
        until = time.monotonic() + self._drain_s
        while not worker.idle(0.1) and time.monotonic() < until and self._asked.empty():
            pass
        if worker.idle(0):
            return
        worker.tasks.stop()
        if not worker.idle(_PATIENCE_S):  # an iteration that hangs, or a Redis that does not reply
            worker.tasks.hand_back_all()
            worker.deregister()
            exit_process(self._code)


def _speak_plainly() -> None:
    """Configure logging: our own messages about Redis outages replace those of Celery and kombu."""
    logging.basicConfig(format="%(levelname)s %(message)s")
    inside = __name__.removesuffix("workers.boot")  # empty in a source checkout
    for name in ("workers", "core", "pipeline"):
        logging.getLogger(f"{inside}{name}").setLevel(min(logging.INFO, logging.getLogger().level))
    for name in ("celery", "kombu", "core.jobs.reaper"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore", SecurityWarning)  # about root in containers: only JSON is deserialized
    for handler in logging.getLogger().handlers:
        handler.addFilter(_without_traceback)


def _without_traceback(record: logging.LogRecord) -> bool:
    if record.name.startswith(("celery", "kombu")):
        record.exc_info = record.exc_text = None
    return True
