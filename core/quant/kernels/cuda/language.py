"""Triton where it is installed, and a stand-in where it is not, so that what is plain PyTorch can still be imported.

Knows nothing of kernels.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

triton: Any = None
tl: Any = None
with suppress(ModuleNotFoundError):
    triton, tl = importlib.import_module("triton"), importlib.import_module("triton.language")


def lacks() -> str | None:
    """Why Triton's kernels cannot be launched, or None if they can."""
    return "triton is not installed" if triton is None else None


def kernel(function: Callable[..., None]) -> Any:
    """`triton.jit`, or the function itself, which then cannot be launched."""
    return function if triton is None else triton.jit(function)


def power(n: int) -> int:
    """The smallest power of two not below n: Triton's blocks have no other sizes."""
    return 1 << max(n - 1, 0).bit_length()


def width(channels: int) -> int:
    """Channels that one program takes: the largest power of two up to 512 that leaves few lanes idle."""
    fitting = [w for w in (64, 128, 256, 512) if -channels % w * 8 <= channels]
    return max(fitting, default=min(64, power(channels)))
