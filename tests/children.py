"""Processes that tests start: their module search path, and forks, which import nothing anew.

The path is a checkout, without packages that only the tests need.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_DEADLINE_S = 300
_IMPORTED = 3
_LEAN = ROOT / "tests" / "lean"  # its sitecustomize.py hides them


def python_path(*folders: str | Path) -> str:
    """The value of PYTHONPATH with which a process imports from these folders, and as a user's would otherwise."""
    return os.pathsep.join(map(str, (_LEAN, *folders)))


def in_fork(run: Callable[[], object]) -> int:
    """Run in a fork of this process, for at most `_DEADLINE_S`.

    Returns its exit code: 0, 1 after an error, which it prints, or minus a signal.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads that the child lacks: none holds a lock
        child = os.fork()
    if child == 0:
        code = 1
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_DEADLINE_S)
        try:
            run()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)  # what pytest would do at the end is its parent's
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def imports(module: str, *packages: str) -> bool:
    """Whether importing this module of ours, in a fork that `forget`s, imports one of these packages."""

    def run() -> None:
        forget(*packages)
        importlib.import_module(module)
        if {*packages} & {*sys.modules}:
            os._exit(_IMPORTED)

    code = in_fork(run)
    assert code in (0, _IMPORTED), f"{module} cannot be imported anew"
    return code == _IMPORTED


def forget(*packages: str) -> None:
    """In a fork: unload all our modules, whatever their names, and these packages, to import them anew.

    What else is loaded costs nothing, and what it would import is not seen.
    """
    ours = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    elsewhere = (f"{ROOT}/tests/", f"{ROOT}/.")
    for name, module in [*sys.modules.items()]:
        path = getattr(module, "__file__", None) or ""
        file_is_ours = path.startswith(f"{ROOT}/") and not path.startswith(elsewhere)  # as ComfyUI names the nodes
        if file_is_ours or name.partition(".")[0] in ours | {*packages}:
            del sys.modules[name]
