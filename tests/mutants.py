"""Runs mutation tests: `python -m tests.mutants core/jobs/keyring.py`.

Each mutant is a copy of the tree; the tests that guard the changed file run in a process forked from one that has
already imported torch and other heavy packages. Each surviving mutant is either a missing test or listed in
docs/internals/testing.md with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.mutations import Mutant, lua_mutants, mutants

ROOT = Path(__file__).resolve().parents[1]

# What guards a room, the quickest first: a mutant is dead at the first test that fails.
ROOMS: dict[str, tuple[str, ...]] = {
    "api/access.py": ("tests/api/test_access.py",),
    "api/key_limits.py": ("tests/api/test_key_limits.py",),
    "api/rate_limits.py": ("tests/api/test_access.py", "tests/api/test_key_limits.py"),
    "core/batching/admission.py": (
        "tests/core/batching/test_scheduler.py",
        "tests/core/batching/test_preemption.py",
    ),
    "core/batching/batcher.py": (
        "tests/core/batching/test_scheduler.py",
        "tests/core/batching/test_preemption.py",
    ),
    "core/batching/policy.py": (
        "tests/core/batching/test_scheduler.py",
        "tests/core/batching/test_preemption.py",
    ),
    "core/batching/scheduler.py": (
        "tests/core/batching/test_scheduler.py",
        "tests/core/batching/test_preemption.py",
    ),
    "core/jobs/keyring.py": ("tests/core/jobs/test_keyring.py", "tests/api/test_access.py"),
    "core/jobs/lua": tuple(  # a folder: all its scripts
        f"tests/core/jobs/test_{name}.py"
        for name in ("store", "reaper", "life", "events", "ledger", "registry", "submissions", "batches", "broker")
    ),
    "core/quant/smoothing.py": ("tests/core/quant/test_smoothing.py",),
    "evaluation/fid.py": ("tests/evaluation/test_fid.py",),
    "evaluation/mlperf.py": ("tests/evaluation/test_mlperf.py",),
    "llm/choose.py": ("tests/llm/test_choose.py",),
    "llm/sample.py": ("tests/llm/test_sample.py", "tests/llm/test_choose.py"),
}
_PYTEST = (  # plugins may be among what was imported beforehand
    "-x", "-q", "--no-header", "-pno:cacheprovider", "-Wignore::pytest.PytestAssertRewriteWarning",
)  # fmt: skip
_LEAST_S = 30.0  # that a mutant's tests may take, however quick they are on the code
_PATIENCE = 5.0  # times what they take on the code


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("room", nargs="?", help=f"a file; without one, after another: {', '.join(ROOMS)}")
    parser.add_argument("--tests", nargs="+", help="the tests that guard it, for a file that is not known here")
    parser.add_argument("--sample", type=int, help="take so many of its mutants")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--lines", help="only these, such as 40-80")
    options = parser.parse_args()
    if options.room is None:
        command = [sys.executable, "-m", "tests.mutants"]
        return max(subprocess.run([*command, room, *sys.argv[1:]], cwd=ROOT).returncode for room in ROOMS)
    room = str(Path(options.room))
    tests = options.tests or ROOMS.get(room)
    if tests is None:
        parser.error(f"{room}: which tests guard it? name them with --tests")
    every = all_of(room)
    if options.lines:
        first, _, last = options.lines.partition("-")
        every = [(file, one) for file, one in every if int(first) <= one.line <= int(last or first)]
    chosen = every
    if options.sample and options.sample < len(every):
        chosen = sorted(random.Random(options.seed).sample(every, options.sample), key=every.index)
    print(f"{room}: {len(chosen)} of {len(every)} mutants, against {' '.join(tests)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        survivors = Runner(Path(folder).resolve() / "tree", tests).run(chosen)
    print(f"{room}: {len(chosen)} mutants, {len(chosen) - len(survivors)} killed, {len(survivors)} left")
    for file, one in survivors:
        print(f"  {file}:{one}")
    return 0


def all_of(room: str) -> list[tuple[str, Mutant]]:
    """The mutants of a file, or of every Lua script in a folder, with the file of each."""
    path = ROOT / room
    files = sorted(path.rglob("*.lua")) if path.is_dir() else [path]
    return [
        (str(file.relative_to(ROOT)), one)
        for file in files
        for one in (lua_mutants if file.suffix == ".lua" else mutants)(file.read_text("utf-8"))
    ]


class Runner:
    """A copy of the tree in which one file at a time is another."""

    def __init__(self, tree: Path, tests: Sequence[str]) -> None:
        self.tree, self.tests = tree, tests
        _copy(tree)

    def run(self, chosen: Sequence[tuple[str, Mutant]]) -> list[tuple[str, Mutant]]:
        """Those of the mutants that no test noticed. Ends the program where the tests fail on the code itself."""
        _prepare(self.tree)
        if self._fails(3600, modules := self.tree / "modules.json"):
            sys.exit("the tests fail on the code as it is")
        # What was compiled so far is used again. A mutant's own code is not kept: the next may be as long and as old.
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.dont_write_bytecode = True
        for name in json.loads(modules.read_text()):
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        began = time.monotonic()
        if self._fails(3600):
            sys.exit(f"the tests fail where modules are imported beforehand: {(self.tree / 'output.txt').read_text()}")
        limit_s = max(_LEAST_S, _PATIENCE * (time.monotonic() - began))
        survivors = []
        for number, (file, one) in enumerate(chosen, 1):
            path = self.tree / file
            original = path.read_text("utf-8")
            path.write_text(one.source, "utf-8")
            began = time.monotonic()
            killed = self._fails(limit_s)
            took_s = time.monotonic() - began
            path.write_text(original, "utf-8")
            print(f"{number}/{len(chosen)} {'killed' if killed else 'LEFT'} {took_s:.1f} s  {file}:{one}", flush=True)
            if not killed:
                survivors.append((file, one))
        return survivors

    def _fails(self, limit_s: float, modules: Path | None = None) -> bool:
        """Whether the tests fail, or take too long. What they had to import can be written down."""
        sys.stdout.flush()
        child = os.fork()
        if not child:
            code = 70
            try:
                code = _test(self.tests, self.tree / "output.txt")
                if modules is not None:
                    modules.write_text(json.dumps(_foreign()))
            finally:
                os._exit(code)
        until = time.monotonic() + limit_s
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > until:
                started = psutil.Process(child).children(recursive=True)
                for process in [psutil.Process(child), *started]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
                os.waitpid(child, 0)
                return True
            time.sleep(0.02)
        return os.waitstatus_to_exitcode(ended[1]) != 0


def _copy(tree: Path) -> None:
    """Everything that git does not ignore, as it is now, and the compiled kernels of earlier tests."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    kernels = Path(".pytest_cache", "d", "kernels")
    if (ROOT / kernels).is_dir():
        shutil.copytree(ROOT / kernels, tree / kernels)


def _prepare(tree: Path) -> None:
    """Have this process, and what it starts, import the copy, on one thread as tests/conftest.py wants it."""
    os.chdir(tree)
    for name in [name for name in sys.modules if name == "tests" or name.startswith("tests.")]:
        del sys.modules[name]
    sys.path[:] = [str(tree), *(entry for entry in sys.path if entry and Path(entry).resolve() != ROOT)]
    os.environ["PYTHONPATH"] = str(tree)
    os.environ["HYPOTHESIS_PROFILE"] = "mutants"
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        os.environ[name] = "1"


def _test(tests: Sequence[str], output: Path) -> int:
    import pytest

    with output.open("w") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
        try:
            return int(pytest.main([*_PYTEST, *tests]))
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()


def _foreign() -> list[str]:
    """Installed modules that are imported now, pytest and its plugins among them."""
    paths = {name: getattr(module, "__file__", None) or "" for name, module in list(sys.modules.items())}
    return [name for name, path in paths.items() if "site-packages" in path]


if __name__ == "__main__":
    sys.exit(main())
