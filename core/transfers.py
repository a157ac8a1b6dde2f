"""Copies tensors to the device without waiting for what is queued there."""

from __future__ import annotations

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor of the CPU on the device, copied in the current stream's order.

    To a GPU through pinned memory: from pageable memory, torch waits until all that the stream has to do is done.
    """
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
