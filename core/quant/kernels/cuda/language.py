"""Triton where it is installed, and a stand-in where it is not, so that what is plain PyTorch can still be imported.

Knows nothing of kernels.
"""

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


def lacks() -> str | None:
    """Why Triton's kernels cannot be launched, or None if they can."""
    return "triton is not installed" if triton is None else None


def keep_in(folder: Path) -> None:
    """Have Triton keep compiled kernels in this folder, unless TRITON_CACHE_DIR names another one.

    Triton fails where it cannot write; so where this folder cannot be, it gets one that ends with the machine's others
    for temporary files, and the log says so.
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
    """The smallest power of two not below n: Triton's blocks have no other sizes."""
    return 1 << max(n - 1, 0).bit_length()


def pixel_stride(x: Tensor) -> int:
    """Elements between neighbouring pixels of x [B, H, W, C]. The stride of a dimension of one may be anything."""
    spacing = [stride for size, stride in zip(x.shape[:3], x.stride(), strict=False) if size > 1]
    return spacing[-1] if spacing else x.shape[3]


def evenly_spaced(x: Tensor) -> bool:
    """Whether x [B, H, W, C] can be addressed by `pixel_stride` alone."""
    steps = (x.shape[1] * x.shape[2], x.shape[2], 1)
    return all(s == step * pixel_stride(x) for n, s, step in zip(x.shape, x.stride(), steps, strict=False) if n > 1)


def width(channels: int) -> int:
    """Channels that one program takes: the largest power of two up to 512 that leaves few lanes idle."""
    fitting = [w for w in (64, 128, 256, 512) if -channels % w * 8 <= channels]
    return max(fitting, default=min(64, power(channels)))
