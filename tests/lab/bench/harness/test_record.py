"""One benchmark at a time: the second waits, says so, and goes on when the first has ended."""

import threading
from pathlib import Path

import pytest
from filelock import FileLock

from lab.bench.harness import record
from tests.workers.crew import eventually


def test_a_second_benchmark_waits_for_the_first_and_says_so(lock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entered = threading.Event()

    def second() -> None:
        with record.alone():
            entered.set()

    said = []
    with FileLock(lock):
        waiting = threading.Thread(target=second)
        waiting.start()
        eventually(lambda: said.append(capsys.readouterr().err) or "waiting for it" in "".join(said), "the notice")
        assert not entered.is_set()
    waiting.join(60)
    assert entered.is_set()


def test_a_first_benchmark_says_nothing_and_unlocks_even_when_it_fails(
    lock: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ZeroDivisionError), record.alone():
        raise ZeroDivisionError
    with FileLock(lock, timeout=0):
        pass
    assert capsys.readouterr().err == ""
