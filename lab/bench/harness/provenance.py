"""Collects a measurement's provenance: commit, digests of the measured parts of the tree, machine and command.

Every result file contains it under `provenance`: it identifies the measured code, and the docs list the parts that have
changed since. Of this process these are the modules that it has imported, with the kernels, scripts and tables that lie
beside them; data, such as models, and what child processes run are named by each benchmark. `python -m
lab.bench.harness.provenance` prints the commit of this tree, for `DIPTYCH_COMMIT` on a machine that has a copy of the
tree without its `.git`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]

# Files and folders that child processes run which do not report what they import: a worker, and the whole service.
WORKER = (
    "contract", "core/batching", "core/quant", "core/kernels", "core/ops", "core/graphs.py", "core/cuda_graphs.py",
    "core/threads.py", "core/transfers.py", "core/digests.py", "core/failures.py", "core/config.py", "core/__init__.py",
    "core/artifacts.py", "core/jobs", "core/logs.py", "core/pictures.py", "core/traces.py", "core/extras.py",
    "core/hub_cache.py", "core/json_files.py", "core/peft_config.py", "unet_opt", "pipeline", "llm", "workers",
)  # fmt: skip
SERVICE = (*WORKER, "api", "deployment", "cli")
EMOJI_XL, EMOJI_LM = ("models/emoji-xl",), ("models/emoji-lm", "models/emoji-lm-draft")

COMMIT_VARIABLE = "DIPTYCH_COMMIT"
DIRTY = "-dirty"
_SOURCE = {
    ".c", ".cpp", ".css", ".cu", ".h", ".html", ".jinja", ".js", ".json", ".lua", ".py", ".safetensors", ".sh", ".toml",
    ".txt", ".yml",
}  # fmt: skip
_NOT_MEASURED = (
    "docs", "tests", "lab/bench/results", "lab/bench/history", "lab/bench/tables", "lab/simulation/tables",
    "benchmarks/results", "benchmarks/history", "benchmarks/h200/results", "benchmarks/costs",  # until 0.3
)  # fmt: skip
# Where folders lay when figures were measured, and where they are now; the longest first.
_MOVED = {
    "benchmarks/simulation": "lab/simulation", "benchmarks/simulate.py": "lab/simulation/simulate.py",
    "benchmarks/costs": "lab/simulation/tables", "benchmarks": "lab/bench", "training": "lab/training",
    "evaluation/scenes": "lab/scenes", "evaluation/captioning": "lab/captions",
}  # fmt: skip
_HIDDEN = {"--results", "--out", "--work"}  # options that say where files go
_DIGITS = 10  # of a commit's id
_BEGUN_S = time.time()


def provenance(artifacts: Iterable[str] = (), imported: Iterable[str] = ()) -> dict[str, Any]:
    """The provenance of this process's measurement.

    `artifacts` are files and folders below `ROOT` that count whole: data, such as models, and what child processes run.
    Of all others what this process has imported counts, and `imported`, which child processes report by `loaded`.
    """
    head = commit()
    folders = sorted(set(artifacts))
    parts = {room: digest(files(room)) for room in folders} | _by_folder({*loaded(), *imported}, folders)
    if head is not None and not head.endswith(DIRTY) and _changed_meanwhile(parts):
        head += DIRTY
    return {
        "commit": head, "date": time.strftime("%Y-%m-%d"), "command": _command(sys.argv), "rooms": parts,
        "machine": machine(),
    }  # fmt: skip


def machine() -> dict[str, Any]:
    """Processor, GPU, memory, load and package versions."""
    import torch

    description: dict[str, Any] = {
        "processor": _processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
    }
    if torch.cuda.is_available():
        driver = (_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "").split("\n")[0]
        versions = {"triton": getattr(sys.modules.get("triton"), "__version__", None), "driver": driver.strip() or None}
        description |= {"gpu": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count(), **versions}
    return description


# -- commits -----------------------------------------------------------------------------------------------------------


def commit() -> str | None:
    """`DIPTYCH_COMMIT`, or the checked out commit, with "-dirty" if source files differ from it; or None.

    Outputs of benchmarks, docs and tests are not source files: a benchmark's output does not make the next one dirty.
    """
    if named := os.environ.get(COMMIT_VARIABLE):
        return named
    if not _is_repository():
        return None
    head = _git("rev-parse", f"--short={_DIGITS}", "HEAD")
    if head is None:
        return None
    changed = (_git("status", "--porcelain", "--no-renames", "--untracked-files=all") or "").splitlines()
    return head.strip() + (DIRTY if any(is_source(line[3:].strip('"')) for line in changed) else "")


def has_commit(commit: str) -> bool:
    """Return whether this repository has the commit."""
    return _is_repository() and _git("cat-file", "-e", f"{commit}^{{commit}}") is not None


def has_full_history() -> bool:
    """Return whether this is a repository with all of its history."""
    return _is_repository() and (_git("rev-parse", "--is-shallow-repository") or "").strip() == "false"


# -- what was imported ------------------------------------------------------------------------------------------------


def loaded() -> set[str]:
    """Files below `ROOT` that decide what this process has run, named relative to it.

    These are its modules' sources, and the source files of other kinds that lie beside a module or in folders below it
    that have no modules: kernels, scripts, tables. Tests are left out.
    """
    names, root = set(), f"{ROOT}/"
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None) or ""
        name = path.removeprefix(root)
        if name != path and name.endswith(".py") and not name.startswith(".") and "/" in name and is_source(name):
            names.add(name)
    return names | {name for folder in {Path(name).parent for name in names} for name in _beside(folder)}


def _beside(folder: Path) -> Iterator[str]:
    """Source files that are no modules, of a package's folder and of the folders below it without modules."""
    for path in sorted((ROOT / folder).iterdir()):
        name = path.relative_to(ROOT).as_posix()
        if path.is_file() and path.suffix not in (".py", ".sh") and is_source(name):
            yield name
        elif path.is_dir() and path.name != "__pycache__" and not any(path.rglob("*.py")):
            yield from (below for below in files(name) if is_source(below))


def _by_folder(names: Iterable[str], rooms: Sequence[str]) -> dict[str, str]:
    """The digest and the names by folder of the files that lie in none of the rooms."""
    folders: dict[str, list[str]] = {}
    for name in sorted(names):
        if not any(name == room or name.startswith(f"{room}/") for room in rooms):
            folder, _, file = name.rpartition("/")
            folders.setdefault(folder, []).append(file)
    return {
        folder: " ".join((digest({f"{folder}/{file}": _blob(ROOT / folder / file) for file in names}), *names))
        for folder, names in folders.items()
    }


# -- digests of parts of the tree --------------------------------------------------------------------------------------


def is_source(path: str) -> bool:
    """Return whether figures may depend on a file, named relative to `ROOT`."""
    below = any(path == folder or path.startswith(f"{folder}/") for folder in _NOT_MEASURED)
    return Path(path).suffix in _SOURCE and not below


def moved(room: str) -> str:
    """Return where a file or folder lies now, which a measurement may have recorded under an earlier name."""
    before = next((before for before in _MOVED if room == before or room.startswith(f"{before}/")), None)
    return room if before is None else _MOVED[before] + room[len(before) :]


def files(room: str) -> dict[str, str]:
    """Source files of a file or folder of the tree, with the git object ids of their contents.

    Files of one that was moved have the names that they had before, by which digests know them. Empty where there is
    no such file or folder any more.
    """
    top = ROOT / moved(room)
    paths = [top] if top.is_file() else sorted(path for path in top.rglob("*") if path.is_file())
    named = {(Path(room) / path.relative_to(top)).as_posix(): path for path in paths if "__pycache__" not in path.parts}
    return {name: _blob(path) for name, path in named.items() if is_source(name) or path == top}


def files_at(commit: str, room: str) -> dict[str, str]:
    """The files as they were at a commit."""
    listed = _git("ls-tree", "-r", "-z", commit, "--", room) or ""
    entries = [entry.partition("\t") for entry in listed.split("\0") if entry]
    return {name: entry.split()[2] for entry, _, name in entries if is_source(name) or name == room}


def is_unchanged(room: str, recorded: str, at: str | None = None) -> bool:
    """Return whether a recorded room is the same now, or at a commit: all of it, or the files that the record names."""
    was, *named = recorded.split(" ")
    blobs = files(room) if at is None else files_at(at, room)
    if named:
        blobs = {name: blob for name, blob in blobs.items() if name.removeprefix(f"{room}/") in named}
    return digest(blobs) == was


def digest(blobs: Mapping[str, str]) -> str:
    """SHA-256 over the names and contents of files, its first 16 digits."""
    lines = "".join(f"{blob} {name}\n" for name, blob in sorted(blobs.items()))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def differing(commit: str, rooms: Mapping[str, str]) -> list[str]:
    """The recorded files and folders that differ from the commit: the measured tree was not that of the commit."""
    return sorted(room for room, was in rooms.items() if not is_unchanged(room, was, commit))


def _blob(path: Path) -> str:
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _changed_meanwhile(rooms: Mapping[str, str]) -> bool:
    """Return whether a file was written after this process began, so that it may differ from the measured code."""
    for room, recorded in rooms.items():
        _, *named = recorded.split(" ")
        for name in (f"{room}/{file}" for file in named) if named else files(room):
            if (ROOT / name).stat().st_mtime > _BEGUN_S:
                return True
    return False


# -- how this process was started --------------------------------------------------------------------------------------


def _command(arguments: Sequence[str]) -> str:
    """The command as typed, without output options and local folders."""
    program = Path(arguments[0]).resolve()
    if program.name in ("diptych", "__main__.py") and program.parent.name in ("bin", "cli"):
        words = ["diptych"]
    elif program.is_relative_to(ROOT) and program.suffix == ".py":
        words = ["python", "-m", ".".join(program.relative_to(ROOT).with_suffix("").parts)]
    else:
        words = [program.name]
    rest = iter(arguments[1:])
    for word in rest:
        if word in _HIDDEN:
            next(rest, None)
        elif word.partition("=")[0] not in _HIDDEN:
            words.append(Path(word).name if word.startswith("/") else word)
    return " ".join(words)


def _is_repository() -> bool:
    top = _git("rev-parse", "--show-toplevel")
    return top is not None and Path(top.strip()).resolve() == ROOT


def _git(*arguments: str) -> str | None:
    return _output("git", "-C", str(ROOT), *arguments)


def _output(*command: str) -> str | None:
    """The output of a command; None where it fails, or does not exist."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    print(commit())
