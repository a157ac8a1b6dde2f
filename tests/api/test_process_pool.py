"""A pool of child processes: its limits on memory, CPU time and calls, and that its memory returns."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from api import process_pool
from api.process_pool import CallCrashed, CallFailed, CallRefused, CallTimeout, ProcessPool
from tests.api.world import eventually

MODULE = "tests.api.pooled"


def pool(**more: Any) -> ProcessPool:
    given: dict[str, Any] = {"memory_bytes": 2**31, "cpu_s": 30, "timeout_s": 120.0, **more}
    return ProcessPool(MODULE, **given)


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def test_calls_are_answered_and_a_process_is_used_again_up_to_its_calls() -> None:
    processes, before = pool(calls=2), children()
    try:
        answers = [processes.call("echo", {"k": k}, [b"a", b"", b"bc" * 10**6]) for k in range(3)]
        assert [answer[0][0] for answer in answers] == [{"k": k} for k in range(3)]
        assert all(blobs == [b"bc" * 10**6, b"", b"a"] for _, blobs in answers)
        first, second, third = (answer[0][1] for answer in answers)
        assert first == second != third
        with pytest.raises(CallRefused, match="must be something else"):
            processes.call("refuse", None)
    finally:
        processes.close()
    assert children() <= before


def test_limits_end_the_call_and_not_the_pool() -> None:
    processes, before = pool(cpu_s=1, memory_bytes=2**30), children()
    try:
        with pytest.raises(CallCrashed, match="memory"):
            processes.call("allocate", 2**31)
        with pytest.raises(CallCrashed, match="too long"):
            processes.call("spin", None)
        with pytest.raises(CallCrashed, match="cannot be decoded"):
            processes.call("die", None)
        assert processes.call("allocate", 2**20) == (2**20, [])
    finally:
        processes.close()
    assert children() <= before


def test_a_call_without_an_answer_times_out() -> None:
    processes, before = pool(timeout_s=2.0), children()
    with pytest.raises(CallTimeout):
        processes.call("hang", None)
    processes.close()
    assert children() <= before


def test_idle_processes_end() -> None:
    processes, before = pool(idle_s=0.1), children()
    pid = processes.call("echo", None)[0][1]
    assert pid not in before
    eventually(lambda: pid not in children())
    assert processes.call("echo", None)[0][1] != pid
    processes.close()


def test_idle_processes_end_when_their_time_is_over_and_not_a_whole_period_later() -> None:
    processes = pool(idle_s=60.0)
    processes.call("echo", 1)
    (child,) = processes._idle
    assert processes._timer is not None
    processes._timer.cancel()
    child.idle_since -= 50.0  # the timer of an earlier process ends 10 s before this one's time is over
    processes._end_idle()
    assert processes._idle == [child] and processes._timer.interval <= 10.0
    processes.close()


def test_children_run_below_the_api_and_the_workers() -> None:
    from deployment import serve

    processes = pool()
    pid = processes.call("echo", 1)[0][1]
    assert psutil.Process(pid).nice() - os.nice(0) > serve.NICENESS
    processes.close()


def test_a_process_that_others_killed_fails_no_call(tmp_path: Path) -> None:
    """While it is idle, and in a call, which is made again: once."""
    processes, before = pool(), children()
    try:
        pid = processes.call("echo", None)[0][1]
        os.kill(pid, signal.SIGKILL)
        second = processes.call("echo", None)[0][1]
        assert second != pid
        assert processes.call("be_killed_once", str(tmp_path / "once"))[0] not in (pid, second)
        with pytest.raises(CallCrashed):
            processes.call("die", None)
    finally:
        processes.close()
    assert children() <= before


def test_a_process_that_does_not_start_is_no_fault_of_the_input() -> None:
    processes = ProcessPool("tests.api.no_such_module", memory_bytes=2**31, cpu_s=30, timeout_s=120.0)
    with pytest.raises(CallFailed):
        processes.call("echo", None)
    processes.close()


def test_a_time_limit_that_ends_with_the_call_leaves_no_killed_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class LateTimer(threading.Timer):
        """One that expires as it is cancelled."""

        def cancel(self) -> None:
            if self.function.__name__ == "expire":
                self.function()
            super().cancel()

    monkeypatch.setattr(process_pool.threading, "Timer", LateTimer)
    processes = pool()
    assert len({processes.call("echo", None)[0][1] for _ in range(2)}) == 1
    processes.close()
