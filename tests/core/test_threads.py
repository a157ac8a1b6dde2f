"""Numbers of threads, as the libraries take them, and priorities of background threads, as the system tells them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.threads import GPU_THREADS, THREAD_LOST, compute_threads, cores

_LIMITED = """
import os, sys
from core.threads import LIMITED, limit_threads
limit_threads(os.environ, 1)
assert "torch" not in sys.modules
import torch
before = len(os.listdir("/proc/self/task"))
torch.randn(512, 512) @ torch.randn(512, 512)
started = len(os.listdir("/proc/self/task")) - before
print(torch.get_num_threads(), started, os.environ["OMP_WAIT_POLICY"], *sorted(LIMITED))
"""


@given(setting=st.integers(0, 1024), gpu=st.booleans())
def test_a_setting_is_obeyed_and_only_a_gpu_needs_few_threads(setting: int, gpu: bool) -> None:
    assert compute_threads(setting, gpu=gpu) == (setting or (GPU_THREADS if gpu else cores()))


def test_libraries_that_are_loaded_later_keep_to_the_limit() -> None:
    """A product starts no thread, so no team of OpenMP exists; what the user has set is kept."""
    environment = {name: value for name, value in os.environ.items() if "_NUM_THREADS" not in name}
    ran = subprocess.run(
        [sys.executable, "-c", _LIMITED], env=environment | {"OMP_WAIT_POLICY": "ACTIVE", "OPENBLAS_NUM_THREADS": "3"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    threads, tasks, policy, *limited = ran.stdout.split()
    assert (threads, tasks, policy) == ("1", "0", "ACTIVE")
    assert limited == ["MKL_NUM_THREADS", "OMP_NUM_THREADS", "RAYON_NUM_THREADS"]


_SHOWN = """
import os, threading
from core.threads import lower_priority
os.nice({nicer})
def show():
    lower_priority("a test", idle={idle})
    print(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
thread = threading.Thread(target=show)
thread.start()
thread.join()
print(os.getpriority(os.PRIO_PROCESS, 0))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere priorities are not per thread")
@pytest.mark.parametrize("nicer", [0, 5, 20])
@pytest.mark.parametrize("idle", [False, True])
def test_a_thread_in_the_background_is_far_behind_its_own_process(nicer: int, idle: bool) -> None:
    code = _SHOWN.format(nicer=nicer, idle=idle)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    thread, process = (int(line) for line in ran.stdout.splitlines())
    assert process == min(19, os.getpriority(os.PRIO_PROCESS, 0) + nicer)
    wanted = min(19, process + 14) if idle else 15
    assert thread == wanted or wanted < process  # nobody may raise a priority again


_LANE_LOST = """
import threading, time
from core.batching.runner import Lane
def wake():
    raise MemoryError
lane = Lane("image")
began = threading.Event()
lane.start(began.wait, lambda _: {}).notify(wake)
began.set()
lane.call(lambda: print("served"))
"""


def test_a_process_ends_with_a_thread_that_it_needs() -> None:
    """A lane that ended in silence would leave its requests running until the device counted as hung."""
    ended = subprocess.run([sys.executable, "-c", _LANE_LOST], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (THREAD_LOST, "")
    assert "the thread image has failed (MemoryError())" in ended.stderr


_NOT_STARTED = """
import _thread, time
from core.threads import end_without_memory
def begin():
    raise {error}
end_without_memory()
_thread.start_new_thread(begin, ())  # as threading does, whose own first lines are outside of all its handlers
time.sleep(1)
"""


@pytest.mark.parametrize(("error", "code"), [("MemoryError", THREAD_LOST), ("ValueError", 0)])
def test_a_thread_that_has_no_memory_to_start_ends_the_process(error: str, code: int) -> None:
    """Thread.start would wait for it for ever."""
    script = _NOT_STARTED.format(error=error)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ended.returncode == code
    assert ("memory has run out" if code else "ValueError") in ended.stderr
