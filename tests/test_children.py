"""What the tests start finds what a user's installation holds."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

from tests.children import ROOT, python_path

NAMES = ("diffusers", "peft", "scipy", "tests.children")
FOUND = f"import importlib.util as u; print(*(name for name in {NAMES} if u.find_spec(name)))"


def test_a_process_finds_neither_peft_nor_scipy_and_all_else() -> None:
    root = python_path(ROOT)
    for environment in (os.environ, os.environ | {"PYTHONPATH": root}):
        done = subprocess.run([sys.executable, "-c", FOUND], env=environment, capture_output=True, text=True)
        assert done.stdout.split() == ["diffusers", "tests.children"], done
    assert importlib.util.find_spec("scipy"), "the tests themselves compare with it"
