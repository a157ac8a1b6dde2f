"""Tests the judge: it finds errors in histories and images, and accepts correct ones."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from typing import Any

import psutil
import pytest
from PIL import Image

from tests.faults.parts import ROOT, wait_for
from tests.faults.rounds import KEPT, history, whole
from tests.faults.stack import Entry


def told(*events: str | tuple[str, dict[str, Any]]) -> list[Entry]:
    pairs = [event if isinstance(event, tuple) else (event, {}) for event in events]
    return [Entry(float(at), type, data) for at, (type, data) in enumerate(pairs)]


def running(attempt: int) -> tuple[str, dict[str, Any]]:
    return "running", {"attempt": attempt}


def progress(steps: int) -> tuple[str, dict[str, Any]]:
    return "progress", {"steps_done": steps}


@pytest.mark.parametrize(
    "stream",
    [
        told("queued", running(1), progress(1), progress(1), progress(2), "succeeded"),
        told("queued", running(1), progress(5), "queued", running(2), progress(1), "failed"),
        told("queued", "cancelled"),
        told(*(progress(step) for step in range(KEPT)), "succeeded"),  # of which the beginning was dropped
    ],
)
def test_a_history_that_is_well(stream: list[Entry]) -> None:
    assert list(history(stream)) == []


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        (told(), "begin with queued"),
        (told(running(1), "succeeded"), "begin with queued"),
        (told("queued", running(1), progress(1)), "never ended"),
        (told("queued", running(1), "succeeded", "succeeded"), "more than once"),
        (told("queued", running(1), "succeeded", progress(1)), "after its end"),
        (told("queued", running(1), "queued", running(1), "succeeded"), "attempts"),
        (told("queued", running(2), "queued", running(1), "succeeded"), "attempts"),
        (told("queued", progress(1), running(1), "succeeded"), "did not run it"),
        (told("queued", running(1), "queued", running(2), progress(10), progress(1), "failed"), "did not run"),
    ],
)
def test_a_history_that_is_wrong(stream: list[Entry], words: str) -> None:
    assert any(words in problem for problem in history(stream))


def test_a_picture_is_whole_or_not() -> None:
    stream = io.BytesIO()
    Image.new("RGB", (32, 32), "red").save(stream, format="PNG")
    data = stream.getvalue()
    assert whole(data)
    assert not any(whole(part) for part in (b"", data[:-1], data[: len(data) // 2], data[:40] + b"\0" + data[41:]))


def test_nothing_is_left_behind_when_the_tests_themselves_are_killed() -> None:
    code = (
        "import subprocess, sys, time\n"
        "from tests.faults.guard import Guard\n"
        "guard = Guard()\n"
        "part = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "guard.watch(part.pid)\n"
        "print(part.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
        os.kill(parent.pid, signal.SIGKILL)
    wait_for("what was guarded is gone", lambda: not psutil.pid_exists(pid), 30)
