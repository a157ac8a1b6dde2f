"""Tests that are run by several forked processes: each runs once, is reported as by one process, and leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.children import ROOT

HEAD = "import os, pathlib, signal, time, pytest\nhere = pathlib.Path(__file__).parent\n"
LOG = HEAD + (
    "def log(*words):\n"
    "    with (here / 'log').open('a') as file: print(*words, file=file)\n"
    "@pytest.fixture(scope='session')\n"
    "def service():\n"
    "    log('up', os.getpid())\n"
    "    yield\n"
    "    log('down', os.getpid())\n"
)


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-p", "tests.parallel", "-p", "no:cacheprovider", *options]


def environment(**variables: str) -> dict[str, str]:
    """Without the plugins that take seconds to import, and what pytest has set for this test."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return inherited | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | variables


def run(folder: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*options), cwd=folder, env=environment(**variables), capture_output=True, text=True, timeout=120
    )


def log(folder: Path) -> list[list[str]]:
    return [line.split() for line in (folder / "log").read_text().splitlines()]


def test_files_run_whole_in_forks_of_one_collection_and_are_reported_as_by_one_process(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(LOG + "log('collected', os.getpid())\n")
    body = HEAD + (
        "from conftest import log\n"
        "log('imported', os.getpid())\n"
        "@pytest.mark.parametrize('k', range(3))\n"
        "def test_each(k, service, tmp_path_factory):\n"
        "    log('ran', os.getpid(), pathlib.Path(__file__).stem, k, tmp_path_factory.getbasetemp())\n"
        "    until = time.monotonic() + 60\n"
        "    while (here / 'log').read_text().count('up') < 2: assert time.monotonic() < until\n"
    )
    for name in "abc":
        (tmp_path / f"test_{name}.py").write_text(body)
    (tmp_path / "test_outcomes.py").write_text(
        HEAD + "import logging, sys, warnings\n"
        "logging.getLogger('early').addHandler(logging.StreamHandler())\n"
        "def test_logs(capfd):\n    logging.getLogger('early').warning('what it logged')\n"
        "    assert 'Traceback' not in capfd.readouterr().err\n"
        "def test_fails():\n    logging.getLogger('early').warning('what it logged')\n"
        "    print('what it printed')\n    assert here == 5\n"
        "def test_skips(): pytest.skip('no reason')\n"
        "@pytest.mark.xfail\ndef test_is_expected(): assert False\n"
        "def test_warns(): warnings.warn('look out')\n"
        "@pytest.fixture\ndef fails_late():\n    yield\n    raise KeyError('late')\n"
        "def test_teardown(fails_late): pass\n"
    )
    done = run(tmp_path, "--processes", "2", "-rs", "--junitxml", "report.xml", ".")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 12 passed, 1 skipped, 1 xfailed, 1 warning, 1 error" in done.stdout
    for text in (
        "what it printed",
        "what it logged",
        "assert PosixPath(",
        "no reason",
        "UserWarning: look out",
        "KeyError: 'late'",
    ):
        assert text in done.stdout
    assert 'errors="1" failures="1" skipped="2"' in (tmp_path / "report.xml").read_text()
    lines = log(tmp_path)
    (collector,) = {pid for kind, pid, *_ in lines if kind in ("collected", "imported")}
    ran = [words for kind, *words in lines if kind == "ran"]
    assert sorted((file, k) for _, file, k, _ in ran) == [(f"test_{name}", str(k)) for name in "abc" for k in range(3)]
    pids = {pid for pid, *_ in ran}
    assert len(pids) == 2 and collector not in pids
    assert len({(pid, base) for pid, _, _, base in ran}) == 2, "each has a folder for all that it runs"
    assert len({(pid, file) for pid, file, *_ in ran}) == 3, "no file is shared"
    for kind in ("up", "down"):
        assert sorted(pid for one, pid, *_ in lines if one == kind) == sorted(pids), "what a session has, each process"


def test_a_process_that_dies_fails_its_test_and_the_rest_of_its_files_is_run(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(
        HEAD + "def test_1(): pass\ndef test_2(): os.kill(os.getpid(), signal.SIGKILL)\ndef test_3(): pass\n"
    )
    (tmp_path / "test_b.py").write_text("def test_4(): pass\n")
    done = run(tmp_path, "--processes", "1", "-v", ".")
    assert done.returncode == 1
    assert "1 failed, 3 passed" in done.stdout and "the process of this test ended with exit code -9" in done.stdout
    assert "FAILED test_a.py::test_2" in done.stdout


def test_an_interrupt_tears_down_what_was_set_up(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(LOG)
    for name in "ab":
        (tmp_path / f"test_{name}.py").write_text("import time\ndef test_waits(service): time.sleep(300)\n")
    words = command("--processes", "2", ".")
    with subprocess.Popen(
        words, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, start_new_session=True
    ) as own:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and (not (tmp_path / "log").exists() or len(log(tmp_path)) < 2):
            time.sleep(0.05)
        os.killpg(own.pid, signal.SIGINT)  # as a terminal does
        text, _ = own.communicate(timeout=60)
    assert own.returncode == pytest.ExitCode.INTERRUPTED, text
    pids = {kind: sorted(pid for one, pid in log(tmp_path) if one == kind) for kind in ("up", "down")}
    assert len(pids["up"]) == 2 and pids["up"] == pids["down"]
    assert not any(Path("/proc", pid).exists() for pid in pids["up"])


def test_threads_that_a_fork_would_lack_are_named(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, name='lost', daemon=True).start()\n"
        "def test_a(): pass\n"
    )
    done = run(tmp_path, "--processes", "2", ".")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "has started threads, which a fork lacks: ['lost']" in done.stderr
