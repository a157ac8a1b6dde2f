"""Children: what they say is heard whole, what they leave behind goes, and they are not started again in a hurry."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from core.config import Settings, read
from deployment import children
from deployment.children import Backoff, ChildProcess, child_environment, reason
from tests.deployment.served import wait_until


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ChildProcess]]:
    started: list[ChildProcess] = []

    def begin(program: str, **options: object) -> ChildProcess:
        command = [sys.executable, "-u", "-c", program]
        child = ChildProcess("child", command, dict(os.environ), tmp_path / "logs" / "child.log", **options)  # type: ignore[arg-type]
        child.start()
        started.append(child)
        return child

    yield begin
    for child in started:
        child.kill()


def hear(child: ChildProcess) -> list[str]:
    lines: list[str] = []
    while child.code is None:
        lines += child.lines()
    return lines + child.lines()


def test_lines_are_heard_once_and_whole_and_the_last_without_its_end(start: Callable[..., ChildProcess]) -> None:
    child = start("import sys\nfor k in range(300): print('line', k, file=(sys.stdout, sys.stderr)[k % 2])\n"
                  "print('without end', end='')")  # fmt: skip
    assert hear(child) == [f"line {k}" for k in range(300)] + ["without end"]
    assert child.lines() == [] and child.code == 0


def test_what_an_earlier_life_said_is_not_heard_again(start: Callable[..., ChildProcess]) -> None:
    child = start(r"import os; os.write(1, b'\xff\n')")  # which is no text
    wait_until(lambda: child.code is not None, "its end")
    child.start()
    assert hear(child) == ["\ufffd"] and child.log.read_bytes() == b"\xff\n" * 2


def test_a_log_does_not_grow_for_ever_and_nothing_of_it_is_missed(
    start: Callable[..., ChildProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "_LOG_BYTES", 1000)
    child = start("import sys\nfor line in range(200):\n    print('x' * 20, line); sys.stdout.flush()\n"
                  "    import time; time.sleep(0.002)")  # fmt: skip
    heard = hear(child)
    assert heard[0].endswith(" 0") and heard[-1].endswith(" 199")
    assert child.log.stat().st_size < 3000


def test_it_has_a_session_of_its_own_is_nice_and_reads_nothing(start: Callable[..., ChildProcess]) -> None:
    child = start("import os, sys; print(os.getsid(0) == os.getpid(), os.nice(0), repr(sys.stdin.read()))", niceness=5)
    assert hear(child) == [f"True {min(os.nice(0) + 5, 19)} ''"]


def test_an_inherited_descriptor_keeps_its_number(start: Callable[..., ChildProcess]) -> None:
    read, write = os.pipe()
    try:
        child = start(f"import os; os.write({write}, b'here')", descriptors=(write,))
        wait_until(lambda: child.code is not None, "its end")
        assert child.code == 0
        assert os.read(read, 10) == b"here"
    finally:
        os.close(read)
        os.close(write)


def test_killing_it_ends_what_it_started(start: Callable[..., ChildProcess]) -> None:
    child = start("import subprocess, sys, time\n"
                  "print(subprocess.Popen(['sleep', '600']).pid, flush=True)\ntime.sleep(600)")  # fmt: skip
    said: list[str] = []
    wait_until(lambda: said.extend(child.lines()) or said, "a word")
    grandchild = psutil.Process(int(said[0]))
    child.kill()
    assert child.code == -9
    grandchild.wait(60)


def test_what_it_left_behind_goes_too(start: Callable[..., ChildProcess]) -> None:
    child = start("import subprocess; print(subprocess.Popen(['sleep', '600']).pid)")
    (said,) = hear(child)
    grandchild = psutil.Process(int(said))
    assert grandchild.is_running()
    child.kill()
    grandchild.wait(60)
    assert child.code == 0 and not grandchild.is_running()


TEXTS = (
    "/a b/=%ä", "127.0.0.1:1", "https://a.example", "a:0.5", "cpu", "5/minute", "redis://:secret@h:1/2", "auto", "0.5",
    "30%", "7", "tp2",
)  # fmt: skip
"""Each of a setting's text is a value of some settings."""


def another_value(name: str) -> Settings:
    """The settings with a value of this one that is not its default."""
    field = Settings.model_fields[name]
    kinds = get_args(field.annotation) or (field.annotation,)
    values: tuple[Any, ...] = TEXTS if str in kinds else (Path("/a b/c"),) if Path in kinds else kinds
    if bool in kinds:
        values = (not field.default,)
    elif isinstance(field.default, int | float):
        values = (field.default + 1, field.default / 2, field.default - 1)
    for value in values:
        with contextlib.suppress(ValidationError):
            settings = Settings(**{name: value})
            if getattr(settings, name) != field.default:
                return settings
    raise AssertionError(f"no value for {name} is known here")


@pytest.mark.parametrize("name", Settings.model_fields)
def test_a_child_has_each_setting_of_its_parent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the parent's own environment says of it, and of settings that have their defaults."""
    monkeypatch.setenv("DIPTYCH_STEPS", "7")
    monkeypatch.setenv("diptych_port", "9")
    monkeypatch.setenv(f"DIPTYCH_{name.upper()}", "not a value")
    settings = another_value(name)
    environment = child_environment(settings)
    assert "diptych_port" not in environment
    for known in [known for known in os.environ if known.upper().startswith("DIPTYCH_")]:
        monkeypatch.delenv(known)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert read() == settings


def test_one_that_never_started_can_be_ended(tmp_path: Path) -> None:
    child = ChildProcess("child", ["/bin/true"], {}, tmp_path / "log")
    child.terminate()
    child.kill()
    assert child.pid == 0 and child.code == 0


def test_a_log_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        ChildProcess("child", ["/bin/true"], {}, tmp_path / "file" / "log").start()


@given(st.lists(st.floats(0, 59.9), min_size=1, max_size=20))
def test_the_wait_doubles_up_to_half_a_minute(lives_s: list[float]) -> None:
    backoff, now = Backoff(started=0.0), 0.0
    for k, life_s in enumerate(lives_s):
        now += life_s
        delay_s = backoff.ended(now)
        assert delay_s == min(0.5 * 2**k, 30.0) and backoff.due == now + delay_s
        now += delay_s
        backoff.begun(now)
        assert backoff.due is None


def test_a_long_life_makes_up_for_earlier_ends() -> None:
    backoff = Backoff(started=0.0)
    assert [backoff.ended(1.0), backoff.ended(1.0)] == [0.5, 1.0]
    backoff.begun(100.0)
    assert backoff.ended(160.0) == 0.5


@pytest.mark.parametrize(
    ("code", "words"),
    [(1, "exit code 1"), (-9, "killed by SIGKILL"), (-99, "killed by signal 99")],
)
def test_exit_codes_in_words(code: int, words: str) -> None:
    assert reason(code) == words
