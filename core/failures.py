"""What torch's errors mean to the engine: memory that ran out, or a device that is lost.

Knows torch's exceptions and the engine's; knows nothing of what was computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from core.batching.runner import DeviceLost, OutOfMemory

T = TypeVar("T")


def translated(compute: Callable[[], T]) -> T:
    """Run it. Raises `OutOfMemory` and `DeviceLost` for what torch says in many ways, and all else as it is."""
    try:
        return compute()
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise OutOfMemory(str(error)) from error
    except RuntimeError as error:
        text = str(error)
        if "can't allocate memory" in text or "out of memory" in text:
            raise OutOfMemory(text) from error
        if "CUDA error" in text or isinstance(error, getattr(torch, "AcceleratorError", ())):
            raise DeviceLost(text) from error
        raise
