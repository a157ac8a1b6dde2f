"""A forked process is as one that was started: its environment, descriptors, session, signals and exit code."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.forks import Forker, Server

TELL = (
    "import os, sys, threading, json\n"
    "print(json.__name__, __name__, sys.argv[1:], os.environ, os.getsid(0) == os.getpid(), file=sys.stderr)\n"
    "threading.Thread(target=lambda: print('a thread is waited for')).start()\n"
    "os.write(int(sys.argv[1]), b'here')\n"
    "sys.exit(int(sys.argv[2]))"
)


def test_it_has_what_it_is_given_and_nothing_else() -> None:
    forker = Forker("json")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        fd = str(theirs.fileno())
        fork = forker.start(
            ("-c", TELL, fd, "7"), env={"A": "b"}, pass_fds=[theirs.fileno()], start_new_session=True
        )  # fmt: skip
        assert ours.recv(9) == b"here"
        assert fork.wait(60) == fork.poll() == fork.returncode == 7
        assert fork.stderr is not None
        with fork.stderr as told:
            assert told.read() == (
                f"json __main__ ['{fd}', '7'] environ({{'A': 'b'}}) True\na thread is waited for\n"
            )  # fmt: skip
        left = forker.start(("-c", "raise ValueError('x')"), env={})
        assert left.wait(60) == 1
        assert left.stderr is not None
        with left.stderr as told:
            assert told.read().endswith("ValueError: x\n")
    forker.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_it_is_ended_by_signals(number: int) -> None:
    forker = Forker()
    log = os.open(os.devnull, os.O_WRONLY)
    fork = forker.start(("-c", "import signal; signal.pause()"), env={}, stderr=log)
    os.close(log)
    with pytest.raises(subprocess.TimeoutExpired):
        fork.wait(0.2)
    assert fork.poll() is None and os.getsid(fork.pid) != fork.pid
    fork.send_signal(number)
    assert fork.wait(60) == -number
    forker.close()


def started(server: Server) -> int:
    """The exit code of a process that is forked from it."""
    forker = Forker(address=server.address)
    with Path(os.devnull).open("wb") as null:
        server.start()
        try:
            return forker.start(("-c", "raise SystemExit(3)"), env={}, stderr=null.fileno()).wait(60)
        finally:
            forker.close()
            server.close()


def test_one_that_cannot_import_is_not_waited_for() -> None:
    with pytest.raises(AssertionError, match="the process that forks has ended"):
        started(Server("no_such_module"))


def test_a_process_that_dies_before_its_answer_takes_no_other_with_it() -> None:
    server = Server()
    request = {"argv": ["-c", ""], "env": {}, "pass_fds": [], "session": False, "niceness": 0}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as gone, Path(os.devnull).open("wb") as null:
        gone.connect(server.address)
        socket.send_fds(gone, [json.dumps(request).encode()], [null.fileno()] * 2)
    assert started(server) == 3
