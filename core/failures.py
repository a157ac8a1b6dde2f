"""Translates torch's errors for the engine: out of memory, or device lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from core.batching.runner import DeviceLost, OutOfMemory

T = TypeVar("T")


def translate_device_errors(compute: Callable[[], T]) -> T:
    """Run the function. Raises `OutOfMemory` and `DeviceLost` for torch's many forms of these, and other errors
    unchanged.
    """
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
