"""Data-parallel training: processes of one run, each with its own rows, share gradients and decisions.

Each process holds the whole model, and the optimizer steps alike everywhere (Li et al. 2020, PyTorch Distributed),
without overlap: the embedded models' gradients are 150 MB. `torchrun` starts the processes, all on one
machine, and says which is which.
"""

from __future__ import annotations

import atexit
import os

import torch
from torch import distributed


def join(on_gpu: bool) -> tuple[int, int]:
    """Joins the group that `torchrun` started and returns this process's rank and how many there are; (0, 1) alone."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return 0, 1
    if on_gpu:
        torch.cuda.set_device(int(os.environ["RANK"]))
    distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    atexit.register(distributed.destroy_process_group)  # gloo's threads, left running, abort an exiting interpreter
    return distributed.get_rank(), world


def values_of_first(*values: float) -> list[float]:
    """Return the first process's values: clocks differ, and learning rates must not."""
    local = torch.tensor(values, dtype=torch.float64)
    distributed.broadcast(local, 0)
    agreed: list[float] = local.tolist()
    return agreed


@torch.no_grad()
def average_(gradients: list[torch.Tensor]) -> None:
    """Replace each gradient by its mean over all processes, in one message."""
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    distributed.all_reduce(flat)
    flat /= distributed.get_world_size()
    parts = flat.split([gradient.numel() for gradient in gradients])
    torch._foreach_copy_(gradients, [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)])
