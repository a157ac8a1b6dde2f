"""The text model's lane on a GPU: its thread submits to a stream of high priority.

Decode reads weights and computes little; beside images, whose forwards do the opposite, its short kernels go first and
both overlap.
"""

from __future__ import annotations

import torch

from core.batching.runner import Lane


class StreamLane(Lane):
    """A lane whose work is all submitted to one stream of the device, scheduled before others where both are ready."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._device = device
        super().__init__(name)

    def _run(self) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream(self._device, priority=-1)):
            super()._run()
