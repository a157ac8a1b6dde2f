"""Errors of devices and networks in the engine's words: out of memory, device lost, not finite. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class OutOfMemory(RuntimeError):
    """The device could not hold this batch. A smaller one may fit."""


class DeviceLost(RuntimeError):
    """An error that sticks to the device: no later result from this process could be trusted."""


class NotFinite(FloatingPointError):
    """A network returned NaN or infinity: `network` names it and its precision, and holds nothing of a request."""

    def __init__(self, network: str) -> None:
        super().__init__(network)
        self.network = network

    def __str__(self) -> str:
        return f"{self.network} returned NaN or infinity"


def device_error(error: BaseException) -> BaseException:
    """`OutOfMemory` or `DeviceLost` for torch's many forms of these, caused by the error; else the error itself."""
    if isinstance(error, OutOfMemory | DeviceLost) or not isinstance(error, RuntimeError | MemoryError):
        return error
    text, kinds = str(error), {kind.__name__ for kind in type(error).__mro__}
    translated: RuntimeError
    if {"MemoryError", "OutOfMemoryError"} & kinds or "can't allocate memory" in text or "out of memory" in text:
        translated = OutOfMemory(text)
    elif "AcceleratorError" in kinds or "CUDA error" in text:
        translated = DeviceLost(text)
    else:
        return error
    translated.__cause__ = error
    return translated


def translate_device_errors(compute: Callable[[], T]) -> T:
    """Run a function on a thread that is no lane's. Raises what `device_error` returns."""
    try:
        return compute()
    except Exception as error:
        if (translated := device_error(error)) is error:
            raise
        raise translated from error
