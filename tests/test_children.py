"""What the tests start finds what a user's installation holds."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time

import pytest

from tests import children
from tests.children import ROOT, imports, in_fork, python_path

NAMES = ("diffusers", "peft", "scipy", "tests.children")
FOUND = f"import importlib.util as u; print(*(name for name in {NAMES} if u.find_spec(name)))"


def test_a_process_finds_neither_peft_nor_scipy_and_all_else() -> None:
    root = python_path(ROOT)
    for environment in (os.environ, os.environ | {"PYTHONPATH": root}):
        done = subprocess.run([sys.executable, "-c", FOUND], env=environment, capture_output=True, text=True)
        assert done.stdout.split() == ["diffusers", "tests.children"], done
    assert importlib.util.find_spec("scipy"), "the tests themselves compare with it"


def test_a_fork_tells_how_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    here: list[int] = []
    assert in_fork(lambda: here.append(1)) == 0 and not here
    assert in_fork(lambda: here[0]) == 1
    assert in_fork(lambda: os.kill(os.getpid(), signal.SIGKILL)) == -signal.SIGKILL
    monkeypatch.setattr(children, "_DEADLINE_S", 1)
    assert in_fork(lambda: time.sleep(60)) == -signal.SIGALRM


def test_what_a_module_of_ours_imports_is_found() -> None:
    """That it is loaded here says nothing."""
    assert imports("core.config", "pydantic_settings") and not imports("core.threads", "pydantic_settings")
    with pytest.raises(AssertionError, match=r"core\.gone cannot be imported"):
        imports("core.gone", "pydantic_settings")
