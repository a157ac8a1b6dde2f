"""Copies tensors to the device without waiting for what is queued there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import torch

_PART = 2**24  # bytes that are copied from pinned memory at a time
_ALIGNMENT = 64  # bytes


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor of the CPU on the device, copied in the current stream's order.

    To a GPU through pinned memory: from pageable memory, torch waits until all that the stream has to do is done.
    """
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def copy_to_device(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copy on the device, to be read in its default stream; complete when this returns. On any thread.

    To a GPU in a stream of their own, so that neither waits for the other.
    """
    with _apart(device):
        copies = [tensor.to(device) for tensor in tensors]
    _complete(copies, device)
    return copies


def copy_to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy from a device to the host's memory, pinned for a GPU; complete when this returns. On any thread, for tensors
    that nothing writes. Beside others' work, as `copy_to_device`.
    """
    device = tensors[0].device if tensors else torch.device("cpu")
    copies: list[torch.Tensor] = []
    memory, used = torch.empty(0, dtype=torch.uint8), 0
    with _apart(device):
        for tensor in tensors:
            if used + tensor.nbytes > memory.nbytes:  # torch rounds each allocation of pinned memory to a power of two
                size = max(_PART, tensor.nbytes)
                memory, used = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda"), 0
            part = memory[used : used + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies.append(part.copy_(tensor, non_blocking=True))
            used += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    if device.type == "cuda":
        _stream(device).synchronize()
    return copies


def refill(tensors: Sequence[torch.Tensor], host: Sequence[torch.Tensor]) -> None:
    """Copy from pinned memory into a device's tensors, which nothing reads meanwhile; as `copy_to_device` otherwise."""
    device = tensors[0].device if tensors else torch.device("cpu")
    with _apart(device):
        for tensor, content in zip(tensors, host, strict=True):
            tensor.copy_(content, non_blocking=True)
    _complete(tensors, device)


def allocated(size_bytes: int, device: torch.device) -> torch.Tensor:
    """Bytes on the device for `filled`: for contents that depend on where they lie."""
    with _apart(device):
        return torch.empty(size_bytes, dtype=torch.uint8, device=device)


def filled(memory: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
    """Fill the tensors that `allocated` returned with these contents, as `copy_to_device` does."""
    if not memory.is_cuda:
        return memory.copy_(host)
    with _apart(memory.device):
        for part, to in zip(host.split(_PART), memory.split(_PART), strict=True):
            to.copy_(part.pin_memory(), non_blocking=True)
    _complete([memory], memory.device)
    return memory


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Context: on a GPU what this thread computes and copies goes in a stream beside others', which it does not wait
    for; complete at its end. For loading: in the default stream each tensor's copy would wait for the steps before it.
    """
    with _apart(device):
        yield
    if device.type == "cuda":
        _stream(device).synchronize()


def _apart(device: torch.device) -> AbstractContextManager[object]:
    """Context: on a GPU in the stream that copies go beside others in."""
    return torch.cuda.stream(_stream(device)) if device.type == "cuda" else nullcontext()


def _complete(copies: Sequence[torch.Tensor], device: torch.device) -> None:
    """Wait for copies in that stream; `copies` are read in the default stream."""
    if device.type != "cuda":
        return
    _stream(device).synchronize()
    for tensor in copies:  # its memory is used again only after what reads it in the default stream
        tensor.record_stream(torch.cuda.default_stream(device))


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for each device: the allocator keeps memory apart for each stream, and torch has so few streams that further
    ones would be those of others, such as a graph's under recording.
    """
    return torch.cuda.Stream(device)
