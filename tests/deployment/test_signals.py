"""The wish to stop: which signals bring it, and which exit code it means."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from deployment import signals
from deployment.signals import StopSignals


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Puts everything back, whatever a test does to it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGHUP, 0)])
def test_each_of_them_asks(number: int, code: int) -> None:
    before = signal.getsignal(number)
    with StopSignals() as stop:
        assert not stop.asked
        os.kill(os.getpid(), number)
        assert stop.asked and stop.exit_code == code and stop.urged == 0
    assert signal.getsignal(number) == before


def test_one_that_arrives_twice_at_once_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    with StopSignals() as stop:
        for at, urged in ((100.0, 0), (100.2, 0), (100.6, 1), (100.8, 1), (102.0, 2)):
            now[0] = at
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.urged == urged
    assert stop.exit_code == 130


def test_the_first_one_decides_the_code() -> None:
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    assert stop.exit_code == 0


def test_ctrl_c_counts_where_it_was_ignored_and_a_lost_terminal_does_not() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.asked
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.asked


def test_signals_that_were_held_back_come_through() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    # To this very thread: any other one of the process, which does not hold it back, would end us all.
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    with StopSignals() as stop:
        assert stop.asked
