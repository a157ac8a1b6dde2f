"""Folders that one test process fills and all of them read."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parallel import VARIABLE


def shared_folder(factory: pytest.TempPathFactory, name: str, fill: Callable[[Path], object]) -> Path:
    """The folder of this name, filled by the first process that asks; others wait for it, and only read.

    A folder that was not filled to the end is filled anew.
    """
    base = factory.getbasetemp()
    folder = (base.parent if VARIABLE in os.environ else base) / f"shared-{name}"
    filled = folder.with_suffix(".filled")
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not filled.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            fill(folder)
            filled.touch()
    return folder
