"""The text panel's own queue on a GPU: a lane whose thread submits to a stream of high priority.

Decoding reads weights and computes little; beside pictures, whose forwards do the opposite, its short kernels go first
and both overlap. Knows streams; knows nothing of what runs on them.
"""

from __future__ import annotations

import torch

from core.batching.runner import Lane


class StreamLane(Lane):
    """A lane all of whose work is submitted to one stream of the device, before others' where both are ready."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._device = device
        super().__init__(name)

    def _run(self) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream(self._device, priority=-1)):
            super()._run()
