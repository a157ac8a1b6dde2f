"""Compiles the C++ kernels for this processor, once, and loads them.

A plain C interface avoids torch's headers, so that compiling takes seconds and is independent of torch's version.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import logging
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

log = logging.getLogger(__name__)

SOURCES = (
    "product.cpp", "norm.cpp", "attention.cpp", "rotary.cpp", "rows.cpp", "tokens.cpp", "mixture.cpp", "program.cpp",
)  # fmt: skip
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-std=c++17", "-w")
_HERE = Path(__file__).resolve().parent
_COMPILE_S = 120.0
_PARTIAL = ".part"  # folders left behind by a killed compiler


class KernelsUnavailable(RuntimeError):
    """An error: INT8 kernels cannot run on this machine. The message says why."""


class LibraryIdentity(NamedTuple):
    """A compiled library's own description: all that its results depend on beside its arguments."""

    instructions: str  # avx512-vnni or avx2
    digest: str  # of the sources, the compiler, its flags and the processor's
    compiler: str  # the first line of its --version


def identity(loaded: ctypes.CDLL) -> LibraryIdentity:
    """A library's sources, compiler and instruction set, as compiled into it."""
    identity_fields = (loaded.diptych_instructions(), loaded.diptych_digest(), loaded.diptych_compiler())
    return LibraryIdentity(*(text.decode("utf-8", "replace") for text in identity_fields))


@cache
def library(cache_dir: Path) -> ctypes.CDLL:
    """The kernels, compiled into `cache_dir` if they are not there yet, which takes seconds.

    Raises `KernelsUnavailable`.
    """
    _check_machine()
    compiler = _compiler()
    path = _path(compiler, cache_dir)
    if path.is_file():
        try:
            _check_ours(path)
            return _load(path)
        except KernelsUnavailable as error:
            log.warning("%s; recompiling", error)
    _compile(compiler, path)
    _check_ours(path)
    return _load(path)


def is_compiled(cache_dir: Path) -> bool:
    """Return whether `library` will find the kernels there, or compiles none on this machine."""
    try:
        _check_machine()
        return _path(_compiler(), cache_dir).is_file()
    except KernelsUnavailable:
        return True


def _check_machine() -> None:
    """Raise `KernelsUnavailable` for a machine that the kernels are not for."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise KernelsUnavailable(
            f"INT8 kernels are for x86 processors under Linux, not {platform.machine()}, {sys.platform}"
        )
    flags = _processor_flags()
    if "avx512_vnni" not in flags and not {"avx2", "fma"} <= flags:
        raise KernelsUnavailable("INT8 kernels need a processor with AVX-512 VNNI or AVX2")


def _path(compiler: list[str], cache_dir: Path) -> Path:
    return cache_dir / f"int8-{_key(compiler)}.so"


def processor() -> str:
    """The processor's own name."""
    return _cpuinfo("model name") or platform.machine()


def _processor_flags() -> set[str]:
    return set(_cpuinfo("flags").split())


def _cpuinfo(name: str) -> str:
    """Linux's description of the first processor; empty elsewhere."""
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith(name):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return ""


def _compiler() -> list[str]:
    """The compiler's command, which CXX may give with arguments."""
    for name in (os.environ.get("CXX", ""), "g++", "clang++"):
        with contextlib.suppress(ValueError):  # an unclosed quotation in CXX
            command = shlex.split(name)
            if command and shutil.which(command[0]):
                return command
    raise KernelsUnavailable("INT8 kernels need a C++ compiler (CXX, g++ or clang++), and none was found")


@cache
def compiler_version() -> str:
    """The C++ compiler's version line; empty if there is none. torch.compile uses the same compiler."""
    try:
        return _said([*_compiler(), "--version"]).strip().partition("\n")[0]
    except KernelsUnavailable:
        return ""


def _key(compiler: list[str]) -> str:
    """File name of the compiled library: changes with the code and with what it is linked to."""
    digest, version = _digest(compiler)
    return hashlib.sha256(repr((digest, version, compiler, str(_openmp()))).encode()).hexdigest()[:16]


def _digest(compiler: list[str]) -> tuple[str, str]:
    """A digest of all that the machine code depends on, and the compiler's version; no path is in either."""
    digest = hashlib.sha256()
    for name in sorted(path.name for path in _HERE.iterdir() if path.suffix in (".cpp", ".h")):
        digest.update(name.encode() + (_HERE / name).read_bytes())
    version = _said([*compiler, "--version"]).strip()
    digest.update(repr((compiler[1:], _FLAGS, version, sorted(_processor_flags()))).encode())
    return digest.hexdigest()[:16], version.partition("\n")[0]


def _openmp() -> Path | None:
    """The OpenMP runtime bundled with torch. A second one would keep a second team of threads."""
    libraries = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return libraries[0].resolve() if libraries else None


def _check_ours(path: Path) -> None:
    """Reject code that another user could have written. Raises `KernelsUnavailable`."""
    for each in (path, path.parent):
        status = each.stat()
        if status.st_uid not in (os.getuid(), 0) or (
            status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX
        ):
            raise KernelsUnavailable(f"{each} belongs to another user, or everybody may write it")


def _load(path: Path) -> ctypes.CDLL:
    try:
        loaded = ctypes.CDLL(str(path))
        loaded.diptych_run.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        loaded.diptych_run.restype = None
        loaded.diptych_size.argtypes = (ctypes.c_int64,)
        loaded.diptych_size.restype = ctypes.c_int64
        for function in (loaded.diptych_instructions, loaded.diptych_digest, loaded.diptych_compiler):
            function.argtypes, function.restype = (), ctypes.c_char_p
        pointer, count, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
        loaded.diptych_pack.argtypes = (pointer, pointer, count, count, count, flag, flag)
        loaded.diptych_pack_down.argtypes = (*[pointer] * 5, count, count, count, flag)
        loaded.diptych_pack.restype = loaded.diptych_pack_down.restype = None
    except (OSError, AttributeError) as error:
        raise KernelsUnavailable(f"INT8 kernels cannot be loaded from {path}: {error}") from error
    return loaded


def _compile(compiler: list[str], path: Path) -> None:
    """Compile into `path` atomically, even with concurrent compilations."""
    runtime = _openmp()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path.parent)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="int8-", suffix=_PARTIAL) as folder:
            work = Path(folder)
            targets, partials = work / "kernels.cpp", work / "kernels.so"
            lines = [f'#include "{_HERE / name}"\n' for name in SOURCES]
            for name, text in zip(("digest", "compiler"), _digest(compiler), strict=True):
                lines.append(f'extern "C" const char* diptych_{name}() {{ return {json.dumps(text)}; }}\n')
            targets.write_text("".join(lines), "utf-8")
            linked = [str(runtime), f"-Wl,-rpath,{runtime.parent}"] if runtime else ["-fopenmp"]
            _said([*compiler, *_FLAGS, "-c", str(targets), "-o", str(work / "kernels.o")])
            _said([*compiler, "-shared", str(work / "kernels.o"), *linked, "-o", str(partials)])
            _load(partials)  # a library that does not load is not kept
            partials.replace(path)
    except OSError as error:
        raise KernelsUnavailable(f"INT8 kernels cannot be compiled into {path.parent}: {error}") from error
    log.info("compiled INT8 kernels into %s", path)


def _said(command: list[str]) -> str:
    """A compiler's output.

    Raises `KernelsUnavailable` with its first error; if it hangs, kills it and its descendants.
    """
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
            text=True, errors="replace", env=environment, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise KernelsUnavailable(
            f"INT8 kernels need a C++ compiler, and {command[0]} cannot be run: {error}"
        ) from error
    try:
        output, complained = process.communicate(timeout=_COMPILE_S)
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise KernelsUnavailable(f"INT8 kernels are not compiled by {command[0]} in {_COMPILE_S:g} s") from error
        raise
    if process.returncode:
        lines = [line.strip() for line in complained.splitlines() if line.strip()]
        reasons = [line for line in lines if "error" in line.lower()] or lines or ["no reason given"]
        raise KernelsUnavailable(f"INT8 kernels do not compile with {command[0]}: {reasons[0]}")
    return output


def _sweep(cache_dir: Path) -> None:
    """Remove what killed compilers left behind."""
    for left in cache_dir.glob(f"int8-*{_PARTIAL}"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > 10 * _COMPILE_S:
                shutil.rmtree(left)
