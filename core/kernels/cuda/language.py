"""Imports Triton, or a stand-in if it is not installed, so that the plain PyTorch references can still be imported."""

from __future__ import annotations

import importlib
import logging
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

log = logging.getLogger(__name__)

triton: Any = None
tl: Any = None
with suppress(ModuleNotFoundError):
    triton, tl = importlib.import_module("triton"), importlib.import_module("triton.language")


def unsupported_reason() -> str | None:
    """Return why Triton's kernels cannot be launched, or None if they can."""
    return "triton is not installed" if triton is None else None


def keep_in(folder: Path) -> None:
    """Set Triton's cache folder, unless TRITON_CACHE_DIR names another one.

    Triton fails if it cannot write; so if this folder is not writable, a temporary one is used, and logged.
    """
    if os.environ.get("TRITON_CACHE_DIR"):
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        log.warning("Triton kernels are compiled at every start: %s cannot be written (%s)", folder, error.strerror)
        folder = Path(tempfile.mkdtemp(prefix="diptych-triton-"))
    os.environ["TRITON_CACHE_DIR"] = str(folder)


def kernel(function: Callable[..., None]) -> Any:
    """`triton.jit`, or the function itself, which then cannot be launched."""
    return function if triton is None else triton.jit(function)


def power(n: int) -> int:
    """The smallest power of two not below n: the only block sizes in Triton."""
    return 1 << max(n - 1, 0).bit_length()


def pixel_stride(x: Tensor) -> int:
    """Elements between neighbouring pixels of x [B, H, W, C]. The stride of a dimension of one may be anything."""
    spacing = [stride for size, stride in zip(x.shape[:3], x.stride(), strict=False) if size > 1]
    return spacing[-1] if spacing else x.shape[3]


def evenly_spaced(x: Tensor) -> bool:
    """Return whether x [B, H, W, C] can be addressed by `pixel_stride` alone."""
    steps = (x.shape[1] * x.shape[2], x.shape[2], 1)
    return all(s == step * pixel_stride(x) for n, s, step in zip(x.shape, x.stride(), steps, strict=False) if n > 1)


def width(channels: int) -> int:
    """Channels that one program takes: the largest power of two up to 512 that leaves few lanes idle."""
    fitting = [w for w in (64, 128, 256, 512) if -channels % w * 8 <= channels]
    return max(fitting, default=min(64, power(channels)))
