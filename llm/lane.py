"""The text model's lane on a GPU: its thread submits to a stream of high priority.

Decode reads weights and computes little; beside images, whose forwards do the opposite, its short kernels go first and
both overlap.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from core.batching.runner import Lane


class StreamLane(Lane):
    """A lane whose work is all submitted to one stream of the device, scheduled before others where both are ready."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._device = device
        super().__init__(name)

    def _run(self) -> None:
        with high_priority(self._device):
            super()._run()


@contextmanager
def high_priority(device: torch.device) -> Iterator[None]:
    """Context: on a GPU this thread submits to a new stream of the lane's priority."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device, priority=-1)):
        yield
