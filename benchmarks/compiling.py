"""Runs torch.compile ahead of a benchmark, in a process that can be killed: within a process it cannot be stopped.

The compiled code is in Inductor's cache on disk, where the benchmark's own process finds it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

LIMIT_S = 300.0
_START_S = 120.0  # for the process to import what the function needs
_END_S = 10.0  # for the process to end by itself, once it is done


class CompileError(RuntimeError):
    """The code did not compile, or not within the limit. The message says which."""


def ahead(function: Callable[..., None], *arguments: Any, limit_s: float = LIMIT_S) -> None:
    """Run `function(*arguments)` in a separate process; function and arguments are pickled.

    After `limit_s` seconds the process and its children are killed. Raises `CompileError`, also for what the
    function raises.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(theirs, function, arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(_START_S):
            raise CompileError(f"the compiling process did not start within {_START_S:g} s")
        ours.recv()  # imports are done
        if not ours.poll(limit_s):
            raise CompileError(f"torch.compile took more than {limit_s:g} s")
        if problem := ours.recv():
            raise CompileError(problem)
        process.join(_END_S)
    except EOFError:
        process.join(_END_S)
        raise CompileError(f"the compiling process ended (exit code {process.exitcode})") from None
    finally:
        with contextlib.suppress(ProcessLookupError):  # before it has begun it leads no group
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join()
        ours.close()


def _run(told: Connection, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.setsid()  # compilers that it starts are ended with it
    told.send("")
    try:
        function(*arguments)
    except Exception as error:
        told.send(str(error).strip() or type(error).__name__)
    else:
        told.send("")
