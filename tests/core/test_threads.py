"""How far behind others threads of the background run, as the system tells it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

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
