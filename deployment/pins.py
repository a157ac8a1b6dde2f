"""Keeps constraints.txt current, with hashes; `make pins` calls it.

    python -m deployment.pins [--uv PATH] [--upgrade]

Packages stay at their versions unless pyproject.toml asks for others or `--upgrade` for the newest; their hashes are
those of all files that the index has of a release, so that every platform verifies its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEAD = """\
# Exact versions of a fresh install, extras and groups included, with the hashes of each release's files.
# Written by `make pins`, read by install.py, which has pip refuse every other file. pyproject.toml says what is needed,
# this file what was resolved, and under `via` for what. One file is taken without a hash: a build of torch other than
# the index's own (CPU builds, whose files PyTorch's index and mirrors of it may build anew) that install.py picked.

"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deployment.pins")
    parser.add_argument("--uv", default="uv", help="the uv that resolves")
    parser.add_argument("--upgrade", action="store_true", help="every package to the newest that fits")
    options = parser.parse_args()
    return pin_packages(ROOT, options.uv, upgrade=options.upgrade)


def pin_packages(root: Path, uv: str, *, upgrade: bool = False) -> int:
    """Write `root`'s constraints.txt for its pyproject.toml, all or nothing. uv's exit status."""
    constraints = root / "constraints.txt"
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))
    groups = [f"--group={name}" for name in project["dependency-groups"]]
    with tempfile.TemporaryDirectory(dir=root, prefix=".pins-") as folder:
        pinned = Path(folder, constraints.name)
        if constraints.exists() and not upgrade:
            pinned.write_bytes(constraints.read_bytes())  # the versions that uv keeps to where it can
        command = [
            uv, "pip", "compile", "--quiet", "--universal", "--python-version", "3.11", "--generate-hashes",
            "--all-extras", *groups, "--no-header", "--output-file", str(pinned), "pyproject.toml",
        ]  # fmt: skip
        code = subprocess.run(command, cwd=root).returncode
        if code == 0:
            text = HEAD + pinned.read_text("utf-8")
            if not constraints.exists() or text != constraints.read_text("utf-8"):  # what hangs on it is made anew
                pinned.write_text(text, "utf-8")
                pinned.replace(constraints)
    return code


if __name__ == "__main__":
    sys.exit(main())
