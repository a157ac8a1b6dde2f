"""Runs the numerical tests as on several processors: `python -m tests.cpus [NAME ...]`.

Each configuration is a separate pytest process whose environment limits torch, oneDNN, MKL and the native kernels to
one instruction set, or turns the kernels off. A child process first reports what torch and the compiler use in that
environment; configurations that this processor cannot run are listed with the reason. Arguments after `--` go to
pytest; tests named there run instead of all numerical tests.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / ".pytest_cache" / "d" / "cpus"
COMPILERS = ("g++", "clang++")  # that the kernels and torch.compile look for
VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "CXX")

# Rooms that compute. What is left out makes records, speaks HTTP or starts processes with a stand-in for the model.
ROOMS = (
    "tests/core/kernels", "tests/core/ops", "tests/core/quant", "tests/core/test_graphs.py", "tests/unet_opt",
    "tests/pipeline", "tests/llm", "tests/models", "tests/evaluation", "tests/training",
    "tests/workers/test_build.py", "tests/workers/test_checker.py", "tests/workers/test_expand.py",
    "tests/workers/test_loras.py", "tests/workers/test_handlers.py", "tests/workers/test_text_encoder.py",
    "tests/workers/test_worker.py",
    "tests/cli/test_captions.py", "tests/cli/test_conditions.py", "tests/cli/test_generate.py",
    "tests/cli/test_quantize.py",
    "tests/deployment/test_default.py", "tests/deployment/test_service.py",
)  # fmt: skip


@dataclass(frozen=True)
class Configuration:
    about: str
    torch: str = ""  # what torch.backends.cpu.get_cpu_capability must say; empty: whatever this processor has
    kernels: str = "native"  # what ours are compiled for: native, avx2, or off, as on a machine without a C++ compiler
    variables: tuple[tuple[str, str], ...] = ()


def _torch(capability: str, onednn: str, mkl: str) -> tuple[tuple[str, str], ...]:
    return (
        ("ATEN_CPU_CAPABILITY", capability), ("ONEDNN_MAX_CPU_ISA", onednn), ("MKL_ENABLE_INSTRUCTIONS", mkl)
    )  # fmt: skip


CONFIGURATIONS = {
    "avx512": Configuration(
        "torch on AVX-512", "AVX512", variables=_torch("avx512", "AVX512_CORE_AMX", "AVX512")
    ),
    "avx2": Configuration("torch on AVX2", "AVX2", variables=_torch("avx2", "AVX2", "AVX2")),
    "default": Configuration("torch without AVX2", "DEFAULT", variables=_torch("default", "SSE41", "SSE4_2")),
    "kernels-avx2": Configuration(
        "torch and our kernels on AVX2", "AVX2", "avx2", _torch("avx2", "AVX2", "AVX2")
    ),
    "kernels-off": Configuration("torch alone: no compiler, so no kernels of ours", kernels="off"),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One line of the table: counts, or why there are none."""

    name: str
    counts: Mapping[str, int]
    reason: str = ""
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return bool(self.counts.get("failed", 0))

    @property
    def cells(self) -> tuple[str, ...]:
        about = CONFIGURATIONS[self.name].about
        if self.reason:
            return self.name, about, "", "", "", f"not run: {self.reason}"
        return (
            self.name,
            about,
            *(str(self.counts[kind]) for kind in ("passed", "failed", "skipped")),
            (f"{self.seconds / 60:.1f} min"),
        )


def environment(configuration: Configuration) -> dict[str, str]:
    """This process's environment, less what may choose instructions, and with what this configuration chooses."""
    made = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    made |= dict(configuration.variables)
    if configuration.kernels == "avx2":
        made["CXX"] = str(_compiler_for_avx2())
    elif configuration.kernels == "off":
        made["PATH"] = _path_without_compilers(made.get("PATH", os.defpath))
    return made


def _compiler_for_avx2() -> Path:
    """A compiler of one word, as torch.compile needs it, that leaves AVX-512 out of -march=native."""
    found = next(filter(None, map(shutil.which, COMPILERS)), None)
    path = WORK / "avx2" / "c++"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\nexec {found or "no-compiler"} -mno-avx512f "$@"\n')
    path.chmod(0o755)
    return path


def _path_without_compilers(path: str) -> str:
    """PATH with folders that hold a compiler replaced by folders of links to all else in them."""
    kept = []
    for number, folder in enumerate(map(Path, path.split(os.pathsep))):
        if any((folder / name).exists() for name in COMPILERS):
            mirror = WORK / "no-compiler" / str(number)
            shutil.rmtree(mirror, ignore_errors=True)
            mirror.mkdir(parents=True)
            for program in folder.iterdir():
                if program.name not in COMPILERS:
                    (mirror / program.name).symlink_to(program)
            folder = mirror
        kept.append(str(folder))
    return os.pathsep.join(kept)


def lacks(configuration: Configuration) -> str | None:
    """Why this machine cannot play the configuration, or None."""
    variables = environment(configuration)
    if configuration.torch and (taken := _capability(configuration.variables)) != configuration.torch:
        return f"torch takes {taken} here"
    if configuration.kernels == "avx2":
        command = [variables["CXX"], "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
        done = subprocess.run(command, env=variables, capture_output=True, text=True)
        if done.returncode:
            return f"no compiler: {done.stderr.strip()[:200]}"
        if "__AVX2__" not in done.stdout or "__AVX512VNNI__" in done.stdout:
            return "the compiler does not take AVX2 alone"
    return None


@functools.cache
def _capability(variables: tuple[tuple[str, str], ...]) -> str:
    """What torch takes with these variables, in a process of its own."""
    code = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env=environment(Configuration("", variables=variables)),
    )  # fmt: skip
    return done.stdout.strip()


def run(name: str, jobs: int, words: Sequence[str]) -> Row:
    """One configuration's tests; what they print goes to the terminal."""
    configuration = CONFIGURATIONS[name]
    if (why := lacks(configuration)) is not None:
        return Row(name, {}, why)
    report = WORK / f"{name}.xml"
    report.unlink(missing_ok=True)
    parallel = ["--processes", str(jobs)] if jobs > 1 else []
    named = any((ROOT / word.partition("::")[0]).exists() for word in words if not word.startswith("-"))
    rooms = [] if named else [room for room in ROOMS if (ROOT / room).exists()]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        *parallel,
        f"--junit-xml={report}",
        "-o",
        "junit_family=xunit1",
        *rooms,
        *words,
    ]
    began = time.monotonic()
    code = subprocess.run(command, cwd=ROOT, env=environment(configuration)).returncode
    try:
        return Row(name, counts(report), f"pytest ended with {code}" if code > 1 else "", time.monotonic() - began)
    except (OSError, ElementTree.ParseError):  # it died, or never began
        return Row(name, {}, f"pytest ended with {code} and no report")


def counts(report: Path) -> dict[str, int]:
    """Passed, failed (errors are) and skipped, from pytest's JUnit report."""
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    total, failed, errors, skipped = (
        sum(int(suite.get(kind, "0")) for suite in suites) for kind in ("tests", "failures", "errors", "skipped")
    )
    return {"passed": total - failed - errors - skipped, "failed": failed + errors, "skipped": skipped}


def table(rows: Sequence[Row]) -> str:
    lines = [("configuration", "", "passed", "failed", "skipped", ""), *(row.cells for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.rjust(width) if column in (2, 3, 4) else cell.ljust(width)
                  for column, (cell, width) in enumerate(zip(line, widths, strict=True))).rstrip()
        for line in lines
    )  # fmt: skip


def main(words: Sequence[str]) -> int:
    at = words.index("--") if "--" in words else len(words)
    ours, theirs = words[:at], words[at + 1 :]
    parser = argparse.ArgumentParser(prog="python -m tests.cpus", description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CONFIGURATIONS)}; default: all")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="pytest processes; default: %(default)s")
    options = parser.parse_args(ours)
    if unknown := set(options.names) - set(CONFIGURATIONS):
        parser.error(f"no configuration is called {', '.join(sorted(unknown))}")
    WORK.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for name in options.names or CONFIGURATIONS:
        print(f"== {name}: {CONFIGURATIONS[name].about}", flush=True)
        rows.append(run(name, options.jobs, theirs))
    print(table(rows))
    return int(any(row.failed or row.reason.startswith("pytest") for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
