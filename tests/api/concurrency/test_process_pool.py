"""A pool of child processes: its limits on memory, CPU time and calls, and that its memory returns."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from api.concurrency import process_pool
from api.concurrency.process_pool import CallCrashed, CallFailed, CallRefused, CallTimeout, ProcessPool
from deployment import serve
from tests.api.world import eventually


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


@pytest.fixture
def pool() -> Iterator[Callable[..., ProcessPool]]:
    """Makes pools, which are closed in the end and leave no process."""
    before = children()
    with ExitStack() as stack:

        def make(module: str = "tests.api.concurrency.pooled", **more: Any) -> ProcessPool:
            given = {"memory_bytes": 2**31, "cpu_s": 30, "timeout_s": 120.0, **more}
            return stack.enter_context(closing(ProcessPool(module, **given)))

        yield make
    assert children() <= before


Make = Callable[..., ProcessPool]


def test_calls_are_answered_and_a_process_is_used_again_up_to_its_calls(pool: Make) -> None:
    processes = pool(calls=2)
    answers = [processes.call("echo", {"k": k}, [b"a", b"", b"bc" * 10**6]) for k in range(3)]
    assert [answer[0][0] for answer in answers] == [{"k": k} for k in range(3)]
    assert all(blobs == [b"bc" * 10**6, b"", b"a"] for _, blobs in answers)
    first, second, third = (answer[0][1] for answer in answers)
    assert first == second != third
    with pytest.raises(CallRefused, match="must be something else"):
        processes.call("refuse", None)


def test_limits_end_the_call_and_not_the_pool(pool: Make) -> None:
    processes = pool(cpu_s=1, memory_bytes=2**30)
    for function, said in (("allocate", "memory"), ("spin", "too long"), ("die", "cannot be decoded")):
        with pytest.raises(CallCrashed, match=said):
            processes.call(function, 2**31)
    assert processes.call("allocate", 2**20) == (2**20, [])


def test_a_call_without_an_answer_times_out(pool: Make) -> None:
    with pytest.raises(CallTimeout):
        pool(timeout_s=2.0).call("hang", None)


def test_idle_processes_end(pool: Make) -> None:
    processes = pool(idle_s=0.1)
    pid = processes.call("echo", None)[0][1]
    eventually(lambda: pid not in children())
    assert processes.call("echo", None)[0][1] != pid


def test_idle_processes_end_when_their_time_is_over_and_not_a_whole_period_later(pool: Make) -> None:
    processes = pool(idle_s=60.0)
    processes.call("echo", 1)
    (child,) = processes._idle
    assert processes._timer is not None
    processes._timer.cancel()
    child.idle_since -= 50.0  # the timer of an earlier process ends 10 s before this one's time is over
    processes._end_idle()
    assert processes._idle == [child] and processes._timer.interval <= 10.0


def test_children_run_below_the_api_and_the_workers(pool: Make) -> None:
    pid = pool().call("echo", 1)[0][1]
    assert psutil.Process(pid).nice() - os.nice(0) > serve.NICENESS


def test_a_process_that_others_killed_fails_no_call(pool: Make, tmp_path: Path) -> None:
    """While it is idle, and in a call, which is made again: once."""
    processes = pool()
    pid = processes.call("echo", None)[0][1]
    os.kill(pid, signal.SIGKILL)
    second = processes.call("echo", None)[0][1]
    assert second != pid
    assert processes.call("be_killed_once", str(tmp_path / "once"))[0] not in (pid, second)
    with pytest.raises(CallCrashed):
        processes.call("die", None)


def test_a_process_that_does_not_start_is_no_fault_of_the_input(pool: Make) -> None:
    with pytest.raises(CallFailed):
        pool("tests.api.concurrency.no_such_module").call("echo", None)


def test_a_time_limit_that_ends_with_the_call_leaves_no_killed_process(
    pool: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    class LateTimer(threading.Timer):
        """One that expires as it is cancelled."""

        def cancel(self) -> None:
            if self.function.__name__ == "expire":
                self.function()
            super().cancel()

    monkeypatch.setattr(process_pool.threading, "Timer", LateTimer)
    processes = pool()
    assert len({processes.call("echo", None)[0][1] for _ in range(2)}) == 1
