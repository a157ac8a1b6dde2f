"""Device errors are told apart by torch's own classes and messages, in one place: where a lane keeps them."""

from __future__ import annotations

import pytest
import torch

from core.batching.runner import Lane
from core.failures import DeviceLost, OutOfMemory, device_error, translate_device_errors

KINDS: list[tuple[BaseException, type[BaseException]]] = [
    (torch.OutOfMemoryError("Tried to allocate 2 GiB"), OutOfMemory),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), OutOfMemory),
    (RuntimeError("CUDA out of memory"), OutOfMemory),
    (MemoryError(), OutOfMemory),
    (RuntimeError("CUDA error: an illegal memory access was encountered"), DeviceLost),
    (torch.AcceleratorError("unspecified launch failure"), DeviceLost),
    (RuntimeError("shapes do not fit"), RuntimeError),
    (ValueError("out of memory"), ValueError),
    (KeyboardInterrupt(), KeyboardInterrupt),
    (OutOfMemory("CUDA error"), OutOfMemory),
]


@pytest.mark.parametrize(("error", "kind"), KINDS, ids=lambda value: getattr(value, "__name__", repr(value)))
def test_errors_of_a_lane_are_in_the_engines_words(error: BaseException, kind: type[BaseException]) -> None:
    def fail() -> None:
        raise error

    lane = Lane("failing")
    with pytest.raises(kind) as caught:
        lane.call(fail)
    lane.close()
    assert type(caught.value) is kind and str(caught.value) == str(error)
    assert caught.value is error or caught.value.__cause__ is error
    assert device_error(caught.value) is caught.value


def test_a_function_of_another_thread_raises_the_same() -> None:
    with pytest.raises(OutOfMemory, match="out of memory"):
        translate_device_errors(lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("out of memory")))
    with pytest.raises(ValueError, match=r"^no$"):
        translate_device_errors(lambda: (_ for _ in ()).throw(ValueError("no")))
