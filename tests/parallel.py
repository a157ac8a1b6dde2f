"""Runs tests in several processes that are forked once all tests are collected: imports and collection are paid once.

`pytest --processes 4`. A file runs in one process, because its tests share fixtures; files start by falling cost
(`tests/costs.json`). The first process reports all tests, so `-x`, `--durations` and `--junitxml` apply as ever.
On other systems than Linux, where libraries do not survive a fork, one process runs them all.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import deque
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import pytest
from _pytest.capture import FDCapture

from tests import costs, forks

VARIABLE = "PYTEST_XDIST_WORKER"  # contains a test process's name, where plugins look for it
# What most processes of a run of everything would import after they are forked, for seconds.
_PRELOADED, _MANY = ("torch._inductor.compile_fx", "torchmetrics"), 20
_ENDING_S = 30.0  # for a test that runs and its fixtures, once the run is stopped


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", type=int, default=0, metavar="N", help="run files of tests in N processes")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """On Linux replaces pytest's loop, if `--processes` is given. Errors of collection and debuggers are left to it."""
    option, processes = session.config.option, session.config.getoption("processes", 0)
    debugger = option.usepdb or option.trace
    if processes < 1 or sys.platform != "linux" or option.collectonly or debugger or session.testsfailed:
        return None
    loop = _Loop(session)
    try:
        loop.run(processes)
    finally:
        loop.stop()
    return True


@dataclass
class _Process:
    pid: int
    left: deque[int] = field(default_factory=deque)  # positions of tests it was given; the first one runs


class _Loop:
    """Hands files to processes that ask for one, and passes on their reports."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        self._config = session.config
        self._files = deque(costs.by_cost([item.nodeid for item in session.items]))
        self._processes: dict[Connection, _Process] = {}
        self._servers = forks.share()  # those that were not asked for yet
        self._started = 0

    def run(self, processes: int) -> None:
        if len(self._files) > _MANY * processes:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for module in _PRELOADED:
                    importlib.import_module(module)
            gc.freeze()
        if threads := _threads():
            raise pytest.UsageError(f"importing the tests has started threads, which a fork lacks: {threads}")
        for _ in range(min(processes, len(self._files))):
            self._start()
        while self._processes:
            for ready in wait([*self._processes, *self._servers]):
                if isinstance(ready, forks.Server):
                    self._servers.remove(ready)
                    ready.start()
                    continue
                assert isinstance(ready, Connection)
                self._receive(ready)
                if self._session.shouldfail:
                    raise self._session.Failed(self._session.shouldfail)
                if self._session.shouldstop:
                    raise self._session.Interrupted(self._session.shouldstop)

    def stop(self) -> None:
        """Processes that still run end after their test, as their connections are closed, or are killed."""
        for connection in self._processes:
            connection.close()
        deadline = time.monotonic() + _ENDING_S
        for process in self._processes.values():
            while os.waitpid(process.pid, os.WNOHANG) == (0, 0):
                if time.monotonic() > deadline:
                    os.kill(process.pid, signal.SIGKILL)
                time.sleep(0.02)
        forks.end()

    def _start(self) -> None:
        connection, its = Pipe()
        name = f"gw{self._started}"
        self._started += 1
        folder = self._config._tmp_path_factory.getbasetemp() / name  # type: ignore[attr-defined]
        sys.stdout.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads of libraries, which hold no lock here
            pid = os.fork()
        if pid == 0:
            try:
                for other in (connection, *self._processes):
                    other.close()
                forks.leave()
                _become(self._config, folder)
                _work(self._session, its)
            finally:
                os._exit(1)  # what pytest does at its end, and handlers of atexit, are the first process's
        its.close()
        self._processes[connection] = _Process(pid)

    def _receive(self, connection: Connection) -> None:
        process, hook = self._processes[connection], self._config.hook
        try:
            kind, content = connection.recv()
        except (EOFError, OSError):
            self._ended(connection)
            return
        match kind:
            case "next":
                file = self._files.popleft() if self._files else []
                process.left.extend(file)
                with contextlib.suppress(OSError):  # it has died, which is read next
                    connection.send(file)
            case "report":
                report = hook.pytest_report_from_serializable(config=self._config, data=content)
                hook.pytest_runtest_logreport(report=report)
            case "done":
                process.left.popleft()
            case "warning":
                hook.pytest_warning_recorded.call_historic(kwargs=content)

    def _ended(self, connection: Connection) -> None:
        """Tests that a process did not get to are run by another; the one in which it died has failed."""
        process = self._processes.pop(connection)
        connection.close()
        code = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
        if not process.left:
            if code:  # a fixture of the session has failed at its end, or it did not begin
                raise self._session.Interrupted(f"a process of tests ended with exit code {code}")
            return
        item = self._session.items[process.left.popleft()]
        text = f"the process of this test ended with exit code {code}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
        self._config.hook.pytest_runtest_logreport(report=report)
        if process.left:
            self._files.appendleft([*process.left])
        if self._files:
            self._start()


def _threads() -> list[str]:
    """Names of threads beside this one, those of libraries such as obstore's tokio too."""
    names = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
    tasks = Path("/proc/self/task")
    if not names and tasks.exists():
        for task in tasks.iterdir():
            with contextlib.suppress(OSError):  # it has ended
                if task.name != str(os.getpid()):
                    names.append((task / "comm").read_text().strip())
    return names


class _Reporter:
    """Sends what is reported in a test process."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config = config
        self._connection = connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", data))

    def pytest_runtest_logfinish(self) -> None:
        self._connection.send(("done", None))

    def pytest_warning_recorded(
        self,
        warning_message: warnings.WarningMessage,
        when: str,
        nodeid: str,
        location: tuple[str, int, str] | None,
    ) -> None:
        warning_message.source = None  # may be anything
        content = {"warning_message": warning_message, "when": when, "nodeid": nodeid, "location": location}
        self._connection.send(("warning", content))

    def receive_file(self) -> list[int]:
        self._connection.send(("next", None))
        file: list[int] = self._connection.recv()
        return file

    @property
    def closed(self) -> bool:
        """Whether the first process is gone, or wants no more reports: it sends nothing that is not asked for."""
        return self._connection.poll()


def _become(config: pytest.Config, folder: Path) -> None:
    """Give a fork what is not to be shared: a folder, what it captures, and a terminal that shows nothing."""
    os.environ[VARIABLE] = folder.name
    folder.mkdir(mode=0o700)
    config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]
    terminal: Any = config.pluginmanager.get_plugin("terminalreporter")
    terminal._tw._file = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    # Handlers of loggers hold the streams that were there when they were made, so those stay, over other files.
    capturing: Any = config.pluginmanager.get_plugin("capturemanager")
    for stream in (capturing._global_capturing.out, capturing._global_capturing.err):
        if isinstance(stream, FDCapture):
            with tempfile.TemporaryFile(buffering=0) as own:
                os.dup2(own.fileno(), stream.tmpfile.fileno(), inheritable=False)


def _work(session: pytest.Session, connection: Connection) -> NoReturn:
    """Run files until there is none left, tear all fixtures down, and exit."""
    reporter = _Reporter(session.config, connection)
    session.config.pluginmanager.register(reporter)
    try:
        try:
            file = reporter.receive_file()
            while file and not reporter.closed:
                item = session.items[file.pop(0)]
                # After a file only the session's fixtures stay. Which file comes next is not known yet: a process that
                # asked for it before its last test would keep it from others that have nothing to do.
                following = session.items[file[0]] if file else session
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                file = file or reporter.receive_file()
        finally:
            session._setupstate.teardown_exact(None)
    except (ConnectionError, EOFError, KeyboardInterrupt):
        os._exit(1)  # the first process has ended or is interrupted
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
        os._exit(1)
    os._exit(0)
