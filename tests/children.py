"""The module search path of the processes that tests start: a checkout, without packages that only the tests need."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_LEAN = ROOT / "tests" / "lean"  # its sitecustomize.py hides them


def python_path(*folders: str | Path) -> str:
    """The value of PYTHONPATH with which a process imports from these folders, and as a user's would otherwise."""
    return os.pathsep.join(map(str, (_LEAN, *folders)))
