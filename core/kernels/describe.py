"""Describes this machine's devices, and the libraries that compile their kernels."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from core.kernels.cpu.library import KernelsUnavailable, identity, library, processor
from core.kernels.cuda import driver, language
from core.kernels.device import AVX2, DeviceInfo

_SOURCES = (".py", ".cpp", ".h", ".json")


def describe(device: torch.device, cache: Path) -> DeviceInfo:
    """The properties of this device that select kernels.

    For a CPU its kernels are compiled into `cache` if they are not there yet, which takes seconds.
    """
    if device.type == "cpu":
        return _cpu(cache)
    if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
        return DeviceInfo("cuda", str(device), triton=triton_version())
    return DeviceInfo(
        "cuda",
        torch.cuda.get_device_name(device),
        capability=torch.cuda.get_device_capability(device),
        triton=triton_version(),
        nvrtc_lacks=driver.nvrtc_unsupported_reason(),
    )


def _cpu(cache: Path) -> DeviceInfo:
    try:
        instructions = identity(library(cache)).instructions
    except KernelsUnavailable as error:
        return DeviceInfo("cpu", processor(), cpu_lacks=str(error))
    slower = "the processor has no AVX-512 VNNI" if instructions == AVX2 else None
    return DeviceInfo("cpu", processor(), instructions=instructions, cpu_lacks=slower)


def triton_version() -> str | None:
    return None if language.triton is None else str(language.triton.__version__)


@functools.cache
def cuda_versions() -> dict[str, str | None]:
    """Versions of all libraries that compute on a GPU, or compile for it, beside torch itself; None: not installed."""
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return {
        "cuda": torch.version.cuda,
        "driver": _asked(driver.driver_version),
        "cudnn": None if cudnn is None else str(cudnn),
        "cublas": next(filter(None, map(_installed, ("nvidia-cublas", "nvidia-cublas-cu12"))), None),
        "triton": triton_version(),
        "nvrtc": _asked(driver.nvrtc_version),
    }


def _asked(of: Callable[[], str]) -> str | None:
    try:
        return of()
    except (driver.DriverError, OSError):
        return None


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@functools.cache
def digest(root: Path, names: Sequence[str]) -> str:
    """A digest of source files: of each folder and file in `names` below `root`, with their names, but no path above
    it.

    Raises OSError for a missing one.
    """
    hasher = hashlib.sha256()
    for name in names:
        files = sorted((root / name).rglob("*")) if (root / name).is_dir() else [root / name]
        for path in files:
            if path.suffix in _SOURCES:
                data = path.read_bytes()
                hasher.update(f"{path.relative_to(root).as_posix()} {len(data)}\n".encode() + data)
    return hasher.hexdigest()[:16]
